"""`kvbench power`. Heavy modules are imported inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.compare import LIMITS, Alpha
from kvbench.cli.options import AsJson, option
from kvbench.cli.screen import print_json, say, show
from kvbench.errors import UserError

ASSUMPTIONS = "Assumptions, instead of a run"


def power(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="Folder of a run from which to estimate the variance of scores.",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        option(
            None,
            "DIR",
            "Use differences from this run, as kvbench compare does. Default: from the full cache.",
        ),
    ] = None,
    drop: Annotated[float, option(LIMITS, "POINTS", "Drop to detect. Default: 2.", show_default=False)] = 2.0,
    probability: Annotated[
        float,
        option(LIMITS, "P", "Probability of detecting it. Default: 0.8.", "--power", show_default=False),
    ] = 0.8,
    alpha: Alpha = 0.05,
    cells: Annotated[
        int | None,
        option(
            LIMITS,
            "N",
            "Number of cells for which p-values are corrected. Default: cells of RUN with differing scores, or 1.",
        ),
    ] = None,
    rate: Annotated[float | None, option(ASSUMPTIONS, "P", "Fraction of correct answers.")] = None,
    discordance: Annotated[
        float | None,
        option(
            ASSUMPTIONS,
            "P",
            "Fraction of answers that are correct in one run and wrong in the other. Default: the worst case, "
            "independent runs.",
        ),
    ] = None,
    questions: Annotated[
        int | None,
        option(
            ASSUMPTIONS,
            "N",
            "Questions per context. Default: 1.",
            "--questions-per-context",
        ),
    ] = None,
    icc: Annotated[
        float | None,
        option(
            ASSUMPTIONS,
            "R",
            "Correlation of the differences within a context, 0 to 1. Default: 1, so that more questions "
            "per context add no information.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate how many samples are needed to detect a drop in score, from a run or from assumptions."""
    from kvbench.regression import power as planning
    from kvbench.regression import show_power
    from kvbench.regression.pairs import COLUMNS
    from kvbench.runs.load import load_frames
    from kvbench.tables.outputs import plain_text

    assumptions = [assumption for assumption in (rate, discordance, questions, icc) if assumption is not None]
    if (run is None) == (rate is None):
        raise UserError("give a RUN or --rate, and not both")
    if run is None:
        if baseline is not None:
            raise UserError("--baseline needs a RUN")
        assert rate is not None
        goal = planning.Goal(drop, probability, alpha, 1 if cells is None else cells)
        sample_plan = planning.assume(
            goal,
            rate,
            discordance,
            1 if questions is None else questions,
            1.0 if icc is None else icc,
        )
        if as_json:
            print_json(show_power.plan_json(sample_plan, goal))
        else:
            say(plain_text(show_power.plan_sentence(sample_plan, goal)))
        return
    if assumptions:
        raise UserError("--discordance, --questions-per-context and --icc go with --rate, not a RUN")
    baseline_frames = None if baseline is None else load_frames(baseline, COLUMNS, coded=True)
    goal, cell_needs = planning.needs(
        load_frames(run, COLUMNS, coded=True),
        planning.Goal(drop, probability, alpha),
        baseline_frames,
        cells,
    )
    if as_json:
        print_json(show_power.needs_json(cell_needs, goal))
        return
    for needs_table in show_power.tables(cell_needs, goal):
        show(needs_table)
    for sentence in show_power.sentences(cell_needs, goal):
        say(plain_text(sentence))
