"""Means over subsets of a group's tasks, e.g. the domains of LongBench."""

from __future__ import annotations

import pandas as pd

from kvbench.harness import catalogue
from kvbench.report.frames import Results, Variant, pick, unit_scale
from kvbench.report.overall import CONFIG, group_means
from kvbench.report.tables import configurations
from kvbench.report.text import DASH, code, interval, number, short


def subset_means(
    results: Results, model: str, group: str, variant: Variant
) -> dict[str, pd.DataFrame]:
    """The means of each subset that the installed benchmark names and that was run.

    Args:
        results: What the report is about.
        model: As in `results`.
        group: Name of the benchmark.
        variant: The panel.

    Returns:
        By name, `group_means` of the subset's tasks, in the benchmark's order; none where fewer
        than two subsets have any.
    """
    benchmark = catalogue.benchmarks()[0].get(group)
    here = _here(results, model, group, variant)
    found = {}
    for name, leaves in (benchmark.subsets if benchmark else {}).items():
        mine = here[here["task"].isin(leaves)]
        means = group_means(mine, results.samples) if len(mine) else mine
        if len(means):
            found[name] = means
    return found if len(found) > 1 else {}


def subset_rows(results: Results, model: str, group: str, variant: Variant) -> list[list[str]]:
    """`subset_means` as a table's cells, its head first: a row per policy and budget.

    A subset's head has the number of its tasks that count. None where there are no means.
    """
    means = subset_means(results, model, group, variant)
    if not means:
        return []
    counts = [f"{code(name)} ({int(mean['tasks'].max())})" for name, mean in means.items()]
    lines = [["policy", "budget", *counts]]
    by_config = [
        ({tuple(str(row[c]) for c in CONFIG): row for row in mean.to_dict("records")}, mean)
        for mean in means.values()
    ]
    for config, _ in configurations(_here(results, model, group, variant)):
        line = [code(short(config[0], 60)), code(config[1])]
        for rows, mean in by_config:
            row, unit = rows.get(config), unit_scale(mean)
            if row is None or row["status"] != "ok":
                line.append(DASH)
                continue
            text = number(row["score"], unit=unit)
            if row["policy"] != "full":
                text += f" {number(row['diff'], unit=unit, signed=True)} "
                text += interval(row["diff_lo"], row["diff_hi"], unit=unit, signed=True)
            line.append(text)
        lines.append(line)
    return lines


def _here(results: Results, model: str, group: str, variant: Variant) -> pd.DataFrame:
    cells = results.cells
    return pick(cells[(cells["model"] == model) & (cells["group"] == group)], variant)
