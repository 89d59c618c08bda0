"""Fidelity: how far the next-token distributions of a compressed cache are from those of the full cache.

The full cache answers greedily once. Its answer is then fed to every compressed cache (teacher forcing), and the
distributions over each token of the answer are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.decode import DecodeRow, Stop
from kvbench.engine.draw import choose, most_likely
from kvbench.engine.measure import log_probabilities
from kvbench.engine.prefix import Prefix

SHORT_ANSWER = 24
"""Maximum number of compared tokens if the question has short reference answers."""


@dataclass(frozen=True)
class FullAnswer:
    """The greedy answer of the full cache.

    Attributes:
        tokens: Its tokens, with the one that ended it.
        logits: Logits before each of them, float32 `[tokens, vocabulary]`.
        reason: Why it ended, as `DecodeRow.reason`.
    """

    tokens: tuple[int, ...]
    logits: Tensor = field(repr=False)
    reason: str


def answer_greedily(prefix: Prefix, logits: Tensor, limit: int, stop: Stop) -> FullAnswer:
    """Answer on the full cache of one sequence.

    Args:
        prefix: The prefilled prompt; the answer is appended to it, except for its last token.
        logits: Logits after the prompt, `[1, vocabulary]`.
        limit: Maximum number of tokens.
        stop: Decides when the answer ends.
    """
    row = DecodeRow(limit, stop)
    token_logits = [logits.float()]
    while True:
        (token_id,) = choose(logits, [None], [len(row.tokens)])
        row.push(token_id)
        if row.reason:
            return FullAnswer(tuple(row.tokens), torch.cat(token_logits), row.reason)
        logits = prefix.extend(torch.tensor([[token_id]], device=prefix.device))
        token_logits.append(logits.float())


@dataclass(kw_only=True)
class FidelityRow(DecodeRow):
    """The full cache's answer, fed to a compressed cache.

    Attributes:
        full_answer: The answer; `given` holds its tokens.
        divergences: KL divergence of the full cache's distribution from the cell's at each token so far, in nats.
        agreements: Whether both find the same token most likely.
        nll_differences: By how much the token is less likely for the cell, in nats.
    """

    full_answer: FullAnswer
    divergences: list[float] = field(default_factory=list)
    agreements: list[bool] = field(default_factory=list)
    nll_differences: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, full_answer: FullAnswer, stop: Stop) -> FidelityRow:
        """Return a row that nothing has been fed to."""
        return cls(len(full_answer.tokens), stop, given=full_answer.tokens, full_answer=full_answer)

    def measure(self, logits: Tensor) -> None:
        """Compare the distributions over the next tokens of the answer.

        Args:
            logits: The cell's logits before each of them, `[n, vocabulary]`; rows beyond the answer are ignored.
        """
        first = len(self.tokens)
        full_log_probs = log_probabilities(self.full_answer.logits[first : first + len(logits)].to(logits.device))
        log_probs = log_probabilities(logits[: len(full_log_probs)])
        probabilities = full_log_probs.exp()
        # A token that the model rules out (-inf) adds nothing.
        terms = torch.where(probabilities > 0, probabilities * (full_log_probs - log_probs), 0.0)
        self.divergences += terms.sum(-1).clamp(min=0).tolist()
        token_ids = torch.tensor(self.given[first : first + len(log_probs)], device=logits.device)
        self.agreements += (most_likely(log_probs) == token_ids).tolist()
        differences = (full_log_probs - log_probs).gather(1, token_ids[:, None])[:, 0]
        self.nll_differences += differences.tolist()
        super().measure(logits)
        if self.reason == "given":  # a dialogue continues as after the answer itself
            self.reason = self.full_answer.reason

    def columns(self) -> dict[str, Any]:
        """Return the result columns of the answer, once all of it was fed."""
        return fidelity_columns(self.divergences, self.agreements, self.nll_differences)


def fidelity_columns(
    divergences: Sequence[float], agreements: Sequence[bool], nll_differences: Sequence[float]
) -> dict[str, Any]:
    """Return the result columns of per-token distances; `kl_middle` needs at least three tokens."""
    token_count = len(divergences)
    columns: dict[str, Any] = {
        "kl": sum(divergences) / token_count,
        "kl_first": divergences[0],
        "kl_last": divergences[-1],
        "agreement": sum(agreements) / token_count,
        "nll_diff": sum(nll_differences) / token_count,
        "first_difference": agreements.index(False) if False in agreements else token_count,
        "fidelity_tokens": token_count,
    }
    if token_count > 2:
        columns["kl_middle"] = sum(divergences[1:-1]) / (token_count - 2)
    return columns
