"""The Pareto front of score against KV bytes held, or read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Memory(NamedTuple):
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


HELD = Memory("share", "kv_bytes_live", "held", "KV cache held, % of full")
READ = Memory("read_share", "kv_bytes_read", "read", "KV cache read per step, % of full")


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
