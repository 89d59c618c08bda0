"""The options of `kvbench analyze dilution` in addition to a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.analysis.perturbation.options import QUERIES
from kvbench.errors import UserError
from kvbench.runs import values
from kvbench.runs.options import ANALYSIS, Options, declare


def _gap(value: Any) -> float:
    if not 0 <= value < 700:
        raise UserError(f"--gap {value}: use a difference of logits, 0 or more")
    return float(value)


@dataclass(frozen=True)
class DilutionOptions(Options):
    """Options of the dilution analysis; `kvbench analyze dilution --help` explains each."""

    query: str = declare(
        "answer", values.choice("query", QUERIES), str, ANALYSIS, "WHOSE",
        "Query to measure with: answer, the first decoded token (the default), or question, the "
        "question's last token.",
    )  # fmt: skip
    gap: float = declare(
        1.0, _gap, float, ANALYSIS, "LOGITS",
        "Near ties of Proposition 3.1: tokens whose logit is at most this far below the largest useful "
        "one. Default: 1.",
    )  # fmt: skip
