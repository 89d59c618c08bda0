"""Measures whole texts window by window (lm-eval's `loglikelihood_rolling`), each from an empty cache.

Nothing stands before a window that could be compressed, so a policy evicts while the text is fed: after tokens at
moment `decode`, after chunks at moment `chunked`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvbench.engine.eviction_state import tail_of
from kvbench.engine.measure import DENSE_BLOCK, MeasuredText, feed_text
from kvbench.engine.prefix import Prefix
from kvbench.engine.threads import now
from kvbench.errors import PluginError
from kvbench.harness.encode import Branch
from kvbench.runs.answers import Prompt, begun, peak_columns
from kvbench.runs.cell import Cell
from kvbench.runs.chunks import end_chunks, feed_chunks
from kvbench.runs.continuations import measured
from kvbench.runs.schema import Response
from kvbench.runs.worker import Worker


@dataclass
class _WholeText:
    """A text that is measured for a cell.

    Attributes:
        windows: Its windows so far.
        response: The cost of the first window, which is the longest.
        seconds: Time to measure it.
    """

    cell: Cell
    prompt: Prompt
    windows: list[MeasuredText] = field(default_factory=list)
    response: Response | None = None
    seconds: float = 0.0


def measure_whole_texts(worker: Worker, wanted: Sequence[tuple[Cell, Sequence[Prompt]]]) -> None:
    """Measure texts for cells, and store the responses.

    Args:
        worker: The model.
        wanted: The cells with repeats of one request.
    """
    texts = [_WholeText(cell, prompt) for cell, prompts in wanted for prompt in prompts]
    for window in texts[0].prompt.branches:
        _measure_window(worker, window, [text for text in texts if text.cell.cell not in worker.failed])
    for text in texts:
        if text.cell.cell not in worker.failed:
            assert text.response is not None
            worker.done([measured(text.response, [_joined(text.windows)], text.seconds)], [text.cell])


def _measure_window(worker: Worker, window: Branch, texts: Sequence[_WholeText]) -> None:
    """Measure one window of the same text for cells; those that begin alike share a prefill."""
    by_first_length: dict[int, list[_WholeText]] = {}
    for text in texts:
        by_first_length.setdefault(_first_length(text.cell, len(window.input_ids)), []).append(text)
    for first_length, alike in by_first_length.items():
        needs = frozenset(need for text in alike for need in text.cell.policy.needs)
        prefix, logits = worker.prefill(window.input_ids[:first_length], needs, logit_count=first_length)
        begun_measurement = MeasuredText(window.input_ids, window.answer_ids)
        begun_measurement.take(logits[0])
        for text in alike:
            measurement = replace(begun_measurement)
            text.windows.append(measurement)
            started = now(worker.device)
            response = _feed_rest(worker, text, measurement, prefix)
            text.seconds += now(worker.device) - started
            text.response = text.response or response


def _first_length(cell: Cell, token_count: int) -> int:
    """Return the number of tokens that are fed before the first eviction step, or at once to a full cache."""
    if cell.moment == "chunked":
        return min(cell.chunk, token_count - tail_of(cell.policy, cell.budget, token_count))
    if cell.is_full:
        return min(DENSE_BLOCK, token_count)
    return min(cell.budget.per_head(token_count), token_count)


def _feed_rest(worker: Worker, text: _WholeText, measurement: MeasuredText, prefix: Prefix) -> Response | None:
    """Feed what follows the first tokens of a window; return the cost of the window, or None if the policy fails."""
    cell, prompt, token_ids = text.cell, text.prompt, measurement.input_ids
    if cell.is_full:
        prefix = prefix.fork()
        while block := measurement.pending_ids[:DENSE_BLOCK]:
            measurement.take(prefix.extend(worker.tensor(block), logit_count=len(block))[0])
    trailing_tokens = tail_of(cell.policy, cell.budget, len(token_ids)) if cell.moment == "chunked" else 0
    prompt_length = len(token_ids) if cell.moment == "chunked" else None
    cache = worker.compress(prefix, cell, prompt, prompt_length=prompt_length, trailing_tokens=trailing_tokens)
    if cache is None:
        return None
    response = begun(cell, prompt, cache, prefix.seconds, cache.seconds)
    try:
        with worker.policy_call():  # a policy also runs while tokens are fed
            if cell.moment == "chunked":
                prompt_ids = worker.tensor(token_ids)
                for logits in feed_chunks(
                    worker.model, prompt_ids, cache, cell.chunk, trailing_tokens, all_logits=True
                ):
                    measurement.take(logits[0])
            else:
                feed_text(worker.model, cache, measurement, width=1)
    except PluginError as error:
        worker.fail(cell, prompt, str(error))
        return None
    if cell.moment == "chunked":
        compress_s = cache.seconds + end_chunks(cache)
        return begun(cell, prompt, cache, prefix.seconds, compress_s)
    return replace(response, **peak_columns(cache, 0))


def _joined(windows: Sequence[MeasuredText]) -> MeasuredText:
    """Return the measurement of a text from those of its windows."""
    return MeasuredText(
        input_ids=(),
        answer_ids=tuple(token_id for window in windows for token_id in window.answer_ids),
        loglikelihood=sum(window.loglikelihood for window in windows),
        is_greedy=all(window.is_greedy for window in windows),
    )
