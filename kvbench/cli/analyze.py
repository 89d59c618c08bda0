"""`kvbench analyze`: effects of eviction inside a model. Heavy modules are imported when needed."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.analysis.attention.options import AttentionOptions
from kvbench.analysis.causes.options import CausesOptions
from kvbench.analysis.dilution.options import DilutionOptions
from kvbench.analysis.perturbation.options import PerturbationOptions
from kvbench.analysis.queries.options import QueryOptions
from kvbench.analysis.retention.options import RetentionOptions
from kvbench.analysis.vision.options import VisionOptions
from kvbench.cli.options import declared_options, given_values, grid_options, split_options
from kvbench.cli.screen import FAILED, complain, progress, say, show, stopping
from kvbench.report.figure_flags import FigureFlags

if TYPE_CHECKING:
    from kvbench.analysis.output import AnalysisOutput
    from kvbench.progress import Reporter

app = typer.Typer(
    help="Look inside a model: what eviction changes, how a budget is distributed, what is kept.",
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_GRID = (
    *("policies", "budgets", "models", "tasks", "moments", "lengths", "samples", "seed"),
    *("device", "dtype", "attn", "revision", "device_map", "quantization", "chat_template"),
    *("lmms_model", "min_pixels", "max_pixels", "max_frames"),
)
_PROMPTS = tuple(name for name in _GRID if name not in ("policies", "budgets", "moments"))
"""Options of an analysis of the full cache, which runs no policy."""
_HELP = {
    "moments": "When to compress, comma-separated: context, before the question (the default), or question, after it.",
    "samples": "Samples per task. Default: 50.",
    "out": "Output folder. Default: results/ANALYSIS-HASH.",
}


@app.callback()
def _root() -> None:
    """Look inside a model: what eviction changes, how a budget is distributed, what is kept."""


@app.command("perturbation")
@grid_options(*_GRID, help_texts=_HELP)
@declared_options(FigureFlags, anchor="out")
@grid_options("out", anchor="first_stage", help_texts=_HELP)
@declared_options(PerturbationOptions)
def perturbation(**flag_values: Any) -> None:
    """Measure how far eviction moves each head's output, and check CriticalKV's bounds."""
    own_values, grid_values = split_options(flag_values, PerturbationOptions)
    _analyze("perturbation.write", "write_perturbation", grid_values, **PerturbationOptions.of(own_values).to_dict())


@app.command("allocation")
@declared_options(FigureFlags, anchor="out")
@grid_options(*_GRID, "out", help_texts=_HELP)
def allocation(**grid_values: Any) -> None:
    """Show how many entries each layer and KV head keeps: a table and a heat map per policy."""
    _analyze("allocation", "write_allocation", grid_values)


@app.command("attention")
@grid_options(*_PROMPTS, help_texts={"samples": "Prompts per task. Default: 4."})
@declared_options(FigureFlags, anchor="out")
@grid_options("out", anchor="bins", help_texts=_HELP)
@declared_options(AttentionOptions)
def attention(**flag_values: Any) -> None:
    """Draw attention maps by layer, and the variance of accumulated attention."""
    own_values, grid_values = split_options(flag_values, AttentionOptions)
    _analyze("attention.write", "write_attention", grid_values, options=AttentionOptions.of(own_values))


@app.command("queries")
@grid_options(*_PROMPTS, help_texts={"samples": "Prompts per task. Default: 10."})
@declared_options(FigureFlags, anchor="out")
@grid_options("out", anchor="components", help_texts=_HELP)
@declared_options(QueryOptions)
def queries(**flag_values: Any) -> None:
    """Fit a vector autoregression to the queries of sampled answers: is it stable and mean-reverting?"""
    own_values, grid_values = split_options(flag_values, QueryOptions)
    _analyze("queries.write", "write_queries", grid_values, options=QueryOptions.of(own_values))


@app.command("dilution")
@grid_options(*_GRID, help_texts=_HELP)
@declared_options(FigureFlags, anchor="out")
@grid_options("out", anchor="gap", help_texts=_HELP)
@declared_options(DilutionOptions)
def dilution(**flag_values: Any) -> None:
    """Measure how much attention useless tokens take, before and after eviction."""
    own_values, grid_values = split_options(flag_values, DilutionOptions)
    _analyze("dilution.write", "write_dilution", grid_values, options=DilutionOptions.of(own_values))


@app.command("retention")
@grid_options(
    *(name for name in _GRID if name != "moments"),
    help_texts={"samples": "Texts per task. Default: 4."},
)
@declared_options(FigureFlags, anchor="out")
@grid_options("out", anchor="horizon", help_texts=_HELP)
@declared_options(RetentionOptions)
def retention(**flag_values: Any) -> None:
    """Show which tokens are kept, and for how long: matrices, eviction maps, survival, the text."""
    own_values, grid_values = split_options(flag_values, RetentionOptions)
    _analyze("retention.write", "write_retention", grid_values, options=RetentionOptions.of(own_values))


@app.command("vision")
@grid_options(
    *_GRID,
    help_texts={
        "moments": "When to compress, comma-separated: context, before the question (the default); "
        "question, after it; or decode, while the answer is generated.",
        "samples": "Samples per task. Default: 1.",
    },
)
@declared_options(FigureFlags, anchor="out")
@grid_options("out", anchor="heads", help_texts=_HELP)
@declared_options(VisionOptions)
def vision(**flag_values: Any) -> None:
    """Show which image tokens are kept, drawn over the image, and cache use by modality."""
    own_values, grid_values = split_options(flag_values, VisionOptions)
    _analyze("vision.write", "write_vision", grid_values, options=VisionOptions.of(own_values))


@app.command("causes")
@grid_options(
    *_GRID,
    help_texts={
        "moments": "When to compress, comma-separated: context, before the question (the default); question, after it; "
        "or decode, while the answer is generated.",
        "samples": "Samples per task. Default: 50, or those of RUN.",
    },
    anchor="run",
)
@declared_options(FigureFlags, anchor="out")
@grid_options("out", anchor="units", help_texts=_HELP)
@declared_options(CausesOptions, anchor="run")
def causes(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="A run to explain; the options restrict it.")] = None,
    **flag_values: Any,
) -> None:
    """Explain why samples are lost: what was evicted, whether it suffices and is needed, in which layers and heads."""
    own_values, grid_values = split_options(flag_values, CausesOptions)
    _analyze("causes.write", "write_causes", grid_values, run=run, options=CausesOptions.of(own_values))


def _analyze(module: str, writer: str, flag_values: Mapping[str, Any], **settings: Any) -> None:
    """Run an analysis; its module, which is slow to import, is imported when the work begins."""
    figure_values, grid_values = split_options(flag_values, FigureFlags)
    settings |= {"figures": FigureFlags.of(figure_values), "command": command_line()}

    def work(reporter: Reporter) -> AnalysisOutput:
        write = getattr(importlib.import_module(f"kvbench.analysis.{module}"), writer)
        output: AnalysisOutput = write(given_values(grid_values), reporter, **settings)
        return output

    carry_out(work)


def command_line() -> str:
    """Return the command line, for the page that documents how its files were made."""
    return shlex.join(["kvbench", *sys.argv[1:]])


def carry_out(
    work: Callable[[Reporter], AnalysisOutput], stop_note: str = "an analysis writes its files at the end"
) -> None:
    """Run an analysis or a benchmark with a progress bar and print its tables.

    Args:
        work: Does the work.
        stop_note: Printed after Ctrl-C: what was kept.
    """
    reporter = progress()
    with stopping(reporter, stop_note):
        reporter.busy("loading model")
        outputs = work(reporter)
    for result_table in outputs.tables:
        show(result_table)
    for note_line in outputs.notes:
        say(note_line, "dim")
    say(f"wrote {outputs.path}: {', '.join(path.name for path in outputs.files if path.parent == outputs.path)}")
    figure_paths = [path for path in outputs.files if path.parent == outputs.path / "figures"]
    formats = dict.fromkeys(path.suffix[1:].upper() for path in figure_paths)
    figure_count = len({path.with_suffix("") for path in figure_paths})
    if figure_count:
        say(f"figures: {figure_count} as {' and '.join(formats)} in {outputs.path / 'figures'}")
    if outputs.failed:
        complain(f"{len(outputs.failed)} cells failed: {next(iter(outputs.failed.values()))}")
        raise typer.Exit(FAILED)
