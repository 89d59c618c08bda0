"""Few contexts rank policies as well as their scores on other contexts say."""

from __future__ import annotations

import numpy as np
from scipy.stats import spearmanr

from scripts.rank_correlation import _drawn


def test_all_contexts_give_spearmans_correlation() -> None:
    generator = np.random.default_rng(1)
    values, truth = generator.random((6, 9)), generator.random(9)
    wanted = spearmanr(values.mean(0), truth).statistic
    assert np.allclose(_drawn(values, truth, 6, 3), wanted)
    assert np.ptp(_drawn(values, truth, 2, 20)) > 0


def test_a_draw_that_ranks_nothing_counts_as_zero() -> None:
    assert _drawn(np.ones((4, 5)), np.arange(5.0), 2, 3).tolist() == [0.0] * 3
