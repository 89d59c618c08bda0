"""Location of passages in a prompt: the statement of an answer, and the columns of some characters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvbench.errors import UserError, quoted
from kvbench.harness.protocol import Request
from kvbench.runs.answers import Prompt

_BEGIN = re.compile(r"(?<=[.!?])\s+|\n+")
_END = re.compile(r"[.!?](?=\s|$)")


def statement_span(request: Request, answer: str) -> tuple[int, int]:
    """Return the character span of the statement in the context that contains an answer.

    It is `needle` in the row's `extra` if given, otherwise the sentence that contains the answer; if there are several,
    the one that shares the most words with the question.

    Raises:
        UserError: The answer is not in the context, or not in the given needle.
    """
    label = f"{request.task}, {request.sample_id}"
    context = request.context
    stated_needle = request.extra.get("needle")
    if stated_needle is not None:
        position = context.find(str(stated_needle))
        if position < 0 or answer not in str(stated_needle):
            raise UserError(f"{label}: the needle is not in the context, or does not contain the answer")
        return position, position + len(str(stated_needle))
    positions = [match.start() for match in re.finditer(re.escape(answer), context)] if answer else []
    if not positions:
        raise UserError(
            f"{label}: the answer {quoted(answer)} is not in the context; "
            "use a --task whose answer is copied from the context, such as niah_depth"
        )
    question_words = set(re.findall(r"\w+", request.question))
    sentences = [sentence_span(context, position, position + len(answer)) for position in positions]
    shared_counts = [len(question_words & set(re.findall(r"\w+", context[begin:end]))) for begin, end in sentences]
    return sentences[shared_counts.index(max(shared_counts))]


def sentence_span(text: str, span_start: int, span_end: int) -> tuple[int, int]:
    """Return the span of the sentence around some characters."""
    boundaries = [match.end() for match in _BEGIN.finditer(text, 0, span_start)]
    next_end = _END.search(text, span_end)
    return boundaries[-1] if boundaries else 0, next_end.end() if next_end else len(text.rstrip())


def token_span(
    tokenizer: Any, prompt: Prompt, span_start: int, span_end: int, spelled: str | None = None
) -> tuple[int, int]:
    """Return the columns of the tokens that overlap characters `span_start` to `span_end` of the context.

    They come from the tokenizer's offsets. For a slow tokenizer, which has none, the tokens of the text before the
    needle and of the text up to its end are compared with those of the prompt.

    Args:
        tokenizer: Tokenizer of the model.
        prompt: The prompt.
        span_start, span_end: Characters of the context.
        spelled: Text that the tokens must spell; None: the first reference answer.

    Returns:
        First column, and the column after the last.

    Raises:
        UserError: The tokens at these columns do not spell it.
    """
    context = prompt.request.context
    prompt_ids = [*prompt.context_ids, *prompt.question_ids]
    if tokenizer.is_fast:
        prompt_text = context + prompt.request.question
        encoding = tokenizer(prompt_text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        first_column = len(prompt_ids) - len(encoding["input_ids"])  # BOS
        span_tokens = [
            token_index
            for token_index, (begin, end) in enumerate(encoding["offset_mapping"])
            if begin < span_end and end > span_start
        ]
        token_columns = (first_column + span_tokens[0], first_column + span_tokens[-1] + 1) if span_tokens else (0, 0)
    else:
        context_ids = tokenizer(context, add_special_tokens=False, verbose=False)["input_ids"]
        first_column = len(prompt.context_ids) - len(context_ids)
        leading_count, _ = _common(tokenizer, context[:span_start], context_ids)
        shared_count, token_count = _common(tokenizer, context[:span_end], context_ids)
        token_columns = (
            first_column + leading_count,
            first_column + shared_count + (shared_count < token_count),
        )
    decoded_text = _letters(tokenizer.decode(prompt_ids[token_columns[0] : token_columns[1]]))
    expected = prompt.request.target[0] if spelled is None else spelled
    if _letters(expected) not in decoded_text:
        raise UserError(
            f"{prompt.request.task}, {prompt.request.sample_id}: cannot locate the needle's tokens with this tokenizer"
        )
    return token_columns


def _common(tokenizer: Any, text: str, all_ids: Sequence[int]) -> tuple[int, int]:
    """Return how many leading tokens a text shares with `all_ids`, and its number of tokens."""
    encoded_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    common_length = min(len(encoded_ids), len(all_ids))
    differences = (
        index for index, (token, reference) in enumerate(zip(encoded_ids, all_ids, strict=False)) if token != reference
    )
    return next(differences, common_length), len(encoded_ids)


def _letters(text: str) -> str:
    """Remove what tokenizers may change: spaces and case."""
    return "".join(text.split()).casefold()
