"""Location of the needle in a prompt: from the task's data to token positions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError
from kvbench.runs.passages import statement_span, token_span

if TYPE_CHECKING:
    from kvbench.harness.protocol import Request
    from kvbench.runs.answers import Prompt


@dataclass(frozen=True)
class Needle:
    """A prompt and its needle.

    Attributes:
        prompt: The prompt.
        start: Column of the needle's first token, in context and question concatenated.
        stop: Column after its last token.
    """

    prompt: Prompt
    start: int
    stop: int


def find_needles(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Needle]:
    """Find the token span of the needle in every prompt.

    The needle is the statement that contains the answer: `needle` in a row's `extra` if given, otherwise the sentence
    of the context that contains the answer; if there are several, the one that shares the most words with the question.
    A haystack may end in the middle of a sentence just before the needle. All needles of a task begin alike, so text
    before their usual first word is excluded.

    Args:
        tokenizer: Tokenizer of the model.
        prompts: Prompts of one task.

    Raises:
        UserError: The task is not a needle task (several answers, or an answer not in its context), or the needle's
            tokens cannot be located.
    """
    spans = [_span(prompt.request) for prompt in prompts]
    statements = [source.request.context[begin:end] for source, (begin, end) in zip(prompts, spans, strict=True)]
    usual_start = Counter(statement.split(maxsplit=1)[0] for statement in statements).most_common(1)[0][0]
    needles = []
    for prompt, (span_start, span_end), statement in zip(prompts, spans, statements, strict=True):
        answer_offset = prompt.request.context.rindex(prompt.request.target[0], span_start, span_end) - span_start
        match_starts = [
            match.start() for match in re.finditer(rf"(?<!\S){re.escape(usual_start)}(?!\S)", statement[:answer_offset])
        ]
        if match_starts and "needle" not in prompt.request.extra:
            span_start += match_starts[-1]
        needles.append(Needle(prompt, *token_span(tokenizer, prompt, span_start, span_end)))
    return needles


def _span(request: Request) -> tuple[int, int]:
    """Return the character span of the statement that contains the only answer."""
    if len(request.target) != 1:
        raise UserError(
            f"{request.task}, {request.sample_id} has {len(request.target)} answers; use a --task with one needle and "
            "one answer, such as niah_depth"
        )
    return statement_span(request, request.target[0])
