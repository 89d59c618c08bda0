"""Means with intervals, held against slow loops, known formulas and simulated coverage."""

from __future__ import annotations

import math
import statistics
import time
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats as reference

from kvbench import stats
from kvbench.stats import (
    AGGREGATE_DRAWS,
    FEW,
    T,
    aggregate_draws,
    discriminative,
    draws_interval,
    paired,
    resampled,
    student_quantile,
    summary,
    tail,
    wilson,
)


def weights_of(clusters, *, seed=0, draws=2000, stream=0):
    """How often each context is drawn in each resample, all of them drawn at once."""
    rng = np.random.default_rng([seed, stream, clusters])
    picks = rng.integers(0, clusters, size=(draws, clusters))
    return np.stack([np.bincount(row, minlength=clusters) for row in picks]).astype(float)


def slow_se(scores, clusters):
    """Equation 4 of arXiv 2411.00640, written as its triple sum, with the C/(C-1) factor."""
    n, mean = len(scores), sum(scores) / len(scores)
    total = 0.0
    for i in range(n):
        for j in range(n):
            if clusters[i] == clusters[j]:
                total += (scores[i] - mean) * (scores[j] - mean)
    c = len(set(clusters))
    return math.sqrt(total * c / (c - 1)) / n


def slow_tail(contexts):
    """The share beyond each end of Hesterberg's expanded percentile interval."""
    return reference.norm.cdf(-math.sqrt(contexts / (contexts - 1)) * reference.t.ppf(0.975, contexts - 1))


def slow_interval(scores, clusters, seed, draws, outside=0.025):
    """The percentile bootstrap one resample and one context at a time."""
    names = sorted(set(clusters))
    members = [[s for s, c in zip(scores, clusters, strict=True) if c == name] for name in names]
    means = []
    for row in weights_of(len(names), seed=seed, draws=draws):
        drawn = [s for k, part in zip(row, members, strict=True) for s in part * int(k)]
        means.append(sum(drawn) / len(drawn))
    return np.quantile(means, outside), np.quantile(means, 1 - outside)


@pytest.fixture
def uneven():
    rng = np.random.default_rng(3)
    clusters = [f"c{i}" for i in rng.integers(0, 12, 60)]
    level = {c: rng.random() for c in clusters}
    scores = [float(np.clip(level[c] + 0.2 * rng.standard_normal(), 0, 1)) for c in clusters]
    return scores, clusters


def test_standard_error_equals_the_triple_sum(uneven):
    scores, clusters = uneven
    assert summary(scores, clusters).se == pytest.approx(slow_se(scores, clusters), rel=1e-12)


def test_standard_error_is_the_usual_one_with_one_score_per_context():
    scores = np.random.default_rng(0).random(40)
    got = summary(scores, [str(i) for i in range(40)])
    assert got.se == pytest.approx(reference.sem(scores), rel=1e-12)
    assert got.mean == pytest.approx(scores.mean())


def test_interval_equals_the_slow_bootstrap(uneven):
    scores, clusters = uneven
    got = summary(scores, clusters, seed=5, draw_count=300)
    assert (got.lo, got.hi) == pytest.approx(slow_interval(scores, clusters, 5, 300), abs=1e-12)


def test_interval_agrees_with_scipy_for_single_questions():
    scores = (np.arange(200) % 4 == 0).astype(float)
    got = summary(scores, [str(i) for i in range(200)], draw_count=20_000)
    want = reference.bootstrap(
        (scores,), np.mean, n_resamples=20_000, method="percentile", random_state=0
    ).confidence_interval
    # Two sets of 20,000 draws: a percentile's own error is about 0.001.
    assert got.lo == pytest.approx(want.low, abs=0.006)
    assert got.hi == pytest.approx(want.high, abs=0.006)


def test_repeating_every_question_of_a_context_adds_no_certainty():
    rng = np.random.default_rng(1)
    once = rng.random(30)
    names = [f"{i:02d}" for i in range(30)]
    single, tenfold = summary(once, names), summary(np.repeat(once, 10), np.repeat(names, 10))
    assert tenfold.se == pytest.approx(single.se)
    assert (tenfold.lo, tenfold.hi) == pytest.approx((single.lo, single.hi))
    apart = summary(np.repeat(once, 10), [str(i) for i in range(300)])
    assert apart.se < 0.5 * single.se  # the negative control: without contexts it looks surer


def test_order_of_rows_and_earlier_calls_do_not_matter(uneven):
    scores, clusters = uneven
    first = summary(scores, clusters)
    order = np.random.default_rng(9).permutation(len(scores))
    summary(scores[:20], clusters[:20])
    assert summary([scores[i] for i in order], [clusters[i] for i in order]) == first
    assert summary(scores, clusters, seed=1).lo != first.lo


@pytest.mark.parametrize(("hits", "n"), [(50, 50), (0, 50), (49, 50), (47, 50), (3, 50), (1, 1)])
def test_nearly_equal_answers_get_wilsons_interval(hits, n):
    scores = [1.0] * hits + [0.0] * (n - hits)
    got = summary(scores, [str(i) for i in range(n)])
    want = reference.binomtest(hits, n).proportion_ci(method="wilson")
    assert (got.lo, got.hi) == pytest.approx((want.low, want.high), abs=1e-12)
    assert got.lo <= got.mean <= got.hi
    assert got.se > 0


def test_lower_end_falls_with_every_wrong_answer():
    names = [str(i) for i in range(50)]
    ends = [summary([0.0] * k + [1.0] * (50 - k), names).lo for k in range(FEW + 3)]
    assert ends == sorted(ends, reverse=True)


def test_a_single_context_outside_zero_to_one_says_nothing_about_others():
    got = summary([3.0, 5.0], ["a", "a"])
    assert (got.mean, got.lo, got.hi) == (4.0, -math.inf, math.inf)


def test_scores_outside_zero_to_one_are_bootstrapped():
    scores = 10 + np.random.default_rng(2).standard_normal(100)
    got = summary(scores, [str(i) for i in range(100)])
    assert got.lo < got.mean < got.hi
    assert got.hi - got.lo == pytest.approx(2 * 1.96 * got.se, rel=0.15)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.93, 0.98])
@pytest.mark.slow
def test_coverage_of_single_questions(level):
    """95% is claimed. 400 runs have a standard error of 1.1 points, and the percentile bootstrap
    is known to fall a little short at n = 50, so 90% to 100% is what can be asked."""
    rng = np.random.default_rng(int(1000 * level))
    names = [f"{i:02d}" for i in range(50)]
    covered = 0
    for _ in range(400):
        got = summary((rng.random(50) < level).astype(float), names, draw_count=400)
        covered += got.lo <= level <= got.hi
    assert 0.90 <= covered / 400 <= 1.0


@pytest.mark.slow
def test_coverage_of_questions_that_share_a_context():
    """Contexts agree within themselves, so the naive interval covers far too seldom."""
    rng = np.random.default_rng(8)
    names = np.repeat([f"{i:02d}" for i in range(40)], 5)
    apart = [f"{i:03d}" for i in range(200)]
    covered = naive = 0
    for _ in range(300):
        level = np.repeat(rng.beta(0.6, 0.4, 40), 5)
        scores = (rng.random(200) < level).astype(float)
        got, alone = summary(scores, names, draw_count=400), summary(scores, apart, draw_count=400)
        covered += got.lo <= 0.6 <= got.hi
        naive += alone.lo <= 0.6 <= alone.hi
    assert 0.90 <= covered / 300 <= 0.98
    assert naive / 300 < 0.85


def test_paired_uses_common_keys_only_and_equals_a_loop():
    rng = np.random.default_rng(4)
    keys = [(f"s{i}", i % 2, 0) for i in range(80)]
    clusters = {k: f"c{i // 2:02d}" for i, k in enumerate(keys)}
    a = {k: float(rng.random() < 0.6) for k in keys[:70]}
    b = {k: float(rng.random() < 0.8) for k in keys[10:]}
    got = paired(a, b, clusters, seed=2, draw_count=200)
    common = [k for k in keys if k in a and k in b]
    gaps = [a[k] - b[k] for k in common]
    assert got.n == 60
    assert got.mean == pytest.approx(np.mean(gaps))
    names = [clusters[k] for k in common]
    want = slow_interval(gaps, names, 2, 200, slow_tail(len(set(names))))
    assert (got.lo, got.hi) == pytest.approx(want, abs=1e-4)
    back = paired(b, a, clusters, seed=2, draw_count=200)
    assert (back.mean, back.lo, back.hi) == pytest.approx((-got.mean, -got.hi, -got.lo))


def test_pairing_is_sharper_than_two_intervals():
    rng = np.random.default_rng(6)
    hard = rng.random(100)
    keys = [str(i) for i in range(100)]
    a = dict(zip(keys, (hard < 0.5).astype(float), strict=True))
    b = dict(zip(keys, (hard < 0.7).astype(float), strict=True))
    same = {k: k for k in keys}
    gap = paired(a, b, same)
    ends = summary(list(a.values()), keys), summary(list(b.values()), keys)
    assert gap.hi - gap.lo < 0.75 * sum(e.hi - e.lo for e in ends)
    assert gap.hi < 0


def test_no_difference_at_all_is_not_certainty():
    keys = [str(i) for i in range(50)]
    right = dict.fromkeys(keys, 1.0)
    got = paired(right, right, {k: k for k in keys})
    half = wilson(0.0, 50)[1]
    assert (got.mean, got.lo, got.hi) == pytest.approx((0.0, -half, half))
    lost = paired(dict.fromkeys(keys, 0.0), right, {k: k for k in keys})
    assert lost.mean == -1.0
    assert lost.lo == -1.0
    assert -1.0 < lost.hi < -0.85


def test_no_common_key_is_nan():
    got = paired({"a": 1.0}, {"b": 1.0}, {"a": "a", "b": "b"})
    assert got.n == 0
    assert math.isnan(got.mean)


@pytest.mark.slow
def test_coverage_of_paired_differences_with_few_losses():
    rng = np.random.default_rng(12)
    keys = [f"{i:02d}" for i in range(50)]
    same = {k: k for k in keys}
    covered = 0
    for _ in range(400):
        kind = rng.random(50)
        full = (kind > 0.02).astype(float)  # 2% only the policy gets right, 6% only full
        policy = np.where(kind < 0.02, 1.0, np.where(kind < 0.08, 0.0, full))
        got = paired(
            dict(zip(keys, policy, strict=True)),
            dict(zip(keys, full, strict=True)),
            same,
            draw_count=400,
        )
        covered += got.lo <= -0.04 <= got.hi
    assert covered / 400 >= 0.90


@pytest.mark.parametrize(
    ("lo", "chance", "tells"),
    [(0.3, 0.25, True), (0.25, 0.25, False), (0.0, 0.0, False), (math.nan, 0.0, False)],
)
def test_discriminative(lo, chance, tells):
    assert discriminative(lo, chance) is tells


def test_what_has_no_interval_is_refused():
    with pytest.raises(ValueError, match="non-empty"):
        summary([], [])
    with pytest.raises(ValueError, match="2 scores but 1 contexts"):
        summary([1.0, 0.0], ["a"])
    with pytest.raises(ValueError, match="not finite"):
        summary([1.0, math.nan], ["a", "b"])


def test_weights_are_shared_and_strata_are_independent():
    one, two = (resampled(lambda w: w, 50, stream=stream) for stream in (1, 2))
    assert resampled(lambda w: w, 50, stream=1) is one
    assert not np.array_equal(one, two)
    assert (one.sum(axis=1) == 50).all()
    assert abs(np.corrcoef(one[:, 0], two[:, 0])[0, 1]) < 0.1


@pytest.mark.parametrize(("contexts", "draws"), [(50, 2000), (501, 2000), (1234, 2000), (9973, 777)])
def test_blocks_change_no_draw_and_no_interval(contexts, draws):
    whole = weights_of(contexts, seed=3, draws=draws, stream=5)
    blocks = []

    def kept(weights):
        blocks.append(len(weights))
        return weights

    drawn = resampled(kept, contexts, seed=3, draw_count=draws, stream=5)
    assert (len(blocks) > 1) == (contexts > 501)
    assert np.array_equal(drawn, whole)
    rng = np.random.default_rng(contexts)
    totals, sizes = rng.standard_normal(contexts), rng.integers(1, 9, contexts).astype(float)
    means = resampled(lambda w: (w @ totals) / (w @ sizes), contexts, seed=3, draw_count=draws, stream=5)
    assert np.array_equal(means, (whole @ totals) / (whole @ sizes))
    scores = np.clip(0.5 + 0.2 * totals, 0.0, 1.0)
    names = [f"{i:05d}" for i in range(contexts)]
    lo, hi = np.quantile(weights_of(contexts, draws=draws) @ scores / contexts, [0.025, 0.975])
    found = summary(scores, names, draw_count=draws)
    assert (found.lo, found.hi) == pytest.approx((lo, hi), rel=1e-13)


def test_the_bootstrap_of_many_contexts_needs_little_memory():
    """All resamples at once would take 46 MB for 1,000 contexts and 4.6 GB for these."""
    rng = np.random.default_rng(0)
    names = [f"c{i}" for i in range(100_000)]
    tracemalloc.start()
    try:
        found = summary(rng.random(100_000), names, draw_count=200)  # the peak does not grow with the draws
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.hi - found.lo == pytest.approx(2 * 1.96 * found.se, rel=0.15)
    assert peak < 120e6


def test_a_grid_is_quick():
    """19 cells, 14 tasks, 50 samples: seconds would be felt after every run."""
    rng = np.random.default_rng(0)
    keys = [(f"s{i}", 0, 0) for i in range(50)]
    clusters = {k: k[0] for k in keys}
    start = time.process_time()
    for _ in range(14):
        full = dict(zip(keys, (rng.random(50) < 0.9).astype(float), strict=True))
        for _ in range(19):
            scores = (rng.random(50) < 0.7).astype(float)
            summary(scores, [k[0] for k in keys])
            paired(dict(zip(keys, scores, strict=True)), full, clusters)
    assert time.process_time() - start < 3.0


def test_scores_without_bounds_have_students_interval_where_contexts_are_few() -> None:
    rng = np.random.default_rng(0)
    for contexts in range(2, 11):
        scores = rng.normal(8.0, 1.0, contexts)
        found = summary(scores, [str(i) for i in range(contexts)])
        half = reference.t.ppf(0.975, contexts - 1) * scores.std(ddof=1) / math.sqrt(contexts)
        assert (found.lo, found.hi) == pytest.approx((scores.mean() - half, scores.mean() + half), rel=1e-4)


def test_the_tail_of_an_expanded_interval_is_hesterbergs() -> None:
    for contexts in (2, 6, 11, 20, 50, 1000):
        assert tail(contexts) == pytest.approx(slow_tail(contexts), rel=2e-4)
    assert 0.0249 < tail(2000) < 0.025


def test_students_quantiles() -> None:
    for df in (*range(1, len(T) + 3), 30, 1000):
        assert student_quantile(df) == pytest.approx(reference.t.ppf(0.975, df), abs=6e-5)


def test_means_of_unbounded_scores_have_an_expanded_interval() -> None:
    scores = (10 + np.random.default_rng(2).standard_normal(15)).tolist()
    names = [f"{i:02d}" for i in range(15)]
    want = slow_interval(scores, names, 0, 400, slow_tail(15))
    got = summary(scores, names, draw_count=400)
    assert (got.lo, got.hi) == pytest.approx(want, abs=1e-3)


def geometric(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values)


def test_an_aggregate_of_resamples_draws_whole_contexts_in_any_order() -> None:
    values, contexts = [1.0, 2.0, 8.0, 4.0], ["b", "a", "a", "c"]
    draws = aggregate_draws(values, contexts, geometric)
    assert len(draws) == AGGREGATE_DRAWS
    sizes, totals = np.array([2, 1, 1]), np.log([16.0, 1.0, 4.0])
    want = resampled(lambda w: np.exp((w @ totals) / (w @ sizes)), 3, draw_count=AGGREGATE_DRAWS)
    assert draws == pytest.approx(want)
    assert aggregate_draws(values[::-1], contexts[::-1], geometric) == pytest.approx(draws)
    low, high = draws_interval(draws, 3)
    assert np.mean((draws >= low) & (draws <= high)) == pytest.approx(1 - 2 * tail(3), abs=0.02)


def test_draws_of_the_same_contexts_are_paired() -> None:
    rng = np.random.default_rng(0)
    values = rng.lognormal(size=60)
    contexts = [str(i) for i in range(60)]
    draws, twice = (aggregate_draws(list(scale * values), contexts, geometric) for scale in (1, 2))
    low, high = draws_interval(twice / draws, 60)
    assert (low, high) == pytest.approx((2, 2))


def test_resamples_without_a_score_are_left_out_unless_they_are_most() -> None:
    def spread(values: Sequence[float]) -> float:
        return 1 / (max(values) - min(values))  # no score if only one value is drawn

    some = aggregate_draws([1.0, 2.0, 3.0], list("abc"), spread)
    assert 0 < np.isnan(some).mean() < 0.5
    assert all(map(math.isfinite, draws_interval(some, 3)))
    most = aggregate_draws([1.0, 2.0], list("ab"), lambda values: spread(values) if len(values) > 2 else math.nan)
    assert draws_interval(most, 2) == (-math.inf, math.inf)
    assert draws_interval(aggregate_draws([1.0, 2.0], ["a", "a"], geometric), 1) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("value", "count", "draws"),
    [(1.0, 5000, 1000), (1.0, 10_000, 500), (("a", ["b"]), 50, 1000), (("a", "b"), 900, 100)],
)
def test_large_corpora_are_drawn_less_often(value: object, count: int, draws: int) -> None:
    assert len(aggregate_draws([value] * count, ["c"] * count, len)) == draws


def test_scores_without_bounds_have_the_same_interval_wherever_they_lie():
    scores, clusters = np.array([0.1, 0.5, 0.2]), ["a", "b", "c"]
    low, high = (stats.summary(scores + shift, clusters, has_bounds=False) for shift in (0.0, 5.0))
    assert (low.lo + 5, low.hi + 5) == pytest.approx((high.lo, high.hi))
    assert low.lo < 0 < stats.summary(scores, clusters).lo
    gaps = [stats.paired_values(scores + s, np.zeros(3) + s, clusters, has_bounds=False) for s in (0.0, 5.0)]
    assert (gaps[0].lo, gaps[0].hi) == pytest.approx((gaps[1].lo, gaps[1].hi))
