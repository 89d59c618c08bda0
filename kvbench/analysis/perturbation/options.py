"""The options of `kvbench analyze perturbation` in addition to a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.errors import UserError
from kvbench.runs import values
from kvbench.runs.options import ANALYSIS, Options, declare

QUERIES = ("answer", "question")


def _fraction(value: Any) -> float:
    if not 0 <= value <= 1:
        raise UserError(f"--first-stage {value}: use a share in [0, 1]")
    return float(value)


@dataclass(frozen=True)
class PerturbationOptions(Options):
    """Options of the perturbation analysis; `kvbench analyze perturbation --help` explains each."""

    query: str = declare(
        "answer", values.choice("query", QUERIES), str, ANALYSIS, "WHOSE",
        "Query to measure with: answer, the first decoded token (the default), or question, the "
        "question's last token.",
    )  # fmt: skip
    first_stage: float = declare(
        0.5, _fraction, float, ANALYSIS, "ALPHA",
        "Fraction of the first stage, for policies without a parameter first_stage. Default: 0.5.",
    )  # fmt: skip
