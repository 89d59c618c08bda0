"""Means over subsets of a group's tasks, such as the domains of LongBench."""

from __future__ import annotations

import pandas as pd

from kvbench.harness import catalogue
from kvbench.report.overall import group_means
from kvbench.report.panel import Panel
from kvbench.report.sorted_samples import Samples
from kvbench.tables.table import Name, Table, beside


def subset_means(panel: Panel, samples: Samples | None) -> dict[str, pd.DataFrame]:
    """Return `group_means` of each subset of the installed benchmark that was run, by name, in the benchmark's order.

    Empty if fewer than two subsets have means.
    """
    benchmark = catalogue.benchmarks()[0].get(panel.group)
    mean_frames = {}
    for subset_name, subset_tasks in (benchmark.subsets if benchmark else {}).items():
        subset_cells = panel.cells[panel.cells["task"].isin(subset_tasks)]
        mean_frame = group_means(subset_cells, samples) if len(subset_cells) else subset_cells
        if len(mean_frame):
            mean_frames[subset_name] = mean_frame
    return mean_frames if len(mean_frames) > 1 else {}


def subset_table(panel: Panel, samples: Samples | None) -> Table | None:
    """Return `subset_means` as a table: a row per policy and budget, a column per subset."""
    mean_frames = subset_means(panel, samples)
    columns = [
        panel.compared(mean_frame, (Name(subset_name), f" ({int(mean_frame['tasks'].max())})"))
        for subset_name, mean_frame in mean_frames.items()
    ]
    table_title = "Means of subsets (number of tasks) with the paired difference from full."
    return beside(table_title, [*panel.names(), *columns]) if columns else None
