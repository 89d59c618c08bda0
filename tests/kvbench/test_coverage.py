"""The claims of docs/statistics.md, each by simulation with fixed seeds."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.regression.significance import holm, paired_p
from kvbench.stats import paired, summary

from .coverage import (
    QUESTIONS,
    changes,
    difference_coverage,
    mean_coverage,
    names,
    scores,
    single_coverage,
)

MEANS = ((0.5, 0.1), (0.5, 0.5), (0.8, 0.1))
DIFFERENCES = ((0.1, 0.1), (0.15, 0.05), (0.3, 0.1), (0.2, 0.2))
"""Cases in which many contexts vary, so that Wilson's wider interval is not used."""


@pytest.mark.parametrize("contexts", [15, 30, 50, 100])
def test_the_interval_of_a_mean_covers_it_in_95_of_100_runs(contexts: int) -> None:
    """Three cases of 500 runs each: their mean has a standard error of 0.6 points."""
    covered = [mean_coverage(*case, contexts, 500) for case in MEANS]
    assert 0.93 <= np.mean(covered) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("contexts", [15, 30, 50, 100])
def test_the_interval_of_a_difference_covers_it_in_95_of_100_runs(contexts: int) -> None:
    """Four cases of 400 runs each: their mean has a standard error of 0.5 points."""
    covered = [difference_coverage(*case, contexts, 400) for case in DIFFERENCES]
    assert 0.93 <= np.mean(covered) <= 0.97


def test_where_few_contexts_vary_the_interval_covers_more() -> None:
    assert mean_coverage(0.95, 0.5, 20, 400) >= 0.97
    assert difference_coverage(0.02, 0.02, 20, 400) >= 0.97


def test_single_questions_are_covered_too() -> None:
    """Coverage moves in steps between contexts; over several numbers of them it is 95%."""
    covered = [single_coverage(level, n, 200) for level in (0.5, 0.8) for n in (20, 30, 50, 100)]
    assert 0.93 <= np.mean(covered) <= 0.97


def test_questions_taken_for_independent_are_too_sure() -> None:
    """The negative control of clustering: every question as a context of its own."""
    rng = np.random.default_rng(0)
    apart = [str(i) for i in range(50 * QUESTIONS)]
    covered = 0
    for _ in range(300):
        found = summary(scores(rng, 0.5, 0.5, 50).ravel(), apart, draw_count=500)
        covered += found.lo <= 0.5 <= found.hi
    assert covered / 300 < 0.85


def test_pairing_halves_an_interval_where_two_runs_mostly_agree() -> None:
    rng = np.random.default_rng(0)
    clusters = names(100)
    keys = range(len(clusters))
    widths = []
    for _ in range(20):
        before, after = (x.ravel() for x in changes(rng, 0.05, 0.05, 100))
        one, two = summary(before, clusters), summary(after, clusters)
        gap = paired(
            dict(zip(keys, after, strict=True)),
            dict(zip(keys, before, strict=True)),
            dict(zip(keys, clusters, strict=True)),
        )
        unpaired = np.hypot(one.hi - one.lo, two.hi - two.lo)
        widths.append((gap.hi - gap.lo) / unpaired)
    assert np.mean(widths) < 0.5


def test_an_unchanged_program_rarely_fails_however_many_cells_it_has() -> None:
    """15 cells, 20 contexts, answers that change for no reason: alarms in 5% of runs at most."""
    rng = np.random.default_rng(0)
    clusters = names(20)
    keys = range(len(clusters))
    by_key = dict(zip(keys, clusters, strict=True))
    plain = corrected = 0
    for _ in range(100):
        p = []
        for _ in range(15):
            before, after = (dict(zip(keys, x.ravel(), strict=True)) for x in changes(rng, 0.1, 0.1, 20))
            p.append(paired_p(after, before, by_key, draws=400))
        plain += min(p) < 0.05
        corrected += min(holm(p)) < 0.05
    assert plain / 100 > 0.2  # without a correction
    assert corrected / 100 <= 0.09  # 5%, and two standard errors of 100 runs
