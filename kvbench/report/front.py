"""The Pareto front of score against KV bytes held."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


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
    best = np.zeros(len(costs), dtype=np.bool_)
    valid = np.flatnonzero(~(np.isnan(costs) | np.isnan(values)))
    order = valid[np.lexsort((-values[valid], costs[valid]))]
    last = -1  # the last optimal point: the dearest and most valuable so far
    for i in order:
        tie = values[i] == values[last] and costs[i] == costs[last]
        if last < 0 or tie or values[i] > values[last]:
            best[i] = True
            last = i
    return best
