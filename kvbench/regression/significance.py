"""Significance of differences: an exact test of paired scores, and a correction for multiple tests.

The test is valid for any number of contexts, while a bootstrap of few contexts gives too many false alarms. Like the
intervals of `kvbench.stats`, it resamples contexts, never questions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvbench.stats import Floats, Key, by_cluster, checked

LEVEL = 0.05
"""Probability of a false alarm in a family of tests, unless a user chooses another."""
EXACT = 16
"""Maximum number of differing contexts for which all sign patterns are enumerated."""
DRAWS = 20_000
MOST_DRAWS = 1_000_000
"""Upper limit of the number of draws, to bound the run time."""
_RESOLUTION = 20
"""Draws per 1 / level, so that the smallest possible p-value is far below the level."""
_FAR = 100
_LEAST, _AT_ONCE = 1000, 2_000_000  # draws at a time; signs at a time: 16 MB
_PARTS = 60
_STEPS = 100_000_000


def paired_p(
    a: Mapping[Key, float],
    b: Mapping[Key, float],
    clusters: Mapping[Key, str],
    *,
    seed: int = 0,
    draws: int = DRAWS,
) -> float:
    """Return the two-sided p-value of the mean of `a - b` over the common keys.

    Under the null hypothesis, the sum of a context's differences is equally likely to have either sign. The test flips
    the signs of contexts: p is the fraction of sign patterns whose mean is at least as far from 0 as the observed one.
    This is Fisher's randomization test, and also the wild cluster bootstrap with the null hypothesis imposed (Cameron,
    Gelbach and Miller 2008, Review of Economics and Statistics 90, 414). With one 0/1 score per context it is McNemar's
    exact test.

    The test is exact if scores are fractions with a common denominator, as nearly all are, or if at most `EXACT`
    contexts differ. Otherwise sign patterns are drawn until `_FAR` of them are as far from 0 as the observed one (Besag
    and Clifford 1991, Biometrika 78, 301), or until `draws` are drawn; the observed pattern is counted with them.

    Args:
        a: Score by key.
        b: Scores to compare with.
        clusters: Context by key; may hold more keys.
        seed: Seed of the draws.
        draws: Maximum number of draws. Drawn p-values are at least `1 / (draws + 1)`.

    Returns:
        The p-value; 1 if nothing differs, NaN if there are no common keys.
    """
    shared_keys = [key for key in a if key in b]
    if not shared_keys:
        return math.nan
    context_names = [clusters[key] for key in shared_keys]
    context_totals, _ = by_cluster(
        checked([a[key] for key in shared_keys], context_names)
        - checked([b[key] for key in shared_keys], context_names),
        context_names,
    )
    return sign_p(context_totals, seed=seed, draws=draws)


def sign_p(context_totals: Floats, *, seed: int = 0, draws: int = DRAWS) -> float:
    """Return `paired_p` for the summed differences per context, `[C]`."""
    # A context whose differences sum to 0, up to float rounding, has no sign.
    context_totals = context_totals[np.abs(context_totals) > 1e-9 * np.abs(context_totals).max(initial=0.0)]
    if not len(context_totals):
        return 1.0
    whole_totals = _whole(context_totals)
    if whole_totals is None:  # weighted scores may have another common fraction
        whole_totals = _whole(context_totals / np.abs(context_totals).min())
    if whole_totals is not None:
        return _counted(whole_totals)
    observed_sum = abs(float(context_totals.sum())) * (1 - 1e-9)  # patterns with an equal sum count
    if len(context_totals) <= EXACT:
        # The first sign can be fixed: a pattern and its opposite are equally far from 0.
        sign_codes = np.arange(2 ** (len(context_totals) - 1))[:, None] >> np.arange(len(context_totals))
        return float(np.mean(np.abs((1.0 - 2.0 * (sign_codes & 1)) @ context_totals) >= observed_sum))
    generator = np.random.default_rng([seed, len(context_totals)])
    far_count = draw_count = 0
    while draw_count < draws and far_count < _FAR:
        batch_size = min(draws - draw_count, max(_LEAST, _AT_ONCE // len(context_totals)))
        sign_matrix = generator.integers(0, 2, size=(batch_size, len(context_totals)), dtype=np.int8) * 2.0 - 1.0
        far_count += int(np.count_nonzero(np.abs(sign_matrix @ context_totals) >= observed_sum))
        draw_count += batch_size
    return (far_count + 1) / (draw_count + 1)


def _whole(context_totals: Floats) -> npt.NDArray[np.int64] | None:
    """Return the totals as integer multiples of a common fraction; None if there is none, or if they are too large."""
    for denominator in range(1, _PARTS + 1):
        rounded_totals = np.rint(context_totals * denominator)
        if rounded_totals.all() and np.abs(context_totals * denominator - rounded_totals).max() < 1e-7:
            whole_totals = rounded_totals.astype(np.int64)
            return whole_totals if len(whole_totals) * np.abs(whole_totals).sum() <= _STEPS else None
    return None


def _counted(whole_totals: npt.NDArray[np.int64]) -> float:
    """Return the exact p-value from the distribution of sums over all sign patterns."""
    largest_sum = int(np.abs(whole_totals).sum())
    observed_sum = abs(int(whole_totals.sum()))
    if not observed_sum:
        return 1.0
    # Equal totals together have a binomial distribution. The most frequent ones come first, for which there is nothing
    # to convolve with; scores of 0 and 1 have no others.
    steps, counts = np.unique(np.abs(whole_totals), return_counts=True)
    sum_shares = np.ones(1)  # fraction of patterns by sum, from the smallest sum on
    for index in np.argsort(-counts, kind="stable"):
        width, weights = 2 * int(steps[index]), _binomial_shares(int(counts[index]))
        shifted_shares = np.zeros(len(sum_shares) + width * (len(weights) - 1))
        if len(sum_shares) == 1:
            shifted_shares[::width] = weights
        else:
            for shift, weight in enumerate(weights):
                shifted_shares[shift * width : shift * width + len(sum_shares)] += weight * sum_shares
        sum_shares = shifted_shares
    # The distribution is symmetric.
    return float(min(1.0, 2 * sum_shares[: largest_sum - observed_sum + 1].sum()))


@functools.lru_cache(maxsize=512)
def _binomial_shares(count: int) -> Floats:
    """Return the fraction of the sign patterns of `count` equal totals by their number of positive signs."""
    coefficients = itertools.accumulate(
        range(count), lambda coefficient, k: coefficient * (count - k) // (k + 1), initial=1
    )
    return np.array([coefficient / 2**count for coefficient in coefficients])


def enough_draws(test_count: int, alpha: float) -> int:
    """Return the number of draws with which the smallest p-value of a family of tests stays far below its level."""
    return min(max(DRAWS, math.ceil(_RESOLUTION * test_count / alpha)), MOST_DRAWS)


def least_contexts(alpha: float) -> int:
    """Return how many contexts must differ, all in one direction, for `paired_p` to be at most `alpha`."""
    return math.ceil(math.log2(2.0 / alpha) - 1e-9)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple tests (Holm 1979), in the same order and at most 1.

    The probability of any false rejection at level alpha is at most alpha, even if the tests are dependent.
    """
    corrected_p = [1.0] * len(p_values)
    largest_p = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest_p = max(largest_p, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected_p[index] = largest_p
    return corrected_p
