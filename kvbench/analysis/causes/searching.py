"""Search for the evidence of a lost sample where no reference answer says what it is.

One chunk of the prompt at a time is given back in all heads. The best one is widened, and then shrunk from both ends
while the answer stays right. If no chunk is sufficient, the best ones are given together, and each is shrunk in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from kvbench.analysis.causes.evidence import Span, column_mask
from kvbench.analysis.causes.probe import AnswerProbe

_Outcomes: TypeAlias = Callable[[Sequence[Sequence[Span]]], list[tuple[bool, float]]]

_CHUNKS, _WIDENING = 16, 16
_MOST_CHUNKS = 4
"""Chunks that are given together if none is sufficient."""


def search_evidence(probe: AnswerProbe, kept: Tensor, columns: int) -> tuple[Span, ...]:
    """Search for passages that bring an answer back; empty if no few chunks do.

    Args:
        probe: Measures caches.
        kept: Entries that the policy keeps, bool `[L, H, all columns]`.
        columns: Columns to search.
    """

    def outcomes(span_sets: Sequence[Sequence[Span]]) -> list[tuple[bool, float]]:
        masks = [kept | column_mask(spans, kept.shape[-1]) for spans in span_sets]
        return [(outcome.right, outcome.nll) for outcome in probe.measure(masks)]

    edges = torch.linspace(0, columns, min(_CHUNKS, columns) + 1).round().int().tolist()
    chunks = list(pairwise(edges))
    results = outcomes([[chunk] for chunk in chunks])
    ranked = sorted(range(len(chunks)), key=lambda index: (not results[index][0], results[index][1]))
    together = [sorted(chunks[index] for index in ranked[:size]) for size in range(1, _MOST_CHUNKS + 1)]
    found = next(
        (spans for spans, (right, _) in zip(together, outcomes(together), strict=True) if right),
        None,
    )
    if found is None:
        return ()
    spans = _merged([(max(0, start - _WIDENING), min(columns, stop + _WIDENING)) for start, stop in found])
    for index in range(len(spans)):
        spans = _shrunk(spans, index, outcomes)
    return tuple(spans)


def _shrunk(spans: list[Span], index: int, outcomes: _Outcomes) -> list[Span]:
    """Cut columns off both ends of one span while the answer stays right, in halving steps."""
    while True:
        start, stop = spans[index]
        steps = [step for step in (1 << power for power in range(3, -1, -1)) if step < stop - start]
        steps = sorted({(stop - start) // 2, (stop - start) // 4, *steps} - {0}, reverse=True)
        candidates = [span for step in steps for span in ((start + step, stop), (start, stop - step))]
        shorter = [[*spans[:index], span, *spans[index + 1 :]] for span in candidates if span[0] < span[1]]
        results = outcomes(shorter) if shorter else []
        accepted = next((option for option, (right, _) in zip(shorter, results, strict=True) if right), None)
        if accepted is None:
            return spans
        spans = accepted


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Return spans in order, with those that touch or overlap as one."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
