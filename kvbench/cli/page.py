"""`kvbench view`: a run's HTML report in the browser. Heavy modules are imported inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.options import Metric, option
from kvbench.cli.screen import complain, progress, stopping
from kvbench.files import state_of
from kvbench.runs.options import FLAG


def view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    metric: Metric = None,
    opens: Annotated[
        bool,
        option(None, FLAG, "Open the page in the browser, or only print its path.", "--open/--no-open"),
    ] = True,
) -> None:
    """Open a run in the browser: Pareto fronts, maps, table and responses, in one file.

    The page is written first if it is missing or older than the results.
    """
    import webbrowser

    from kvbench.report.frames import prepare
    from kvbench.report.page import NAME, write_page
    from kvbench.report.sorted_samples import COLUMNS
    from kvbench.runs.folders import stored_command
    from kvbench.runs.integrity import CELLS, SAMPLES
    from kvbench.runs.load import load_frames, responses_of
    from kvbench.tables.text import slug

    page_path = run / "report" / (slug(metric) if metric else "") / NAME
    table_paths = [run / CELLS, run / SAMPLES]
    page_time = page_path.stat().st_mtime_ns if page_path.is_file() else 0
    if not all(table_path.is_file() and max(state_of(table_path)[1:3]) < page_time for table_path in table_paths):
        reporter = progress()
        with stopping(reporter):
            reporter.busy(f"reading {run}")
            results = prepare(*load_frames(run, COLUMNS, coded=True, metric=metric))
            page_path = write_page(
                results,
                responses_of(run, metric),
                page_path.parent,
                commands=[stored_command(run)],
                reporter=reporter,
            )
    print(page_path)
    if opens and not webbrowser.open(page_path.resolve().as_uri()):
        complain("cannot open a browser; open the file yourself, or copy it to another machine")
