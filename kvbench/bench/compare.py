"""Ratios to the full cache, paired by repeat."""

from __future__ import annotations

from typing import Any

import pandas as pd

SIZE = ["context", "batch", "generate"]
CELL = ["policy", "budget", *SIZE]
RATIOS = ("ttft_s", "step_s", "tokens_per_s", "peak_bytes", "kv_bytes_live")
"""What is divided by the same of the full cache."""


def summarize(frame: pd.DataFrame) -> pd.DataFrame:
    """Medians over repeats, with ratios to the full cache.

    A ratio is the median over repeats of what a setting took, divided by what the full cache took
    in the same repeat. A machine that is busy for a while slows both.

    Args:
        frame: As `kvbench.bench.measure.run_bench` returns it.

    Returns:
        A row per setting: medians of the measurements; for each of `RATIOS` a column `NAME_ratio`
        with the smallest and largest ratio in `NAME_ratio_lo` and `NAME_ratio_hi`; and `error`.
    """
    full = frame[frame["policy"] == "full"].set_index([*SIZE, "repeat"])
    rows = []
    for key, part in frame.groupby(CELL, sort=False):
        assert isinstance(key, tuple)
        row: dict[str, Any] = dict(zip(CELL, key, strict=True))
        numbers = part.select_dtypes("number").columns.difference([*SIZE, "repeat"])
        row |= {str(name): value for name, value in part[numbers].median().items()}
        base = full.reindex(pd.MultiIndex.from_frame(part[[*SIZE, "repeat"]]))
        for name in RATIOS:
            ratio = part[name].to_numpy() / base[name].to_numpy()
            ratios = pd.Series(ratio)
            row |= {
                f"{name}_ratio": ratios.median(),
                f"{name}_ratio_lo": ratios.min(),
                f"{name}_ratio_hi": ratios.max(),
            }
        row["error"] = next((e for e in part["error"] if e), "")
        rows.append(row)
    return pd.DataFrame(rows)
