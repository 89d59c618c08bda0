"""The comparison with a release sees entries that it cannot keep, without the release."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.release_agreement import PRESSES, compared

WINDOW, TOKENS = 4, 30
PREFERENCES = [3.0, 1.0]


def found(name: str) -> tuple[Tensor, list[float] | None]:
    """Scores of two layers of two heads, in which the window has the largest of its layer."""
    score = torch.rand(2, 2, TOKENS, generator=torch.Generator().manual_seed(0))
    if name == "cake":
        score[..., -WINDOW:] = float("inf")
        return score, PREFERENCES
    score[1] /= 2
    score[..., -WINDOW:] = score.flatten(1).amax(1)[:, None, None]
    return score, None


def chosen(name: str, budget: int, score: Tensor) -> Tensor:
    """What the release keeps, by loops over sorted entries."""
    worth, kept = score.clone(), torch.zeros_like(score, dtype=torch.bool)
    worth[..., -WINDOW:] = 9.0
    units = [(layer, head) for layer in (0, 1) for head in (0, 1)]
    every = [(-float(worth[a, b, i]), a, b, i) for a, b in units for i in range(TOKENS)]
    if name == "cake":
        for layer, head in units:
            count = WINDOW + round(PREFERENCES[layer] / 4 * 2 * (budget - WINDOW))
            own = sorted(x for x in every if x[1:3] == (layer, head))
            for _, a, b, i in own[:count]:
                kept[a, b, i] = True
        return kept
    groups = [every]
    if name == "defensivekv":
        groups = [[x for x in every if x[1] == layer] for layer in (0, 1)]
    for group in groups:
        for _, a, b, i in sorted(group)[: 4 * budget // len(groups)]:
            kept[a, b, i] = True
    return kept


@pytest.mark.parametrize("name", PRESSES)
def test_what_a_release_keeps_agrees_and_a_mutated_choice_does_not(name: str) -> None:
    score, preferences = found(name)
    kept = chosen(name, 12, score)
    assert compared(name, kept, (score, preferences), WINDOW, 12) == 0
    for other in (chosen(name, 12, -score), kept.roll(1, -1), kept.flip(0)):
        assert compared(name, other, (score, preferences), WINDOW, 12) > 0
