"""Continuous batching: a row that has ended makes room for the next response.

The pool decodes one ragged batch. Its number of rows is constant, so that the shapes of all matrix
products, and with them the bits of a response on a CPU, do not depend on what else is decoded.
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
from kvbench.engine.driver import forward
from kvbench.engine.refill import absorb, among, place, vacancies, vacant, vacate

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


class Pool(Generic[_Owner]):
    """Decodes responses on caches that are not cut any more and have no sliding windows.

    Args:
        model: The model, inside `engine`.
        slots: Rows of the batch.
        intake: Rows of a forward that feeds questions.
        width: Columns of a forward that feeds questions: the length of the longest.
        room: Whether this many responses, which hold these caches, may be decoded together.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: int,
        intake: int,
        width: int,
        room: Callable[[int, list[RaggedCache]], bool],
    ) -> None:
        self.model = model
        self.slots, self.intake, self.width = slots, intake, width
        self.room = room
        self.device = next(model.parameters()).device
        self.waiting: list[Pooled[_Owner]] = []
        self.active: dict[int, Pooled[_Owner]] = {}
        self.cache: RaggedCache | None = None

    def add(self, item: Pooled[_Owner]) -> Iterator[Pooled[_Owner]]:
        """Queue a response; yield those that end before the pool can take the next one."""
        self.waiting.append(item)
        if len(self.waiting) == self.intake or not self._allows(len(self.waiting) + 1):
            yield from self._admit()

    def drain(self) -> Iterator[Pooled[_Owner]]:
        """Decode everything that is left."""
        if self.waiting:
            yield from self._admit()
        while self.active:
            yield from self._step()

    def _admit(self) -> Iterator[Pooled[_Owner]]:
        """Move the waiting responses into free rows; decode until there are enough."""
        while self.active and not self._allows(len(self.active) + len(self.waiting)):
            yield from self._step()
        items, self.waiting = self.waiting, []
        free = [slot for slot in range(self.slots) if slot not in self.active]
        caches = [item.cache for item in items if item.cache is not None]
        if self.cache is None:
            self.cache = vacant(caches[0], self.slots)
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
        return rows <= self.slots and self.room(rows, held)

    def _ask(self, slots: Sequence[int]) -> None:
        """Feed the questions in one forward; on a CPU its shape is always the same."""
        if not slots:
            return
        assert self.cache is not None
        began = now(self.device)
        rows, width = [*slots], self.width
        if self.device.type == "cpu":  # rows that hold least wait beside them
            others = sorted(set(range(self.slots)) - set(slots), key=lambda s: s in self.active)
            rows += others[: max(0, self.intake - len(rows))]
        else:  # a GPU promises no bits
            width = max(len(self.active[slot].question) for slot in slots)
        asked = [self.active[slot].question for slot in slots]
        count = torch.tensor([*map(len, asked), *[0] * (len(rows) - len(slots))])
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for i, question in enumerate(asked):
            ids[i, width - len(question) :] = torch.tensor(question)
        mask = torch.arange(width) >= width - count[:, None]
        part = among(self.cache, rows, count.tolist())
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
        ids = torch.zeros(self.slots, 1, dtype=torch.long)
        alive = torch.zeros(self.slots, 1, dtype=torch.bool)
        for slot in slots:
            ids[slot], alive[slot] = self.active[slot].row.tokens[-1], True
        mask = None if len(slots) == self.slots else alive.to(self.device)
        logits = forward(self.model, self.cache, ids.to(self.device), mask)
        seconds = (now(self.device) - began) / len(slots)
        for item in self.active.values():
            item.seconds += seconds
        yield from self._choose(slots, logits[slots])
