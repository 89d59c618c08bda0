"""`kvbench analyze`: what eviction does inside a model. What is heavy is imported when needed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.options import (
    Device,
    DeviceMap,
    Dtype,
    Lengths,
    Quantization,
    Revision,
    Seed,
    Template,
)
from kvbench.cli.screen import FAILED, INTERRUPTED, console

if TYPE_CHECKING:
    from kvbench.analysis.write import Done
    from kvbench.progress import Reporter

app = typer.Typer(
    help="Look inside: output perturbation, how a budget is spread, and what is retained.",
    rich_markup_mode=None,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", metavar="NAME[:KEY=VALUE...]", help="Policies, as for kvbench run."),
]
Budgets = Annotated[
    list[str] | None,
    typer.Option("--budget", metavar="B", help="What is KEPT: 0.2, or 512 tokens. Default: 0.2."),
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="M", help="reference (the default), a folder or a hub id."),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", metavar="T", help="Groups, tasks or your own ./mine.jsonl."),
]
Moments = Annotated[
    list[str] | None,
    typer.Option("--moment", metavar="WHEN", help="context (the default) or question."),
]
Samples = Annotated[
    int | None, typer.Option("--samples", metavar="N", help="Per task. Default: 50.")
]
Out = Annotated[
    str | None,
    typer.Option("--out", metavar="DIR", help="Default: results/<analysis>-<hash of the flags>."),
]


@app.callback()
def _root() -> None:
    """Look inside: output perturbation, how a budget is spread, and what is retained."""


@app.command("perturbation")
def perturbation(
    context: typer.Context,
    policy: Policies = None,
    budget: Budgets = None,
    model: Models = None,
    task: Tasks = None,
    moment: Moments = None,
    length: Lengths = None,
    samples: Samples = None,
    seed: Seed = None,
    out: Out = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    device_map: DeviceMap = None,
    quantization: Quantization = None,
    chat_template: Template = None,
    query: Annotated[
        str,
        typer.Option(
            metavar="WHOSE",
            help="answer: the first decoded token's query (the default); question: that of the "
            "question's last token.",
        ),
    ] = "answer",
    first_stage: Annotated[
        float,
        typer.Option(
            metavar="ALPHA",
            help="Share of stage 1 for policies that have no parameter first_stage. Default: 0.5.",
        ),
    ] = 0.5,
) -> None:
    """L1 change of every head's output by eviction, winners, and CriticalKV's bounds."""
    given = _given(context, ("query", "first_stage"))

    def work(reporter: Reporter) -> Done:
        from kvbench.analysis.perturbation.write import write_perturbation

        return write_perturbation(
            given, reporter, query=query, first_stage=first_stage, command=_command()
        )

    _show(work)


@app.command("allocation")
def allocation(
    context: typer.Context,
    policy: Policies = None,
    budget: Budgets = None,
    model: Models = None,
    task: Tasks = None,
    moment: Moments = None,
    length: Lengths = None,
    samples: Samples = None,
    seed: Seed = None,
    out: Out = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    device_map: DeviceMap = None,
    quantization: Quantization = None,
    chat_template: Template = None,
) -> None:
    """Entries that each layer and KV head gets, as a table and a heat map per policy."""
    given = _given(context)

    def work(reporter: Reporter) -> Done:
        from kvbench.analysis.allocation.write import write_allocation

        return write_allocation(given, reporter, command=_command())

    _show(work)


@app.command("retention")
def retention(
    context: typer.Context,
    policy: Policies = None,
    budget: Budgets = None,
    model: Models = None,
    task: Tasks = None,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Look at this text instead of a task's.")
    ] = None,
    moment: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="decode: as the text passes token by token (the default); context: once, where "
            "the context ends.",
        ),
    ] = None,
    length: Lengths = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", help="Texts of each task. Default: 4.")
    ] = None,
    traces: Annotated[
        int | None,
        typer.Option(metavar="N", help="Texts that the policies run over and that are shown: 1."),
    ] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens that the model adds to a text at most. Default: the task's answer; none "
            "with --text.",
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="L", help="Layers to draw, as 0,3, or all. Default: some.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(metavar="H", help="KV heads to draw, as 0,1, or all.")
    ] = None,
    top: Annotated[
        list[str] | None,
        typer.Option(metavar="K", help="Survival by rank. Default: 16,64,256."),
    ] = None,
    mass: Annotated[
        list[str] | None,
        typer.Option(metavar="P", help="Survival by share of the attention. Default: 0.9,0.99."),
    ] = None,
    horizon: Annotated[
        int | None,
        typer.Option(
            metavar="L", help="Steps that survival is followed for. Default: half of the text."
        ),
    ] = None,
    seed: Seed = None,
    out: Out = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    device_map: DeviceMap = None,
    quantization: Quantization = None,
    chat_template: Template = None,
) -> None:
    """Retention matrices, eviction maps, survival, and the text with what is retained of it."""
    own = {k: context.params[k] for k in _OF_RETENTION}
    given = _given(context, _OF_RETENTION)

    def work(reporter: Reporter) -> Done:
        from kvbench.analysis.retention.options import Options
        from kvbench.analysis.retention.write import write_retention

        options = Options.read({k: v for k, v in own.items() if v not in (None, [], ())})
        return write_retention(given, reporter, options=options, command=_command())

    _show(work)


_OF_RETENTION = (
    "moment", "text", "traces", "new_tokens", "layers", "heads", "top", "mass", "horizon",
)  # fmt: skip


def _given(context: typer.Context, own: Sequence[str] = ()) -> dict[str, Any]:
    """The flags that were given but the command's own: a grid's, under names that it takes."""
    return {k: v for k, v in context.params.items() if v not in (None, [], ()) and k not in own}


def _command() -> str:
    return shlex.join(["kvbench", *sys.argv[1:]])


def _show(work: Callable[[Reporter], Done]) -> None:
    """Carry out an analysis under a progress bar and print its tables."""
    from rich.console import Console

    from kvbench.progress import reporter

    progress = reporter(Console(stderr=True))
    try:
        done = work(progress)
    except KeyboardInterrupt:
        progress.stop()
        print("kvbench: stopped; an analysis writes its files when it ends", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        progress.stop()
    from kvbench.report.outputs import terminal

    screen = console()
    for table in done.tables:
        screen.print(terminal(table))
    for line in done.notes:
        screen.print(line, style="dim", markup=False, highlight=False)
    print(f"wrote {done.path}: {', '.join(p.name for p in done.files if p.parent == done.path)}")
    drawn = [p for p in done.files if p.suffix == ".png"]
    print(f"figures: {len(drawn)} as PNG and SVG in {done.path / 'figures'}")
    if done.failed:
        first = " ".join(next(iter(done.failed.values())).split())
        print(f"kvbench: {len(done.failed)} cells failed: {first}", file=sys.stderr)
        raise typer.Exit(FAILED)
