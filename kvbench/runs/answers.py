"""Prompts with token ids, and responses in progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from kvbench.benchmark import Medium
from kvbench.decoding import THINK, Thinking
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import DecodeRow, Stop
from kvbench.engine.evict import record_peaks
from kvbench.harness.encode import Branch
from kvbench.harness.protocol import Request
from kvbench.runs.cell import Cell
from kvbench.runs.index import Key
from kvbench.runs.schema import Response


@dataclass(frozen=True)
class Prompt:
    """A request with its token ids, one per repeat.

    Attributes:
        context_ids: Tokens of the context.
        question_ids: Tokens of the rest of the prompt.
        given_ids: Tokens to measure instead of an answer.
        repeat: Index of the answer among the answers to this request, from 0.
        branches: Texts to measure instead of an answer: those of `Request.continuations` in their order, or the windows
            of a whole text (`Request.rolling`). The context is empty if all of them are alone.
    """

    request: Request
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    given_ids: tuple[int, ...] = ()
    repeat: int = 0
    branches: tuple[Branch, ...] = ()

    @property
    def media(self) -> tuple[Medium, ...]:
        """Return the images and videos of the context."""
        return self.request.media

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the tokens of the whole prompt."""
        return (*self.context_ids, *self.question_ids)

    @property
    def limit(self) -> int:
        """Return the maximum number of tokens that can follow the prompt."""
        if self.branches:
            return max(len(branch.lead_ids) + len(branch.answer_ids) for branch in self.branches)
        return len(self.given_ids) or self.request.max_new_tokens

    @property
    def steps(self) -> int:
        """Return the maximum number of tokens of the response."""
        return sum(len(branch.answer_ids) for branch in self.branches) or self.limit


@dataclass
class PendingAnswer:
    """A row to decode and its response in progress.

    Attributes:
        cell: The cell that answers.
        row: Tokens and stop condition.
        cache: The compressed cache.
        response: All fields known before decoding.
        logits: Logits after the prompt, `[1, vocabulary]`; None if the question is pending.
    """

    cell: Cell
    prompt: Prompt
    row: DecodeRow
    cache: RaggedCache
    response: Response
    logits: Tensor | None = None


class _OfCell(Protocol):
    cell: Cell


_Row = TypeVar("_Row", bound=_OfCell)


def stop_of(request: Request, tokenizer: Any, end_tokens: Sequence[int], thinking: Thinking | None) -> Stop:
    """Return the stop condition of the answer to a request.

    Args:
        tokenizer: Decodes tokens.
        end_tokens: Token ids that end a response.
        thinking: The tokens around thinking, if the tokenizer has them.
    """
    starts_thinking = request.question.rstrip().endswith(THINK)
    return Stop(tokenizer, end_tokens, request.until, thinking, starts_thinking)


def sees_question(cell: Cell, prompt: Prompt) -> bool:
    """Return whether a cell compresses the cache after the question of a prompt.

    The full cache evicts nothing, so its continuations share the question's forward with the cells that do.
    """
    return cell.moment in ("question", "decode") or (cell.is_full and bool(prompt.branches))


def leads(prompt: Prompt) -> set[tuple[int, ...]]:
    """Return the different tokens between the question and the texts of a prompt."""
    return {branch.lead_ids for branch in prompt.branches if not branch.alone}


def by_cell(items: Sequence[_Row]) -> list[list[_Row]]:
    """Group the rows of one batch by cell."""
    items_by_cell: dict[str, list[_Row]] = {}
    for item in items:
        items_by_cell.setdefault(item.cell.cell, []).append(item)
    return list(items_by_cell.values())


def by_request(cell_prompts: Iterable[tuple[Cell, Prompt]]) -> list[tuple[Cell, list[Prompt]]]:
    """Group prompts of a cell that differ only in `repeat`; one cache serves each group."""
    groups: dict[tuple[str, str, int], tuple[Cell, list[Prompt]]] = {}
    for cell, prompt in cell_prompts:
        groups.setdefault(key_of(cell, prompt)[:3], (cell, []))[1].append(prompt)
    return list(groups.values())


def forks(count: int, cache: RaggedCache) -> Iterator[RaggedCache]:
    """Yield `count` independent caches for continuations; the last one is the cache itself."""
    for remaining in reversed(range(count)):
        yield cache.fork() if remaining else cache


def key_of(cell: Cell, prompt: Prompt) -> Key:
    """Return the key under which a response is stored."""
    request = prompt.request
    return (cell.cell, request.sample_id, request.question_id, prompt.repeat)


def begun(cell: Cell, prompt: Prompt, cache: RaggedCache, prefill_s: float, compress_s: float) -> Response:
    """Return a cell's response with all fields known before decoding."""
    return replace(
        empty(cell, prompt),
        context_tokens=len(prompt.context_ids),
        question_tokens=len(prompt.question_ids),
        budget_entries=(cache.budget_entries or [0])[0],
        held_entries=(cache.held_entries or [0])[0],
        prefill_s=prefill_s,
        compress_s=compress_s,
        **cache.footprint(0),
    )


def ended(response: Response, row: DecodeRow, decode_s: float) -> Response:
    """Return a response with the output of its row, generated in `decode_s` seconds, or its error."""
    if row.error:
        return replace(response, error=row.error, decode_s=decode_s)
    return replace(
        response,
        response=row.text(),
        stop=row.reason,
        generated_tokens=len(row.tokens),
        decode_s=decode_s,
    )


def finished(answers: Sequence[PendingAnswer], cache: RaggedCache, seconds: float) -> list[Response]:
    """Return the responses of a decoded batch.

    If entries were evicted during decoding (moment `decode`), entries and bytes are peak values, including the buffer.

    Args:
        answers: The rows of the batch.
        seconds: Decode time.
    """
    responses = []
    evict_seconds = 0.0 if cache.eviction_state is None else cache.eviction_state.seconds
    for answer_index, answer in enumerate(answers):
        response = replace(
            ended(answer.response, answer.row, (seconds - evict_seconds) / len(answers)),
            compress_s=answer.response.compress_s + evict_seconds / len(answers),
        )
        responses.append(replace(response, **peak_columns(cache, answer_index)))
    return responses


def peak_columns(cache: RaggedCache, sequence_index: int) -> dict[str, Any]:
    """Return the peak memory cost of a sequence that was evicted from as it grew; empty for other caches."""
    eviction_state = cache.eviction_state
    if eviction_state is None:
        return {}
    record_peaks(cache, [sequence_index])
    return {
        "budget_entries": eviction_state.heads * eviction_state.budget[sequence_index],
        "held_entries": eviction_state.peak[sequence_index],
        "kv_bytes_live": eviction_state.live[sequence_index],
        "kv_bytes_read": eviction_state.live[sequence_index],
        "kv_bytes_allocated": eviction_state.room[sequence_index],
        "kv_bytes_full": cache.full_bytes(sequence_index),
        "held_visual": cache.visual_entries(sequence_index),
    }


def empty(cell: Cell, prompt: Prompt) -> Response:
    """Return a response with nothing but its key."""
    request = prompt.request
    return Response(
        cell=cell.cell,
        sample_id=request.sample_id,
        question_id=request.question_id,
        repeat=prompt.repeat,
        doc_id=request.doc_id,
        context_id=request.context_id,
        request=request.digest,
    )
