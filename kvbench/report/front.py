"""The Pareto front of score against KV bytes held, or read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class MemoryMetric(NamedTuple):
    """A count of KV bytes that scores are held against.

    Attributes:
        share: The column of its share of the full cache's bytes.
        bytes: The column of the bytes.
        verb: What is done to them.
        label: What an axis of the shares is called.
    """

    share: str
    bytes: str
    verb: str
    label: str


HELD = MemoryMetric("share", "kv_bytes_live", "held", "KV cache held, % of full")
READ = MemoryMetric("read_share", "kv_bytes_read", "read", "KV cache read per step, % of full")


def front(cost: npt.ArrayLike, value: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Which points are Pareto-optimal: no other is cheaper and as good, or better and as cheap.

    Points that tie in both are kept together; a point with a NaN is never optimal.

    Args:
        cost: `[n]`, less is better.
        value: `[n]`, more is better.

    Returns:
        `[n]`, in O(n log n).
    """
    costs, values = np.asarray(cost, dtype=np.float64), np.asarray(value, dtype=np.float64)
    is_optimal = np.zeros(len(costs), dtype=np.bool_)
    valid_indices = np.flatnonzero(~(np.isnan(costs) | np.isnan(values)))
    sorted_indices = valid_indices[np.lexsort((-values[valid_indices], costs[valid_indices]))]
    last_optimal = -1  # the last optimal point: the dearest and most valuable so far
    for point_index in sorted_indices:
        is_tie = values[point_index] == values[last_optimal] and costs[point_index] == costs[last_optimal]
        if last_optimal < 0 or is_tie or values[point_index] > values[last_optimal]:
            is_optimal[point_index] = True
            last_optimal = point_index
    return is_optimal
