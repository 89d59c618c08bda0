"""What an answer comes from: columns of the prompt, from the task's own fields."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.analysis.causes.options import SEARCH, SENTENCE, TARGET
from kvbench.errors import UserError, quoted
from kvbench.runs.answers import Prompt
from kvbench.runs.passages import statement_span, token_span

Span = tuple[int, int]
"""First column, and the column after the last."""


@dataclass(frozen=True)
class EvidenceSpans:
    """Columns of a prompt that an answer comes from.

    Attributes:
        spans: The passages; several if the answer has several parts.
        target_spans: The reference answers in them; empty if unknown.
        source: How it was found: `sentence`, `target`, `regex` or `search`.
    """

    spans: tuple[Span, ...]
    target_spans: tuple[Span, ...]
    source: str

    def mask(self, columns: int) -> Tensor:
        """Return the columns of the passages, bool `[columns]`."""
        return column_mask(self.spans, columns)


def column_mask(spans: Iterable[Span], columns: int) -> Tensor:
    """Return the columns in any of the spans, bool `[columns]`."""
    mask = torch.zeros(columns, dtype=torch.bool)
    for start, stop in spans:
        mask[start:stop] = True
    return mask


def find_evidence(tokenizer: Any, prompt: Prompt, requested: str | None) -> EvidenceSpans | None:
    """Find the evidence of a prompt in its context; None if it has to be searched for.

    Args:
        tokenizer: Tokenizer of the model.
        prompt: The prompt.
        requested: As the option `evidence`.

    Raises:
        UserError: The context contains no reference answer or no match, or the tokens cannot be located.
    """
    request = prompt.request
    present = [target for target in dict.fromkeys(request.target) if target and target in request.context]
    if requested == SEARCH or (requested is None and not present):
        return None
    if requested not in (None, SENTENCE, TARGET):
        assert requested is not None
        matches = [match for match in re.finditer(requested, request.context) if match.group()]
        if not matches:
            raise UserError(
                f"{request.task}, {request.sample_id}: --evidence {requested} matches nothing in the context; "
                "use another expression, or search"
            )
        spans = {token_span(tokenizer, prompt, *match.span(), match.group()) for match in matches}
        return EvidenceSpans(tuple(sorted(spans)), (), "regex")
    if not present:
        shown = ", ".join(map(quoted, request.target[:3]))
        raise UserError(
            f"{request.task}, {request.sample_id}: the reference answer {shown} does not occur in the context; "
            "use --evidence search or a regular expression"
        )
    statements, targets = set(), set()
    for answer in present:
        begin, end = statement_span(request, answer)
        answer_begin = request.context.rindex(answer, begin, end)
        targets.add(token_span(tokenizer, prompt, answer_begin, answer_begin + len(answer), answer))
        statements.add(token_span(tokenizer, prompt, begin, end, answer))
    if requested == TARGET:
        statements = targets
    return EvidenceSpans(tuple(sorted(statements)), tuple(sorted(targets)), requested or SENTENCE)
