"""Parsing and validation of the non-grid options of `kvbench analyze vision`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.analysis.choosing import check_minimums, json_values, parse_integers_or_all
from kvbench.errors import UserError, nearest
from kvbench.runs.answers import Prompt

MOMENTS = ("context", "question", "decode")
"""Supported moments."""

QUESTIONS = ("last", "all")
MOST_LAYERS = 4
MOST_HEADS = 2


@dataclass(frozen=True)
class VisionOptions:
    """Options of the vision analysis.

    Attributes:
        questions: Questions to analyse per sample: the `last` one, which in a dialogue follows all images, or `all`.
        steps: Number of decode steps to draw, evenly spaced, including the first and the last.
        layers, heads: Layers (the model's index) and KV heads to draw; None for a few, evenly spaced, and empty for
            all.
        new_tokens: Maximum tokens per answer; None for the task's limit.
    """

    questions: str = "last"
    steps: int = 2
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    new_tokens: int | None = None

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            UserError: A value is out of range.
        """
        if self.questions not in QUESTIONS:
            hint = nearest(self.questions, QUESTIONS) or f"; use {' or '.join(QUESTIONS)}"
            raise UserError(f"--questions {self.questions}{hint}")
        check_minimums(self, {"steps": 1, "new_tokens": 1})

    @classmethod
    def read(cls, flags: Mapping[str, Any]) -> VisionOptions:
        """Parse flags; a flag that is None was not given.

        Args:
            flags: Values by attribute. Layers and heads are texts with commas, or `all`.

        Raises:
            UserError: A value cannot be parsed or is out of range.
        """
        parsed = {attribute: flag_value for attribute, flag_value in flags.items() if flag_value is not None}
        for flag in ("layers", "heads"):
            if flag in parsed:
                parsed[flag] = parse_integers_or_all(flag, parsed[flag])
        return cls(**parsed)

    def select_prompts(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts to analyse, in order."""
        first_repeats = [prompt for prompt in prompts if not prompt.repeat]
        if self.questions == "all":
            return first_repeats
        return list({prompt.request.sample_id: prompt for prompt in first_repeats}.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the options as a JSON-serialisable dict."""
        return json_values(self)
