"""`kvbench report`. What is heavy is imported inside the command."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.cli import complete
from kvbench.cli.options import Names, option
from kvbench.cli.screen import console, print_json, rows_of, show
from kvbench.runs.options import FLAG


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    against: Annotated[
        Names,
        option(
            None,
            "NAME",
            "Also compare every policy with this one at the same budget, question by "
            "question. Takes several, with commas.",
            autocompletion=complete.policies,
        ),
    ] = None,
    with_published: Annotated[
        bool,
        option(
            None,
            FLAG,
            "Also lay the scores beside those that papers print for the same policy, task "
            "and budget (kvbench published).",
            "--with-published",
        ),
    ] = False,
    within: Annotated[
        float | None,
        option(
            None,
            "POINTS",
            "Name the cheapest policy and budget within so many points of the full cache. "
            "Default: 1.",
            min=0,
        ),
    ] = None,
    batch: Annotated[
        int | None, option(None, "N", "Say what memory it saves at this batch size.", min=1)
    ] = None,
    context: Annotated[
        int | None,
        option(
            None,
            "TOKENS",
            "Say what memory it saves at this context. Default: the run's own.",
            min=1,
        ),
    ] = None,
    html: Annotated[
        bool,
        option(None, FLAG, "Also write report.html, a page to filter and browse.", "--html"),
    ] = False,
    out: Annotated[
        Path | None, option(None, "DIR", "Folder of the report. Default: report/ in the first run.")
    ] = None,
    quiet: Annotated[
        bool, option(None, FLAG, "Print only errors and the path of the summary.", "--quiet")
    ] = False,
    as_json: Annotated[
        bool, option(None, FLAG, "Print cells, means and comparisons as JSON.", "--json")
    ] = False,
) -> None:
    """Show the tables of runs; write Pareto fronts and a summary."""
    from kvbench.report import against as pairs
    from kvbench.report import choosing
    from kvbench.report.frames import prepare
    from kvbench.report.outputs import terminal
    from kvbench.report.overall import group_means
    from kvbench.report.samples import COLUMNS, Samples
    from kvbench.report.terminal import RunTable
    from kvbench.report.text import slug
    from kvbench.report.write import write_report
    from kvbench.runs.load import load_frames, responses_of

    if quiet:
        warnings.simplefilter("ignore")
    cells, samples = load_frames(runs, COLUMNS, coded=True)
    grouped = Samples(samples)
    results = prepare(cells, grouped)
    bases = [name for text in against or [] for name in text.split(",") if name]
    held = [(base, pairs.differences(cells, grouped, base)) for base in bases]
    shown = not quiet and not as_json
    aim = choosing.Aim.of(within, batch, context)
    if shown:
        console().print(RunTable(results))
        if any(value is not None for value in (within, batch, context)):
            console().print(choosing.render_choices(results, aim))
    folder = out or runs[0] / "report"
    written = write_report(results, folder, aim)
    if html:
        from kvbench.report.page import write_page

        written.append(write_page(results, responses_of(runs), folder, aim))
    for base, found in held:
        if shown:
            for table in pairs.tables(found, base):
                console().print(terminal(table))
        written.append(pairs.write(found, base, folder / f"against-{slug(base)}.md"))
    more: dict[str, Any] = {}
    if with_published:
        from kvbench.published import beside

        matched = beside.pairs(cells)
        line = "" if matched else beside.unmatched(cells)
        if shown and matched:
            show(beside.beside_table(matched))
        elif shown:
            print(line)
        written += beside.write(matched, line, folder)
        more["published"] = beside.as_records(matched)
    if as_json:
        print_json(
            {
                "files": [str(path) for path in written],
                "cells": rows_of(cells),
                "means": rows_of(group_means(cells, grouped)),
                "against": {base: rows_of(found) for base, found in held},
                "cheapest": choosing.as_records(results, aim),
            }
            | more
        )
    for path in [] if as_json else written[: 1 if quiet else None]:
        print(path if quiet else f"wrote {path}")
