"""The Pareto front of scores and memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd


class MemoryMetric(NamedTuple):
    """A memory metric for Pareto fronts.

    Attributes:
        share: Column on the x axis, by default the share of the full cache's bytes.
        bytes: Column that the front compares.
        verb: `held` or `read`.
        label: Axis label.
        unit: Unit of the x axis: `%`, `bytes` or `tokens`.
    """

    share: str
    bytes: str
    verb: str
    label: str
    unit: str = "%"


HELD = MemoryMetric("share", "kv_bytes_live", "held", "KV cache held, % of full")
READ = MemoryMetric("read_share", "kv_bytes_read", "read", "KV cache read per step, % of full")


def with_axis(memory: MemoryMetric, x_axis: str | None) -> MemoryMetric:
    """Return a memory metric with another x axis, one of `figure_options.X_AXES`; None: percent."""
    label = memory.label.removesuffix(", % of full")
    if x_axis == "bytes":
        return memory._replace(share=memory.bytes, label=label, unit="bytes")
    if x_axis == "tokens":
        tokens = f"{memory.verb}_tokens"
        return memory._replace(share=tokens, bytes=tokens, label=f"{label}, tokens per KV head", unit="tokens")
    return memory


def front(cost: npt.ArrayLike, value: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return which points are Pareto-optimal: no other is cheaper and as good, or better and as cheap.

    Of points that tie in both, all are optimal; a point with a NaN is never optimal. Numbers that differ from the 13th
    digit on tie, as means of the same numbers do. Runs in O(n log n).

    Args:
        cost: `[n]`, lower is better.
        value: `[n]`, higher is better.
    """
    costs, values = _to_twelve_digits(cost), _to_twelve_digits(value)
    is_optimal = np.zeros(len(costs), dtype=np.bool_)
    valid_indices = np.flatnonzero(~(np.isnan(costs) | np.isnan(values)))
    sorted_indices = valid_indices[np.lexsort((-values[valid_indices], costs[valid_indices]))]
    last_optimal = -1  # the last optimal point, with the highest cost and value so far
    for point_index in sorted_indices:
        is_tie = values[point_index] == values[last_optimal] and costs[point_index] == costs[last_optimal]
        if last_optimal < 0 or is_tie or values[point_index] > values[last_optimal]:
            is_optimal[point_index] = True
            last_optimal = point_index
    return is_optimal


def _to_twelve_digits(numbers: npt.ArrayLike) -> npt.NDArray[np.float64]:
    return np.array([float(f"{entry:.12g}") for entry in np.asarray(numbers, dtype=np.float64)])


def front_of(points: pd.DataFrame, memory: MemoryMetric = HELD) -> npt.NDArray[np.intp]:
    """Return the positions of the Pareto-optimal rows of a panel, in ascending order of bytes.

    Policies that see the answer are on no front.
    """
    competing = np.flatnonzero(~points["informed"].to_numpy(dtype=bool))
    if not len(competing):
        return competing
    scores = points["score"].to_numpy(dtype=np.float64)
    # If a lower score is better, the front runs along the lowest points.
    rank_key = scores if points["higher_is_better"].iloc[0] else -scores
    front_indices = competing[front(points[memory.bytes].iloc[competing], rank_key[competing])]
    shares = points[memory.share].to_numpy(dtype=np.float64)
    return front_indices[np.argsort(shares[front_indices], kind="stable")]
