"""The options of `kvbench analyze attention` in addition to a grid."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.analysis.choosing import drawn
from kvbench.runs import values
from kvbench.runs.options import ANALYSIS, Options, declare

MOST_LAYERS = 8
"""Layers drawn by default."""


@dataclass(frozen=True)
class AttentionOptions(Options):
    """Options of the attention analysis; `kvbench analyze attention --help` explains each."""

    layers: tuple[int, ...] | None = drawn("layers", "LAYERS")
    bins: int = declare(
        128, values.integer("bins", 2, 1024), int, ANALYSIS, "N",
        "Most rows and columns of a map; longer prompts share them evenly. Default: 128.",
    )  # fmt: skip
