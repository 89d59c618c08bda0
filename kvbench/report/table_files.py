"""The tables of a report, and their files: CSV for programs and LaTeX for papers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.files import replacing
from kvbench.report.frames import Results
from kvbench.report.panel import MOST_TASKS, Panel, panels
from kvbench.report.strata import strata, subset_table
from kvbench.tables.outputs import csv, latex
from kvbench.tables.table import Name, Table, beside
from kvbench.tables.text import mean_of, slug


@dataclass(frozen=True)
class PanelTable:
    """A table of a report.

    Attributes:
        stem: File name without suffix.
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
    """Return all tables of a report, panel by panel."""
    report_panels = []
    for panel in panels(results):
        variant_label = panel.variant.label.replace(", ", "-").replace(" ", "-")
        stem_suffix = f"-{slug(variant_label)}" if variant_label else ""
        stem_suffix += f"-{slug(panel.model)}" if len(results.models) > 1 else ""
        stem_tables = _panel_tables(panel, results)
        report_panels.append(
            PanelTables(panel, tuple(PanelTable(stem + stem_suffix, table) for stem, table in stem_tables))
        )
    return report_panels


def write_tables(report_panels: Iterable[PanelTables], folder: Path) -> list[Path]:
    """Write every table as CSV and LaTeX, with a title that names model and panel, and return the paths.

    Args:
        report_panels: The tables.
        folder: Existing folder for the files.

    Raises:
        UserError: A file cannot be written; an existing one is unchanged.
    """
    written_paths = []
    for panel_entry in report_panels:
        for panel_table in panel_entry.tables:
            title_prefix = (Name(panel_entry.panel.model), " · ", *panel_entry.panel.title, ": ")
            titled_table = replace(panel_table.table, title=(*title_prefix, panel_table.table.title))
            for suffix, table_text in ((".csv", csv(titled_table)), (".tex", latex(titled_table))):
                table_path = folder / f"{panel_table.stem}{suffix}"
                with replacing(table_path) as partial_path:
                    partial_path.write_text(table_text, encoding="utf-8")
                written_paths.append(table_path)
    return written_paths


def _panel_tables(panel: Panel, results: Results) -> Iterator[tuple[str, Table]]:
    """Yield the tables of a panel with the prefixes of their file names."""
    name_columns, overall = panel.names(), panel.overall
    group_slug = slug(panel.group)
    if len(panel.tasks) == 1:
        (task_name,) = panel.tasks
        task_cells = panel.of_task(task_name)
        score_column = panel.scores(task_cells, ("score", panel.marks(task_name)), bounds=True)
        table_columns = [
            *name_columns,
            panel.held(),
            *panel.read(),
            *panel.allocated(),
            score_column,
            panel.gaps(task_cells),
            *panel.distances(task_cells),
        ]
        yield f"scores-{slug(task_name)}", beside(panel.metric_title(task_name), table_columns)
    elif len(overall):
        table_columns = [
            *name_columns,
            panel.held(),
            *panel.read(),
            *panel.allocated(),
            panel.held_bytes(),
            panel.scores(overall, "mean", bounds=True, failed="incomplete"),
            panel.gaps(overall),
            *panel.distances(overall),
            *panel.optimal(),
        ]
        mean_label = mean_of(int(overall["tasks"].max())).capitalize()
        yield f"mean-{group_slug}", beside(f"{mean_label}.", table_columns)
    if subsets_table := subset_table(panel, results.samples):
        yield f"subsets-{group_slug}", subsets_table
    for first_task in range(0, len(panel.tasks) * (len(panel.tasks) > 1), MOST_TASKS):
        chunk_tasks = panel.tasks[first_task : first_task + MOST_TASKS]
        score_columns = [
            panel.scores(panel.of_task(chunk_task), panel.task_title(chunk_task)) for chunk_task in chunk_tasks
        ]
        stem_suffix = f"-{first_task // MOST_TASKS + 1}" if len(panel.tasks) > MOST_TASKS else ""
        yield (
            f"tasks-{group_slug}{stem_suffix}",
            beside("Scores of the tasks.", [*name_columns, *score_columns]),
        )
    for task_name, field_name, strata_table in strata(panel, results.samples):
        yield f"strata-{slug(task_name)}-by-{slug(field_name)}", strata_table
