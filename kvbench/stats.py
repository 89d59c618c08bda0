"""Uncertainty of scores: clustered standard errors, bootstrap intervals, paired differences.

Questions about one context are not independent, so the bootstrap resamples contexts, never questions (Miller 2024,
"Adding Error Bars to Evals", arXiv 2411.00640: clustered standard errors and paired differences). Everything is
deterministic. The draws depend only on a seed and the number of contexts, and contexts are sorted, so an interval
depends neither on the order of the rows nor on other cells.

A percentile bootstrap is overconfident when almost nothing varies: 50 correct answers out of 50 would give an interval
of width zero, and 49 out of 50 an interval whose lower end is above Wilson's for 50 out of 50. Therefore, if fewer than
`FEW` contexts differ from the most common result, scores in [0, 1] get Wilson's interval on the number of contexts. It
is the standard choice for one 0/1 answer per context, and conservative otherwise: a score in [0, 1] with mean p has a
variance of at most p(1 - p). For differences, gains and losses are two such means, combined by square-and-add
(Newcombe 1998, Statistics in Medicine 17, 2635). Unbounded scores, such as a log-likelihood, get Student's t interval
on the clustered standard error if there are `len(T) + 1` contexts or fewer.

For differences and unbounded scores of 10 to 20 contexts, the percentile bootstrap is too narrow: it ignores that the
variance is estimated from few contexts. These get the expanded percentile interval, see `tail`. A mean of scores in
[0, 1] reaches its nominal coverage without it. docs/statistics.md shows the simulation.

A score that is not a mean, such as a perplexity or a BLEU of the corpus, gets the expanded percentile interval of
`aggregate_draws`, which computes it anew on every resample. Nothing guards it against overconfidence if little varies.

For significance tests, see `kvbench.regression.significance`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)
Clusters: TypeAlias = Sequence[str] | npt.NDArray[np.int64]
"""Context of each score, by name or by index among the sorted names."""

DRAWS = 2000
AGGREGATE_DRAWS = 1000
_LEAST_DRAWS = 100
_MOST_NUMBERS, _MOST_TEXTS = 5_000_000, 50_000  # values over all draws: a corpus metric takes 0.4 ms for a text
FEW = 5  # with fewer varying contexts, resamples take too few distinct values
Z = 1.959963984540054  # the 97.5% quantile of the normal distribution
T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""The 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom."""
_NORMAL = statistics.NormalDist()
_BLOCK = 1_000_000  # weights drawn at once, 8 MB; matrices up to this size are cached
_ROWS = 24  # block sizes are multiples of this, so that BLAS sums every row in the same order


@dataclass(frozen=True)
class Estimate:
    """A mean with its uncertainty.

    Attributes:
        mean: Mean over all scores.
        se: Standard error clustered by context. If nothing varies, it is the half-width of the interval divided by
            1.96, so it is never 0 for scores in [0, 1].
        lo: Lower end of the 95% interval.
        hi: Upper end of the 95% interval.
        n: Number of scores.
        clusters: Number of contexts.
    """

    mean: float
    se: float
    lo: float
    hi: float
    n: int = 0
    clusters: int = 0


@dataclass(frozen=True)
class Difference:
    """A mean paired difference, first minus second, with its 95% interval over `n` pairs."""

    mean: float
    lo: float
    hi: float
    n: int = 0


NO_DIFFERENCE = Difference(math.nan, math.nan, math.nan)


def summary(
    scores: npt.ArrayLike,
    clusters: Sequence[str],
    *,
    seed: int = 0,
    draw_count: int = DRAWS,
    has_bounds: bool = True,
) -> Estimate:
    """Return the mean, clustered standard error and 95% interval of the scores of one cell.

    The standard error is equation 4 of arXiv 2411.00640, `sqrt(sum_c (sum_i s_ic - mean)^2) / n`, times
    `sqrt(C / (C - 1))`, so that it equals the usual one if there is one score per context. A single context gives an
    infinite interval unless scores are in [0, 1].

    Args:
        scores: `[n]`, finite.
        clusters: `[n]`, the context of each score.
        seed: Seed of the bootstrap.
        draw_count: Number of bootstrap resamples.
        has_bounds: Whether scores that lie in [0, 1] are bounded by it.

    Raises:
        ValueError: No scores, a score that is not finite, or lengths that differ.
    """
    score_values = checked(scores, clusters)
    cluster_totals, cluster_sizes = by_cluster(score_values, clusters)
    mean_score = float(cluster_totals.sum() / cluster_sizes.sum())
    is_bounded = has_bounds and bool(score_values.min() >= 0.0 and score_values.max() <= 1.0)
    lower_bound, upper_bound = _interval(
        cluster_totals, cluster_sizes, is_bounded, signed=False, seed=seed, draw_count=draw_count
    )
    standard_error = clustered_se(cluster_totals, cluster_sizes)
    if not standard_error > 0.0:
        standard_error = (upper_bound - lower_bound) / (2 * Z)
    return Estimate(mean_score, standard_error, lower_bound, upper_bound, len(score_values), len(cluster_sizes))


def paired(
    scores: Mapping[Key, float],
    reference_scores: Mapping[Key, float],
    clusters: Mapping[Key, str],
    *,
    seed: int = 0,
    draw_count: int = DRAWS,
    has_bounds: bool = True,
) -> Difference:
    """Return the mean of `scores - reference_scores` over the common keys, with a bootstrap clustered by context.

    Args:
        scores: Score by key, such as `(sample_id, question_id, repeat)`.
        reference_scores: Scores to compare with, usually those of the full cache.
        clusters: Context by key; may hold more keys.
        seed: Seed of the bootstrap.
        draw_count: Number of bootstrap resamples.
        has_bounds: As for `summary`.

    Returns:
        The difference; NaN with `n = 0` if there are no common keys.
    """
    shared_keys = [shared_key for shared_key in scores if shared_key in reference_scores]
    if not shared_keys:
        return NO_DIFFERENCE
    cluster_names = [clusters[shared_key] for shared_key in shared_keys]
    return paired_values(
        [scores[shared_key] for shared_key in shared_keys],
        [reference_scores[shared_key] for shared_key in shared_keys],
        cluster_names,
        seed=seed,
        draw_count=draw_count,
        has_bounds=has_bounds,
    )


def paired_values(
    scores: npt.ArrayLike,
    reference_scores: npt.ArrayLike,
    clusters: Clusters,
    *,
    seed: int = 0,
    draw_count: int = DRAWS,
    has_bounds: bool = True,
) -> Difference:
    """Return `paired` for aligned arrays of scores.

    Args:
        scores: `[n]`, at least one score.
        reference_scores: `[n]`, the scores to compare with.
        clusters: `[n]`, the context of each score.
        seed: Seed of the bootstrap.
        draw_count: Number of bootstrap resamples.
        has_bounds: As for `summary`.
    """
    score_values, reference_values = checked(scores, clusters), checked(reference_scores, clusters)
    # Bounds are those of the scores: differences in [-1, 1] may also come from unbounded scores.
    is_bounded = has_bounds and bool(
        min(score_values.min(), reference_values.min()) >= 0 and max(score_values.max(), reference_values.max()) <= 1
    )
    cluster_totals, cluster_sizes = by_cluster(score_values - reference_values, clusters)
    lower_bound, upper_bound = _interval(
        cluster_totals, cluster_sizes, is_bounded, signed=True, seed=seed, draw_count=draw_count
    )
    return Difference(
        float(cluster_totals.sum() / cluster_sizes.sum()),
        lower_bound,
        upper_bound,
        len(score_values),
    )


def aggregate_draws(
    values: Sequence[Any], clusters: Sequence[str], aggregate: Callable[[Sequence[Any]], float], *, seed: int = 0
) -> Floats:
    """Return an aggregate of the values of every bootstrap resample of contexts.

    There are `AGGREGATE_DRAWS` (1000) resamples, fewer if there are more than 50 values with texts or 5000 others, and
    at least 100. The draws are those of `resampled`, so the difference of the draws of two cells with the same contexts
    is paired.

    Args:
        values: `[n]`, anything that `aggregate` takes.
        clusters: `[n]`, the context of each value.
        aggregate: Returns the score of any of the values, with repetitions.
        seed: Seed of the bootstrap.

    Returns:
        `[draws]`, NaN for a resample that has no score: the correlation of equal values, say.
    """
    cluster_names, cluster_indices = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    by_context: list[list[Any]] = [[] for _ in cluster_names]
    for cluster_index, value in zip(cluster_indices, values, strict=True):
        by_context[cluster_index].append(value)

    def aggregate_of(draw: Floats) -> float:
        picked = [value for count, own in zip(draw, by_context, strict=True) for value in own * int(count)]
        try:
            return float(aggregate(picked))
        except Exception:  # a metric of the harness or of a plugin
            return math.nan

    most_values = _MOST_TEXTS if _holds_text(values[0]) else _MOST_NUMBERS
    return resampled(
        lambda draw_weights: np.array([aggregate_of(draw) for draw in draw_weights]),
        len(cluster_names),
        seed=seed,
        draw_count=max(_LEAST_DRAWS, min(AGGREGATE_DRAWS, most_values // len(values))),
    )


def _holds_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and any(map(_holds_text, value)))


def draws_interval(draws: Floats, context_count: int) -> tuple[float, float]:
    """Return the expanded percentile interval of `aggregate_draws`, or of the difference of two of them.

    Infinite for a single context, or if most resamples have no score.
    """
    finite_draws = draws[np.isfinite(draws)]
    if context_count == 1 or 2 * len(finite_draws) < len(draws):
        return -math.inf, math.inf
    tail_probability = tail(context_count)
    lower_bound, upper_bound = np.quantile(finite_draws, [tail_probability, 1 - tail_probability])
    return float(lower_bound), float(upper_bound)


def discriminative(full_lo: float, chance: float) -> bool:
    """Return whether a task is informative: the full cache's lower bound is above the chance level.

    Otherwise every difference is noise around chance. False for NaN (the full cache failed or was not run).
    """
    return bool(full_lo > chance)


def wilson(proportion: float, sample_size: float) -> tuple[float, float]:
    """Return Wilson's 95% score interval for `proportion` in `sample_size` independent trials."""
    shrinkage = 1.0 + Z * Z / sample_size
    centre = (proportion + Z * Z / (2 * sample_size)) / shrinkage
    half_width = (
        Z / shrinkage * math.sqrt(proportion * (1 - proportion) / sample_size + Z * Z / (4 * sample_size * sample_size))
    )
    # At p = 0 and 1, rounding must not leave the mean outside its interval.
    return (
        max(0.0, min(proportion, centre - half_width)),
        min(1.0, max(proportion, centre + half_width)),
    )


def tail(context_count: int) -> float:
    """Return the tail probability on each side of an expanded 95% percentile interval.

    Hesterberg 2015, "What Teachers Should Know About the Bootstrap" (The American Statistician 69, 371). Resamples have
    a variance that is too small by (C - 1) / C, and normal tails instead of Student's t. This probability corrects
    both: it is at most 2.5%, and approaches 2.5% as the number of contexts grows.
    """
    degrees = context_count - 1
    return _NORMAL.cdf(-math.sqrt(context_count / degrees) * student_quantile(degrees))


def student_quantile(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t, accurate to four digits.

    Beyond the table `T`, use Fisher's expansion around the normal quantile (Abramowitz and Stegun, 26.7.5).
    """
    if degrees <= len(T):
        return T[degrees - 1]
    z = Z
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * degrees**4)
    )


def normal_quantile(probability: float) -> float:
    """Return the quantile of the standard normal distribution."""
    return _NORMAL.inv_cdf(probability)


def resampled(
    statistic: Callable[[Floats], Floats],
    cluster_count: int,
    *,
    seed: int = 0,
    draw_count: int = DRAWS,
    stream: int = 0,
) -> Floats:
    """Return a statistic of every bootstrap resample, computed in blocks that fit into memory.

    All cells with the same number of contexts share their draws. This pairs the cells and makes a grid cheap: a
    resample of any cell is one row of a matrix product.

    Args:
        statistic: Maps the number of times each context is drawn, `[k, clusters]` (rows sum to `cluster_count`), to
            `[k, ...]`.
        cluster_count: Number of contexts.
        seed: Seed of the bootstrap.
        draw_count: Number of bootstrap resamples.
        stream: Index of an independent set of draws. Strata must not share one, or their errors would be correlated.

    Returns:
        `[draw_count, ...]`, regardless of the number of blocks.
    """
    if cluster_count * draw_count <= _BLOCK:
        return statistic(_kept_weights(cluster_count, seed, draw_count, stream))
    return np.concatenate(
        [statistic(draw_weights) for draw_weights in _drawn_weights(cluster_count, seed, draw_count, stream)]
    )


def _drawn_weights(cluster_count: int, seed: int, draw_count: int, stream: int) -> Iterator[Floats]:
    """Yield the weights of `draw_count` resamples in blocks of about equal size, from one stream of draws."""
    generator = np.random.default_rng([seed, stream, cluster_count])
    # With multiples of _ROWS, a matrix product sums every row in the same order as without blocks.
    block_rows = -(-draw_count // max(1, cluster_count * draw_count // _BLOCK) // _ROWS) * _ROWS
    for block_start in range(0, draw_count, block_rows):
        row_count = min(block_rows, draw_count - block_start)
        picked_clusters = generator.integers(0, cluster_count, size=(row_count, cluster_count))
        # Offset the contexts of each resample, so that one bincount serves all of them.
        picked_clusters += np.arange(row_count)[:, None] * cluster_count
        pick_counts = np.bincount(picked_clusters.ravel(), minlength=row_count * cluster_count)
        del picked_clusters
        yield pick_counts.reshape(row_count, cluster_count).astype(np.float64)


@lru_cache(maxsize=32)
def _kept_weights(cluster_count: int, seed: int, draw_count: int, stream: int) -> Floats:
    (draw_weights,) = _drawn_weights(cluster_count, seed, draw_count, stream)
    draw_weights.flags.writeable = False  # the cache hands the same array to every caller
    return draw_weights


def few_vary(cluster_means: Floats) -> bool:
    """Return whether fewer than `FEW` contexts differ from the most common mean."""
    # Rounded, because means such as 0.1 + 0.2 and 0.3 are one result. The reference is the most common result, not the
    # overall mean: 46 contexts at 1 and 4 others say little about the spread.
    _, value_counts = np.unique(np.round(cluster_means, 12), return_counts=True)
    return bool(len(cluster_means) - value_counts.max() < FEW)


def bounded_interval(cluster_means: Floats, cluster_sizes: Floats, *, signed: bool) -> tuple[float, float]:
    """Return the interval for cells in which few contexts vary (see the module's docstring).

    Args:
        cluster_means: `[C]` mean score of each context in [0, 1], or mean difference in [-1, 1].
        cluster_sizes: `[C]` number of scores of each context.
        signed: Whether the means are differences.
    """
    cluster_count = len(cluster_means)
    # The mean weights every score equally, so contexts are weighted by their number of scores; the number of
    # independent trials is still that of the contexts, which makes the interval wider.
    cluster_shares = cluster_sizes / cluster_sizes.sum()
    if not signed:
        return wilson(float(np.clip(cluster_shares @ cluster_means, 0.0, 1.0)), cluster_count)
    # A difference is a mean gain minus a mean loss, each in [0, 1]. At the lower end of the interval, gains are low and
    # losses high.
    mean_gain = float(np.clip(cluster_shares @ np.maximum(cluster_means, 0.0), 0.0, 1.0))
    mean_loss = float(np.clip(cluster_shares @ np.maximum(-cluster_means, 0.0), 0.0, 1.0))
    (gain_lower, gain_upper), (loss_lower, loss_upper) = (
        wilson(mean_gain, cluster_count),
        wilson(mean_loss, cluster_count),
    )
    lower_bound = mean_gain - mean_loss - math.hypot(mean_gain - gain_lower, loss_upper - mean_loss)
    upper_bound = mean_gain - mean_loss + math.hypot(gain_upper - mean_gain, mean_loss - loss_lower)
    return max(-1.0, lower_bound), min(1.0, upper_bound)


def _interval(
    cluster_totals: Floats,
    cluster_sizes: Floats,
    is_bounded: bool,
    *,
    signed: bool,
    seed: int,
    draw_count: int,
) -> tuple[float, float]:
    cluster_means = cluster_totals / cluster_sizes
    if is_bounded and few_vary(cluster_means):
        return bounded_interval(cluster_means, cluster_sizes, signed=signed)
    if len(cluster_sizes) == 1:
        return -math.inf, math.inf
    if not is_bounded and few_contexts(len(cluster_sizes)):
        mean_score = float(cluster_totals.sum() / cluster_sizes.sum())
        half_width = student_half_width(cluster_totals, cluster_sizes)
        return mean_score - half_width, mean_score + half_width
    # Drawn sums are divided by drawn sizes, because contexts may differ in their number of scores.
    drawn_means = resampled(
        lambda draw_weights: (draw_weights @ cluster_totals) / (draw_weights @ cluster_sizes),
        len(cluster_sizes),
        seed=seed,
        draw_count=draw_count,
    )
    tail_probability = tail(len(cluster_sizes)) if signed or not is_bounded else 0.025
    lower_bound, upper_bound = np.quantile(drawn_means, [tail_probability, 1 - tail_probability])
    return float(lower_bound), float(upper_bound)


def few_contexts(context_count: int) -> bool:
    """Return whether a bootstrap of so many contexts is too narrow for a score without bounds."""
    return context_count <= len(T) + 1


def student_half_width(cluster_totals: Floats, cluster_sizes: Floats) -> float:
    """Return half the width of Student's 95% interval of a mean over all scores, from at least two contexts.

    Args:
        cluster_totals, cluster_sizes: As for `clustered_se`.
    """
    return student_quantile(len(cluster_sizes) - 1) * clustered_se(cluster_totals, cluster_sizes)


def clustered_se(cluster_totals: Floats, cluster_sizes: Floats) -> float:
    """Return the standard error of a mean over all scores, clustered by context; NaN for one context.

    Args:
        cluster_totals: `[C]` sum of the scores of each context.
        cluster_sizes: `[C]` number of scores of each context.
    """
    cluster_count, mean_score = len(cluster_sizes), cluster_totals.sum() / cluster_sizes.sum()
    if cluster_count == 1:
        return math.nan
    # Residuals are summed per context before squaring, so correlated scores count as one; c / (c - 1) corrects for
    # estimating the mean from the same contexts.
    residuals = cluster_totals - mean_score * cluster_sizes
    return float(np.sqrt(np.square(residuals).sum() * cluster_count / (cluster_count - 1)) / cluster_sizes.sum())


def by_cluster(score_values: Floats, clusters: Clusters) -> tuple[Floats, Floats]:
    """Return the sum and the number of values per context, in sorted order of the contexts.

    Args:
        score_values: `[n]`.
        clusters: `[n]`, the context of each value.

    Returns:
        `[C]` and `[C]`.
    """
    cluster_names = clusters if isinstance(clusters, np.ndarray) else np.asarray(clusters, dtype=str)
    _, cluster_indices = np.unique(cluster_names, return_inverse=True)
    # Sort within a context, too: a sum of floats depends on the order of its terms.
    sort_order = np.lexsort((score_values, cluster_indices))
    cluster_totals = np.bincount(cluster_indices[sort_order], weights=score_values[sort_order]).astype(np.float64)
    return cluster_totals, np.bincount(cluster_indices).astype(np.float64)


def checked(scores: npt.ArrayLike, clusters: Clusters) -> Floats:
    """Validate scores, `[n]`, and return them as an array.

    Raises:
        ValueError: No scores, a score that is not finite, or lengths that differ.
    """
    score_values = np.asarray(scores, dtype=np.float64)
    if score_values.ndim != 1 or not len(score_values):
        raise ValueError("scores must be a non-empty one-dimensional array")
    if len(score_values) != len(clusters):
        raise ValueError(f"{len(score_values)} scores but {len(clusters)} contexts")
    if not np.isfinite(score_values).all():
        raise ValueError("a score is not finite; a cell with failed samples has no interval")
    return score_values
