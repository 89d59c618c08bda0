"""`kvbench view`: runs in the browser. Heavy modules are imported inside the command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.options import Metric, option
from kvbench.cli.screen import complain, progress, stopping
from kvbench.runs.options import FLAG


def view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or one that holds runs.")],
    metric: Metric = None,
    opens: Annotated[
        bool,
        option(None, FLAG, "Open the page in the browser, or only print its path.", "--open/--no-open"),
    ] = True,
    out: Annotated[
        Path | None,
        option(None, "DIR", "Folder of the pages. Default: report/ in a run, and for many runs the folder itself."),
    ] = None,
) -> None:
    """Open a run in the browser, or a list of all runs in a folder.

    The page of a run has Pareto fronts, maps, tables and responses in one file. It is written first if it is missing or
    older than the results.
    """
    import webbrowser

    from kvbench.runs.folders import is_run
    from kvbench.viewer.run_page import run_page
    from kvbench.viewer.runs_page import write_runs_page

    problems: list[str] = []
    reporter = progress()
    with stopping(reporter):
        if is_run(run) or not os.path.isdir(run):  # Path.is_dir raises if the name is too long
            page_path = run_page(run, metric, out, reporter)
        else:
            page_path, problems = write_runs_page(run, reporter, metric, out)
    for problem in problems:
        complain(problem)
    print(page_path)
    if opens and not webbrowser.open(page_path.resolve().as_uri()):
        complain("cannot open a browser; open the file yourself, or copy it to another machine")
