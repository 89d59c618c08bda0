"""Batch sizes for prefill and decoding: as large as memory allows."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Sequence
from itertools import count, pairwise, takewhile
from pathlib import Path

import torch
from torch import nn

from kvbench.engine.cache import RaggedCache
from kvbench.engine.models import devices_of, model_info
from kvbench.engine.pool import smallest_count
from kvbench.engine.shared import can_share
from kvbench.engine.steady import LEAST, Steady
from kvbench.engine.threads import available_cores

MOST = 128
"""Rows of a batch where memory allows them."""

_FIXED = 32
"""Rows on a CPU where a batch must have a constant size."""

_INDEX_BYTES = 4
"""Bytes that a row needs for an entry which it reads where it was prefilled."""

_ROW_PREFILLS = 5
"""Most full caches that a row may need: one that it reads, one and a half times its own rows, and their growth."""

_SPARE = 3
"""Whole caches held beside the batch: the prefilled context, and copies of its parts."""

_FED = 512
"""Tokens that keep a CPU busy for one forward. A batch that feeds several tokens to each row has no more if it can."""

_ASKED = 1024
"""The same for questions, which need no logits but those of their last tokens."""

_FORWARD = 1e13
"""Operations that keep a GPU busy for one forward; contexts are prefilled together up to this limit.

They take a GPU tens of milliseconds, and launching the kernels of a forward takes several. A larger batch would gain
nothing and could add padding.
"""

_TOGETHER = 32
"""Maximum number of contexts that a GPU prefills together by default."""

CPU_SHARE, GPU_SHARE = 0.5, 0.8
"""Fractions of a CPU's memory, and of a GPU's free memory, that caches may take by default.

A process that uses only some of the cores takes a proportional part, because others may use the rest.
"""

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


class Batching:
    """Plans the batches of one model.

    The number of rows is a step of a ladder, 8, 16, 24, 32, 48 and so on, chosen by what the batch holds. On a CPU the
    bits of a response must not depend on what else is decoded: where matrix products of these sizes disagree
    (`Steady`), those between powers of two are left out, then the largest. A ladder begins at 8 rows, or at 16, 32 or
    48 where that doubles its largest step; if none agrees, every batch of a task has the same number of rows. Batches
    that feed no question have a ladder of their own, because products of question tokens have more sizes to agree, and
    more steps, 8, 12, 16, 20 and so on, because fewer products tell whether a step agrees.

    Args:
        model: The model on its devices.
        batch_size: Maximum number of responses decoded together, or `auto`.
        cache_memory: Bytes that the caches of a batch may take; None: a fraction of the memory.
        prefill_batch: Maximum number of contexts prefilled together, or `auto`: one on a CPU, which is no slower and
            keeps the bits of a response independent of other contexts.

    Attributes:
        token_bytes: Bytes of a token in the full cache, over all layers and KV heads.
        shares: Whether rows can read entries where they were prefilled.
        counts: Row counts of batches that feed questions to all rows at once, ascending.
        fed_counts: Row counts of batches whose rows hold their questions already.
        asking: Row counts of batches that feed questions to some rows of a batch.
        own: The plan of batches outside the pool whose rows hold all of their entries, as those that evict later do.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_size: int | str,
        cache_memory: int | None,
        prefill_batch: int | str = "auto",
    ) -> None:
        weight = next(model.parameters())
        model_facts = model_info(model)
        self.cpu = weight.device.type == "cpu"
        self.batch_size, self.prefill_batch = batch_size, prefill_batch
        self._weights = sum(parameter.numel() for parameter in model.parameters())
        self._gpus = [device for device in devices_of(model) if device.type == "cuda"]
        self._memory = self._available() if cache_memory is None else cache_memory
        entry_bytes = 2 * model_facts.head_dim * weight.element_size() + 4  # 4 for its column
        self._segments = model_facts.layers * model_facts.kv_heads
        self.token_bytes = self._segments * entry_bytes
        probe = weight.new_empty(1, 1, 1, model_facts.head_dim)
        self.shares = can_share(probe, probe, 1.0)
        self._limit: float | None = None
        self._row_bytes = 0
        self._most = MOST if self.cpu or batch_size == "auto" else int(batch_size)
        self._steady = Steady(model) if self.cpu else None
        # What products agree with in batches that feed questions, and in others; 0: a batch has a constant size.
        self._least = self._fed_least = 0
        self.counts: tuple[int, ...] = (self._most,)
        self.asking: tuple[int, ...] = self.counts
        self.fed_counts: tuple[int, ...] = self.counts
        self._queued: tuple[int, ...] = self.counts
        self.prefills = 1
        self._copies = 1.5
        self.own = self

    def _available(self) -> int:
        """Return the bytes that caches may take by default."""
        if not self.cpu:
            return int(GPU_SHARE * sum(torch.cuda.mem_get_info(gpu)[0] for gpu in self._gpus))
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for limit_file in _CGROUP_LIMITS:
            limit_text = limit_file.read_text().strip() if limit_file.exists() else ""
            memory_bytes = min(memory_bytes, int(limit_text)) if limit_text.isdecimal() else memory_bytes
        return int(CPU_SHARE * memory_bytes * min(1, torch.get_num_threads() / available_cores()))

    def fit(
        self,
        tokens: int,
        widths: Collection[int],
        trunk_widths: Collection[int] = (),
        branch_widths: Collection[int] = (),
        given_widths: Collection[int] = (),
        queues: int = 1,
        media_bytes: int = 0,
        own_tokens: int | None = None,
    ) -> None:
        """Plan the batches of a task, with queues of caches half as long as the batch.

        Args:
            tokens: Tokens of its longest prompt and answer.
            widths: Numbers of question tokens fed to a row at once.
            trunk_widths, branch_widths: The same for batches of `rows_for`; the tokens of branches all get logits.
            given_widths: Numbers of tokens of given answers fed to a row at once.
            queues: Number of queues, and of batches of `rows_for` that copy one.
            media_bytes: Bytes kept of media; see `kvbench.engine.vision.remembered_bytes`.
            own_tokens: Tokens of a row that reads the others where they were prefilled; None: rows hold all of them.
        """
        cache_bytes = max(1, tokens) * self.token_bytes
        cache_count = (self._memory - media_bytes) / cache_bytes - _SPARE
        self.prefills = max(1, min(self._prefills(tokens), int(cache_count / 2)))
        if self.prefills > 1:  # the batch itself, beside the sequence extracted from it
            cache_count -= self.prefills
        asked_widths, row_bytes = {*widths, *given_widths}, _ROW_PREFILLS * cache_bytes
        own = copy.copy(self)  # caches are copied into such a batch all at once, so that it takes them twice
        own.own = own
        own._limit, own._row_bytes, own._copies = cache_count * cache_bytes, row_bytes, 2
        own._choose_ladders(
            cache_count / (1 + max(1, queues / 2)), asked_widths, given_widths, trunk_widths, branch_widths
        )
        self._limit = None
        if own_tokens is not None and self.shares:  # `has_room` counts the prefills that are held
            self._limit, self._row_bytes = cache_count * cache_bytes, row_bytes
            cache_count = self._limit / (own_tokens * self.token_bytes + tokens * self._segments * _INDEX_BYTES)
        self._choose_ladders(cache_count / (1 + queues / 2), asked_widths, given_widths, trunk_widths, branch_widths)
        self.own = own

    def for_caches(self, reads_prefill: bool) -> Batching:
        """Return the plan of batches outside the pool, of caches that read a prefill or hold all of their entries."""
        return self if reads_prefill else self.own

    def _choose_ladders(
        self,
        affordable_rows: float,
        widths: Collection[int],
        given_widths: Collection[int],
        trunk_widths: Collection[int],
        branch_widths: Collection[int],
    ) -> None:
        """Choose the ladders of all batches; see `fit` for widths, of which `widths` has those of given answers too."""
        row_count = max(1, min(int(affordable_rows), self._most))
        self._choose(row_count, given_widths)
        self.fed_counts, self._fed_least = self.counts, self._least
        self._choose(row_count, widths, trunk_widths, branch_widths)

    def _choose(
        self,
        row_count: int,
        widths: Collection[int],
        trunk_widths: Collection[int] = (),
        branch_widths: Collection[int] = (),
    ) -> None:
        """Choose the ladders of batches of at most `row_count` rows; see `fit` for widths.

        A ladder that begins later is chosen if it has at least twice as many rows.
        """
        if self._steady is None:
            self._climb(row_count, LEAST[0], widths)
            return
        steady = self._steady
        # As far as memory allows it, the choice does not depend on memory, and so on what else a run measures.
        least = most = 0
        for candidate in (LEAST[0], *(later for later in LEAST[1:] if later <= row_count)):
            top = self._top(steady, candidate, self._most, widths, trunk_widths, branch_widths)
            if top >= 2 * most:
                least, most = candidate, top
            if 2 * most > self._most:
                break
        top = self._top(steady, least, min(most, row_count), widths, trunk_widths, branch_widths) if most else 0
        self._least = least if top else 0
        if not top:
            row_count = min(row_count, _FIXED)
            self.counts, self.asking = (row_count,), (max(1, row_count // 2),)
            self._queued = self.asking
            return
        steps = _between(self.counts, 2 * LEAST[0])
        if not widths:  # to compare a further step is cheap where a row is one token
            steps += _between(sorted({*self.counts, *steps}), LEAST[0])
        self.counts = _joined(steady, self.counts, steps, least, widths)
        self.asking = _joined(steady, self.asking, _between(self.asking, LEAST[0]), least, widths)

    def _climb(self, row_count: int, least: int, widths: Collection[int]) -> None:
        """Set the ladders of batches of at most `row_count` rows, and of `least` if they can have fewer."""
        self.counts, self._queued = _ladder(row_count, least), _ladder(max(1, row_count // 2), least)
        # Groups no larger than needed leave fewer rows vacant.
        self.asking = self._counts_for(max(widths, default=1), _ASKED)

    def _top(
        self,
        steady: Steady,
        least: int,
        row_count: int,
        widths: Collection[int],
        trunk_widths: Collection[int],
        branch_widths: Collection[int],
    ) -> int:
        """Set the ladders from `least` on without the largest steps that disagree; return the top, 0 if all do."""
        self._climb(row_count, least, widths)
        while not self._is_steady(steady, least, widths, trunk_widths, branch_widths):
            if len(self.counts) == 1 or self.counts[-2] < _FIXED:
                return 0
            self._climb(self.counts[-2], least, widths)
        return self.rows

    def _is_steady(
        self,
        steady: Steady,
        least: int,
        widths: Collection[int],
        trunk_widths: Collection[int],
        branch_widths: Collection[int],
    ) -> bool:
        """Return whether a row has the same bits at every step of the ladders from `least` on; see `fit` for widths."""
        fed_tokens = {batch_rows * width for batch_rows in {*self.counts, *self.asking} for width in widths if width}
        head_rows = {*self.counts, *(self.asking if widths else ())}
        for width in {*trunk_widths, *branch_widths}:
            row_counts = self._counts_for(width)
            fed_tokens |= {batch_rows * width for batch_rows in row_counts}
            head_rows |= {*row_counts, *(batch_rows * width for batch_rows in row_counts if width in branch_widths)}
        return all(steady.at(batch_rows, least, with_head=True) for batch_rows in head_rows) and all(
            steady.at(token_count, least) for token_count in fed_tokens
        )

    def gives_same_bits(self, token_count: int) -> bool:
        """Return whether a token has the same bits in a forward of this many as in those that feed questions."""
        return self._steady is not None and self._least > 0 and self._steady.at(token_count, self._least)

    def allows_rows(self, row_count: int) -> bool:
        """Return whether a batch of this many rows, which feeds no question, gives a row the usual bits."""
        return self._steady is not None and self._fed_least > 0 and self._steady.at(row_count, self._fed_least, True)

    def _prefills(self, tokens: int) -> int:
        """Return how many contexts of at most `tokens` tokens to prefill together if memory allows it."""
        if isinstance(self.prefill_batch, int):
            return self.prefill_batch
        operations = 2 * self._weights * max(1, tokens)
        return 1 if self.cpu else min(_TOGETHER, int(_FORWARD / operations))

    @property
    def rows(self) -> int:
        """Return the maximum number of rows."""
        return self.counts[-1]

    def halve(self) -> bool:
        """Halve the number of rows after memory ran out; return False if there is only one.

        Contexts are then prefilled one by one.
        """
        if self.rows == 1 and self.prefills == 1:
            return False
        self.prefill_batch = 1
        self._most, self._least, self._fed_least = max(1, self.rows // 2), 0, 0
        self.own = self
        self.counts, self.asking = (self._most,), (max(1, self._most // 2),)
        self.fed_counts, self._queued = self.counts, self.asking
        for gpu in self._gpus:
            with torch.cuda.device(gpu):
                torch.cuda.empty_cache()
        return True

    def slots(self, row_count: int, question_fed: bool = False) -> int:
        """Return the batch size for decoding `row_count` responses, whose questions the caches may hold already."""
        return smallest_count(self.fed_counts if question_fed else self.counts, row_count) if self.cpu else row_count

    def _counts_for(self, width: int, most_tokens: int = _FED) -> tuple[int, ...]:
        """Return the row counts of a batch that feeds `width` tokens to caches of the queue, ascending."""
        if not self.cpu:
            return self._queued
        return tuple(row_count for row_count in self._queued if row_count * width <= most_tokens) or self._queued[:1]

    def rows_for(self, width: int) -> int:
        """Return the maximum number of rows of a batch that feeds `width` tokens to caches of the queue."""
        return self._counts_for(width)[-1]

    def slots_for(self, row_count: int, width: int) -> int:
        """Return the batch size for feeding `width` tokens to `row_count` caches of the queue."""
        return smallest_count(self._counts_for(width), row_count) if self.cpu else row_count

    def has_room(self, row_count: int, waiting_caches: Iterable[RaggedCache], question_fed: bool = False) -> bool:
        """Return whether a batch of `row_count` can grow, given all caches that wait to be decoded; see `slots`."""
        max_rows = self.fed_counts[-1] if question_fed else self.rows
        if isinstance(self.batch_size, int):
            max_rows = min(max_rows, self.batch_size)
        if row_count >= max_rows:
            return False
        waiting_caches = list(waiting_caches)
        if self._limit is not None:
            # Counting what caches hold takes longer than the rest of the queue, so it is done near the limit only.
            most_held = sum(cache.batch for cache in waiting_caches) * self._row_bytes
            if most_held > self._limit and self._held(waiting_caches) > self._limit:
                return False
        if self.cpu:
            return True
        # Own rows are copied into one batch, so those of waiting caches can take a third of the free memory.
        own_bytes, prefills = 0, dict[int, int]()
        for cache in waiting_caches:
            read_bytes = {address: size for layer in cache.ragged for address, size in layer.prefill_bytes().items()}
            own_bytes += cache.allocated_bytes() - sum(read_bytes.values())
            prefills |= read_bytes
        # The layers, and with them their caches, can be on several GPUs.
        free_bytes = len(self._gpus) * min(torch.cuda.mem_get_info(gpu)[0] for gpu in self._gpus)
        return 2 * own_bytes <= min(free_bytes, self._memory - sum(prefills.values())) - own_bytes

    def _held(self, caches: Iterable[RaggedCache]) -> int:
        """Return the bytes that caches need, with every prefill that they share, as measured in their first layers.

        Own rows count half as much again, because they are copied when they enter a batch; twice if all do at once.
        """
        layers = [layer for cache in caches for layer in cache.ragged[:1]]
        shared = [entries for layer in layers for entries in layer.shared if entries is not None]
        keys = {id(entries.key): entries.key for entries in shared}.values()  # many sequences have one tensor
        prefills = {key.data_ptr(): key.shape[2] for key in keys}
        tokens = sum(self._copies * sum(layer.reserved_room()) / layer.heads for layer in layers)
        indices = sum(entries.count / len(entries.lengths) for entries in shared)
        return int((tokens + sum(prefills.values())) * self.token_bytes + indices * self._segments * _INDEX_BYTES)


def _ladder(row_count: int, least: int) -> tuple[int, ...]:
    """Return the row counts of a batch of at most `row_count` rows, ascending from `least` if that is fewer."""
    steps = takewhile(lambda step: step < row_count, (least << exponent for exponent in count()))
    return (*steps, row_count)


def _joined(
    steady: Steady, row_counts: Sequence[int], steps: Sequence[int], least: int, widths: Collection[int]
) -> tuple[int, ...]:
    """Return row counts, ascending, with those of `steps` that give a row the same bits; see `Batching.fit`."""
    same = [
        step
        for step in steps
        if steady.at(step, least, with_head=True) and all(steady.at(step * width, least) for width in widths if width)
    ]
    return tuple(sorted({*row_counts, *same}))


def _between(row_counts: Sequence[int], least: int) -> list[int]:
    """Return row counts in the middle between those of a ladder from `least` on."""
    return [(low + high) // 2 for low, high in pairwise(row_counts) if low >= least]
