"""The options of `kvbench analyze vision` in addition to a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.analysis.choosing import drawn
from kvbench.runs import values
from kvbench.runs.options import ANALYSIS, Options, declare

if TYPE_CHECKING:
    from kvbench.runs.answers import Prompt

MOMENTS = ("context", "question", "decode")
"""Supported moments."""

QUESTIONS = ("last", "all")
MOST_LAYERS = 4
MOST_HEADS = 2


@dataclass(frozen=True)
class VisionOptions(Options):
    """Options of the vision analysis; `kvbench analyze vision --help` explains each."""

    questions: str = declare(
        "last", values.choice("questions", QUESTIONS), str, ANALYSIS, "WHICH",
        "Questions per sample: last (the default) or all.",
    )  # fmt: skip
    new_tokens: int | None = declare(
        None, values.optional(values.at_least("new-tokens", 1)), int, ANALYSIS, "N",
        "Maximum number of tokens per answer. Default: the task's limit.",
    )  # fmt: skip
    steps: int = declare(
        2, values.at_least("steps", 1), int, ANALYSIS, "N",
        "Decode steps to draw, evenly spaced from the first to the last. Default: 2.",
    )  # fmt: skip
    layers: tuple[int, ...] | None = drawn("layers", "L")
    heads: tuple[int, ...] | None = drawn("heads", "H")

    def select_prompts(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts to analyse, in order."""
        first_repeats = [prompt for prompt in prompts if not prompt.repeat]
        if self.questions == "all":
            return first_repeats
        return list({prompt.request.sample_id: prompt for prompt in first_repeats}.values())
