"""How certain a score is: clustered standard errors, bootstrap intervals, paired differences.

Questions about one context are not independent, so the bootstrap draws contexts, never questions
(Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640: clustered standard errors and paired
differences). Everything is deterministic. The draws depend only on a seed and the number of
contexts, and contexts are taken in sorted order, so an interval depends neither on the order of the
rows nor on which other cells were computed before.

A percentile bootstrap is overconfident when almost nothing varies: 50 right answers out of 50 would
give an interval of width zero, and 49 out of 50 one whose lower end is above Wilson's for 50 out of
50. Therefore, if fewer than `FEW` contexts differ from the most common result, scores in [0, 1] get
Wilson's interval on the number of contexts. It is the standard choice for one 0/1 answer per
context, and conservative otherwise: a score in [0, 1] with mean p has a variance of p(1 - p) at
most. Differences get the same treatment: their gains and their losses are two such means, joined by
square-and-add (Newcombe 1998, Statistics in Medicine 17, 2635). Unbounded scores, such as a
log-likelihood, get Student's t interval on the clustered standard error if there are
`len(T) + 1` contexts or fewer.

The percentile bootstrap of 10 to 20 contexts is too narrow for differences and unbounded scores: it
knows neither that a variance was estimated nor from how few contexts. They get the expanded
percentile interval, whose ends are further out; see `tail`. A mean of scores in [0, 1] reaches its
level as it is. docs/statistics.md shows the simulation.

Whether a difference is there at all is a question for `kvbench.regression.significance`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)
Clusters: TypeAlias = Sequence[str] | npt.NDArray[np.int64]
"""Contexts by name, or by the place of the name among the sorted ones."""

DRAWS = 2000
FEW = 5  # with fewer varying contexts, resamples take too few different values
Z = 1.959963984540054  # the 97.5% quantile of the normal distribution
T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""The 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom."""
_NORMAL = statistics.NormalDist()
_BLOCK = 1_000_000  # weights that are drawn at once, 8 MB; a matrix that is no larger is kept
_ROWS = 24  # resamples of a block, or a multiple: rows that BLAS sums alike


@dataclass(frozen=True)
class Estimate:
    """A mean with its uncertainty.

    Attributes:
        mean: Mean over all scores.
        se: Standard error clustered by context. Where nothing varies it is the interval's half
            width over 1.96, so it is never 0 for scores in [0, 1].
        lo: Lower end of the 95% interval.
        hi: Upper end.
        n: Scores.
        clusters: Contexts.
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
    scores: npt.ArrayLike, clusters: Sequence[str], *, seed: int = 0, n: int = DRAWS
) -> Estimate:
    """Mean, clustered standard error and 95% interval of the scores of one cell.

    The standard error is equation 4 of arXiv 2411.00640, `sqrt(sum_c (sum_i s_ic - mean)^2) / n`,
    times `sqrt(C / (C - 1))`, so that with one score per context it is the usual one.

    Args:
        scores: `[n]`, finite.
        clusters: `[n]`, the context of each score.
        seed: Seed of the bootstrap.
        n: Draws of the bootstrap.

    Returns:
        The estimate. One context alone gives an infinite interval if scores are not in [0, 1],
        because it says nothing about others.

    Raises:
        ValueError: No scores, a score that is not finite, or lengths that differ.
    """
    values = checked(scores, clusters)
    totals, sizes = by_cluster(values, clusters)
    mean = float(totals.sum() / sizes.sum())
    bounded = bool(values.min() >= 0.0 and values.max() <= 1.0)
    lo, hi = _interval(totals, sizes, bounded, signed=False, seed=seed, n=n)
    se = clustered_se(totals, sizes)
    if not se > 0.0:
        se = (hi - lo) / (2 * Z)
    return Estimate(mean, se, lo, hi, len(values), len(sizes))


def paired(
    a: Mapping[Key, float],
    b: Mapping[Key, float],
    clusters: Mapping[Key, str],
    *,
    seed: int = 0,
    n: int = DRAWS,
) -> Difference:
    """Mean of `a - b` over the keys that both have, with a bootstrap clustered by context.

    Args:
        a: Score by key, such as `(sample_id, question_id, repeat)`.
        b: The scores to compare with, usually those of the full cache.
        clusters: Context by key; may hold more keys.
        seed: Seed of the bootstrap.
        n: Draws.

    Returns:
        The difference; NaN with `n = 0` if they have no key in common.
    """
    keys = [key for key in a if key in b]
    if not keys:
        return NO_DIFFERENCE
    names = [clusters[key] for key in keys]
    return paired_values([a[key] for key in keys], [b[key] for key in keys], names, seed=seed, n=n)


def paired_values(
    a: npt.ArrayLike, b: npt.ArrayLike, clusters: Clusters, *, seed: int = 0, n: int = DRAWS
) -> Difference:
    """`paired` of scores of the same keys.

    Args:
        a: `[n]`, at least one score.
        b: `[n]`, the scores to compare with.
        clusters: `[n]`, the context of each score.
        seed: Seed of the bootstrap.
        n: Draws.
    """
    first, second = checked(a, clusters), checked(b, clusters)
    # Bounds are read off the scores: differences in [-1, 1] may also come from unbounded scores.
    bounded = bool(min(first.min(), second.min()) >= 0 and max(first.max(), second.max()) <= 1)
    totals, sizes = by_cluster(first - second, clusters)
    lo, hi = _interval(totals, sizes, bounded, signed=True, seed=seed, n=n)
    return Difference(float(totals.sum() / sizes.sum()), lo, hi, len(first))


def discriminative(full_lo: float, chance: float) -> bool:
    """Whether a task can tell policies apart: full's lower bound is above the chance level.

    If it is not, every difference is noise around chance. NaN (full failed or was not run) is above
    nothing.
    """
    return bool(full_lo > chance)


def wilson(p: float, n: float) -> tuple[float, float]:
    """Wilson's 95% score interval of a proportion `p` seen in `n` independent trials."""
    shrink = 1.0 + Z * Z / n
    centre = (p + Z * Z / (2 * n)) / shrink
    half = Z / shrink * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    # At p = 0 and 1 the ends are exact; rounding must not leave the mean outside its interval.
    return (max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))


def tail(contexts: int) -> float:
    """Share of the resamples beyond each end of an expanded 95% percentile interval.

    Hesterberg 2015, "What Teachers Should Know About the Bootstrap" (The American Statistician 69,
    371). Resamples have a variance that is too small by (C - 1) / C, and normal tails where those
    of Student's t are due. The share makes up for both: it is at most 2.5%, and approaches that
    with more contexts.
    """
    df = contexts - 1
    return _NORMAL.cdf(-math.sqrt(contexts / df) * student_quantile(df))


def student_quantile(df: int) -> float:
    """The 97.5% quantile of Student's t, right to four digits.

    Above the degrees of freedom of `T` it is Fisher's expansion around the normal quantile
    (Abramowitz and Stegun, 26.7.5).
    """
    if df <= len(T):
        return T[df - 1]
    z = Z
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * df**4)
    )


def normal_quantile(share: float) -> float:
    """The number below which a standard normal variable lies with probability `share`."""
    return _NORMAL.inv_cdf(share)


def resampled(
    of: Callable[[Floats], Floats], clusters: int, *, seed: int = 0, n: int = DRAWS, stream: int = 0
) -> Floats:
    """What a function makes of the resamples of a bootstrap, in blocks that fit into memory.

    Every cell with that number of contexts gets the same draws. That pairs the cells, and it makes
    a grid cheap: a resample of any cell is one row of a matrix product.

    Args:
        of: Takes how often each context is drawn in some of the resamples, `[k, clusters]`, whose
            rows sum to `clusters`; gives `[k, ...]`.
        clusters: Contexts.
        seed: Seed of the bootstrap.
        n: Draws.
        stream: Which independent set of draws. Strata must not share one: their errors would add up
            as if the same luck struck every task.

    Returns:
        `[n, ...]`, the same however many blocks there are.
    """
    if clusters * n <= _BLOCK:
        return of(_kept_weights(clusters, seed, n, stream))
    return np.concatenate([of(w) for w in _drawn_weights(clusters, seed, n, stream)])


def _drawn_weights(clusters: int, seed: int, n: int, stream: int) -> Iterator[Floats]:
    """The weights of `n` resamples in blocks of about equal size, from one stream of draws."""
    rng = np.random.default_rng([seed, stream, clusters])
    # Whole groups of rows: a matrix product then sums every row in the same order as without blocks
    rows = -(-n // max(1, clusters * n // _BLOCK) // _ROWS) * _ROWS
    for start in range(0, n, rows):
        count = min(rows, n - start)
        picks = rng.integers(0, clusters, size=(count, clusters))
        # Each resample counts into cells of its own, so that one bincount serves all of them.
        picks += np.arange(count)[:, None] * clusters
        counts = np.bincount(picks.ravel(), minlength=count * clusters)
        del picks
        yield counts.reshape(count, clusters).astype(np.float64)


@lru_cache(maxsize=32)
def _kept_weights(clusters: int, seed: int, n: int, stream: int) -> Floats:
    (weights,) = _drawn_weights(clusters, seed, n, stream)
    weights.flags.writeable = False  # the cache hands the same array to every caller
    return weights


def few_vary(means: Floats) -> bool:
    """Whether fewer than `FEW` contexts differ from the most common result, given their means."""
    # Rounded, because means such as 0.1 + 0.2 and 0.3 are one result. It is the most common result
    # that counts, not the overall mean: 46 contexts at 1 and 4 others say little about the spread.
    _, counts = np.unique(np.round(means, 12), return_counts=True)
    return bool(len(means) - counts.max() < FEW)


def bounded_interval(means: Floats, sizes: Floats, *, signed: bool) -> tuple[float, float]:
    """The interval that is used where few contexts vary (see the module's docstring).

    Args:
        means: `[C]` mean score of each context in [0, 1], or mean difference in [-1, 1].
        sizes: `[C]` scores of each context.
        signed: Whether these are differences.
    """
    c = len(means)
    # The mean weighs every score the same, so a context counts by its scores; the number of
    # independent trials is nevertheless that of the contexts, which makes the interval wider.
    share = sizes / sizes.sum()
    if not signed:
        return wilson(float(np.clip(share @ means, 0.0, 1.0)), c)
    # A difference is a mean of gains minus a mean of losses, each of them in [0, 1]. The interval's
    # lower end is where gains are low and losses are high at once.
    gain = float(np.clip(share @ np.maximum(means, 0.0), 0.0, 1.0))
    loss = float(np.clip(share @ np.maximum(-means, 0.0), 0.0, 1.0))
    (gain_lo, gain_hi), (loss_lo, loss_hi) = wilson(gain, c), wilson(loss, c)
    lo = gain - loss - math.hypot(gain - gain_lo, loss_hi - loss)
    hi = gain - loss + math.hypot(gain_hi - gain, loss - loss_lo)
    return max(-1.0, lo), min(1.0, hi)


def _interval(
    totals: Floats, sizes: Floats, bounded: bool, *, signed: bool, seed: int, n: int
) -> tuple[float, float]:
    means = totals / sizes
    if bounded and few_vary(means):
        return bounded_interval(means, sizes, signed=signed)
    if len(sizes) == 1:
        return -math.inf, math.inf
    if not bounded and len(sizes) <= len(T) + 1:
        # Unbounded scores have no Wilson interval, and a bootstrap of few contexts is too narrow.
        mean = float(totals.sum() / sizes.sum())
        half = T[len(sizes) - 2] * clustered_se(totals, sizes)
        return mean - half, mean + half
    # A resample divides drawn sums by drawn sizes: contexts may differ in their number of scores.
    drawn = resampled(lambda w: (w @ totals) / (w @ sizes), len(sizes), seed=seed, n=n)
    outside = tail(len(sizes)) if signed or not bounded else 0.025
    lo, hi = np.quantile(drawn, [outside, 1 - outside])
    return float(lo), float(hi)


def clustered_se(totals: Floats, sizes: Floats) -> float:
    """Standard error of a mean over all scores, clustered by context; NaN for one context.

    Args:
        totals: `[C]` sum of the scores of each context.
        sizes: `[C]` number of scores of each context.
    """
    c, mean = len(sizes), totals.sum() / sizes.sum()
    if c == 1:
        return math.nan
    # Residuals are summed within a context before they are squared, so scores that err together
    # count as one; c / (c - 1) corrects for estimating the mean from the same contexts.
    residual = totals - mean * sizes
    return float(np.sqrt(np.square(residual).sum() * c / (c - 1)) / sizes.sum())


def by_cluster(values: Floats, clusters: Clusters) -> tuple[Floats, Floats]:
    """Sum and number of the values of each context, contexts in sorted order.

    Args:
        values: `[n]`.
        clusters: `[n]`, the context of each value.

    Returns:
        `[C]` and `[C]`.
    """
    names = clusters if isinstance(clusters, np.ndarray) else np.asarray(clusters, dtype=str)
    _, index = np.unique(names, return_inverse=True)
    # Sorted within a context, too: a sum of floats depends on the order of its terms.
    order = np.lexsort((values, index))
    totals = np.bincount(index[order], weights=values[order]).astype(np.float64)
    return totals, np.bincount(index).astype(np.float64)


def checked(scores: npt.ArrayLike, clusters: Clusters) -> Floats:
    """Scores as an array.

    Args:
        scores: `[n]`.
        clusters: `[n]`, the context of each score.

    Raises:
        ValueError: No scores, a score that is not finite, or lengths that differ.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError("scores must be one row of at least one number")
    if len(values) != len(clusters):
        raise ValueError(f"{len(values)} scores but {len(clusters)} contexts")
    if not np.isfinite(values).all():
        raise ValueError("a score is not finite; a cell with failed samples has no interval")
    return values
