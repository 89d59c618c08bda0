"""Ratios to the full cache, paired by repeat."""

from __future__ import annotations

from typing import Any

import pandas as pd

SIZE = ["context", "batch", "generate"]
CELL = ["policy", "budget", *SIZE]
RATIOS = ("ttft_s", "step_s", "tokens_per_s", "peak_bytes", "kv_bytes_live")
"""Measurements with ratios to the full cache."""


def summarize(frame: pd.DataFrame) -> pd.DataFrame:
    """Return medians over repeats, with ratios to the full cache.

    A ratio is the median over repeats of a setting's value divided by the full cache's value in the same repeat, so
    that a temporarily busy machine affects both.

    Args:
        frame: Output of `kvbench.analysis.speed.timing.run_bench`.

    Returns:
        A row per setting: medians of the measurements; for each of `RATIOS` a column `NAME_ratio` with the smallest and
            largest ratio in `NAME_ratio_lo` and `NAME_ratio_hi`; and `error`.
    """
    full_rows = frame[frame["policy"] == "full"].set_index([*SIZE, "repeat"])
    summary_rows = []
    for cell_key, repeats in frame.groupby(CELL, sort=False):
        assert isinstance(cell_key, tuple)
        summary_row: dict[str, Any] = dict(zip(CELL, cell_key, strict=True))
        number_columns = repeats.select_dtypes("number").columns.difference([*SIZE, "repeat"])
        summary_row |= {str(column): median for column, median in repeats[number_columns].median().items()}
        baseline = full_rows.reindex(pd.MultiIndex.from_frame(repeats[[*SIZE, "repeat"]]))
        for column in RATIOS:
            ratio_values = repeats[column].to_numpy() / baseline[column].to_numpy()
            ratios = pd.Series(ratio_values)
            summary_row |= {
                f"{column}_ratio": ratios.median(),
                f"{column}_ratio_lo": ratios.min(),
                f"{column}_ratio_hi": ratios.max(),
            }
        summary_row["error"] = next((error for error in repeats["error"] if error), "")
        summary_rows.append(summary_row)
    return pd.DataFrame(summary_rows)
