"""`kvbench compare` and `kvbench power`. What is heavy is imported inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.options import FLAG, OUTPUT, AsJson
from kvbench.cli.screen import FAILED, MISUSE, OK, complain, console, print_json
from kvbench.files import write_whole

LIMITS = "Limits"

Alpha = Annotated[
    float,
    typer.Option(
        metavar="P",
        help="Chance of a false alarm in the whole comparison. Default: 0.05.",
        rich_help_panel=LIMITS,
        show_default=False,
    ),
]


def compare(
    baseline: Annotated[
        Path, typer.Argument(metavar="BASELINE", help="Folder of the run to compare with.")
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the new run.")],
    max_drop: Annotated[
        float,
        typer.Option(
            metavar="POINTS",
            help="How much a score may drop: points, 0 to 100 (percent of the baseline where "
            "scores are not in [0, 1]). Default: 1.",
            rich_help_panel=LIMITS,
            show_default=False,
        ),
    ] = 1.0,
    alpha: Alpha = 0.05,
    markdown: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write Markdown, for a CI summary.", rich_help_panel=OUTPUT
        ),
    ] = None,
    junit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write JUnit XML, a test case per cell.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", metavar=FLAG, help="Print only what is wrong.", rich_help_panel=OUTPUT
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fail if a run's scores have dropped significantly below those of a baseline.

    Exit codes: 0, no cell dropped by more than is allowed and significantly; 1, a cell did; 2, a
    cell of the baseline could not be compared, or the input is wrong.
    """
    from kvbench.regression import show
    from kvbench.regression.compare import compare as compare_runs
    from kvbench.regression.junit import junit as junit_xml
    from kvbench.report.outputs import plain_text, terminal
    from kvbench.runs.store import load_frames

    found = compare_runs(load_frames(baseline), load_frames(run), max_drop=max_drop, alpha=alpha)
    code = FAILED if found.failed else OK if found.complete else MISUSE
    if markdown is not None:
        text = show.markdown_page(found, str(baseline), str(run))
        write_whole(markdown, text.encode())
    if junit is not None:
        write_whole(junit, junit_xml(found, f"kvbench compare {baseline} {run}"))
    if as_json:
        print_json(show.as_json(found, code))
    elif not quiet:
        screen = console()
        for table in show.tables(found):
            screen.print(terminal(table))
        for sentence in show.sentences(found):
            print(plain_text(sentence))
        if code == OK:
            print(show.verdict(found))
    if code != OK:
        complain(show.complaint(found))
        raise typer.Exit(code)
