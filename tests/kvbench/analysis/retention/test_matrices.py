"""Retention, sparsity and the retention of tokens, against loops and numbers by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvbench.analysis.retention.matrices import (
    TokenSums,
    binned,
    retention,
    sparsity,
    steps_shown,
)
from tests.kvbench.analysis.retention import oracles


def gates(tokens: int) -> torch.Tensor:
    """Log beta from none at all to gone at once, float32 `[3, 2, T]`."""
    generator = torch.Generator().manual_seed(0)
    found = -(10 ** torch.empty(3, 2, tokens).uniform_(-9, 2, generator=generator))
    found[0, 0] = 0.0
    found[0, 1, ::2] = 0.0
    found[1, 0] = -200.0
    return found


def test_retention_is_beta_to_the_age() -> None:
    log_beta = gates(23)
    found = retention(log_beta, torch.arange(23))
    for layer, head in np.ndindex(3, 2):
        slow = oracles.retention(log_beta[layer, head].tolist())
        assert found[layer, head].tolist() == [pytest.approx(row, rel=1e-9, abs=1e-300) for row in slow]
    assert torch.equal(retention(log_beta, torch.tensor([4, 17])), found[..., [4, 17], :])


@pytest.mark.parametrize("tokens", [1, 2, 23, 64])
def test_sparsity_is_one_minus_the_mean_of_the_triangle(tokens: int) -> None:
    log_beta = gates(tokens)
    found = sparsity(log_beta)
    for layer, head in np.ndindex(3, 2):
        slow = oracles.sparsity(log_beta[layer, head].tolist())
        assert float(found[layer, head]) == pytest.approx(slow, abs=1e-12)
    assert found[0, 0] == 0  # what never fades
    assert float(found[1, 0]) == pytest.approx(1 - 2 / (tokens + 1))  # the diagonal alone


def test_sparsity_by_hand() -> None:
    # beta = 1/2 and T = 3: the rows sum to 1, 3/2 and 7/4; of 6 fields 17/4 are left.
    found = sparsity(torch.full((3,), math.log(0.5)))
    assert float(found) == pytest.approx(1 - 17 / 24)


def test_tokens_are_averaged_over_heads_and_occurrences() -> None:
    sums = TokenSums()
    halves = torch.tensor([[[0.5, 1.0, 0.25]], [[0.5, 0.5, 0.75]]]).log()
    sums.add([7, 9, 7], halves)
    sums.add([9], torch.tensor([[[0.125]], [[0.125]]]).log())
    first, second = sums.rows()
    assert [first["token_id"], first["count"], second["token_id"]] == [7, 2, 9]
    assert first["beta"] == pytest.approx((0.5 + 0.5) / 2)
    assert second["beta"] == pytest.approx((0.75 + 0.125) / 2)
    # log2 of the two occurrences of 9: mean of (0, -1) and of (-3, -3)
    assert second["half_life"] == pytest.approx(1 / ((0.5 + 3) / 2))
    never = TokenSums()
    never.add([1], torch.zeros(1, 1, 1))
    assert never.rows()[0]["half_life"] == math.inf


def test_bins_average_what_there_is() -> None:
    picture = np.array([[1.0, 3.0, np.nan, 5.0, np.nan, np.nan]])
    found = binned(picture, 3)
    assert found[0, :2].tolist() == [2.0, 5.0]
    assert np.isnan(found[0, 2])
    assert binned(picture, 6) is picture
    assert binned(np.ones((2, 1000)), 320).shape == (2, 320)


def test_a_long_text_is_shown_at_some_steps_with_its_first_and_last() -> None:
    assert steps_shown(5, 9).tolist() == [0, 1, 2, 3, 4]
    some = steps_shown(1000, 50).tolist()
    assert len(some) == 50 == len(set(some))
    assert (some[0], some[-1]) == (0, 999)
