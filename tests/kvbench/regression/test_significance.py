"""The test of paired differences, held against slow loops, known tests and simulated alarms."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats as reference

from kvbench.regression.significance import EXACT, holm, least_contexts, paired_p, sign_p


def slow_p(totals: list[float]) -> float:
    """All exchanges of signs, one at a time."""
    far = [
        abs(sum(s * t for s, t in zip(signs, totals, strict=True))) >= abs(sum(totals)) - 1e-12
        for signs in itertools.product((1, -1), repeat=len(totals))
    ]
    return sum(far) / len(far)


def gaps_p(gaps: list[float], clusters: list[str], n: int = 20_000) -> float:
    keys = range(len(gaps))
    return paired_p(
        dict(zip(keys, gaps, strict=True)),
        dict.fromkeys(keys, 0.0),
        dict(zip(keys, clusters, strict=True)),
        draws=n,
    )


def test_p_goes_through_all_exchanges_of_contexts() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        gaps = rng.integers(-2, 3, 24) / 2
        names = [f"c{i}" for i in rng.integers(0, 8, 24)]
        totals = [sum(g for g, c in zip(gaps, names, strict=True) if c == n) for n in set(names)]
        assert gaps_p(gaps.tolist(), names) == pytest.approx(slow_p(totals))


def test_p_of_single_questions_is_mcnemars_exact_test() -> None:
    for losses, gains in ((6, 0), (5, 1), (10, 3), (7, 7), (40, 20), (400, 300)):
        gaps = [-1.0] * losses + [1.0] * gains + [0.0] * 30
        want = reference.binomtest(gains, losses + gains).pvalue
        got = gaps_p(gaps, [str(i) for i in range(len(gaps))])
        assert got == pytest.approx(want, abs=1e-12)


def test_p_of_fractions_and_of_other_numbers_is_the_same_share_of_exchanges() -> None:
    rng = np.random.default_rng(1)
    for contexts in (3, 9, EXACT, EXACT + 1):
        names = [str(i) for i in range(contexts)]
        thirds = rng.integers(-4, 5, contexts) / 3
        assert gaps_p(thirds.tolist(), names) == pytest.approx(slow_p(thirds.tolist()))
        odd = rng.standard_normal(contexts).tolist()
        drawn = contexts > EXACT
        assert gaps_p(odd, names) == pytest.approx(slow_p(odd), abs=0.03 if drawn else 1e-12)


def test_a_drawn_p_is_never_zero_and_can_be_as_small_as_its_draws_allow() -> None:
    gaps = (1 + np.random.default_rng(0).random(60)).tolist()
    names = [str(i) for i in range(60)]
    assert gaps_p(gaps, names, n=5000) == 1 / 5001
    assert gaps_p([round(gap) for gap in gaps], names) < 1e-15  # whole numbers are counted


def test_p_of_no_difference_is_one_and_of_nothing_nan() -> None:
    assert gaps_p([0.0] * 5, list("abcde")) == 1.0
    assert gaps_p([0.3, -0.1 - 0.2], ["a", "a"]) == 1.0  # what floats leave over is no difference
    assert math.isnan(paired_p({"a": 1.0}, {"b": 1.0}, {"a": "a", "b": "b"}))


@pytest.mark.parametrize("contexts", [5, 8, 25, 60])
def test_p_gives_no_more_false_alarms_than_it_says(contexts: int) -> None:
    """Two runs of one thing: at 5%, at most 5% of 500 pairs; 2 points are two standard errors."""
    rng = np.random.default_rng(contexts)
    names = np.repeat([f"{i:02d}" for i in range(contexts)], 3).tolist()
    alarms = 0
    for _ in range(500):
        level = np.repeat(rng.beta(0.6, 0.4, contexts), 3)
        gaps = (rng.random(3 * contexts) < level) * 1.0 - (rng.random(3 * contexts) < level)
        alarms += gaps_p(gaps.tolist(), names, n=400) <= 0.05
    assert alarms / 500 <= 0.07


def test_as_many_contexts_as_are_needed_for_a_small_p() -> None:
    for alpha in (0.05, 0.01, 0.05 / 56, 0.5):
        least = least_contexts(alpha)
        names = [str(i) for i in range(least)]
        assert gaps_p([-1.0] * least, names) <= alpha
        assert least == 1 or gaps_p([-1.0] * (least - 1), names[1:]) > alpha


def test_holms_correction() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_bounds_the_chance_of_any_false_alarm() -> None:
    rng = np.random.default_rng(0)
    shared, own = rng.standard_normal((2000, 1)), rng.standard_normal((2000, 20))
    p = 2 * reference.norm.sf(np.abs(np.sqrt(0.5) * shared + np.sqrt(0.5) * own))
    assert (p.min(axis=1) < 0.05).mean() > 0.3  # without a correction
    assert np.mean([min(holm(row.tolist())) < 0.05 for row in p]) <= 0.06


def _shifted(totals: Sequence[int]) -> float:
    """The p-value by the distribution of sums, one total after the other."""
    shares = {0: 1.0}
    for total in totals:
        following: dict[int, float] = defaultdict(float)
        for value, share in shares.items():
            following[value + total] += share / 2
            following[value - total] += share / 2
        shares = following
    return sum(share for value, share in shares.items() if abs(value) >= abs(sum(totals)))


@pytest.mark.parametrize(
    "totals", [[1] * 30 + [-1] * 12, [2, 2, -2, 3, 3, 5], [1, -1, 2], [7], [1] * 25 + [-2] * 9 + [4]]
)
def test_equal_totals_are_counted_together(totals: list[int]) -> None:
    assert sign_p(np.array(totals, dtype=float)) == pytest.approx(_shifted(totals), rel=1e-12)
