"""A local window: the most recent tokens, the "local window" baseline of D2O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.errors import UserError
from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Score, Scores, View, protect_nothing, protect_sinks


@dataclass(frozen=True)
class Recency(Score):
    """`s_i = i - t <= 0`: the more recent, the better.

    Attributes:
        sinks: First tokens of the sequence that are protected (0: none). With sinks the newest
            token is protected too, and gives way after them: where a share is smaller than
            `sinks + 1` entries the last token stays.
    """

    name: ClassVar[str] = "recency"
    sinks: int = 0

    def __post_init__(self) -> None:
        """Check the range."""
        if self.sinks < 0:
            raise UserError(f"sinks={self.sinks}: a number of tokens, 0 or more, would be right")

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, `[B, H, n]`."""
        protect = protect_nothing(v)
        if self.sinks:
            newest = ((v.age == 0) & v.valid).to(torch.int8) * Scores.NEWEST
            protect = torch.maximum(protect_sinks(v, self.sinks), newest)
        return Scores(-v.age.float(), protect)


LOCAL = Policy(
    name="local",
    score=Recency(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps the most recent tokens",
    paper="D2O, arXiv 2406.13035 (baseline 'local window')",
    moments=("context", "question", "decode"),
    cost="time and memory O(H T)",
)
