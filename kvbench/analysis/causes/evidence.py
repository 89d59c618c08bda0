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
        spans: The passages; several if the answer has several parts, none if they are to be searched for.
        target_spans: The reference answers; empty if the context does not contain them.
        source: How the passages were found: `sentence`, `target`, `regex` or `search`; empty if they were not.
    """

    spans: tuple[Span, ...]
    target_spans: tuple[Span, ...]
    source: str


def column_mask(spans: Iterable[Span], columns: int) -> Tensor:
    """Return the columns in any of the spans, bool `[columns]`."""
    mask = torch.zeros(columns, dtype=torch.bool)
    for start, stop in spans:
        mask[start:stop] = True
    return mask


def find_evidence(tokenizer: Any, prompt: Prompt, requested: str | None) -> EvidenceSpans:
    """Find the evidence of a prompt and its reference answers in the context.

    Args:
        tokenizer: Tokenizer of the model.
        prompt: The prompt.
        requested: As the option `evidence`.

    Raises:
        UserError: The context contains no reference answer or no match, or the tokens cannot be located.
    """
    request = prompt.request
    present = [target for target in dict.fromkeys(request.target) if target and target in request.context]
    if requested in (SENTENCE, TARGET) or (requested is None and present):
        if not present:
            shown = ", ".join(map(quoted, request.target[:3]))
            raise UserError(
                f"{request.task}, {request.sample_id}: the reference answer {shown} does not occur in the context; "
                "use --evidence search or a regular expression"
            )
        statements, targets = _answer_spans(tokenizer, prompt, present)
        return EvidenceSpans(targets if requested == TARGET else statements, targets, requested or SENTENCE)
    try:
        _, targets = _answer_spans(tokenizer, prompt, present)
    except UserError:  # here they only say which heads hold the answer
        targets = ()
    if requested in (None, SEARCH):
        return EvidenceSpans((), targets, "")
    assert requested is not None
    matches = [match for match in re.finditer(requested, request.context) if match.group()]
    if not matches:
        raise UserError(
            f"{request.task}, {request.sample_id}: --evidence {requested} matches nothing in the context; "
            "use another expression, or search"
        )
    spans = {token_span(tokenizer, prompt, *match.span(), match.group()) for match in matches}
    return EvidenceSpans(tuple(sorted(spans)), targets, "regex")


def _answer_spans(tokenizer: Any, prompt: Prompt, answers: Iterable[str]) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return the columns of the statements with some answers, and of the answers in them."""
    statements, targets = set(), set()
    for answer in answers:
        begin, end = statement_span(prompt.request, answer)
        answer_begin = prompt.request.context.rindex(answer, begin, end)
        targets.add(token_span(tokenizer, prompt, answer_begin, answer_begin + len(answer), answer))
        statements.add(token_span(tokenizer, prompt, begin, end, answer))
    return tuple(sorted(statements)), tuple(sorted(targets))
