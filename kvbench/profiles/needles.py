"""Where the needle of a prompt is: from the task's data to token positions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError

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
        start: Column of the needle's first token in context and question together.
        stop: Column behind its last.
    """

    prompt: Prompt
    start: int
    stop: int


def find_needles(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Needle]:
    """Find the needle of every prompt, to the token.

    The needle is the statement that holds the answer: what the task gives as `needle` in a row's
    `extra`, else the sentence of the context in which the answer stands. Of several sentences it is
    the one that shares most words with the question. A haystack may be cut off in the middle of a
    sentence just before the needle; as all needles of a task begin alike, what comes before their
    usual first word is left out.

    Args:
        tokenizer: Of the model.
        prompts: Of one task.

    Raises:
        UserError: There are several answers, or one stands nowhere in its context, so the task is
            no needle task; or the tokenizer does not say where the needle is.
    """
    spans = [_span(prompt.request) for prompt in prompts]
    texts = [p.request.context[a:b] for p, (a, b) in zip(prompts, spans, strict=True)]
    usual = Counter(text.split(maxsplit=1)[0] for text in texts).most_common(1)[0][0]
    found = []
    for prompt, (start, stop), text in zip(prompts, spans, texts, strict=True):
        answer = prompt.request.context.rindex(prompt.request.target[0], start, stop) - start
        at = [m.start() for m in re.finditer(rf"(?<!\S){re.escape(usual)}(?!\S)", text[:answer])]
        if at and "needle" not in prompt.request.extra:
            start += at[-1]
        found.append(Needle(prompt, *token_span(tokenizer, prompt, start, stop)))
    return found


def _span(request: Request) -> tuple[int, int]:
    """Characters of the statement that holds the answer."""
    where = f"{request.task}, {request.sample_id}"
    context, answer = request.context, request.target[0]
    if len(request.target) != 1:
        raise UserError(
            f"{where}: {len(request.target)} answers; a task with one needle and one answer, such "
            "as niah_depth, would be right"
        )
    given = request.extra.get("needle")
    if given is not None:
        at = context.find(str(given))
        if at < 0 or answer not in str(given):
            raise UserError(f"{where}: its needle does not stand in the context with the answer")
        return at, at + len(str(given))
    places = [m.start() for m in re.finditer(re.escape(answer), context)] if answer else []
    if not places:
        raise UserError(
            f"{where}: the answer {answer!r} does not stand in the context; a task whose needle "
            "is to be copied, such as niah_depth, would be right"
        )
    asked = set(re.findall(r"\w+", request.question))
    sentences = [_sentence(context, at, at + len(answer)) for at in places]
    shared = [len(asked & set(re.findall(r"\w+", context[a:b]))) for a, b in sentences]
    return sentences[shared.index(max(shared))]


def _sentence(text: str, start: int, stop: int) -> tuple[int, int]:
    """The sentence around some characters."""
    before = [m.end() for m in _BEGIN.finditer(text, 0, start)]
    after = _END.search(text, stop)
    return before[-1] if before else 0, after.end() if after else len(text.rstrip())


def token_span(tokenizer: Any, prompt: Prompt, start: int, stop: int) -> tuple[int, int]:
    """Columns of the tokens that hold any of the characters `start` to `stop` of the context.

    By the tokenizer's offsets; a slow tokenizer has none, and the tokens of the text before the
    needle, and of that up to its end, are held against those of the prompt.

    Returns:
        First column, and the one behind the last.

    Raises:
        UserError: The tokens there do not read as the text does.
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
            f"{prompt.request.task}, {prompt.request.sample_id}: the tokenizer does not say "
            "which tokens are the needle"
        )
    return span


def _common(tokenizer: Any, text: str, ids: Sequence[int]) -> tuple[int, int]:
    """How many first tokens of a text are also those of `ids`, and how many it has."""
    own = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    pairs = zip(own, ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(ids))), len(own)


def _letters(text: str) -> str:
    """A text without what tokenizers may change: its spaces and its case."""
    return "".join(text.split()).casefold()
