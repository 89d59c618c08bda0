"""Continuous batching: an ended row makes room for the next response.

The pool decodes one ragged batch with row counts allowed by the caller. On a CPU these are the counts that give a row
the same bits, so a response does not depend on what else is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from kvbench.engine.attend import ignores_width
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import DecodeRow
from kvbench.engine.draw import choose
from kvbench.engine.driver import forward, left_padded
from kvbench.engine.models import model_info
from kvbench.engine.refill import (
    absorb,
    among,
    extended,
    fill_rows,
    shrunk,
    vacancies,
    vacant,
    vacate,
)
from kvbench.engine.threads import now

_Owner = TypeVar("_Owner")

_LEAST_WIDTH, _WIDTH_STEP = 12, 2
"""Fewest columns of a forward that feeds questions on a CPU, unless no question has as many: with more than 8 queries,
attention ignores their number. And their multiple: every number of columns is compared once."""

_ROW_STEP = 4
"""Multiple of the rows of a batch that empties: every number of rows is compared once."""


@dataclass
class Pooled(Generic[_Owner]):
    """A response that waits for a row of the pool or occupies one.

    Attributes:
        row: Its tokens and stop condition.
        cache: The compressed cache of one sequence; None once the pool has taken it over.
        question: Tokens to feed before generation, if `logits` is None.
        logits: Logits after the prompt, `[1, vocabulary]`; None if the question is pending.
        owner: The caller's data.
        seconds: Its fraction of the question and decode time.
    """

    row: DecodeRow
    cache: RaggedCache | None
    question: Sequence[int]
    logits: Tensor | None
    owner: _Owner
    seconds: float = 0.0


def smallest_count(row_counts: Sequence[int], required: int) -> int:
    """Return the smallest sufficient row count among ascending `row_counts`."""
    return next(row_count for row_count in row_counts if row_count >= required)


class Pool(Generic[_Owner]):
    """Decodes responses on caches without further eviction steps and without sliding windows.

    Args:
        model: The model, inside `engine`.
        row_counts: Allowed batch sizes, ascending.
        question_counts: Allowed batch sizes of a forward that feeds questions, ascending. Responses enter the batch in
            groups of the last size.
        question_width: Length of the longest question.
        fits_memory: Tells whether a number of responses that hold these caches can be decoded together.
        gives_same_bits: Tells whether a forward of a number of tokens gives a token the same bits, on a CPU, as those
            that feed questions in these batches.
        allows_rows: Tells whether a batch may have a size that is not among `row_counts`. It is asked when no response
            waits, for multiples of 4.
    """

    def __init__(
        self,
        model: nn.Module,
        row_counts: Sequence[int],
        question_counts: Sequence[int],
        question_width: int,
        fits_memory: Callable[[int, list[RaggedCache]], bool],
        gives_same_bits: Callable[[int], bool] = lambda token_count: False,
        allows_rows: Callable[[int], bool] = lambda row_count: False,
    ) -> None:
        self.model = model
        self.counts, self.asking, self.width = row_counts, question_counts, question_width
        self.room, self.agrees, self.allows_rows = fits_memory, gives_same_bits, allows_rows
        self.group = model_info(model).group
        self.device = next(model.parameters()).device
        self.waiting: list[Pooled[_Owner]] = []
        self.active: dict[int, Pooled[_Owner]] = {}
        self.cache: RaggedCache | None = None

    @property
    def lacking(self) -> int:
        """Return how many more responses must be queued before they enter the batch together."""
        return max(1, self.asking[-1] - len(self.waiting))

    def add(self, response: Pooled[_Owner]) -> Iterator[Pooled[_Owner]]:
        """Queue a response; yield the responses that end before the pool can take another."""
        assert response.cache is not None
        for layer in response.cache.ragged:
            layer.expect(len(response.question))
        self.waiting.append(response)
        if len(self.waiting) == self.asking[-1] or not self._allows(len(self.waiting) + 1):
            yield from self._admit()

    def drain(self) -> Iterator[Pooled[_Owner]]:
        """Decode all remaining responses."""
        if self.waiting:
            yield from self._admit()
        while self.active:
            self._shrink()
            yield from self._step()

    def _admit(self) -> Iterator[Pooled[_Owner]]:
        """Move waiting responses into free rows, decoding until enough rows are free."""
        while self.active and not self._allows(len(self.active) + len(self.waiting)):
            yield from self._step()
        responses, self.waiting = self.waiting, []
        caches = [response.cache for response in responses if response.cache is not None]
        row_count = len(self.active) + len(responses)
        if question_count := sum(response.logits is None for response in responses):  # vacant rows fill their batch
            row_count = max(row_count, smallest_count(self.asking, question_count))
        row_count = smallest_count(self.counts, row_count)
        if self.cache is None:
            self.cache = vacant(caches[0], row_count)
        elif self.cache.batch < row_count:
            self.cache = extended(self.cache, row_count)
        free_slots = [slot for slot in range(self.cache.batch) if slot not in self.active]
        slots = vacancies(self.cache, free_slots, caches)
        fill_rows(self.cache, slots, caches)
        for slot, response in zip(slots, responses, strict=True):
            self.active[slot] = response
        self._ask([slot for slot in slots if self.active[slot].logits is None])
        first_logits = torch.cat([response.logits for response in responses if response.logits is not None])
        for response in responses:
            response.cache = response.logits = None
        yield from self._choose(slots, first_logits)

    def _allows(self, row_count: int) -> bool:
        live_caches = [response.cache for response in self.waiting if response.cache is not None]
        live_caches += [] if self.cache is None else [self.cache]
        return row_count <= self.counts[-1] and self.room(row_count, live_caches)

    def _shrink(self) -> None:
        """Remove vacant rows when no response is left to fill them."""
        assert self.cache is not None
        row_count = smallest_count(self.counts, len(self.active))
        closest_count = -(-len(self.active) // _ROW_STEP) * _ROW_STEP
        if self.counts[0] < closest_count < row_count and self.allows_rows(closest_count):
            row_count = closest_count
        if row_count < self.cache.batch:
            slots = sorted(self.active)
            self.cache = extended(shrunk(self.cache, slots), row_count)
            self.active = {slots.index(slot): response for slot, response in self.active.items()}

    def _ask(self, slots: Sequence[int]) -> None:
        """Feed the questions in one forward."""
        if not slots:
            return
        assert self.cache is not None
        batch_rows = [*slots]
        if self.device.type == "cpu":  # the smallest rows fill the batch and wait
            other_slots = set(range(self.cache.batch)) - set(slots)
            spare_rows = smallest_count(self.asking, len(batch_rows)) - len(batch_rows)
            batch_rows += sorted(other_slots, key=lambda other_slot: other_slot in self.active)[:spare_rows]
        questions = [self.active[slot].question for slot in slots]
        questions += [()] * (len(batch_rows) - len(slots))
        column_count = self._column_count(questions)
        started = now(self.device)
        token_ids, token_mask = left_padded(questions, column_count)
        question_cache = among(self.cache, batch_rows, [*map(len, questions)])
        question_tokens = sum(map(len, questions))
        device_ids, device_mask = token_ids.to(self.device), token_mask.to(self.device)
        logits = forward(self.model, question_cache, device_ids, device_mask, token_count=question_tokens)
        absorb(self.cache, batch_rows, question_cache)
        seconds = now(self.device) - started
        for question_index, slot in enumerate(slots):
            self.active[slot].logits = logits[question_index : question_index + 1]
            self.active[slot].seconds += seconds / len(slots)

    def _column_count(self, questions: Sequence[Sequence[int]]) -> int:
        """Return the columns of a forward that feeds questions.

        On a CPU they are always the same unless a token has the same bits with fewer.
        """
        assert self.cache is not None
        longest = max(map(len, questions))
        if self.device.type != "cpu":  # a GPU does not promise equal bits
            return longest
        columns = max(_LEAST_WIDTH, -(-longest // _WIDTH_STEP) * _WIDTH_STEP)
        if columns >= self.width or not all(ignores_width(layer, self.group) for layer in self.cache.ragged):
            return self.width
        return columns if self.agrees(len(questions) * columns) else self.width

    def _choose(
        self, slots: Sequence[int], logits: Tensor, rows: Sequence[int] | None = None
    ) -> Iterator[Pooled[_Owner]]:
        """Choose the next token of slots; yield the rows that end.

        Args:
            slots: The slots.
            logits: `[rows, vocabulary]`.
            rows: The row of every slot; None: in their order.
        """
        decode_rows = [self.active[slot].row for slot in slots]
        next_tokens = choose(
            logits,
            [decode_row.draw for decode_row in decode_rows],
            [len(decode_row.tokens) for decode_row in decode_rows],
            rows,
        )
        for decode_row, token_id in zip(decode_rows, next_tokens, strict=True):
            decode_row.push(token_id)
        if ended := [slot for slot, decode_row in zip(slots, decode_rows, strict=True) if decode_row.reason]:
            assert self.cache is not None
            vacate(self.cache, ended)
            for slot in ended:
                yield self.active.pop(slot)

    def _step(self) -> Iterator[Pooled[_Owner]]:
        """Feed the last token of every row and choose the next ones."""
        assert self.cache is not None
        started = now(self.device)
        slots = list(self.active)  # in queue order
        token_ids = torch.zeros(self.cache.batch, 1, dtype=torch.long)
        is_active = torch.zeros(self.cache.batch, 1, dtype=torch.bool)
        for slot in slots:
            token_ids[slot], is_active[slot] = self.active[slot].row.tokens[-1], True
        active_mask = None if len(slots) == self.cache.batch else is_active.to(self.device)
        logits = forward(self.model, self.cache, token_ids.to(self.device), active_mask, token_count=len(slots))
        seconds = (now(self.device) - started) / len(slots)
        for response in self.active.values():
            response.seconds += seconds
        yield from self._choose(slots, logits, slots)
