"""Answers questions about contexts for many cells, with one prefill per context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice

import torch
from torch import Tensor

from kvbench.benchmark import Medium
from kvbench.engine.cache import RaggedCache
from kvbench.engine.clock import now
from kvbench.engine.decode import BLOCK, Batch
from kvbench.engine.driver import forward
from kvbench.engine.evict import restore
from kvbench.engine.pool import Pooled
from kvbench.engine.prefix import Prefix
from kvbench.engine.pruning import prunes, pruning_of
from kvbench.engine.upkeep import tail_of
from kvbench.errors import PluginError
from kvbench.moments import LATER
from kvbench.runs.answers import (
    Answer,
    Lane,
    Prompt,
    begun,
    by_cell,
    by_request,
    ended,
    finished,
    forks,
    key_of,
)
from kvbench.runs.cell import Cell
from kvbench.runs.store import Response
from kvbench.runs.worker import Prefilled, Worker
from kvbench.view import Need

_RUNNING = "decode "
"""Begins the names of lanes whose policy runs while they are decoded."""

Wanted = list[tuple[Cell, list[Prompt]]]
"""Cells with the prompts that they have not answered yet."""


@dataclass
class _Context:
    """A context, and what is still to be answered about it."""

    ids: tuple[int, ...]
    media: tuple[Medium, ...]
    wanted: Wanted

    @property
    def shared(self) -> Wanted:
        """The cells that one prefill of the whole context serves."""
        return [w for w in self.wanted if w[0].moment != "chunked" and not prunes(w[0].policy)]

    @property
    def needs(self) -> frozenset[Need]:
        """What these cells need to have observed."""
        return frozenset(need for cell, _ in self.shared for need in cell.policy.needs)


@torch.no_grad()
def answer_contexts(worker: Worker, prompts: Sequence[Prompt], cells: Sequence[Cell]) -> None:
    """Answer everything that is still open for one task.

    A cell fails with its reason if its policy raises or does not meet its budget; the other cells
    continue.

    Args:
        worker: The model.
        prompts: The prompts of the task; those of one context are adjacent.
        cells: The cells that answer them, at any moment but `turns`.
    """
    _Contexts(worker, prompts).answer(cells)


class _Contexts:
    """The prompts of one task, and the answers that wait to be decoded."""

    def __init__(self, worker: Worker, prompts: Sequence[Prompt]) -> None:
        self.worker = worker
        self.prompts = prompts
        self.lanes: dict[str, Lane] = {}
        self._cells: Sequence[Cell] = ()
        # The same room and width for every row, also if only some of them are left to do: the
        # bits of a response must not depend on what was resumed.
        self.reserve = self.width = longest = 0
        given = False
        for p in prompts:  # once: they are read from the disk
            self.reserve = max(self.reserve, len(p.question_ids) + p.limit)
            self.width = max(self.width, len(p.question_ids))
            longest = max(longest, len(p.context_ids))
            given |= bool(p.given_ids)
        worker.batching.fit(
            longest + self.reserve,
            [self.width, *([BLOCK] if given else [])],
        )
        self.pool = worker.pool(self.width)

    def answer(self, cells: Sequence[Cell]) -> None:
        self._cells = cells
        for wave in self._waves(cells):
            for context, made in zip(wave, self._prefilled(wave), strict=True):
                self._whole(context, made)
                for cell, missing in context.wanted:
                    if prunes(cell.policy):
                        self._pruned(cell, missing)
                self._chunked([(c, m) for c, m in context.wanted if c.moment == "chunked"])
        for name in list(self.lanes):
            self._flush(name)
        self._done(self.pool.drain())

    def _open(self, cells: Sequence[Cell]) -> Iterator[tuple[slice, _Context]]:
        """The contexts that some cells have not answered yet, and the places of their prompts."""
        end = 0
        for _, group in groupby(self.prompts, key=lambda p: (p.context_ids, p.media)):
            together = list(group)
            end += len(together)
            if (context := self._opened(together, cells)) is not None:
                yield slice(end - len(together), end), context

    def _opened(self, together: Sequence[Prompt], cells: Sequence[Cell]) -> _Context | None:
        """The context of some prompts; None if all cells have answered them."""
        done = self.worker.store.keys()
        wanted = [
            (cell, [p for p in together if key_of(cell, p) not in done])
            for cell in cells
            if cell.cell not in self.worker.failed
        ]
        wanted = [(cell, missing) for cell, missing in wanted if missing]
        first = together[0]
        return _Context(first.context_ids, first.media, wanted) if wanted else None

    def _waves(self, cells: Sequence[Cell]) -> Iterator[list[_Context]]:
        """Contexts that are prefilled together; of similar length, because they are padded."""
        most = self.worker.batching.prefills
        contexts: Iterable[_Context] = (context for _, context in self._open(cells))
        if most > 1:  # the order needs all contexts, and memory may not hold them
            known = [(bool(c.media), len(c.ids), at) for at, c in self._open(cells)]
            known.sort(key=lambda one: one[:2])
            again = (self._opened(self.prompts[at], cells) for _, _, at in known)
            contexts = (context for context in again if context is not None)
        for alone, group in groupby(contexts, key=lambda c: bool(c.media) or not c.shared):
            while wave := list(islice(group, 1 if alone else most)):
                yield wave

    def _prefilled(self, wave: Sequence[_Context]) -> Iterator[tuple[Prefix, Tensor] | None]:
        """What is there of every context of a wave once all are prefilled together."""
        together = None
        if len(wave) > 1:
            needs = frozenset(need for context in wave for need in context.needs)
            together = self.worker.prefill_together([context.ids for context in wave], needs)
        for row in range(len(wave)):
            if together is None:
                yield None
            else:
                prefix, logits = together
                yield prefix.sequence(row), logits[row : row + 1]

    def _whole(self, opened: _Context, made: tuple[Prefix, Tensor] | None) -> None:
        """Make a row for every cell and question of one context, which is prefilled once."""
        wanted = opened.shared
        if not wanted:
            return
        prefill = partial(self.worker.prefill, opened.ids, opened.needs, opened.media)
        context = Prefilled(prefill, made)
        early = [(c, missing) for c, missing in wanted if c.moment not in ("question", "decode")]
        for cell, missing, cache in self._compressed(context, early):
            for prompt, copy in zip(missing, forks(len(missing), cache), strict=True):
                self._add("ask", cell, prompt, copy, context.prefix.seconds, copy.seconds)
        late: dict[tuple[int, ...], list[tuple[Cell, Prompt]]] = {}
        for cell, missing in wanted:
            for prompt in missing if cell.moment in ("question", "decode") else ():
                late.setdefault(prompt.question_ids, []).append((cell, prompt))
        for question_ids, pairs in late.items():
            # Extending the prefix makes copies: a policy can only spoil these.
            prefix = context.intact()
            asked = Prefilled(partial(self._longer, prefix, question_ids))
            for cell, repeats, cache in self._compressed(asked, by_request(pairs)):
                lane = "told" if cache.upkeep is None else f"{_RUNNING}{cell.policy}"
                seconds = (asked.prefix.seconds, cache.seconds)
                for prompt, copy in zip(repeats, forks(len(repeats), cache), strict=True):
                    self._add(lane, cell, prompt, copy, *seconds, asked.logits)

    def _compressed(
        self, prefilled: Prefilled, wanted: Wanted
    ) -> Iterator[tuple[Cell, list[Prompt], RaggedCache]]:
        """Compress a prefix for cells, many of one moment together; leave out cells that fail."""
        by_moment: dict[str, Wanted] = {}
        for cell, prompts in wanted:
            if cell.cell not in self.worker.failed:
                by_moment.setdefault(cell.moment, []).append((cell, prompts))
        for moment, group in by_moment.items():
            left = iter(group)
            # No more than the pool can take: caches that are made together are freed together.
            while together := [*islice(left, 1 if moment in LATER else self.pool.lacking)]:
                cells = [cell for cell, _ in together]
                caches: list[RaggedCache | None] = [None] * len(cells)
                if len(cells) > 1:
                    caches = self.worker.compress_all(prefilled.intact(), cells, self.reserve)
                for (cell, prompts), made in zip(together, caches, strict=True):
                    cache = made
                    if cache is None:
                        prefix = prefilled.intact()
                        cache = self.worker.compress(prefix, cell, prompts[0], self.reserve)
                    if cache is not None:
                        yield cell, prompts, cache

    def _longer(self, prefix: Prefix, question_ids: tuple[int, ...]) -> tuple[Prefix, Tensor]:
        """Context and question together, and the logits after them."""
        longer = prefix.fork()
        return longer, longer.extend(self.worker.tensor(question_ids), question=True)

    def _pruned(self, cell: Cell, missing: list[Prompt]) -> None:
        """Prefill for one cell alone, whose policy prunes visual tokens meanwhile."""
        worker = self.worker
        pruning = pruning_of(cell.policy, cell.budget)
        asked = cell.moment == "question"
        groups = [missing]  # before the question one prefill serves all of them
        if asked:
            groups = [repeats for _, repeats in by_request((cell, p) for p in missing)]
        for together in groups:
            prompt = together[0]
            ids = prompt.ids if asked else prompt.context_ids
            try:
                with worker.policy_call():
                    prefix, logits = worker.prefill(ids, cell.policy.needs, prompt.media, pruning)
            except PluginError as error:
                worker.fail(cell, prompt, str(error))
                return
            cache = worker.compress(prefix, cell, prompt, self.reserve)
            if cache is None:
                return
            for one, copy in zip(together, forks(len(together), cache), strict=True):
                seconds = (prefix.seconds, cache.seconds)
                if asked:
                    self._add("told", cell, one, copy, *seconds, logits)
                else:
                    self._add("ask", cell, one, copy, *seconds)

    # -- chunked prefill ---------------------------------------------------------------------------

    def _chunked(self, wanted: Wanted) -> None:
        """Prefill whole prompts in chunks, each cut back to budget; cells share the first chunk."""
        pairs = by_request([(cell, prompt) for cell, missing in wanted for prompt in missing])
        needs = frozenset(need for cell, _ in wanted for need in cell.policy.needs)
        by_head: dict[tuple[int, ...], list[tuple[Cell, list[Prompt], int]]] = {}
        for cell, repeats in pairs:
            ids = repeats[0].ids
            tail = tail_of(cell.policy, cell.budget, len(ids))
            head = ids[: min(cell.chunk, len(ids) - tail)]
            by_head.setdefault(head, []).append((cell, repeats, tail))
        for head, group in by_head.items():
            self._from_first_chunk(head, group, needs)

    def _from_first_chunk(
        self,
        head: tuple[int, ...],
        group: Sequence[tuple[Cell, list[Prompt], int]],
        needs: frozenset[Need],
    ) -> None:
        """Prefill one first chunk, and go on from it for every cell, its prompt and its tail."""
        first = Prefilled(partial(self.worker.prefill, head, needs))
        for cell, repeats, tail in group:
            if cell.cell in self.worker.failed:
                continue
            prefix, whole = first.intact(), len(repeats[0].ids)
            cache = self.worker.compress(prefix, cell, repeats[0], whole=whole, tail=tail)
            if cache is not None:
                self._rest(cell, repeats, prefix, cache, first.logits, tail)

    def _rest(
        self,
        cell: Cell,
        repeats: Sequence[Prompt],
        prefix: Prefix,
        cache: RaggedCache,
        logits: Tensor,
        tail: int,
    ) -> None:
        """Prefill what comes after the first chunk, on the cell's own cache."""
        worker = self.worker
        began = now(worker.device)
        try:
            with worker.policy_call():  # a policy also runs between chunks
                logits = self._later_chunks(cell, repeats[0].ids, cache, logits, tail)
        except PluginError as error:
            worker.fail(cell, repeats[0], str(error))
            return
        cuts = 0.0
        cache.held_entries = [cache.live_entries(0)]
        if cache.upkeep is not None:
            cuts = cache.upkeep.seconds
            cache.budget_entries = [cache.upkeep.heads * cache.upkeep.budget[0]]
        cache.settle()
        prefill_s = prefix.seconds + now(worker.device) - began - cuts
        for prompt, copy in zip(repeats, forks(len(repeats), cache), strict=True):
            self._add("told", cell, prompt, copy, prefill_s, cache.seconds + cuts, logits)

    def _later_chunks(
        self, cell: Cell, ids: tuple[int, ...], cache: RaggedCache, logits: Tensor, tail: int
    ) -> Tensor:
        """Prefill the chunks after the first and the tail; return the logits after them."""
        worker, upkeep, body = self.worker, cache.upkeep, len(ids) - tail
        allowed = [] if upkeep is None else upkeep.budget
        for at in range(cell.chunk, body, cell.chunk):
            if upkeep is not None:
                upkeep.final = at + cell.chunk >= body
                if upkeep.final:  # the last cut leaves room for the tail
                    upkeep.coming = tail
                    upkeep.budget = [b - tail for b in allowed]
            chunk = worker.tensor(ids[at : min(at + cell.chunk, body)])
            logits = forward(worker.model, cache, chunk)
            restore(cache, [0])  # a chunk of one token is not cut when its forward ends
        if upkeep is not None:
            upkeep.budget, upkeep.coming = allowed, 0
        if tail:
            logits = forward(worker.model, cache, worker.tensor(ids[body:]))
        return logits

    # -- decoding ----------------------------------------------------------------------------------

    def _add(
        self,
        lane: str,
        cell: Cell,
        prompt: Prompt,
        cache: RaggedCache,
        prefill_s: float,
        compress_s: float,
        logits: Tensor | None = None,
    ) -> None:
        """Queue one response; decode as soon as there is enough to do."""
        if cell.cell in self.worker.failed:  # while an earlier repeat was decoded
            return
        response = begun(cell, prompt, cache, prefill_s, compress_s)
        row = self.worker.row(cell, prompt)
        coding = cache.ragged[0].coding
        if cell.policy.read is not None:  # the policy runs while the cell decodes
            lane = f"{_RUNNING}{lane} {cell.policy}"
        elif coding is not None:  # a batch has one coding
            lane = f"{lane} {coding}"
        elif cache.upkeep is None and not cache.slides and not row.given:
            cache.settle()
            question = prompt.question_ids
            self._done(self.pool.add(Pooled(row, cache, question, logits, response)))
            return
        waiting = self.lanes.setdefault(lane, Lane(logits is not None)).waiting
        waiting.append(Answer(cell, prompt, row, cache, response, logits))
        if not self.worker.batching.has_room(len(waiting), self._waiting_caches()):
            self._flush(lane)

    def _done(self, items: Iterable[Pooled[Response]]) -> None:
        """Store the responses that the pool has ended."""
        responses = [ended(item.owner, item.row, item.seconds) for item in items]
        if responses:
            self.worker.done(responses, self._cells)

    def _waiting_caches(self) -> Iterator[RaggedCache]:
        return (answer.cache for lane in self.lanes.values() for answer in lane.waiting)

    def _flush(self, name: str) -> None:
        """Decode what waits in a lane."""
        lane = self.lanes[name]
        answers, lane.waiting = lane.waiting, []
        if not answers:
            return
        cells = [a.cell for a in answers]
        if not name.startswith(_RUNNING):
            self.worker.done(self._decode(answers, lane.asked), cells)
            return
        try:
            with self.worker.policy_call():
                responses = self._decode(answers, lane.asked)
        except PluginError as error:
            groups = by_cell(answers)
            if len(groups) == 1:
                for a in answers:
                    self.worker.fail(a.cell, a.prompt, str(error))
                return
            for group in groups:  # decode each cell alone to find out which one fails
                lane.waiting = [replace(a, row=self.worker.row(a.cell, a.prompt)) for a in group]
                self._flush(name)
            return
        self.worker.done(responses, cells)

    def _decode(self, answers: list[Answer], asked: bool) -> list[Response]:
        """Decode answers in one batch."""
        worker = self.worker
        began = now(worker.device)
        if not asked and answers[0].cache.slides:
            for a in answers:  # padding would push tokens out of the sliding windows
                a.logits = forward(worker.model, a.cache, worker.tensor(a.prompt.question_ids))
        caches = [a.cache for a in answers]
        batch = Batch(worker.model, caches, worker.batching.slots(len(answers)))
        known = [a.logits for a in answers if a.logits is not None]
        if known:
            logits = torch.cat(known)
        else:
            logits = batch.feed([a.prompt.question_ids for a in answers], self.width)
        rows = [a.row for a in answers]
        if rows[0].given:
            batch.measure(rows, logits)
        else:
            waits = batch.cache.upkeep is not None or bool(batch.cache.readings)
            batch.answer(rows, logits, pause=waits)
        return finished(answers, batch.cache, now(worker.device) - began)
