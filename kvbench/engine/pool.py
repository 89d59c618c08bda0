"""Continuous batching: a row that has ended makes room for the next response.

The pool decodes one ragged batch. The caller says which numbers of rows it may have: on a CPU those
in which a row has the same bits, so that a response does not depend on what else is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from kvbench.engine.cache import RaggedCache
from kvbench.engine.clock import now
from kvbench.engine.decode import Row
from kvbench.engine.draw import choose
from kvbench.engine.driver import forward, left_padded
from kvbench.engine.refill import absorb, among, extended, picked, place, vacancies, vacant, vacate

_Owner = TypeVar("_Owner")


@dataclass
class Pooled(Generic[_Owner]):
    """A response that waits for a row of the pool, or has one.

    Attributes:
        row: Its tokens and when it ends.
        cache: The compressed cache of one sequence; None once the pool has taken it over.
        question: Tokens to feed before it is generated, if `logits` is None.
        logits: Logits after the prompt, `[1, vocabulary]`; None if the question is still to be fed.
        owner: What the caller knows about it.
        seconds: Its share of the time that questions and decode steps took.
    """

    row: Row
    cache: RaggedCache | None
    question: Sequence[int]
    logits: Tensor | None
    owner: _Owner
    seconds: float = 0.0


def least(counts: Sequence[int], wanted: int) -> int:
    """The smallest of some ascending numbers of rows that is enough."""
    return next(n for n in counts if n >= wanted)


class Pool(Generic[_Owner]):
    """Decodes responses on caches that are not cut any more and have no sliding windows.

    Args:
        model: The model, inside `engine`.
        counts: Numbers of rows that the batch may have, ascending.
        asking: Numbers of rows that a forward that feeds questions may have, ascending. So many
            responses as the last one says enter the batch together.
        width: Columns of a forward that feeds questions: the length of the longest.
        room: Whether this many responses, which hold these caches, may be decoded together.
    """

    def __init__(
        self,
        model: nn.Module,
        counts: Sequence[int],
        asking: Sequence[int],
        width: int,
        room: Callable[[int, list[RaggedCache]], bool],
    ) -> None:
        self.model = model
        self.counts, self.asking, self.width = counts, asking, width
        self.room = room
        self.device = next(model.parameters()).device
        self.waiting: list[Pooled[_Owner]] = []
        self.active: dict[int, Pooled[_Owner]] = {}
        self.cache: RaggedCache | None = None

    @property
    def lacking(self) -> int:
        """How many more responses have to wait before they enter the batch together."""
        return max(1, self.asking[-1] - len(self.waiting))

    def add(self, item: Pooled[_Owner]) -> Iterator[Pooled[_Owner]]:
        """Queue a response; yield those that end before the pool can take the next one."""
        self.waiting.append(item)
        if len(self.waiting) == self.asking[-1] or not self._allows(len(self.waiting) + 1):
            yield from self._admit()

    def drain(self) -> Iterator[Pooled[_Owner]]:
        """Decode everything that is left."""
        if self.waiting:
            yield from self._admit()
        while self.active:
            self._shrink()
            yield from self._step()

    def _admit(self) -> Iterator[Pooled[_Owner]]:
        """Move the waiting responses into free rows; decode until there are enough."""
        while self.active and not self._allows(len(self.active) + len(self.waiting)):
            yield from self._step()
        items, self.waiting = self.waiting, []
        caches = [item.cache for item in items if item.cache is not None]
        rows = least(self.counts, len(self.active) + len(items))
        if self.cache is None:
            self.cache = vacant(caches[0], rows)
        elif self.cache.batch < rows:
            self.cache = extended(self.cache, rows)
        free = [slot for slot in range(self.cache.batch) if slot not in self.active]
        slots = vacancies(self.cache, free, caches)
        place(self.cache, slots, caches)
        for slot, item in zip(slots, items, strict=True):
            self.active[slot] = item
        self._ask([slot for slot in slots if self.active[slot].logits is None])
        first = torch.cat([item.logits for item in items if item.logits is not None])
        for item in items:
            item.cache = item.logits = None
        yield from self._choose(slots, first)

    def _allows(self, rows: int) -> bool:
        held = [item.cache for item in self.waiting if item.cache is not None]
        held += [] if self.cache is None else [self.cache]
        return rows <= self.counts[-1] and self.room(rows, held)

    def _shrink(self) -> None:
        """Leave out vacant rows: nothing will take them."""
        assert self.cache is not None
        rows = least(self.counts, len(self.active))
        if rows < self.cache.batch:
            slots = sorted(self.active)
            self.cache = extended(picked(self.cache, slots), rows)
            self.active = {slots.index(slot): item for slot, item in self.active.items()}

    def _ask(self, slots: Sequence[int]) -> None:
        """Feed the questions in one forward; on a CPU their width is always the same."""
        if not slots:
            return
        assert self.cache is not None
        began = now(self.device)
        rows, width = [*slots], self.width
        if self.device.type == "cpu":  # rows that hold least wait beside them
            others = set(range(self.cache.batch)) - set(slots)
            spare = least(self.asking, len(rows)) - len(rows)
            rows += sorted(others, key=lambda s: s in self.active)[:spare]
        else:  # a GPU promises no bits
            width = max(len(self.active[slot].question) for slot in slots)
        asked = [self.active[slot].question for slot in slots]
        asked += [()] * (len(rows) - len(slots))
        ids, mask = left_padded(asked, width)
        part = among(self.cache, rows, [*map(len, asked)])
        logits = forward(self.model, part, ids.to(self.device), mask.to(self.device))
        absorb(self.cache, rows, part)
        seconds = now(self.device) - began
        for i, slot in enumerate(slots):
            self.active[slot].logits = logits[i : i + 1]
            self.active[slot].seconds += seconds / len(slots)

    def _choose(self, slots: Sequence[int], logits: Tensor) -> Iterator[Pooled[_Owner]]:
        """Choose the next token of rows, `logits` `[rows, vocabulary]`; yield those that end."""
        rows = [self.active[slot].row for slot in slots]
        tokens = choose(logits, [row.draw for row in rows], [len(row.tokens) for row in rows])
        for slot, row, token in zip(slots, rows, tokens, strict=True):
            row.push(token)
            if row.reason:
                assert self.cache is not None
                vacate(self.cache, slot)
                yield self.active.pop(slot)

    def _step(self) -> Iterator[Pooled[_Owner]]:
        """Feed the last token of every row, and choose the next ones."""
        assert self.cache is not None
        began = now(self.device)
        slots = list(self.active)  # in the order in which they were queued
        ids = torch.zeros(self.cache.batch, 1, dtype=torch.long)
        alive = torch.zeros(self.cache.batch, 1, dtype=torch.bool)
        for slot in slots:
            ids[slot], alive[slot] = self.active[slot].row.tokens[-1], True
        mask = None if len(slots) == self.cache.batch else alive.to(self.device)
        logits = forward(self.model, self.cache, ids.to(self.device), mask)
        seconds = (now(self.device) - began) / len(slots)
        for item in self.active.values():
            item.seconds += seconds
        yield from self._choose(slots, logits[slots])
