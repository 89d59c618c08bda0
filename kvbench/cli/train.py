"""`kvbench train`: training of learned policies' gates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.cli import complete
from kvbench.cli.options import DryRun, OneModel, declared_options, grid_options, option, split_options
from kvbench.cli.screen import progress, stopping
from kvbench.runs.options import FLAG, MODEL, OUTPUT, WHAT
from kvbench.training.options import TrainingOptions

app = typer.Typer(
    help="Train the gates of learned policies.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Train the gates of learned policies."""


@app.command()
@grid_options("revision", "device", "attn", anchor="model")
@declared_options(TrainingOptions, anchor="dtype")
def gates(
    policy: Annotated[
        str,
        option(
            WHAT,
            "NAME",
            "trimkv, dbtrimkv, locret, kvzap, lococo or seerattn_r.",
            autocompletion=complete.trainers,
        ),
    ],
    data: Annotated[
        str | None,
        option(
            WHAT,
            "DATA",
            "chats (synthetic conversations), reference (samples of the reference model's tasks), "
            "a task, FILE.jsonl or a hub data set. Several, comma-separated, alternate. "
            "Default: that of the model's recipe.",
            show_default=False,
        ),
    ] = None,
    model: OneModel = "reference",
    dtype: Annotated[
        str,
        option(
            MODEL,
            "TYPE",
            "Dtype of the model: float32, bfloat16, float16 or auto. Gates are float32.",
            show_default=False,
        ),
    ] = "auto",
    out: Annotated[
        Path | None,
        option(OUTPUT, "DIR", "Folder of the gates. Default: the user's cache, where policies look."),
    ] = None,
    resume: Annotated[
        bool,
        option(
            OUTPUT,
            FLAG,
            "Resume an earlier training run (the default), or discard it.",
            "--resume/--fresh",
            show_default=False,
        ),
    ] = True,
    dry_run: DryRun = False,
    **flag_values: Any,
) -> None:
    """Train the gates of trimkv, dbtrimkv, locret or kvzap, or the convolutions of lococo.

    The model itself does not change.

    The same command resumes an interrupted training run.
    """
    from kvbench.training.command import plan, train

    settings, grid_values = split_options(flag_values, TrainingOptions)
    training_plan = plan(
        model,
        policy,
        data,
        settings,
        out=out,
        device=grid_values["device"] or "auto",
        dtype=dtype,
        attn=grid_values["attn"] or "auto",
        revision=grid_values["revision"],
    )
    if dry_run:
        print("\n".join(training_plan.lines()))
        return
    reporter = progress()
    resume_note = f"checkpoints are kept in {training_plan.out}; the same command (without --fresh)"
    with stopping(reporter, f"{resume_note} resumes from the last one"):
        summary_lines = train(training_plan, reporter, fresh=not resume)
    for summary_line in summary_lines:
        print(summary_line)
