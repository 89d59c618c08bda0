"""Answers questions about contexts for many cells, with one prefill per context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.benchmark import Medium
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import BLOCK, Batch, DecodeRow
from kvbench.engine.driver import forward
from kvbench.engine.eviction_state import tail_of
from kvbench.engine.fidelity import FidelityRow
from kvbench.engine.pool import Pooled
from kvbench.engine.prefix import Prefix
from kvbench.engine.pruning import prunes, pruning_of
from kvbench.engine.threads import now
from kvbench.engine.vision import remembered_bytes
from kvbench.errors import PluginError
from kvbench.moments import LATER, Moment
from kvbench.runs.answers import (
    PendingAnswer,
    Prompt,
    begun,
    by_cell,
    by_request,
    empty,
    ended,
    finished,
    forks,
    sees_question,
)
from kvbench.runs.cell import Cell
from kvbench.runs.chunks import end_chunks, feed_chunks
from kvbench.runs.continuations import Continuations, add_widths, branch_width, measured
from kvbench.runs.full_answers import FullAnswers, answer_widths
from kvbench.runs.schema import Response
from kvbench.runs.whole_texts import measure_whole_texts
from kvbench.runs.work import Wanted, context_key, context_tokens, is_compared, unanswered
from kvbench.runs.worker import Worker
from kvbench.view import Need

_IN_PLACE = 32
"""Cells that are compressed together if they have no entries of their own, only four bytes for each that they read."""


class _Queue(NamedTuple):
    """What answers must have in common to be decoded in one batch.

    Attributes:
        question_fed: Whether the questions are in the caches already.
        reads_prefill: Whether the caches read entries where they were prefilled, and so take little memory.
        policy: The policy, if it runs while the answers are decoded.
        coding: How the entries are quantised.
        columns: Tokens fed per forward of the full cache's answers, which are measured; 0 if answers are generated.
    """

    question_fed: bool
    reads_prefill: bool
    policy: str
    coding: str
    columns: int = 0


@dataclass
class _Context:
    """A context, and what is still to be answered about it."""

    ids: tuple[int, ...]
    media: tuple[Medium, ...]
    wanted: Wanted

    @property
    def shared(self) -> Wanted:
        """The cells that one prefill of the whole context serves."""
        if not self.ids:
            return []
        return [pending for pending in self.wanted if pending[0].moment != "chunked" and not prunes(pending[0].policy)]

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
        self.queues: dict[_Queue, list[PendingAnswer]] = {}
        self._cells: Sequence[Cell] = ()
        # The same room and width for every row, also if only some of them are left to do: the
        # bits of a response must not depend on what was resumed.
        self.reserve = self.width = longest_context = 0
        trunk_widths: set[int] = set()
        branch_widths: set[int] = set()
        has_given = False
        visual_tokens: dict[tuple[Medium, ...], int] = {}
        for prompt in prompts:  # once: they are read from the disk
            self.reserve = max(self.reserve, len(prompt.question_ids) + prompt.limit)
            longest_context = max(longest_context, len(prompt.context_ids))
            if prompt.media:
                visual_tokens[prompt.media] = worker.visual_count(prompt.context_ids)
            if prompt.branches:
                add_widths(prompt, trunk_widths, branch_widths)
            else:
                self.width = max(self.width, len(prompt.question_ids))
                has_given |= bool(prompt.given_ids)
                if worker.fidelity and not prompt.given_ids:
                    branch_widths |= answer_widths(prompt.limit)
        if worker.fidelity:
            trunk_widths |= {max(self.width, columns) for columns in branch_widths}
        worker.batching.fit(
            longest_context + self.reserve,
            [self.width],
            trunk_widths,
            branch_widths,
            given_widths=[BLOCK] if has_given else [],
            queues=3 if worker.fidelity else 1,
            media_bytes=remembered_bytes(sum(visual_tokens.values())),
            own_tokens=self.reserve,
        )
        self.pool = worker.pool(self.width)
        self.continuations = Continuations(worker)
        self.full_answers: FullAnswers | None = None

    def answer(self, cells: Sequence[Cell]) -> None:
        self._cells = cells
        for prefill_batch in self._waves(cells):
            with self.worker.meter.contexts(sum(context_tokens(context.wanted) for context in prefill_batch)):
                for context, prefilled in zip(prefill_batch, self._prefilled(prefill_batch), strict=True):
                    self._answer_context(context, prefilled)
        for queue in sorted(self.queues, key=lambda queue: not queue.columns):  # measured answers are generated next
            self._flush(queue)
        for queue in list(self.queues):
            self._flush(queue)
        self._done(self.pool.drain())
        self.continuations.drain()

    def _answer_context(self, context: _Context, prefilled: tuple[Prefix, Tensor] | None) -> None:
        """Prefill and compress a context for all cells, and queue their responses."""
        if not context.ids:
            self._without_context(context)
            return
        if self.worker.fidelity or any(cell.policy.is_informed for cell, _ in context.wanted):
            self.full_answers = FullAnswers(
                self.worker, self.worker.tokenizer, self.worker.stop, context.ids, context.media
            )
        self._whole(context, prefilled)
        for cell, cell_prompts in context.wanted:
            if prunes(cell.policy):
                self._pruned(cell, cell_prompts)
        self._chunked([(cell, cell_prompts) for cell, cell_prompts in context.wanted if cell.moment == "chunked"])

    def _open(self, cells: Sequence[Cell]) -> Iterator[tuple[slice, _Context]]:
        """The contexts that some cells have not answered yet, and the places of their prompts."""
        end_index = 0
        for _, prompt_group in groupby(self.prompts, key=context_key):
            same_context = list(prompt_group)
            end_index += len(same_context)
            if (context := self._opened(same_context, cells)) is not None:
                yield slice(end_index - len(same_context), end_index), context

    def _opened(self, same_context: Sequence[Prompt], cells: Sequence[Cell]) -> _Context | None:
        """The context of some prompts; None if all cells have answered them."""
        open_cells = [cell for cell in cells if cell.cell not in self.worker.failed]
        pending = unanswered(open_cells, same_context, self.worker.store.keys())
        first_prompt = same_context[0]
        return _Context(first_prompt.context_ids, first_prompt.media, pending) if pending else None

    def _waves(self, cells: Sequence[Cell]) -> Iterator[list[_Context]]:
        """Contexts that are prefilled together; of similar length, because they are padded."""
        max_contexts = self.worker.batching.prefills
        contexts: Iterable[_Context] = (context for _, context in self._open(cells))
        if max_contexts > 1:  # the order needs all contexts, and memory may not hold them
            context_keys = [
                (bool(opened.media), len(opened.ids), prompt_range) for prompt_range, opened in self._open(cells)
            ]
            context_keys.sort(key=lambda context_key: context_key[:2])
            reopened = (self._opened(self.prompts[prompt_range], cells) for _, _, prompt_range in context_keys)
            contexts = (context for context in reopened if context is not None)
        for runs_alone, context_group in groupby(contexts, key=lambda opened: bool(opened.media) or not opened.shared):
            while prefill_batch := list(islice(context_group, 1 if runs_alone else max_contexts)):
                yield prefill_batch

    def _prefilled(self, prefill_batch: Sequence[_Context]) -> Iterator[tuple[Prefix, Tensor] | None]:
        """What is there of every context of a wave once all are prefilled together."""
        batch_result = None
        if len(prefill_batch) > 1:
            needs = frozenset(need for context in prefill_batch for need in context.needs)
            batch_result = self.worker.prefill_together([context.ids for context in prefill_batch], needs)
        for row_index in range(len(prefill_batch)):
            if batch_result is None:
                yield None
            else:
                prefix, logits = batch_result
                context = prefill_batch[row_index]
                alone = prefix.sequence(row_index)
                alone.remake = partial(self._prefill_alone, context)
                yield alone, logits[row_index : row_index + 1]

    def _prefill_alone(self, context: _Context) -> Prefix:
        return self.worker.prefill(context.ids, context.needs, context.media)[0]

    def _whole(self, open_context: _Context, batch_result: tuple[Prefix, Tensor] | None) -> None:
        """Make a row for every cell and question of one context, which is prefilled once."""
        pending = open_context.shared
        if not pending:
            return
        prefix, context_logits = batch_result or self.worker.prefill(
            open_context.ids, open_context.needs, open_context.media
        )
        if self.full_answers is not None:
            self.full_answers.share(prefix, context_logits)
            for cell, cell_prompts in pending:
                if cell.policy.is_informed:
                    self._informed(prefix, cell, cell_prompts)
            pending = [(cell, cell_prompts) for cell, cell_prompts in pending if not cell.policy.is_informed]
        before_question = [
            (early_cell, early_prompts)
            for early_cell, cell_prompts in pending
            if (early_prompts := [prompt for prompt in cell_prompts if not sees_question(early_cell, prompt)])
        ]
        for cell, cell_prompts, cache in self._compressed(prefix, before_question):
            for prompt, forked in zip(cell_prompts, forks(len(cell_prompts), cache), strict=True):
                self._add(cell, prompt, forked, prefix.seconds, forked.seconds)
        by_question: dict[tuple[int, ...], list[tuple[Cell, Prompt]]] = {}
        for cell, cell_prompts in pending:
            for prompt in cell_prompts:
                if sees_question(cell, prompt):
                    by_question.setdefault(prompt.question_ids, []).append((cell, prompt))
        for question_ids, cell_pairs in by_question.items():
            # Continuations may share no token after the context; their leads follow.
            with_question, logits = self.worker.ask(prefix, question_ids) if question_ids else (prefix, context_logits)
            for cell, repeats, cache in self._compressed(with_question, by_request(cell_pairs)):
                for prompt, forked in zip(repeats, forks(len(repeats), cache), strict=True):
                    self._add(cell, prompt, forked, with_question.seconds, cache.seconds, logits)

    def _informed(self, prefix: Prefix, cell: Cell, cell_prompts: Sequence[Prompt]) -> None:
        """Make rows for a cell whose policy sees question and answer, so that every question has its own cache."""
        assert self.full_answers is not None
        for _, repeats in by_request((cell, prompt) for prompt in cell_prompts):
            seen, logits = prefix, None
            if sees_question(cell, repeats[0]):
                seen, logits = self.worker.ask(prefix, repeats[0].question_ids)
            told = seen.told(cell.policy, self.full_answers.following(repeats[0], question_fed=logits is not None))
            for _, _, cache in self._compressed(told, [(cell, repeats)]):
                for prompt, forked in zip(repeats, forks(len(repeats), cache), strict=True):
                    self._add(cell, prompt, forked, seen.seconds, cache.seconds, logits)
            prefix.cache.modified_in_place |= told.modified_in_place  # they share keys and values

    def _compressed(self, prefix: Prefix, pending: Wanted) -> Iterator[tuple[Cell, list[Prompt], RaggedCache]]:
        """Compress a prefix for cells, many of one moment together; leave out cells that fail."""
        by_moment: dict[Moment, Wanted] = {}
        for cell, prompts in pending:
            if cell.cell not in self.worker.failed:
                by_moment.setdefault(cell.moment, []).append((cell, prompts))
        for moment, moment_group in by_moment.items():
            for batch in self._compressed_together(prefix, moment, moment_group):
                cells = [cell for cell, _ in batch]
                caches: list[RaggedCache | None] = [None] * len(cells)
                if len(cells) > 1:
                    caches = self.worker.compress_all(prefix, cells, self.reserve)
                for (cell, prompts), batch_cache in zip(batch, caches, strict=True):
                    cache = batch_cache
                    if cache is None:
                        cache = self.worker.compress(prefix, cell, prompts[0], self.reserve)
                    if cache is not None:
                        yield cell, prompts, cache

    def _compressed_together(self, prefix: Prefix, moment: Moment, wanted: Wanted) -> Iterator[Wanted]:
        """Divide cells of one moment into those that are compressed together."""
        if moment in LATER:
            yield from ([pending] for pending in wanted)
            return
        most_in_place = min(_IN_PLACE, self.pool.counts[-1])  # fewer once memory has run out
        for in_place, cells in groupby(wanted, key=lambda pending: prefix.lends_to(pending[0].policy, moment)):
            # No more copies than the pool can take: caches that are made together are freed together.
            while batch := [*islice(cells, max(most_in_place if in_place else 0, self.pool.lacking))]:
                yield batch

    def _without_context(self, context: _Context) -> None:
        """Measure texts that nothing precedes."""
        worker = self.worker
        for cell, cell_prompts in context.wanted:
            for prompt in cell_prompts:
                worker.meter.begin(cell, prompt)
        if context.wanted[0][1][0].request.rolling:
            measure_whole_texts(worker, context.wanted)
            return
        for cell, cell_prompts in context.wanted:
            for prompt in cell_prompts:
                started = now(worker.device)
                texts = [worker.measure_alone(branch) for branch in prompt.branches]
                worker.done([measured(empty(cell, prompt), texts, now(worker.device) - started)], [cell])

    def _pruned(self, cell: Cell, cell_prompts: list[Prompt]) -> None:
        """Prefill for one cell alone, whose policy prunes visual tokens meanwhile."""
        worker = self.worker
        pruning = pruning_of(cell.policy, cell.budget)
        has_question = cell.moment == "question"
        prompt_groups = [cell_prompts]  # before the question one prefill serves all of them
        if has_question:
            prompt_groups = [repeats for _, repeats in by_request((cell, cell_prompt) for cell_prompt in cell_prompts)]
        for group_prompts in prompt_groups:
            prompt = group_prompts[0]
            token_ids = prompt.ids if has_question else prompt.context_ids
            try:
                with worker.policy_call():
                    prefix, logits = worker.prefill(token_ids, cell.policy.needs, prompt.media, pruning)
            except PluginError as error:
                worker.fail(cell, prompt, str(error))
                return
            cache = worker.compress(prefix, cell, prompt, self.reserve)
            if cache is None:
                return
            for group_prompt, forked in zip(group_prompts, forks(len(group_prompts), cache), strict=True):
                prompt_logits = logits if has_question else None
                self._add(cell, group_prompt, forked, prefix.seconds, cache.seconds, prompt_logits)

    # -- chunked prefill ---------------------------------------------------------------------------

    def _chunked(self, pending: Wanted) -> None:
        """Prefill whole prompts in chunks, each cut back to budget; cells share the first chunk."""
        cell_pairs = by_request([(cell, prompt) for cell, cell_prompts in pending for prompt in cell_prompts])
        needs = frozenset(need for cell, _ in pending for need in cell.policy.needs)
        by_first_chunk: dict[tuple[int, ...], list[tuple[Cell, list[Prompt], int]]] = {}
        for cell, repeats in cell_pairs:
            token_ids = repeats[0].ids
            trailing_tokens = tail_of(cell.policy, cell.budget, len(token_ids))
            first_chunk = token_ids[: min(cell.chunk, len(token_ids) - trailing_tokens)]
            by_first_chunk.setdefault(first_chunk, []).append((cell, repeats, trailing_tokens))
        for first_chunk, chunk_group in by_first_chunk.items():
            self._from_first_chunk(first_chunk, chunk_group, needs)

    def _from_first_chunk(
        self,
        first_chunk: tuple[int, ...],
        chunk_group: Sequence[tuple[Cell, list[Prompt], int]],
        needs: frozenset[Need],
    ) -> None:
        """Prefill one first chunk, and go on from it for every cell, its prompt and its tail."""
        prefix, logits = self.worker.prefill(first_chunk, needs)
        for cell, repeats, trailing_tokens in chunk_group:
            if cell.cell in self.worker.failed:
                continue
            prompt_length = len(repeats[0].ids)
            cache = self.worker.compress(
                prefix,
                cell,
                repeats[0],
                prompt_length=prompt_length,
                trailing_tokens=trailing_tokens,
            )
            if cache is not None:
                self._rest(cell, repeats, prefix, cache, logits, trailing_tokens)

    def _rest(
        self,
        cell: Cell,
        repeats: Sequence[Prompt],
        prefix: Prefix,
        cache: RaggedCache,
        logits: Tensor,
        trailing_tokens: int,
    ) -> None:
        """Prefill what comes after the first chunk, on the cell's own cache."""
        worker = self.worker
        start_time = now(worker.device)
        try:
            with worker.meter.phase("prefill"), worker.policy_call():  # a policy also runs between chunks
                token_ids = worker.tensor(repeats[0].ids)
                for chunk_logits in feed_chunks(worker.model, token_ids, cache, cell.chunk, trailing_tokens):
                    logits = chunk_logits
        except PluginError as error:
            worker.fail(cell, repeats[0], str(error))
            return
        evict_seconds = end_chunks(cache)
        prefill_s = prefix.seconds + now(worker.device) - start_time - evict_seconds
        for prompt, forked in zip(repeats, forks(len(repeats), cache), strict=True):
            self._add(cell, prompt, forked, prefill_s, cache.seconds + evict_seconds, logits)

    # -- decoding ----------------------------------------------------------------------------------

    def _add(
        self,
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
        self.worker.meter.begin(cell, prompt)
        if prompt.branches:
            self.continuations.add(cell, prompt, cache, response)
            return
        if self.full_answers is None or not self.worker.fidelity or not is_compared(prompt):
            self._generate(cell, prompt, cache, response, logits)
            return
        full_answer = self.full_answers.of(prompt)
        columns = branch_width(len(full_answer.tokens) - 1) or 1
        queue = self._queue(cell, cache, logits)._replace(columns=columns)
        if not queue.policy:
            cache.detach_state()
        waiting = self.queues.setdefault(queue, [])
        row = FidelityRow.of(full_answer, self.worker.stop(prompt))
        waiting.append(PendingAnswer(cell, prompt, row, cache, response, logits))
        batching = self.worker.batching.for_caches(queue.reads_prefill)
        is_full = len(waiting) >= batching.rows_for(self._widest(queue))
        if is_full or not batching.has_room(len(waiting), self._waiting_caches()):
            self._flush(queue)

    def _generate(
        self, cell: Cell, prompt: Prompt, cache: RaggedCache, response: Response, logits: Tensor | None
    ) -> None:
        """Queue one answer for decoding."""
        row = self.worker.row(cell, prompt)
        queue = self._queue(cell, cache, logits)
        if not (queue.policy or queue.coding or cache.forbids_gaps or row.given):
            cache.detach_state()
            question_ids = prompt.question_ids
            self._done(self.pool.add(Pooled(row, cache, question_ids, logits, response)))
            return
        waiting = self.queues.setdefault(queue, [])
        waiting.append(PendingAnswer(cell, prompt, row, cache, response, logits))
        if not self.worker.batching.for_caches(queue.reads_prefill).has_room(
            len(waiting), self._waiting_caches(), queue.question_fed
        ):
            self._flush(queue)

    def _queue(self, cell: Cell, cache: RaggedCache, logits: Tensor | None) -> _Queue:
        """Return the queue of answers that can be decoded with this one."""
        first_layer = cache.ragged[0]
        runs = cache.eviction_state is not None or cell.policy.read is not None
        policy = str(cell.policy) if runs else ""
        return _Queue(logits is not None, first_layer.is_shared, policy, str(first_layer.coding or ""))

    def _widest(self, queue: _Queue) -> int:
        """Return the columns of the widest forward that measures the answers of a queue."""
        return queue.columns if queue.question_fed else max(self.width, queue.columns)

    def _done(self, items: Iterable[Pooled[Response]]) -> None:
        """Store the responses that the pool has ended."""
        responses = [ended(item.owner, item.row, item.seconds) for item in items]
        if responses:
            self.worker.done(responses, self._cells)

    def _waiting_caches(self) -> Iterator[RaggedCache]:
        return (answer.cache for waiting in self.queues.values() for answer in waiting)

    def _flush(self, queue: _Queue) -> None:
        """Decode what waits in a queue."""
        answers, self.queues[queue] = self.queues[queue], []
        if not answers:
            return
        cells = [answer.cell for answer in answers]
        responses: list[Response] = []
        try:
            with self.worker.policy_call() if queue.policy else nullcontext():
                if queue.columns:
                    self._compare(answers, queue)
                else:
                    responses = self._decode(answers, queue)
        except PluginError as error:
            cell_groups = by_cell(answers)
            if len(cell_groups) == 1:
                for answer in answers:
                    self.worker.fail(answer.cell, answer.prompt, str(error))
                return
            for cell_group in cell_groups:  # decode each cell alone to find out which one fails
                self.queues[queue] = [replace(answer, row=self._restarted(answer)) for answer in cell_group]
                self._flush(queue)
            return
        if not queue.columns:
            self.worker.done(responses, cells)
            return
        while answers:  # each leaves this list, so that its cache can be freed
            answer = answers.pop(0)
            if isinstance(answer.row, FidelityRow) and not answer.row.error:
                answer.response = replace(answer.response, **answer.row.columns())
            if answer.cell.cell not in self.worker.failed:
                self._generate(answer.cell, answer.prompt, answer.cache, answer.response, answer.logits)

    def _restarted(self, answer: PendingAnswer) -> DecodeRow:
        """Return the row of an answer without its tokens."""
        if isinstance(answer.row, FidelityRow):
            return FidelityRow.of(answer.row.full_answer, answer.row.stop)
        return self.worker.row(answer.cell, answer.prompt)

    def _compare(self, answers: Sequence[PendingAnswer], queue: _Queue) -> None:
        """Feed the full cache's answers to copies of caches in one batch."""
        if not queue.question_fed and answers[0].cache.forbids_gaps:  # feeding changes a cache
            answers = [replace(answer, cache=answer.cache.fork()) for answer in answers]
        slots = self.worker.batching.for_caches(queue.reads_prefill).slots_for(len(answers), self._widest(queue))
        batch, logits = self._prompted(answers, queue.question_fed, slots)
        batch.measure([answer.row for answer in answers], logits, queue.columns)

    def _prompted(self, answers: Sequence[PendingAnswer], question_fed: bool, slots: int) -> tuple[Batch, Tensor]:
        """Return a batch of answers that has read the questions, and the logits after them."""
        worker = self.worker
        if not question_fed and answers[0].cache.forbids_gaps:
            for answer in answers:  # padding would push tokens out of the sliding windows
                if answer.logits is None:  # it is decoded again, alone, after another cell of its batch has failed
                    fed_cache = answer.cache.fork()
                    answer.logits = forward(worker.model, fed_cache, worker.tensor(answer.prompt.question_ids))
                    answer.cache = fed_cache
        batch = Batch(worker.model, [answer.cache for answer in answers], slots)
        answer_logits = [answer.logits for answer in answers if answer.logits is not None]
        if answer_logits:
            return batch, torch.cat(answer_logits)
        return batch, batch.feed([answer.prompt.question_ids for answer in answers], self.width)

    def _decode(self, answers: list[PendingAnswer], queue: _Queue) -> list[Response]:
        """Decode answers in one batch."""
        worker = self.worker
        start_time = now(worker.device)
        slots = self.worker.batching.for_caches(queue.reads_prefill).slots(len(answers), queue.question_fed)
        batch, logits = self._prompted(answers, queue.question_fed, slots)
        rows = [answer.row for answer in answers]
        if rows[0].given:
            batch.measure(rows, logits)
        else:
            pauses = batch.cache.eviction_state is not None or bool(batch.cache.readings)
            batch.answer(rows, logits, pause_ended=pauses)
        return finished(answers, batch.cache, now(worker.device) - start_time)
