"""Means over subsets of a group's tasks, such as the domains of LongBench."""

from __future__ import annotations

import pandas as pd

from kvbench.harness import catalogue
from kvbench.report.overall import group_means
from kvbench.report.panel import Panel
from kvbench.report.samples import Samples
from kvbench.report.table import Name, Table, beside


def subset_means(panel: Panel, samples: Samples | None) -> dict[str, pd.DataFrame]:
    """The means of each subset that the installed benchmark names and that was run.

    Args:
        panel: The panel.
        samples: The samples of its cells.

    Returns:
        By name, `group_means` of the subset's tasks, in the benchmark's order; empty where fewer
        than two subsets have means.
    """
    benchmark = catalogue.benchmarks()[0].get(panel.group)
    means = {}
    for name, leaves in (benchmark.subsets if benchmark else {}).items():
        mine = panel.cells[panel.cells["task"].isin(leaves)]
        found = group_means(mine, samples) if len(mine) else mine
        if len(found):
            means[name] = found
    return means if len(means) > 1 else {}


def subset_table(panel: Panel, samples: Samples | None) -> Table | None:
    """`subset_means` as a table: a row per policy and budget, a column per subset."""
    means = subset_means(panel, samples)
    columns = [
        panel.compared(mean, (Name(name), f" ({int(mean['tasks'].max())})"))
        for name, mean in means.items()
    ]
    title = "Means of subsets (number of tasks) with the paired difference to full."
    return beside(title, [*panel.names(), *columns]) if columns else None
