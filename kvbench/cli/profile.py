"""`kvbench profile`: what is measured once for a model and kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli import complete
from kvbench.cli.options import (
    OUTPUT,
    PROMPTS,
    WHAT,
    Device,
    DeviceMap,
    Dtype,
    OneModel,
    Quantization,
    Revision,
    Seed,
    Template,
    given_flags,
    option,
)
from kvbench.cli.screen import progress, stopping

if TYPE_CHECKING:
    from kvbench.profiles.summaries import QuerySummary

app = typer.Typer(
    help="Measure what some policies need to know about a model.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Measure what some policies need to know about a model."""


Length = Annotated[
    str | None,
    option(PROMPTS, "TOKENS", "Length of prompt and answer together, with commas. Default: 1024."),
]


@app.command()
def heads(
    context: typer.Context,
    kind: Annotated[
        str,
        option(
            WHAT,
            "KIND",
            "ablation: what answers lose without a head's context (the default); reason: "
            "attention to the needle; copy: how often a head copies the token of the answer.",
            show_default=False,
        ),
    ] = "ablation",
    task: Annotated[
        str | None,
        option(
            WHAT,
            "NAME",
            "Tasks whose context contains the answer, with commas. Default: facts.",
            autocompletion=complete.tasks,
        ),
    ] = None,
    model: OneModel = "reference",
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    quantization: Quantization = None,
    samples: Annotated[
        int | None, option(PROMPTS, "N", "Per task and length. Default: 33.")
    ] = None,
    length: Length = None,
    chat_template: Template = None,
    seed: Seed = None,
    out: Annotated[
        Path | None,
        option(
            OUTPUT,
            "FILE",
            "Where to write the profile. Default: the user's cache, where policies look.",
        ),
    ] = None,
) -> None:
    """Measure how much each KV head retrieves, for headkv and duo_attention."""
    from kvbench.profiles.command import profile_heads

    given = given_flags(context, "kind", "model", "out")
    told = progress()
    with stopping(told, "a profile is written when it is complete"):
        told.busy(f"loading model {model}")
        lines = profile_heads(model, kind, given, out, told)
    for line in lines:
        print(line)


QueryTask = Annotated[
    str | None,
    option(
        WHAT,
        "NAME",
        "Tasks whose prompts the model reads, with commas. Default: facts.",
        autocompletion=complete.tasks,
    ),
]
QuerySamples = Annotated[int | None, option(PROMPTS, "N", "Per task and length. Default: 20.")]
QueryOut = Annotated[
    Path | None,
    option(
        OUTPUT,
        "FOLDER",
        "Where to write the result. Default: the user's cache, where the policy looks.",
    ),
]


@app.command()
def qfilters(
    context: typer.Context,
    task: QueryTask = None,
    model: OneModel = "reference",
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    quantization: Quantization = None,
    samples: QuerySamples = None,
    length: Length = None,
    chat_template: Template = None,
    seed: Seed = None,
    out: QueryOut = None,
) -> None:
    """Estimate the direction that the queries of each KV head share, for qfilters."""
    from kvbench.profiles.summaries import FILTERS

    _summarise(FILTERS, context, model, out)


@app.command()
def queries(
    context: typer.Context,
    task: QueryTask = None,
    model: OneModel = "reference",
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    quantization: Quantization = None,
    samples: QuerySamples = None,
    length: Length = None,
    chat_template: Template = None,
    seed: Seed = None,
    out: QueryOut = None,
) -> None:
    """Measure mean and covariance of each head's queries, for expected_attention."""
    from kvbench.profiles.summaries import STATISTICS

    _summarise(STATISTICS, context, model, out)


def _summarise(sort: QuerySummary, context: typer.Context, model: str, out: Path | None) -> None:
    from kvbench.profiles.command import profile_queries

    given = given_flags(context, "model", "out")
    told = progress()
    with stopping(told, f"{sort.noun} are written when they are complete"):
        told.busy(f"loading model {model}")
        lines = profile_queries(sort, model, given, out, told)
    for line in lines:
        print(line)
