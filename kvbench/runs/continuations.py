"""Measures the continuations of prompts: branches of one cache, batched with those of other cells and questions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import BLOCK, NOT_FINITE, Batch
from kvbench.engine.driver import forward
from kvbench.engine.measure import MeasuredText, feed_text, feed_texts, log_probabilities
from kvbench.engine.threads import now
from kvbench.errors import PluginError
from kvbench.runs.answers import Prompt, leads, peak_columns, sees_question
from kvbench.runs.cell import Cell
from kvbench.runs.schema import Response
from kvbench.runs.worker import Worker

_TRUNK_WIDTH = 128
"""Maximum number of columns of a forward that feeds questions."""


def trunk_columns(token_count: int) -> int:
    """Return the columns that feed so many tokens to a row: a power of two, or a multiple of `_TRUNK_WIDTH`.

    The number depends on nothing but the row, so that the bits of a row do not depend on the others.
    """
    if token_count > _TRUNK_WIDTH:
        return token_count + -token_count % _TRUNK_WIDTH
    return 1 << (token_count - 1).bit_length() if token_count else 0


def branch_width(token_count: int) -> int:
    """Return the columns of the forwards that feed so many tokens to a branch."""
    return min(BLOCK, trunk_columns(token_count))


def add_widths(prompt: Prompt, trunk_widths: set[int], branch_widths: set[int]) -> None:
    """Add the columns of the forwards that can feed a prompt up to where its texts branch, and of those that follow."""
    different_leads, question_length = leads(prompt), len(prompt.question_ids)
    trunk_lengths = {question_length}
    if len(different_leads) == 1:
        (lead_ids,) = different_leads
        trunk_lengths = {len(lead_ids), question_length + len(lead_ids)}
    branches = [branch for branch in prompt.branches if not branch.alone]
    branch_lengths = {
        len(branch.answer_ids) - 1 if len(different_leads) == 1 else len(branch.input_ids) for branch in branches
    }
    trunk_widths |= {min(_TRUNK_WIDTH, trunk_columns(length)) for length in trunk_lengths if length}
    branch_widths |= {branch_width(length) for length in branch_lengths if length}


@dataclass
class _Pending:
    """The continuations of a prompt, to be measured on a cell's cache.

    Attributes:
        trunk_ids: Tokens to feed before the texts branch.
        texts: The texts that are measured after the prompt, in the order of its branches.
        shares_lead: Whether the trunk includes the lead of all texts.
        response: All fields known before measuring.
    """

    cell: Cell
    prompt: Prompt
    response: Response
    trunk_ids: tuple[int, ...] = ()
    texts: list[MeasuredText] = field(default_factory=list)
    shares_lead: bool = False

    def __post_init__(self) -> None:
        branches = [branch for branch in self.prompt.branches if not branch.alone]
        different_leads = leads(self.prompt)
        self.texts = [MeasuredText(branch.input_ids, branch.answer_ids) for branch in branches]
        self.shares_lead = len(different_leads) == 1
        if not sees_question(self.cell, self.prompt) and self.cell.moment != "chunked":
            self.trunk_ids = self.prompt.question_ids
        if self.shares_lead:
            (lead_ids,) = different_leads
            self.trunk_ids += lead_ids
            for text in self.texts:
                text.fed = len(lead_ids) - 1  # the last one counts when its logits are taken


class _Queue(NamedTuple):
    """What prompts must have in common to be measured in one batch.

    Attributes:
        columns: Columns that feed the trunk; 0: there is none.
        reads_prefill: Whether the caches read entries where they were prefilled, and so take little memory.
    """

    columns: int
    reads_prefill: bool


class Continuations:
    """Measures continuations on compressed caches, and stores the responses.

    Args:
        worker: The model.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._waiting: dict[_Queue, list[tuple[_Pending, RaggedCache]]] = {}

    def add(self, cell: Cell, prompt: Prompt, cache: RaggedCache, response: Response) -> None:
        """Queue the continuations of a prompt; measure as soon as there is enough to do.

        Args:
            cell: The cell.
            prompt: The prompt.
            cache: The cell's cache; it is used up.
            response: All fields known before measuring.
        """
        pending = _Pending(cell, prompt, response)
        is_coded = cache.ragged[0].coding is not None
        if cache.eviction_state is not None or cache.readings or cache.forbids_gaps or is_coded:
            self._measure_single(pending, cache)
            return
        cache.detach_state()
        if cell.is_full:  # a batch would copy whole caches, which takes longer than a forward of one row
            started = now(self.worker.device)
            self._measure_branches(pending, cache)
            self.worker.done([self._ended(pending, now(self.worker.device) - started)], [cell])
            return
        queue = _Queue(trunk_columns(len(pending.trunk_ids)), cache.ragged[0].is_shared)
        waiting = self._waiting.setdefault(queue, [])
        waiting.append((pending, cache))
        batching = self.worker.batching.for_caches(queue.reads_prefill)
        all_waiting = [waiting_cache for waiting in self._waiting.values() for _, waiting_cache in waiting]
        row_count = batching.rows_for(min(_TRUNK_WIDTH, queue.columns))
        if len(waiting) >= row_count or not batching.has_room(len(waiting), all_waiting):
            self._flush(queue)
        elif len(all_waiting) >= batching.counts[-1]:  # queues of several widths together hold as much as a batch
            self._flush(max(self._waiting, key=lambda queue: len(self._waiting[queue])))

    def drain(self) -> None:
        """Measure everything that waits."""
        for queue in [*self._waiting]:
            self._flush(queue)

    def _flush(self, queue: _Queue) -> None:
        """Measure what waits in a queue."""
        waiting = self._waiting.pop(queue)
        worker = self.worker
        batching = worker.batching.for_caches(queue.reads_prefill)
        started = now(worker.device)
        all_pending, caches = [pending for pending, _ in waiting], [cache for _, cache in waiting]
        del waiting
        trunk = None
        if queue.columns:
            trunk_width = min(_TRUNK_WIDTH, queue.columns)
            trunk = Batch(worker.model, caches, batching.slots_for(len(all_pending), trunk_width))
            caches.clear()  # the batch has copies
            for rest in range(queue.columns - trunk_width, -1, -trunk_width):  # columns that follow
                ends = [len(pending.trunk_ids) - rest for pending in all_pending]
                pieces = [
                    pending.trunk_ids[max(0, end - trunk_width) : end]
                    for pending, end in zip(all_pending, ends, strict=True)
                ]
                logits = trunk.feed(pieces, trunk_width)
            for pending, row_logits in zip(all_pending, logits, strict=True):
                _measure_first(pending, row_logits)
        rows_by_width: dict[int, list[tuple[int, MeasuredText]]] = {}
        for row_index, pending in enumerate(all_pending):
            for text in pending.texts:
                if text.pending_ids:
                    rows_by_width.setdefault(branch_width(len(text.pending_ids)), []).append((row_index, text))
        for width, rows in rows_by_width.items():
            row_count = batching.rows_for(width)
            for start in range(0, len(rows), row_count):
                row_indices, texts = zip(*rows[start : start + row_count], strict=True)
                slots = batching.slots_for(len(texts), width)
                if trunk is None:
                    batch = Batch(worker.model, [caches[row_index] for row_index in row_indices], slots)
                else:
                    batch = trunk.branches(row_indices, slots)
                feed_texts(batch, texts, width)
        seconds = (now(worker.device) - started) / len(all_pending)
        responses = [self._ended(pending, seconds) for pending in all_pending]
        worker.done(responses, [pending.cell for pending in all_pending])

    # -- caches that a batch would mix up -----------------------------------------------------------

    def _measure_single(self, pending: _Pending, cache: RaggedCache) -> None:
        """Measure the continuations of one prompt on a cache with eviction state, readers, codes or sliding windows."""
        worker = self.worker
        started = now(worker.device)
        try:
            with worker.policy_call():  # a policy can run again while tokens are fed
                columns, evict_seconds = self._measure_branches(pending, cache)
        except PluginError as error:
            worker.fail(pending.cell, pending.prompt, str(error))
            return
        response = self._ended(pending, now(worker.device) - started - evict_seconds)
        response = replace(response, compress_s=response.compress_s + evict_seconds, **columns)
        worker.done([response], [pending.cell])

    def _measure_branches(self, pending: _Pending, cache: RaggedCache) -> tuple[dict[str, Any], float]:
        """Feed the trunk and every branch; return the peak memory cost and the seconds of later eviction steps."""
        model = self.worker.model
        evicts = cache.eviction_state is not None
        if pending.trunk_ids:  # one token at moment `decode`, where the question is in the cache
            logits = forward(model, cache, self.worker.tensor(pending.trunk_ids))
            _measure_first(pending, logits[0])
        evict_seconds = 0.0 if cache.eviction_state is None else cache.eviction_state.seconds
        columns = [peak_columns(cache, 0)]
        longer_texts = [text for text in pending.texts if text.pending_ids]
        if cache.forbids_gaps:  # padding would push tokens out of the sliding windows
            for text in longer_texts:
                branch_cache = cache.fork()
                feed_text(model, branch_cache, text, 1 if evicts else BLOCK)
                columns.append(peak_columns(branch_cache, 0))
        elif longer_texts:
            batch = Batch(model, [cache.fork() for _ in longer_texts], len(longer_texts))
            width = 1 if evicts else max(branch_width(len(text.pending_ids)) for text in longer_texts)
            feed_texts(batch, longer_texts, width)
            columns += [peak_columns(batch.cache, row_index) for row_index in range(batch.rows)]
            evict_seconds += 0.0 if batch.cache.eviction_state is None else batch.cache.eviction_state.seconds
        largest = {name: max(row.get(name, 0) for row in columns) for name in columns[0]}
        return largest, evict_seconds

    # -- responses -----------------------------------------------------------------------------------

    def _ended(self, pending: _Pending, seconds: float) -> Response:
        """Return the response of a prompt whose texts are measured."""
        return measured(pending.response, self._in_order(pending), seconds)

    def _in_order(self, pending: _Pending) -> Iterator[MeasuredText]:
        """Yield the texts of all branches; those that are alone are measured once for all cells."""
        texts = iter(pending.texts)
        for branch in pending.prompt.branches:
            yield self.worker.measure_alone(branch) if branch.alone else next(texts)


def _measure_first(pending: _Pending, trunk_logits: Tensor) -> None:
    """Measure the first token of all texts, if the trunk ends with their lead; `trunk_logits` are `[vocabulary]`."""
    if pending.shares_lead:
        log_probs = log_probabilities(trunk_logits[None])
        for text in pending.texts:
            text.advance(log_probs)


def measured(response: Response, texts: Iterable[MeasuredText], seconds: float) -> Response:
    """Return a response with the log-likelihood of each text, measured in `seconds` seconds, or its error."""
    texts = [*texts]
    if not all(text.is_finite for text in texts):
        return replace(response, error=NOT_FINITE, decode_s=seconds)
    token_counts = [len(text.answer_ids) for text in texts]
    record = {
        "loglikelihood": [text.loglikelihood for text in texts],
        "greedy": [text.is_greedy for text in texts],
        "tokens": token_counts,
    }
    token_count = sum(token_counts)
    return replace(response, response=json.dumps(record), stop="given", generated_tokens=token_count, decode_s=seconds)
