"""`kvbench profile`: measurements made once per model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli import complete
from kvbench.cli.options import OneModel, given_values, grid_options, option
from kvbench.cli.screen import progress, stopping
from kvbench.runs.options import OUTPUT, WHAT

if TYPE_CHECKING:
    from kvbench.profiles.summaries import QuerySummary

app = typer.Typer(
    help="Measure per-model data that some policies need.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Measure per-model data that some policies need."""


_GRID = (
    *("revision", "device", "dtype", "attn", "device_map", "quantization"),
    *("samples", "lengths", "chat_template", "seed"),
)
_LENGTHS = "Total length of prompt and answer, comma-separated. Default: 1024."


@app.command()
@grid_options(
    *_GRID,
    anchor="model",
    help_texts={"samples": "Samples per task and length. Default: 33.", "lengths": _LENGTHS},
)
def heads(
    kind: Annotated[
        str,
        option(
            WHAT,
            "KIND",
            "ablation: loss of answers without a head's context (the default); reason: "
            "attention to the needle; copy: how often a head copies the answer's token.",
            show_default=False,
        ),
    ] = "ablation",
    task: Annotated[
        str | None,
        option(
            WHAT,
            "NAME",
            "Tasks whose context contains the answer, comma-separated. Default: facts.",
            autocompletion=complete.tasks,
        ),
    ] = None,
    model: OneModel = "reference",
    out: Annotated[
        Path | None,
        option(
            OUTPUT,
            "FILE",
            "Output file. Default: the user's cache, where policies look.",
        ),
    ] = None,
    **grid_values: Any,
) -> None:
    """Measure how much each KV head retrieves, for headkv and duo_attention."""
    from kvbench.profiles.command import profile_heads

    flag_values = given_values({"task": task, **grid_values})
    reporter = progress()
    with stopping(reporter, "the profile is written at the end"):
        reporter.busy(f"loading model {model}")
        summary_lines = profile_heads(model, kind, flag_values, out, reporter)
    for summary_line in summary_lines:
        print(summary_line)


_query_options = grid_options(
    *_GRID,
    anchor="model",
    help_texts={"samples": "Samples per task and length. Default: 20.", "lengths": _LENGTHS},
)
QueryTask = Annotated[
    str | None,
    option(
        WHAT,
        "NAME",
        "Tasks of the prompts, comma-separated. Default: facts.",
        autocompletion=complete.tasks,
    ),
]
QueryOut = Annotated[
    Path | None,
    option(
        OUTPUT,
        "FOLDER",
        "Output folder. Default: the user's cache, where the policy looks.",
    ),
]


@app.command()
@_query_options
def qfilters(
    task: QueryTask = None,
    model: OneModel = "reference",
    out: QueryOut = None,
    **grid_values: Any,
) -> None:
    """Estimate the common direction of each KV head's queries, for qfilters."""
    from kvbench.profiles.summaries import FILTERS

    _summarise(FILTERS, {"task": task, **grid_values}, model, out)


@app.command()
@_query_options
def queries(
    task: QueryTask = None,
    model: OneModel = "reference",
    out: QueryOut = None,
    **grid_values: Any,
) -> None:
    """Measure mean and covariance of each head's queries, for expected_attention."""
    from kvbench.profiles.summaries import STATISTICS

    _summarise(STATISTICS, {"task": task, **grid_values}, model, out)


def _summarise(query_summary: QuerySummary, all_values: dict[str, Any], model: str, output_path: Path | None) -> None:
    from kvbench.profiles.command import profile_queries

    flag_values = given_values(all_values)
    reporter = progress()
    with stopping(reporter, f"{query_summary.noun} are written at the end"):
        reporter.busy(f"loading model {model}")
        summary_lines = profile_queries(query_summary, model, flag_values, output_path, reporter)
    for summary_line in summary_lines:
        print(summary_line)
