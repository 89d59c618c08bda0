"""Finds the needle of a prompt: from the task's data to token positions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError, quoted

if TYPE_CHECKING:
    from kvbench.harness.protocol import Request
    from kvbench.runs.answers import Prompt

_BEGIN = re.compile(r"(?<=[.!?])\s+|\n+")
_END = re.compile(r"[.!?](?=\s|$)")


@dataclass(frozen=True)
class Needle:
    """A prompt and its needle.

    Attributes:
        prompt: The prompt.
        start: Column of the needle's first token, counted over context and question together.
        stop: Column after its last token.
    """

    prompt: Prompt
    start: int
    stop: int


def find_needles(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Needle]:
    """Find the needle of every prompt, to the token.

    The needle is the statement that contains the answer: `needle` in a row's `extra` if the task
    gives it, otherwise the sentence of the context that contains the answer. If several do, it is
    the one that shares most words with the question. A haystack may be cut off in the middle of a
    sentence just before the needle. All needles of a task begin alike, so text before their usual
    first word is left out.

    Args:
        tokenizer: Tokenizer of the model.
        prompts: Prompts of one task.

    Raises:
        UserError: It is not a needle task, because there are several answers or one is not in its
            context; or the tokenizer does not tell where the needle is.
    """
    spans = [_span(prompt.request) for prompt in prompts]
    texts = [p.request.context[a:b] for p, (a, b) in zip(prompts, spans, strict=True)]
    usual = Counter(text.split(maxsplit=1)[0] for text in texts).most_common(1)[0][0]
    needles = []
    for prompt, (start, stop), text in zip(prompts, spans, texts, strict=True):
        answer = prompt.request.context.rindex(prompt.request.target[0], start, stop) - start
        at = [m.start() for m in re.finditer(rf"(?<!\S){re.escape(usual)}(?!\S)", text[:answer])]
        if at and "needle" not in prompt.request.extra:
            start += at[-1]
        needles.append(Needle(prompt, *token_span(tokenizer, prompt, start, stop)))
    return needles


def _span(request: Request) -> tuple[int, int]:
    """Characters of the statement that contains the answer."""
    where = f"{request.task}, {request.sample_id}"
    context, answer = request.context, request.target[0]
    if len(request.target) != 1:
        raise UserError(
            f"{where}: {len(request.target)} answers; use a --task with one needle and one answer, "
            "such as niah_depth"
        )
    given = request.extra.get("needle")
    if given is not None:
        at = context.find(str(given))
        if at < 0 or answer not in str(given):
            raise UserError(f"{where}: its needle is not in the context, or lacks the answer")
        return at, at + len(str(given))
    places = [m.start() for m in re.finditer(re.escape(answer), context)] if answer else []
    if not places:
        raise UserError(
            f"{where}: the answer {quoted(answer)} is not in the context; use a --task whose "
            "needle is to be copied, such as niah_depth"
        )
    words = set(re.findall(r"\w+", request.question))
    sentences = [_sentence(context, at, at + len(answer)) for at in places]
    shared = [len(words & set(re.findall(r"\w+", context[a:b]))) for a, b in sentences]
    return sentences[shared.index(max(shared))]


def _sentence(text: str, start: int, stop: int) -> tuple[int, int]:
    """The sentence around some characters."""
    before = [m.end() for m in _BEGIN.finditer(text, 0, start)]
    after = _END.search(text, stop)
    return before[-1] if before else 0, after.end() if after else len(text.rstrip())


def token_span(tokenizer: Any, prompt: Prompt, start: int, stop: int) -> tuple[int, int]:
    """Columns of the tokens that contain any of the characters `start` to `stop` of the context.

    The tokenizer's offsets tell. A slow tokenizer has no offsets: the tokens of the text before the
    needle, and of the text up to its end, are compared with those of the prompt.

    Returns:
        First column, and the column after the last.

    Raises:
        UserError: The tokens at these columns do not spell the answer.
    """
    context = prompt.request.context
    ids = [*prompt.context_ids, *prompt.question_ids]
    if tokenizer.is_fast:
        text = context + prompt.request.question
        encoded = tokenizer(
            text, add_special_tokens=False, verbose=False, return_offsets_mapping=True
        )
        first = len(ids) - len(encoded["input_ids"])  # BOS
        inside = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < stop and b > start]
        span = (first + inside[0], first + inside[-1] + 1) if inside else (0, 0)
    else:
        plain = tokenizer(context, add_special_tokens=False, verbose=False)["input_ids"]
        first = len(prompt.context_ids) - len(plain)
        before, _ = _common(tokenizer, context[:start], plain)
        same, length = _common(tokenizer, context[:stop], plain)
        span = (first + before, first + same + (same < length))
    read = _letters(tokenizer.decode(ids[span[0] : span[1]]))
    if _letters(prompt.request.target[0]) not in read:
        raise UserError(
            f"{prompt.request.task}, {prompt.request.sample_id}: the tokenizer does not tell "
            "which tokens are the needle"
        )
    return span


def _common(tokenizer: Any, text: str, ids: Sequence[int]) -> tuple[int, int]:
    """How many leading tokens a text has in common with `ids`, and how many it has in all."""
    encoded = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    shorter = min(len(encoded), len(ids))
    differ = (i for i, (a, b) in enumerate(zip(encoded, ids, strict=False)) if a != b)
    return next(differ, shorter), len(encoded)


def _letters(text: str) -> str:
    """A text without what tokenizers may change: spaces and case."""
    return "".join(text.split()).casefold()
