"""The options of figures that all commands with figures share. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.runs import values
from kvbench.runs.options import FLAG, Options, declare

FIGURES = "Figures"
"""Heading of the options in the help."""


@dataclass(frozen=True)
class FigureFlags(Options):
    """Options of figures as a user gives them; `figure_options.figure_options` checks them."""

    formats: tuple[str, ...] | None = declare(
        None, values.optional(values.names("formats")), list, FIGURES, "FORMATS",
        "File formats: pdf, png, svg; comma-separated. Default: png,svg.",
        flag="format",
    )  # fmt: skip
    labels: tuple[str, ...] | None = declare(
        None, values.optional(values.names("labels")), list, FIGURES, "POLICY=LABEL",
        "Show a policy under this name, such as snapkv=SnapKV. Repeatable or comma-separated.",
        flag="label",
    )  # fmt: skip
    width: float | None = declare(
        None, values.optional(float), float, FIGURES, "INCHES",
        "Width of every figure, such as 3.3 or 7. Default: 3.5 or 7, by its panels.",
    )  # fmt: skip
    no_title: bool = declare(
        False, bool, bool, FIGURES, FLAG, "Leave out the titles of figures.", spelling="--no-title",
    )  # fmt: skip


DEFAULT_FLAGS = FigureFlags()
