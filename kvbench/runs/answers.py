"""Responses in the making: what the executors share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from torch import Tensor

from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import Row
from kvbench.harness.protocol import Request as Question
from kvbench.runs.cell import Cell
from kvbench.runs.store import Response


@dataclass(frozen=True)
class Prompt:
    """A question with its token ids, once for each repeat.

    Attributes:
        question: What is asked.
        context_ids: Of the context.
        question_ids: Of the rest of the prompt.
        given_ids: Of what is measured instead of an answer.
        repeat: Which answer to the question it is, from 0.
    """

    question: Question
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    given_ids: tuple[int, ...] = ()
    repeat: int = 0

    @property
    def limit(self) -> int:
        """Tokens that may follow the prompt."""
        return len(self.given_ids) or self.question.max_new_tokens


@dataclass
class Answer:
    """A row to be decoded and the response that it becomes.

    Attributes:
        cell: For which cell.
        prompt: What was asked.
        row: Its tokens and its end.
        cache: Its compressed cache.
        response: All that is known before the decoding.
        logits: After the prompt, `[1, vocabulary]`; None where the question is still to be fed.
    """

    cell: Cell
    prompt: Prompt
    row: Row
    cache: RaggedCache
    response: Response
    logits: Tensor | None = None


@dataclass
class Lane:
    """Answers that may be decoded in one batch.

    Attributes:
        asked: Whether the questions are in the caches already.
        waiting: The answers.
    """

    asked: bool
    waiting: list[Answer] = field(default_factory=list)


class _OfCell(Protocol):
    cell: Cell


_Row = TypeVar("_Row", bound=_OfCell)


def by_cell(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Rows of one batch apart, cell by cell."""
    found: dict[str, list[_Row]] = {}
    for row in rows:
        found.setdefault(row.cell.cell, []).append(row)
    return list(found.values())


def alike(wanted: Iterable[tuple[Cell, Prompt]]) -> list[tuple[Cell, list[Prompt]]]:
    """The prompts of a cell that differ in nothing but `repeat` together: one cache serves them."""
    found: dict[tuple[str, str, int], tuple[Cell, list[Prompt]]] = {}
    for cell, prompt in wanted:
        found.setdefault(key_of(cell, prompt)[:3], (cell, []))[1].append(prompt)
    return list(found.values())


def forks(count: int, cache: RaggedCache) -> Iterator[RaggedCache]:
    """A cache for each of several that go on from one; the last one is the cache itself."""
    for left in reversed(range(count)):
        yield cache.fork() if left else cache


def begun(
    cell: Cell, prompt: Prompt, cache: RaggedCache, prefill_s: float, compress_s: float
) -> Response:
    """What a response says before it is generated."""
    return replace(
        empty(cell, prompt),
        context_tokens=len(prompt.context_ids),
        question_tokens=len(prompt.question_ids),
        budget_entries=(cache.budget_entries or [0])[0],
        held_entries=(cache.held_entries or [0])[0],
        kv_bytes_live=cache.live_bytes(),
        kv_bytes_allocated=cache.allocated_bytes(),
        kv_bytes_full=cache.full_bytes(0),
        prefill_s=prefill_s,
        compress_s=compress_s,
    )


def finished(answers: Sequence[Answer], cache: RaggedCache, seconds: float) -> list[Response]:
    """The responses of a batch that was decoded.

    Where the cache was cut while it grew (moment `decode`) the entries and bytes are those of the
    peak, the buffer included.

    Args:
        answers: The rows of the batch.
        cache: Its cache.
        seconds: What decoding it took.
    """
    out = []
    cuts = 0.0 if cache.upkeep is None else cache.upkeep.seconds
    for i, a in enumerate(answers):
        response = replace(
            a.response,
            response=a.row.text(),
            stop=a.row.reason,
            generated_tokens=len(a.row.tokens),
            decode_s=(seconds - cuts) / len(answers),
            compress_s=a.response.compress_s + cuts / len(answers),
        )
        if cache.upkeep is not None:
            taken = cache.upkeep.room[i : i + 1] or [response.kv_bytes_allocated]
            peak, info = cache.upkeep.peak[i], cache.upkeep.info
            entry = sum(layer.entry_bytes() for layer in cache.ragged) / len(cache.ragged)
            response = replace(
                response,
                budget_entries=info.layers * info.kv_heads * cache.upkeep.budget[i],
                held_entries=peak,
                kv_bytes_live=round(peak * entry),
                kv_bytes_allocated=taken[0],
                kv_bytes_full=cache.full_bytes(i),
            )
        out.append(response)
    return out


def key_of(cell: Cell, prompt: Prompt) -> tuple[str, str, int, int]:
    """What a response is stored under."""
    question = prompt.question
    return (cell.cell, question.sample_id, question.question_id, prompt.repeat)


def empty(cell: Cell, prompt: Prompt) -> Response:
    """A response that says nothing yet."""
    question = prompt.question
    return Response(
        cell=cell.cell,
        sample_id=question.sample_id,
        question_id=question.question_id,
        repeat=prompt.repeat,
        doc_id=question.doc_id,
        context_id=question.context_id,
        response="",
        stop="",
        error="",
        context_tokens=0,
        question_tokens=0,
        generated_tokens=0,
        budget_entries=0,
        held_entries=0,
        kv_bytes_live=0,
        kv_bytes_allocated=0,
        kv_bytes_full=0,
        prefill_s=0.0,
        compress_s=0.0,
        decode_s=0.0,
    )
