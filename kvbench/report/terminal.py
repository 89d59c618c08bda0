"""The tables of a run in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from kvbench.report.frames import Results, falling, prepare
from kvbench.report.numbers import size
from kvbench.report.outputs import plain_text, terminal
from kvbench.report.panel import DOWN, MOST_TASKS, Filled, Panel, panels
from kvbench.report.remarks import remarks
from kvbench.report.table import Name, Phrase, beside
from kvbench.report.text import listed, plain, short, tokens

_MOST_FAILED = 12


def run_table(cells: pd.DataFrame, samples: pd.DataFrame | None = None) -> RunTable:
    """The results of one or several runs as something `rich.print` shows.

    Args:
        cells: The frame of `cells.parquet`.
        samples: The frame of `samples.parquet`. With it the interval of the mean over tasks is a
            bootstrap; without it the intervals of the tasks are joined.
    """
    return RunTable(prepare(cells, samples))


class RunTable:
    """A table for each panel, split so that it fits the terminal, and what explains it."""

    def __init__(self, results: Results) -> None:
        self.results = results

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the tables and what a reader must know to read them."""
        if not len(self.results.cells):
            yield Text("no cells: nothing has been run")
            return
        for panel in panels(self.results):
            yield from _fitted(panel, console, options)
        yield from _notes(self.results)


def _fitted(panel: Panel, console: Console, options: ConsoleOptions) -> Iterator[RichTable]:
    """One table if it fits the terminal; else the means, and then as many tasks as fit."""
    names, several = panel.names(), len(panel.tasks) > 1
    lead = panel.scores(
        panel.overall, "mean" if several else ("score", panel.marks(panel.tasks[0]))
    )
    means = [panel.held(), *panel.read(), *panel.allocated(), lead, panel.gaps(panel.overall)]
    tasks = [panel.scores(panel.of_task(t), panel.task_title(t)) for t in panel.tasks] * several
    title: tuple[Phrase, ...] = (Name(panel.model), " · ", *panel.title)
    if not several:
        title = (*title, ": ", *panel.metric_title(panel.tasks[0]))

    def fits(columns: list[Filled]) -> bool:
        table = terminal(beside("", [*names, *columns]))
        return console.measure(table, options=options.update(width=9999)).maximum <= (
            options.max_width
        )

    chunks = [[*means, *tasks]]
    if len(tasks) > MOST_TASKS or not fits(chunks[0]):
        chunks = [means]
        for column in tasks:
            if len(chunks) == 1 or len(chunks[-1]) == MOST_TASKS or not fits([*chunks[-1], column]):
                chunks.append([])
            chunks[-1].append(column)
    for i, chunk in enumerate(chunks):
        part = f" ({i + 1} of {len(chunks)})" if len(chunks) > 1 else ""
        yield terminal(beside((*title, part), [*names, *chunk]))


def _notes(results: Results) -> Iterator[Text]:
    cells = results.cells
    # Full is run once for all moments; at decode its answer counts for those beside it alone.
    done = cells[cells["status"] == "ok"]
    cut = done[done["policy"] != "full"]
    whole = (cut if len(cut) else done)["kv_bytes_full"].mean()
    held = f"; the full cache holds {size(whole)} per sample" if len(done) else ""
    yield Text(
        "Scores in [0, 1] are shown in points, 0 to 100. KV held: live bytes as a share of the "
        f"full cache's{held}. Differences to full are paired by question; brackets are 95% "
        "intervals.",
        "dim",
    )
    lower = falling(cells)
    if lower:
        metrics = listed(list(dict.fromkeys(cells.loc[cells["task"].isin(lower), "metric"])))
        yield Text(f"{DOWN.strip()} lower is better: {plain(metrics)}")
    for remark in remarks(results):
        yield Text(plain_text(remark))
    failed = cells[cells["status"] != "ok"]
    for _, row in failed.head(_MOST_FAILED).iterrows():
        where = f"{short(row['policy'])} {plain(row['budget'])} {plain(row['moment'])}".rstrip()
        place = short(row["task"])
        if row["length"]:
            place += f" at {tokens(row['length'])}"
        yield Text(f"failed: {where} on {place}: {short(row['error'], 300)}", "red")
    if len(failed) > _MOST_FAILED:
        yield Text(f"{len(failed) - _MOST_FAILED} more cells failed; the report lists them", "red")
