"""Search for the largest batch that fits into a memory limit."""

from __future__ import annotations

from collections.abc import Callable

_MOST_GROWTH = 4
"""Factor by which a batch may grow from one trial to the next while all fit."""


def largest_batch(peak_of: Callable[[int], float], limit: float) -> int:
    """Return the largest batch whose peak memory is within the limit; 0 if not even one sequence fits.

    The peak grows about linearly with the batch, so each trial is where the line through the smallest and the largest
    batch that fit meets the limit. Where that does not close in, the interval is halved.

    Args:
        peak_of: Peak memory in bytes of a trial with a batch size; infinity if it runs out of memory.
        limit: Memory in bytes.
    """
    fitting: list[tuple[int, float]] = []
    too_large: int | None = None
    candidate = 1
    halve = False
    while True:
        peak_bytes = peak_of(candidate)
        if peak_bytes <= limit:
            fitting.append((candidate, peak_bytes))
        else:
            too_large = candidate
        largest = fitting[-1][0] if fitting else 0
        if too_large is not None and too_large - largest <= 1:
            return largest
        highest = _MOST_GROWTH * largest if too_large is None else too_large - 1
        if halve and too_large is not None:
            candidate = (largest + too_large) // 2
        else:
            candidate = min(max(_extrapolate(fitting, limit), largest + 1), highest)
        halve = too_large is not None and not halve


def _extrapolate(fitting: list[tuple[int, float]], limit: float) -> int:
    """Return where a line through the first and last peak meets the limit; twice the batch if it never does."""
    batch, peak_bytes = fitting[-1]
    if len(fitting) > 1:
        earlier_batch, earlier_peak = fitting[0]
        per_sequence = (peak_bytes - earlier_peak) / (batch - earlier_batch)
        if per_sequence > 0:
            return batch + int((limit - peak_bytes) / per_sequence)
    return 2 * batch
