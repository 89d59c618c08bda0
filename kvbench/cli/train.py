"""`kvbench train`: gates of learned policies, and their ablations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli import complete
from kvbench.cli.options import FLAG, MODEL, OUTPUT, WHAT, DryRun, Revision
from kvbench.cli.screen import INTERRUPTED, complain, progress

if TYPE_CHECKING:
    from kvbench.progress import Reporter

app = typer.Typer(
    help="Train the gates that learned policies score with.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

GATES, LOSS, TRAINING = "Gates", "Loss", "Training"


@app.callback()
def _root() -> None:
    """Train the gates that learned policies score with."""


@app.command()
def gates(
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="trimkv, dbtrimkv or locret.",
            autocompletion=complete.trainers,
            rich_help_panel=WHAT,
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="chats (made-up conversations), reference (samples of the tasks of the reference "
            "model), a task, FILE.jsonl or a data set of the hub. Several, with commas, take "
            "turns. Default: that of the model's recipe.",
            rich_help_panel=WHAT,
            show_default=False,
        ),
    ] = None,
    text_column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Column that holds the text of a row.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Split of a hub data set. Default: train.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    subset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Configuration of a hub data set.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="reference (the default), a local folder or a hub id.",
            autocompletion=complete.models,
            rich_help_panel=MODEL,
            show_default=False,
        ),
    ] = "reference",
    revision: Revision = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="DEV",
            help="cpu, cuda, cuda:1 or auto (the default).",
            rich_help_panel=MODEL,
            show_default=False,
        ),
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="Type of the model: float32, bfloat16, float16 or auto. Gates are float32.",
            rich_help_panel=MODEL,
            show_default=False,
        ),
    ] = "auto",
    gate: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="mlp (the default) or linear.",
            rich_help_panel=GATES,
        ),
    ] = None,
    gate_input: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="WHAT",
            help="What gates read: hidden (the default) or kv.",
            rich_help_panel=GATES,
        ),
    ] = None,
    hidden_dim: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Width of the MLP. Default: 512; for locret 1024.",
            rich_help_panel=GATES,
        ),
    ] = None,
    gate_dim: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Width of the input of a tied readout. Default: 64.",
            rich_help_panel=GATES,
        ),
    ] = None,
    tied: Annotated[
        bool | None,
        typer.Option(
            "--tied/--untied",
            metavar=FLAG,
            help="Use one readout for all heads. Default: only for dbtrimkv.",
            rich_help_panel=GATES,
        ),
    ] = None,
    bias: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Initial bias. Default: 8; for dbtrimkv 18.",
            rich_help_panel=GATES,
        ),
    ] = None,
    gating: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="additive (the default), or multiplicative as in Eq. 3 of TRIM-KV.",
            rich_help_panel=GATES,
        ),
    ] = None,
    no_kl: Annotated[
        bool,
        typer.Option(
            "--no-kl",
            metavar=FLAG,
            help="Leave out the distillation loss.",
            rich_help_panel=LOSS,
        ),
    ] = False,
    no_ntp: Annotated[
        bool,
        typer.Option(
            "--no-ntp",
            metavar=FLAG,
            help="Leave out the next-token loss.",
            rich_help_panel=LOSS,
        ),
    ] = False,
    no_capacity: Annotated[
        bool,
        typer.Option(
            "--no-capacity",
            metavar=FLAG,
            help="Leave out the capacity loss.",
            rich_help_panel=LOSS,
        ),
    ] = False,
    reverse_kl: Annotated[
        bool,
        typer.Option(
            "--reverse-kl",
            metavar=FLAG,
            help="Use KL(student, teacher), not KL(teacher, student).",
            rich_help_panel=LOSS,
        ),
    ] = False,
    capacity: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens that a head may retain.",
            rich_help_panel=LOSS,
        ),
    ] = None,
    capacity_weight: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Weight of the capacity loss. Default: 1.",
            rich_help_panel=LOSS,
        ),
    ] = None,
    capacity_reduce: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="Reduce the capacity loss over heads by mean (the default) or sum.",
            rich_help_panel=LOSS,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Optimizer steps. Default: 1000.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Train on about this many tokens. Replaces --steps.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Maximum length of a sequence. Default: the paper's.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Sequences per batch and device. Default: 1.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Batches per step. Default: 4.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Learning rate of AdamW. Default: 2e-4.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Schedule of the learning rate: linear, cosine or constant.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            help="Warm-up steps. Default: 0.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Weight decay of AdamW.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            metavar=FLAG,
            help="Recompute activations to save memory. Default: on a GPU.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Seed of the data and the initial weights. Default: 0.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the gates. Default: the user's cache, where policies look.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    save_steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Steps between checkpoints.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    log_steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Steps between lines of the log.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--fresh",
            metavar=FLAG,
            help="Continue an earlier training (the default), or start again.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = True,
    dry_run: DryRun = False,
) -> None:
    """Train the gates of trimkv, dbtrimkv or locret. The model itself does not change.

    The same command continues a training after an interruption.
    """
    from kvbench.training.command import plan, train

    given = {
        "steps": steps,
        "tokens": tokens,
        "length": length,
        "batch_size": batch_size,
        "accumulate": accumulate,
        "lr": lr,
        "schedule": schedule,
        "weight_decay": weight_decay,
        "warmup": warmup,
        "capacity": capacity,
        "capacity_weight": capacity_weight,
        "capacity_reduce": capacity_reduce,
        "kl": False if no_kl else None,
        "ntp": False if no_ntp else None,
        "with_capacity": False if no_capacity else None,
        "reverse_kl": True if reverse_kl else None,
        "gate": gate,
        "input": gate_input,
        "hidden_dim": hidden_dim,
        "gate_dim": gate_dim,
        "bias": bias,
        "tied": tied,
        "gating": gating,
        "column": text_column,
        "split": split,
        "subset": subset,
        "seed": seed,
        "checkpointing": checkpointing,
        "save_steps": save_steps,
        "log_steps": log_steps,
    }
    planned = plan(
        model, policy, data, given, out=out, device=device, dtype=dtype, revision=revision
    )
    if dry_run:
        print("\n".join(planned.lines()))
        return
    note = f"checkpoints are kept in {planned.out}, and the same command (without --fresh)"
    with _progress(f"{note} continues from the last one") as told:
        lines = train(planned, told, fresh=not resume)
    for line in lines:
        print(line)


@contextmanager
def _progress(note: str) -> Iterator[Reporter]:
    """Show the progress; after Ctrl-C, tell the user how to continue."""
    told = progress()
    try:
        yield told
    except KeyboardInterrupt:
        told.stop()
        complain(f"stopped; {note}")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        told.stop()
