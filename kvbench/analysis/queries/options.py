"""The options of `kvbench analyze queries` in addition to a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.errors import UserError
from kvbench.runs import values
from kvbench.runs.options import ANALYSIS, Options, declare


def _share(value: Any) -> float:
    if not 0 < value < 1:
        raise UserError(f"--train-share {value}: use a share between 0 and 1, such as 0.75")
    return float(value)


@dataclass(frozen=True)
class QueryOptions(Options):
    """Options of the analysis of queries; `kvbench analyze queries --help` explains each."""

    layer: int | None = declare(
        None, values.optional(values.integer("layer", 0)), int, ANALYSIS, "LAYER",
        "Full-attention layer of the model. Default: the one in the middle.",
    )  # fmt: skip
    head: int = declare(
        0, values.integer("head", 0), int, ANALYSIS, "HEAD", "Query head. Default: 0."
    )  # fmt: skip
    rollouts: int = declare(
        128, values.integer("rollouts", 4), int, ANALYSIS, "N", "Sampled answers per prompt. Default: 128."
    )  # fmt: skip
    new_tokens: int = declare(
        256, values.integer("new_tokens", 4), int, ANALYSIS, "TOKENS",
        "Most tokens of a sampled answer. Default: 256.",
    )  # fmt: skip
    temperature: float = declare(
        1.0, values.temperature, float, ANALYSIS, "T", "Temperature of the sampled answers. Default: 1.",
    )  # fmt: skip
    train_share: float = declare(
        0.75, _share, float, ANALYSIS, "SHARE",
        "Share of a prompt's answers that the model is fitted to. Default: 0.75."
    )  # fmt: skip
    components: int = declare(
        8, values.integer("components", 1), int, ANALYSIS, "N",
        "Principal components of the queries. Default: 8.",
    )  # fmt: skip
