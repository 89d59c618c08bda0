"""`kvbench analyze`: what eviction does inside a model. What is heavy is imported when needed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli import complete
from kvbench.cli.options import given_values, grid_options, option
from kvbench.cli.screen import FAILED, complain, console, progress, stopping
from kvbench.runs.options import CACHE, WHAT

if TYPE_CHECKING:
    from kvbench.analysis.write import AnalysisOutput
    from kvbench.progress import Reporter

app = typer.Typer(
    help="Look inside a model: what eviction changes, how a budget is spread, what is kept.",
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ANALYSIS = "Analysis"

_GRID = (
    *("policies", "budgets", "models", "tasks", "moments", "lengths", "samples", "seed"),
    *("device", "dtype", "revision", "device_map", "quantization", "chat_template"),
)
_HELP = {
    "moments": "When to compress, with commas: context, before the question (the default), or "
    "question, after it.",
    "samples": "Per task. Default: 50.",
    "out": "Folder of the results. Default: results/ANALYSIS-HASH.",
}
DrawnLayers = Annotated[
    str | None, option(ANALYSIS, "L", "Layers to draw, with commas, or all. Default: a few.")
]
DrawnHeads = Annotated[
    str | None, option(ANALYSIS, "H", "KV heads to draw, with commas, or all. Default: a few.")
]


@app.callback()
def _root() -> None:
    """Look inside a model: what eviction changes, how a budget is spread, what is kept."""


@app.command("perturbation")
@grid_options(*_GRID, help=_HELP)
@grid_options("out", after="first_stage", help=_HELP)
def perturbation(
    query: Annotated[
        str,
        option(
            ANALYSIS,
            "WHOSE",
            "Whose query to measure with: answer, the first decoded token (the default), or "
            "question, the question's last token.",
            show_default=False,
        ),
    ] = "answer",
    first_stage: Annotated[
        float,
        option(
            ANALYSIS,
            "ALPHA",
            "Share of the first stage, for policies without a parameter first_stage. Default: 0.5.",
            show_default=False,
        ),
    ] = 0.5,
    **grid: Any,
) -> None:
    """Measure how far eviction moves each head's output, and check CriticalKV's bounds."""

    def work(reporter: Reporter) -> AnalysisOutput:
        from kvbench.analysis.perturbation.write import write_perturbation

        return write_perturbation(
            given_values(grid),
            reporter,
            query=query,
            first_stage=first_stage,
            command=command_line(),
        )

    carry_out(work)


@app.command("allocation")
@grid_options(*_GRID, "out", help=_HELP)
def allocation(**grid: Any) -> None:
    """Show how many entries each layer and KV head gets: a table and a heat map per policy."""

    def work(reporter: Reporter) -> AnalysisOutput:
        from kvbench.analysis.allocation.write import write_allocation

        return write_allocation(given_values(grid), reporter, command=command_line())

    carry_out(work)


@app.command("retention")
@grid_options(
    *(name for name in _GRID if name != "moments"),
    help={"samples": "Texts per task. Default: 4."},
)
@grid_options("out", after="horizon", help=_HELP)
def retention(
    context: typer.Context,
    text: Annotated[
        str | None, option(WHAT, "FILE", "Analyse this text instead of a task.")
    ] = None,
    moment: Annotated[
        str | None,
        option(
            CACHE,
            "WHEN",
            "decode: token by token through the text (the default); context: once, at the end "
            "of the context.",
            autocompletion=complete.moments,
        ),
    ] = None,
    traces: Annotated[
        int | None,
        option(ANALYSIS, "N", "Texts that policies run over and that are shown. Default: 1."),
    ] = None,
    new_tokens: Annotated[
        int | None,
        option(
            ANALYSIS,
            "N",
            "Maximum number of tokens that the model adds to a text. Default: the task's "
            "limit; 0 with --text.",
        ),
    ] = None,
    layers: DrawnLayers = None,
    heads: DrawnHeads = None,
    top: Annotated[
        list[str] | None,
        option(
            ANALYSIS, "K", "Ranks for survival among the top K, with commas. Default: 16,64,256."
        ),
    ] = None,
    mass: Annotated[
        list[str] | None,
        option(ANALYSIS, "P", "Shares of attention for survival, with commas. Default: 0.9,0.99."),
    ] = None,
    horizon: Annotated[
        int | None,
        option(
            ANALYSIS, "STEPS", "Number of steps to follow survival for. Default: half of the text."
        ),
    ] = None,
    **grid: Any,
) -> None:
    """Show which tokens stay, and for how long: matrices, eviction maps, survival, the text."""
    own = {k: context.params[k] for k in _OF_RETENTION}

    def work(reporter: Reporter) -> AnalysisOutput:
        from kvbench.analysis.retention.options import Options
        from kvbench.analysis.retention.write import write_retention

        options = Options.read({k: v for k, v in own.items() if v not in (None, [], ())})
        return write_retention(
            given_values(grid), reporter, options=options, command=command_line()
        )

    carry_out(work)


_OF_RETENTION = (
    "moment", "text", "traces", "new_tokens", "layers", "heads", "top", "mass", "horizon",
)  # fmt: skip


@app.command("vision")
@grid_options(
    *_GRID,
    help={
        "moments": "When to compress, with commas: context, before the question (the default); "
        "question, after it; or decode, while the answer is written, with a budget in tokens.",
        "samples": "Samples per task. Default: 1.",
    },
)
@grid_options("out", after="heads", help=_HELP)
def vision(
    context: typer.Context,
    questions: Annotated[
        str | None,
        option(ANALYSIS, "WHICH", "Questions of a sample: last (the default) or all."),
    ] = None,
    new_tokens: Annotated[
        int | None,
        option(ANALYSIS, "N", "Maximum number of tokens of an answer. Default: the task's limit."),
    ] = None,
    steps: Annotated[
        int | None,
        option(
            ANALYSIS,
            "N",
            "Decode steps to draw, evenly spaced from the first to the last. Default: 2.",
        ),
    ] = None,
    layers: DrawnLayers = None,
    heads: DrawnHeads = None,
    **grid: Any,
) -> None:
    """Show what is kept of images: tokens over the picture, and cache use by modality."""
    own = {k: context.params[k] for k in _OF_VISION}

    def work(reporter: Reporter) -> AnalysisOutput:
        from kvbench.analysis.vision.options import Options
        from kvbench.analysis.vision.write import write_vision

        return write_vision(
            given_values(grid), reporter, options=Options.read(own), command=command_line()
        )

    carry_out(work)


_OF_VISION = ("questions", "new_tokens", "steps", "layers", "heads")


def command_line() -> str:
    """The command that was given, for the page that says how its files were made."""
    return shlex.join(["kvbench", *sys.argv[1:]])


def carry_out(work: Callable[[Reporter], AnalysisOutput]) -> None:
    """Carry out an analysis or a benchmark under a progress bar and print its tables."""
    told = progress()
    with stopping(told, "an analysis writes its files when it ends"):
        told.busy("loading model")
        done = work(told)
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
        complain(f"{len(done.failed)} cells failed: {next(iter(done.failed.values()))}")
        raise typer.Exit(FAILED)
