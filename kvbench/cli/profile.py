"""`kvbench profile`: what is measured of a model once and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.options import Device, DeviceMap, Dtype, Quantization, Revision, Template

app = typer.Typer(
    help="Measure what policies must know of a model.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Measure what policies must know of a model."""


@app.command()
def heads(
    model: Annotated[
        str, typer.Option(metavar="M", help="reference, a local folder or a hub id.")
    ] = "reference",
    kind: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="ablation (the default): what answers lose without a head's context; reason: "
            "attention to the needle; copy: how often a head copies the answered token.",
        ),
    ] = "ablation",
    task: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help="Tasks whose answer stands in the context. Default: niah_depth.",
        ),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Prompt and answer together. Default: 1024."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", help="Per task and length. Default: 33.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of the data. Default: 0.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Default: in the user's cache, where policies look."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    device_map: DeviceMap = None,
    quantization: Quantization = None,
    chat_template: Template = None,
) -> None:
    """Score how much every KV head retrieves: the head profile of headkv and duo_attention."""
    from rich.console import Console

    from kvbench.profiles.command import profile_heads
    from kvbench.progress import reporter

    given = {
        "tasks": task,
        "lengths": length,
        "samples": samples,
        "seed": seed,
        "device": device,
        "dtype": dtype,
        "revision": revision,
        "device_map": device_map,
        "quantization": quantization,
        "chat_template": chat_template,
    }
    for line in profile_heads(model, kind, given, out, reporter(Console(stderr=True))):
        print(line)
