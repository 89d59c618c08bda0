"""The tables of a run in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from kvbench.report.frames import Results, lower_is_better_tasks, prepare
from kvbench.report.headroom import headroom, headroom_tables
from kvbench.report.panel import DOWN, MOST_TASKS, Filled, Panel, panels
from kvbench.report.remarks import remarks
from kvbench.tables.numbers import size
from kvbench.tables.outputs import plain_text, terminal
from kvbench.tables.table import Name, Phrase, beside
from kvbench.tables.text import listed, plain, short, tokens

_MOST_FAILED = 12


def run_table(cells: pd.DataFrame, samples: pd.DataFrame | None = None) -> RunTable:
    """Return the results of one or several runs for `rich.print`.

    Args:
        cells: The frame of `cells.parquet`.
        samples: The frame of `samples.parquet`. With it, the interval of the mean over tasks is a bootstrap; without
            it, the intervals of the tasks are combined.
    """
    return RunTable(prepare(cells, samples))


class RunTable:
    """A table for each panel, split to fit the terminal, with explanations."""

    def __init__(self, results: Results) -> None:
        self.results = results

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the tables and their explanations."""
        if not len(self.results.cells):
            yield Text("no cells: nothing has been run yet")
            return
        for panel in panels(self.results):
            yield from _fitted(panel, console, options)
        yield from map(terminal, headroom_tables(headroom(self.results)))
        yield from _notes(self.results)


def _fitted(panel: Panel, console: Console, options: ConsoleOptions) -> Iterator[RichTable]:
    """Yield one table if it fits the terminal; otherwise the means, then as many tasks per table as fit."""
    name_columns, has_several_tasks = panel.names(), len(panel.tasks) > 1
    lead_column = panel.scores(panel.overall, "mean" if has_several_tasks else ("score", panel.marks(panel.tasks[0])))
    mean_columns = [
        panel.held(),
        *panel.read(),
        *panel.allocated(),
        lead_column,
        panel.gaps(panel.overall),
        *panel.distances(panel.overall),
    ]
    task_columns = [
        panel.scores(panel.of_task(task_name), panel.task_title(task_name)) for task_name in panel.tasks
    ] * has_several_tasks
    table_title: tuple[Phrase, ...] = (Name(panel.model), " · ", *panel.title)
    if not has_several_tasks:
        table_title = (*table_title, ": ", *panel.metric_title(panel.tasks[0]))

    def fits(chunk_columns: list[Filled]) -> bool:
        chunk_table = terminal(beside("", [*name_columns, *chunk_columns]))
        return console.measure(chunk_table, options=options.update(width=9999)).maximum <= (options.max_width)

    column_chunks = [[*mean_columns, *task_columns]]
    if len(task_columns) > MOST_TASKS or not fits(column_chunks[0]):
        column_chunks = [mean_columns]
        for column in task_columns:
            if (
                len(column_chunks) == 1
                or len(column_chunks[-1]) == MOST_TASKS
                or not fits([*column_chunks[-1], column])
            ):
                column_chunks.append([])
            column_chunks[-1].append(column)
    for chunk_index, column_chunk in enumerate(column_chunks):
        part_label = f" ({chunk_index + 1} of {len(column_chunks)})" if len(column_chunks) > 1 else ""
        yield terminal(beside((*table_title, part_label), [*name_columns, *column_chunk]))


def _notes(results: Results) -> Iterator[Text]:
    cells = results.cells
    # Full is run once for all moments, but its bytes depend on the moment, so use those next to the policies.
    ok_cells = cells[cells["status"] == "ok"]
    compressed_cells = ok_cells[ok_cells["policy"] != "full"]
    full_bytes = (compressed_cells if len(compressed_cells) else ok_cells)["kv_bytes_full"].mean()
    is_one_size = len(ok_cells) and ok_cells["dtype"].nunique() == 1
    held_text = f"; the full cache holds {size(full_bytes)} per sample" if is_one_size else ""
    yield Text(
        f"Scores in [0, 1] are shown in points, 0 to 100. KV held: live bytes as a share of the full cache's{held_text}"
        ". Differences from full are paired by question; brackets are 95% intervals.",
        "dim",
    )
    lower_tasks = lower_is_better_tasks(cells)
    if lower_tasks:
        metric_text = listed(list(dict.fromkeys(cells.loc[cells["task"].isin(lower_tasks), "metric"])))
        yield Text(f"{DOWN.strip()} lower is better: {plain(metric_text)}")
    for remark in remarks(results):
        yield Text(plain_text(remark))
    failed_cells = cells[cells["status"] != "ok"]
    for _, cell in failed_cells.head(_MOST_FAILED).iterrows():
        setting = f"{short(cell['policy'])} {plain(cell['budget'])} {plain(cell['moment'])}".rstrip()
        task_text = short(cell["task"])
        if cell["length"]:
            task_text += f" at {tokens(cell['length'])}"
        yield Text(f"failed: {setting} on {task_text}: {short(cell['error'], 300)}", "red")
    if len(failed_cells) > _MOST_FAILED:
        yield Text(f"{len(failed_cells) - _MOST_FAILED} more cells failed; the report lists them", "red")
