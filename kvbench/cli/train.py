"""`kvbench train`: training of learned policies' gates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.cli import complete
from kvbench.cli.options import DryRun, OneModel, given_values, grid_options, option
from kvbench.cli.screen import progress, stopping
from kvbench.runs.options import FLAG, MODEL, OUTPUT, WHAT

app = typer.Typer(
    help="Train the gates of learned policies.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

GATES, LOSS, TRAINING = "Gates", "Loss", "Training"


@app.callback()
def _root() -> None:
    """Train the gates of learned policies."""


@app.command()
@grid_options("revision", "device", anchor="model")
def gates(
    context: typer.Context,
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
    column: Annotated[str | None, option(WHAT, "NAME", "Column with the text.", "--text-column")] = None,
    split: Annotated[str | None, option(WHAT, "NAME", "Split of a hub data set. Default: train.")] = None,
    subset: Annotated[str | None, option(WHAT, "NAME", "Configuration of a hub data set.")] = None,
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
    gate: Annotated[str | None, option(GATES, "KIND", "mlp (the default) or linear.")] = None,
    input: Annotated[str | None, option(GATES, "WHAT", "Input of the gates: hidden (the default) or kv.")] = None,
    hidden_dim: Annotated[int | None, option(GATES, "N", "Width of the MLP. Default: 512; for locret 1024.")] = None,
    gate_dim: Annotated[
        int | None,
        option(
            GATES,
            "N",
            "Input width of a tied readout (default: 64), or width of a block's summary (default: the head dim).",
        ),
    ] = None,
    block: Annotated[int | None, option(GATES, "N", "Entries per block, for seerattn_r. Default: 64.")] = None,
    tied: Annotated[
        bool | None,
        option(
            GATES,
            FLAG,
            "Use one readout for all heads. Default: only for dbtrimkv.",
            "--tied/--untied",
        ),
    ] = None,
    bias: Annotated[
        float | None, option(GATES, "X", "Initial bias. Default: 8; for dbtrimkv 18, for kvzap -4.")
    ] = None,
    gating: Annotated[
        str | None,
        option(GATES, "KIND", "additive (the default), or multiplicative as in Eq. 3 of TRIM-KV."),
    ] = None,
    kernel_size: Annotated[
        int | None,
        option(GATES, "N", "Kernel width of lococo in entries; odd. Default: 21."),
    ] = None,
    keep_rate: Annotated[
        float | None,
        option(GATES, "X", "Fraction of --capacity that lococo keeps unchanged. Default: 0.5."),
    ] = None,
    mix: Annotated[
        float | None,
        option(GATES, "X", "Initial weight of lococo's convolution in a merged entry. Default: 0.5."),
    ] = None,
    no_kl: Annotated[bool, option(LOSS, FLAG, "Omit the distillation loss.", "--no-kl")] = False,
    no_ntp: Annotated[bool, option(LOSS, FLAG, "Omit the next-token loss.", "--no-ntp")] = False,
    no_capacity: Annotated[bool, option(LOSS, FLAG, "Omit the capacity loss.", "--no-capacity")] = False,
    reverse_kl: Annotated[
        bool | None,
        option(LOSS, FLAG, "Use KL(student, teacher), not KL(teacher, student).", "--reverse-kl"),
    ] = None,
    capacity: Annotated[int | None, option(LOSS, "TOKENS", "Tokens retained per head without penalty.")] = None,
    chunk: Annotated[
        int | None,
        option(LOSS, "TOKENS", "Tokens between two eviction steps of lococo. Default: 512."),
    ] = None,
    capacity_weight: Annotated[float | None, option(LOSS, "X", "Weight of the capacity loss. Default: 1.")] = None,
    capacity_reduce: Annotated[
        str | None,
        option(LOSS, "HOW", "Reduce the capacity loss over heads by mean (the default) or sum."),
    ] = None,
    steps: Annotated[int | None, option(TRAINING, "N", "Optimizer steps. Default: 1000.")] = None,
    tokens: Annotated[int | None, option(TRAINING, "N", "Train on about this many tokens. Replaces --steps.")] = None,
    passes: Annotated[
        int | None,
        option(TRAINING, "N", "Passes over each sequence, for kvzap. Default: 15."),
    ] = None,
    length: Annotated[
        int | None,
        option(TRAINING, "TOKENS", "Maximum length of a sequence. Default: the paper's."),
    ] = None,
    batch_size: Annotated[int | None, option(TRAINING, "N", "Sequences per batch and device. Default: 1.")] = None,
    accumulate: Annotated[int | None, option(TRAINING, "N", "Batches per step. Default: 4.")] = None,
    lr: Annotated[
        float | None,
        option(TRAINING, "X", "Learning rate of AdamW. Default: 2e-4; for lococo 0.05."),
    ] = None,
    schedule: Annotated[
        str | None,
        option(TRAINING, "KIND", "Schedule of the learning rate: linear, cosine or constant."),
    ] = None,
    warmup: Annotated[int | None, option(TRAINING, "STEPS", "Warm-up steps. Default: 0.")] = None,
    weight_decay: Annotated[float | None, option(TRAINING, "X", "Weight decay of AdamW.")] = None,
    checkpointing: Annotated[
        bool | None,
        option(
            TRAINING,
            FLAG,
            "Recompute activations to save memory. Default: on a GPU.",
            "--checkpointing/--no-checkpointing",
        ),
    ] = None,
    seed: Annotated[int | None, option(TRAINING, "N", "Seed of the data and the initial weights. Default: 0.")] = None,
    out: Annotated[
        Path | None,
        option(OUTPUT, "DIR", "Folder of the gates. Default: the user's cache, where policies look."),
    ] = None,
    save_steps: Annotated[int | None, option(OUTPUT, "N", "Steps between checkpoints.")] = None,
    log_steps: Annotated[int | None, option(OUTPUT, "N", "Steps between log records.")] = None,
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
    **grid_values: Any,
) -> None:
    """Train the gates of trimkv, dbtrimkv, locret or kvzap, or the convolutions of lococo.

    The model itself does not change.

    The same command resumes an interrupted training run.
    """
    from kvbench.training.command import plan, train

    settings = given_values(context.params, _OF_THE_COMMAND)
    excluded_losses = {"kl": no_kl, "ntp": no_ntp, "with_capacity": no_capacity}
    settings |= {loss_name: False for loss_name, is_excluded in excluded_losses.items() if is_excluded}
    training_plan = plan(
        model,
        policy,
        data,
        settings,
        out=out,
        device=grid_values["device"] or "auto",
        dtype=dtype,
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


_OF_THE_COMMAND = (
    "policy", "data", "model", "revision", "device", "dtype", "out", "resume", "dry_run",
    "no_kl", "no_ntp", "no_capacity",
)  # fmt: skip
