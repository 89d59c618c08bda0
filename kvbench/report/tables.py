"""The tables of a report, and their files: CSV for programs and LaTeX for papers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.files import replacing
from kvbench.report.frames import Results
from kvbench.report.outputs import csv, latex
from kvbench.report.panel import MOST_TASKS, Panel, panels
from kvbench.report.strata import strata
from kvbench.report.subsets import subset_table
from kvbench.report.table import Name, Table, beside
from kvbench.report.text import mean_of, slug


@dataclass(frozen=True)
class PanelTable:
    """A table of a report.

    Attributes:
        stem: Name of its files, without the ending.
        table: The table; its title assumes that the page names the panel.
    """

    stem: str
    table: Table


@dataclass(frozen=True)
class PanelTables:
    """A panel of a report with its tables."""

    panel: Panel
    tables: tuple[PanelTable, ...]


def report_tables(results: Results) -> list[PanelTables]:
    """All tables of a report, panel by panel."""
    found = []
    for panel in panels(results):
        label = panel.variant.label.replace(", ", "-").replace(" ", "-")
        end = f"-{slug(label)}" if label else ""
        end += f"-{slug(panel.model)}" if len(results.models) > 1 else ""
        named = _panel_tables(panel, results)
        found.append(PanelTables(panel, tuple(PanelTable(s + end, t) for s, t in named)))
    return found


def write_tables(found: Iterable[PanelTables], folder: Path) -> list[Path]:
    """Write every table as CSV and as LaTeX, under a title that names model and panel.

    Args:
        found: The tables.
        folder: Where to; it exists.

    Returns:
        The files written.

    Raises:
        UserError: A file cannot be written; a file of that name is then as it was before.
    """
    paths = []
    for part in found:
        for one in part.tables:
            where = (Name(part.panel.model), " · ", *part.panel.title, ": ")
            whole = replace(one.table, title=(*where, one.table.title))
            for suffix, text in ((".csv", csv(whole)), (".tex", latex(whole))):
                path = folder / f"{one.stem}{suffix}"
                with replacing(path) as aside:
                    aside.write_text(text, encoding="utf-8")
                paths.append(path)
    return paths


def _panel_tables(panel: Panel, results: Results) -> Iterator[tuple[str, Table]]:
    """Tables of a panel, each with the beginning of its files' names."""
    names, overall = panel.names(), panel.overall
    group = slug(panel.group)
    if len(panel.tasks) == 1:
        (task,) = panel.tasks
        cells = panel.of_task(task)
        score = panel.scores(cells, ("score", panel.marks(task)), bounds=True)
        columns = [
            *names,
            panel.held(),
            *panel.read(),
            *panel.allocated(),
            score,
            panel.gaps(cells),
        ]
        yield f"scores-{slug(task)}", beside(panel.metric_title(task), columns)
    elif len(overall):
        columns = [
            *names,
            panel.held(),
            *panel.read(),
            *panel.allocated(),
            panel.held_bytes(),
            panel.scores(overall, "mean", bounds=True, failed="incomplete"),
            panel.gaps(overall),
            *panel.optimal(),
        ]
        mean = mean_of(int(overall["tasks"].max())).capitalize()
        yield f"mean-{group}", beside(f"{mean}.", columns)
    if subsets := subset_table(panel, results.samples):
        yield f"subsets-{group}", subsets
    for i in range(0, len(panel.tasks) * (len(panel.tasks) > 1), MOST_TASKS):
        tasks = panel.tasks[i : i + MOST_TASKS]
        scores = [panel.scores(panel.of_task(t), panel.task_title(t)) for t in tasks]
        part = f"-{i // MOST_TASKS + 1}" if len(panel.tasks) > MOST_TASKS else ""
        yield f"tasks-{group}{part}", beside("Scores of the tasks.", [*names, *scores])
    for task, field, table in strata(panel, results.samples):
        yield f"strata-{slug(task)}-by-{slug(field)}", table
