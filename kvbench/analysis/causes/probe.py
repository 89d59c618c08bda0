"""The full cache's answer, fed through caches that hold chosen entries of one prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import forward
from kvbench.engine.masks import masked_copies

BATCH = 8
"""Caches in one forward. Larger batches were slower on a CPU."""


class ProbeResult(NamedTuple):
    """What a cache makes of the full cache's answer.

    Attributes:
        right: Whether every judged token is the most likely one.
        same: Whether every token of the answer is.
        nll: Negative log-likelihood of the judged tokens, in nats.
        margin: Least difference between the logit of a judged token and the largest other one; negative if one is
            wrong.
    """

    right: bool
    same: bool
    nll: float
    margin: float


@dataclass
class AnswerProbe:
    """Measures caches of one sample.

    Attributes:
        model: The model, inside `engine`.
        cache: The full cache of one sequence, dense; not changed.
        fed_ids: Tokens to feed: the rest of the prompt, and the answer without its last token.
        answer_ids: Tokens that the last of these must predict.
        judged: Indices in `answer_ids` of the tokens that decide whether the answer is right.
        cells: Number of caches measured so far.
    """

    model: nn.Module
    cache: RaggedCache
    fed_ids: Sequence[int]
    answer_ids: Sequence[int]
    judged: Sequence[int]
    cells: int = field(default=0)

    def measure(self, keep_masks: Sequence[Tensor]) -> list[ProbeResult]:
        """Measure caches that hold some entries of the full cache.

        Args:
            keep_masks: Entries of each, bool `[L, H, columns]`.
        """
        outcomes = []
        for start in range(0, len(keep_masks), BATCH):
            batch_masks = torch.stack([*keep_masks[start : start + BATCH]], 1)
            copies = masked_copies(self.cache, [*batch_masks], len(self.fed_ids))
            outcomes += self._outcomes(copies, batch_masks.shape[1])
        return outcomes

    def measure_cache(self, cache: RaggedCache) -> ProbeResult:
        """Measure a compressed cache with its own keys and values; it is appended to."""
        return self._outcomes(cache, 1)[0]

    def _outcomes(self, cache: RaggedCache, rows: int) -> list[ProbeResult]:
        self.cells += rows
        device = next(self.model.parameters()).device
        token_ids = torch.tensor(self.fed_ids, device=device).expand(rows, -1)
        logits = forward(self.model, cache, token_ids, logit_count=len(self.answer_ids)).float()
        answer = torch.tensor(self.answer_ids, device=device).expand(rows, -1)[..., None]
        predicted = logits.argmax(-1) == answer[..., 0]
        likelihood = logits.log_softmax(-1).gather(-1, answer)[..., 0]
        answer_logits = logits.gather(-1, answer)[..., 0]
        margins = answer_logits - logits.scatter(-1, answer, float("-inf")).amax(-1)
        judged = torch.tensor(self.judged, device=device)
        return [
            ProbeResult(*row)
            for row in zip(
                predicted[:, judged].all(-1).tolist(),
                predicted.all(-1).tolist(),
                (-likelihood[:, judged].double().sum(-1)).tolist(),
                margins[:, judged].amin(-1).tolist(),
                strict=True,
            )
        ]
