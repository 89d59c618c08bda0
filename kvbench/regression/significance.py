"""Is a difference there at all? An exact test of paired scores, and a correction for many tests.

The test holds for any number of contexts, where a bootstrap of few contexts gives too many false
alarms. Like the intervals of `kvbench.stats` it counts contexts, never questions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvbench.stats import Floats, Key, by_cluster, checked

EXACT = 16
"""At most so many contexts that differ are exchanged in all ways, one way at a time."""
DRAWS = 20_000
MOST_DRAWS = 1_000_000
"""More draws than this take too long, whatever the number of tests."""
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
    n: int = DRAWS,
) -> float:
    """Two-sided p-value of the mean of `a - b` over the keys that both have.

    If `a` and `b` are two measurements of the same thing, the sum of a context's differences is as
    likely to have one sign as the other. So the signs of the contexts are exchanged: p is the share
    of exchanges whose mean is at least as far from 0 as the one that was seen. This is Fisher's
    randomization test, and also the wild cluster bootstrap with the null hypothesis imposed
    (Cameron, Gelbach and Miller 2008, Review of Economics and Statistics 90, 414). With one 0/1
    score per context it is McNemar's exact test.

    It is exact where scores are fractions with a common denominator, as nearly all are, and where
    at most `EXACT` contexts differ. Otherwise exchanges are drawn until `_FAR` of them are as far
    from 0 (Besag and Clifford 1991, Biometrika 78, 301), or `n` are drawn; the one that was seen
    is counted with them.

    Args:
        a: Score by key.
        b: The scores to compare with.
        clusters: Context by key; may hold more keys.
        seed: Seed of the draws.
        n: Most draws. No p is below `1 / (n + 1)` where signs are drawn.

    Returns:
        The p-value; 1 if nothing differs, NaN if there is no key in common.
    """
    keys = [key for key in a if key in b]
    if not keys:
        return math.nan
    names = [clusters[key] for key in keys]
    totals, _ = by_cluster(
        checked([a[key] for key in keys], names) - checked([b[key] for key in keys], names), names
    )
    return sign_p(totals, seed=seed, n=n)


def sign_p(totals: Floats, *, seed: int = 0, n: int = DRAWS) -> float:
    """`paired_p` of the summed differences of each context, `[C]`."""
    # A context whose differences are 0 has no sign. What float sums leave over 0 is none either.
    totals = totals[np.abs(totals) > 1e-9 * np.abs(totals).max(initial=0.0)]
    if not len(totals):
        return 1.0
    whole = _whole(totals)
    if whole is None:  # scores that are weighted have a common fraction of their own
        whole = _whole(totals / np.abs(totals).min())
    if whole is not None:
        return _counted(whole)
    seen = abs(float(totals.sum())) * (1 - 1e-9)  # an exchange that gives the same sum counts
    if len(totals) <= EXACT:
        # The first sign can stay: an exchange and its opposite are equally far from 0.
        codes = np.arange(2 ** (len(totals) - 1))[:, None] >> np.arange(len(totals))
        return float(np.mean(np.abs((1.0 - 2.0 * (codes & 1)) @ totals) >= seen))
    rng = np.random.default_rng([seed, len(totals)])
    far = drawn = 0
    while drawn < n and far < _FAR:
        rows = min(n - drawn, max(_LEAST, _AT_ONCE // len(totals)))
        signs = rng.integers(0, 2, size=(rows, len(totals)), dtype=np.int8) * 2.0 - 1.0
        far += int(np.count_nonzero(np.abs(signs @ totals) >= seen))
        drawn += rows
    return (far + 1) / (drawn + 1)


def _whole(totals: Floats) -> npt.NDArray[np.int64] | None:
    """The totals as whole multiples of a common fraction; None if they have none, or very many."""
    for parts in range(1, _PARTS + 1):
        near = np.rint(totals * parts)
        if near.all() and np.abs(totals * parts - near).max() < 1e-7:
            whole = near.astype(np.int64)
            return whole if len(whole) * np.abs(whole).sum() <= _STEPS else None
    return None


def _counted(whole: npt.NDArray[np.int64]) -> float:
    """Share of all exchanges of signs whose sum is at least as far from 0, by adding them up."""
    reach = int(np.abs(whole).sum())
    share = np.zeros(2 * reach + 1)  # of the exchanges with each sum, from -reach to reach
    share[reach] = 1.0
    for step in np.abs(whole):
        shifted = np.zeros_like(share)
        shifted[step:] = share[:-step] / 2
        shifted[:-step] += share[step:] / 2
        share = shifted
    seen = abs(int(whole.sum()))
    # As many sums are at or below -seen as at or above it.
    return float(min(1.0, 2 * share[: reach - seen + 1].sum())) if seen else 1.0


def least_contexts(alpha: float) -> int:
    """How many contexts must differ, all in one direction, for `paired_p` to be at most `alpha`."""
    return math.ceil(math.log2(2.0 / alpha) - 1e-9)


def holm(p: Sequence[float]) -> list[float]:
    """Correct p-values for having looked at all of them (Holm 1979).

    Among the differences whose corrected p is below alpha, the chance that any is false is at most
    alpha, whatever the tests have to do with each other.

    Args:
        p: The p-values.

    Returns:
        The corrected p-values in the same order, at most 1.
    """
    corrected = [1.0] * len(p)
    floor = 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        floor = max(floor, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = floor
    return corrected
