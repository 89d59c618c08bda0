"""`kvbench train`: what learned policies must be trained for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.screen import INTERRUPTED

if TYPE_CHECKING:
    from kvbench.progress import Reporter

app = typer.Typer(
    help="Train what learned policies score with.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Train what learned policies score with."""


@app.command()
def gates(
    policy: Annotated[
        str, typer.Option(metavar="P", help="Whose gates: trimkv, dbtrimkv or locret.")
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="reference: samples of the reference model's tasks; a task, as for `kvbench run`; "
            "FILE.jsonl with text, or context, question and answers; or a data set of the hub. "
            "Several with commas between take turns.",
        ),
    ] = "reference",
    model: Annotated[
        str, typer.Option(metavar="M", help="reference, a local folder or a hub id.")
    ] = "reference",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Default: in the user's cache, where policies look."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Optimizer steps. Default: 1000.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Instead of --steps: about so many tokens.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Of a sequence, at most. Default: the paper's."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", help="Sequences at once, a device. Default: 1.")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(metavar="N", help="Batches of a step. Default: 4.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(metavar="X", help="Learning rate of AdamW. Default: 2e-4.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="S", help="Of the learning rate: linear or cosine.")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(metavar="X", help="Of AdamW.")] = None,
    warmup: Annotated[
        int | None, typer.Option(metavar="N", help="Steps of warm-up. Default: 0.")
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option("--capacity", metavar="M", help="Tokens that a head may retain."),
    ] = None,
    capacity_weight: Annotated[
        float | None, typer.Option(metavar="X", help="Weight of the capacity loss. Default: 1.")
    ] = None,
    capacity_reduce: Annotated[
        str | None, typer.Option(metavar="R", help="Over heads, trimkv: mean (default) or sum.")
    ] = None,
    no_kl: Annotated[bool, typer.Option("--no-kl", help="Without the distillation loss.")] = False,
    no_ntp: Annotated[bool, typer.Option("--no-ntp", help="Without the next-token loss.")] = False,
    no_capacity: Annotated[
        bool, typer.Option("--no-capacity", help="Without the capacity loss.")
    ] = False,
    reverse_kl: Annotated[
        bool, typer.Option("--reverse-kl", help="Student to teacher instead of teacher to student.")
    ] = False,
    gate: Annotated[str | None, typer.Option(metavar="G", help="mlp (default) or linear.")] = None,
    gate_input: Annotated[
        str | None,
        typer.Option("--input", metavar="I", help="What gates read: hidden (default) or kv."),
    ] = None,
    hidden_dim: Annotated[
        int | None, typer.Option(metavar="N", help="Width of the MLP. Default: 512; locret 1024.")
    ] = None,
    gate_dim: Annotated[
        int | None, typer.Option(metavar="N", help="What a tied readout reads. Default: 64.")
    ] = None,
    bias: Annotated[
        float | None,
        typer.Option(metavar="X", help="Where it starts. Default: 8; dbtrimkv 18."),
    ] = None,
    tied: Annotated[
        bool | None,
        typer.Option("--tied/--untied", help="One readout for all heads. Default: for dbtrimkv."),
    ] = None,
    gating: Annotated[
        str | None,
        typer.Option(metavar="G", help="additive (default), or multiplicative as TRIM-KV's Eq. 3."),
    ] = None,
    text_column: Annotated[
        str | None, typer.Option(metavar="C", help="Where a row's text stands.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="S", help="Of a hub data set. Default: train.")
    ] = None,
    subset: Annotated[
        str | None, typer.Option(metavar="S", help="Configuration of a hub data set.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Of data and first weights. Default: 0.")
    ] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            help="Recompute activations in the backward pass: less memory. Default: on a GPU.",
        ),
    ] = None,
    save_steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps from checkpoint to checkpoint.")
    ] = None,
    log_steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps from line to line of the log.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="D", help="cpu, cuda, cuda:1 or auto (the default).")
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(metavar="D", help="Of the model: float32, bfloat16 or auto. Gates: float32."),
    ] = "auto",
    revision: Annotated[
        str | None, typer.Option(metavar="R", help="Branch, tag or commit of a hub model.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--fresh", help="Go on where the same training stopped, or begin anew."
        ),
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done; do nothing.")
    ] = False,
) -> None:
    """Train the gates of trimkv, dbtrimkv or locret; the model itself stays as it is."""
    from rich.console import Console

    from kvbench.progress import reporter
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
    progress = reporter(Console(stderr=True))
    note = f"checkpoints are kept in {planned.out}, and the same command (without --fresh)"
    with _stopping(progress, f"{note} goes on from the last of them"):
        for line in train(planned, progress, fresh=not resume):
            print(line)


@app.command()
def ablations(
    tables: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TABLE]...", help="Which tables of the recipe. Default: all."),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            help="What is trained, evaluated and compared. Default: the ablations of the papers of "
            "TRIM-KV and DBTrimKV, on the reference model.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Gates, runs and tables.")] = Path(
        "results/ablations"
    ),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done; do nothing.")
    ] = False,
) -> None:
    """Train variants of gates and evaluate them on the same questions: a table an ablation.

    The same command goes on where it stopped.
    """
    from rich.console import Console

    from kvbench.progress import reporter
    from kvbench.training.ablations.recipe import PAPERS, read
    from kvbench.training.ablations.run import ablate, describe

    found = read(recipe or PAPERS)
    chosen = found.pick(tables or [])
    if dry_run:
        print("\n".join(describe(found, chosen, out)))
        return
    progress = reporter(Console(stderr=True))
    with _stopping(progress, f"the same command goes on with what {out} holds"):
        for path in ablate(found, chosen, out, progress):
            print(path.read_text(encoding="utf-8"))
            print(f"wrote {path}", file=sys.stderr)


@contextmanager
def _stopping(progress: Reporter, note: str) -> Iterator[None]:
    """End the progress whatever happens; after Ctrl-C say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        progress.stop()
        print(f"kvbench: stopped; {note}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        progress.stop()
