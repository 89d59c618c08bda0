"""The options of `kvbench analyze causes` in addition to a grid."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvbench.errors import UserError
from kvbench.runs import values
from kvbench.runs.options import ANALYSIS, Options, declare

UNITS = ("heads", "layers")
SENTENCE, TARGET, SEARCH = "sentence", "target", "search"


def _evidence(value: Any) -> str:
    evidence = str(value)
    try:
        pattern = re.compile(evidence)
    except re.error as error:
        raise UserError(
            f"--evidence {evidence}: neither sentence, target or search nor a regular expression: {error}"
        ) from None
    if pattern.match(""):
        raise UserError(f"--evidence {evidence!r} matches an empty text; use sentence, target, search or another regex")
    return evidence


@dataclass(frozen=True)
class CausesOptions(Options):
    """Options of the analysis of causes; `kvbench analyze causes --help` explains each."""

    against: str | None = declare(
        None, values.optional(values.text("against")), str, ANALYSIS, "POLICY",
        "Also explain why this policy answers what the others lose at the same budget.",
    )  # fmt: skip
    evidence: str | None = declare(
        None, values.optional(_evidence), str, ANALYSIS, "WHAT",
        "What the answer comes from: sentence, the statement with the reference answer; target, the reference answer "
        "alone; search, whatever brings the answer back; or a regular expression. Default: sentence, and search where "
        "the context does not contain the reference answer.",
    )  # fmt: skip
    units: str = declare(
        "heads", values.choice("units", UNITS), str, ANALYSIS, "WHICH",
        "Smallest unit of the interventions: heads (the default) or layers, which takes half the time.",
    )  # fmt: skip
