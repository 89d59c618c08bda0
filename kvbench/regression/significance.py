"""Is a difference there at all? An exact test of paired scores, and a correction for many tests.

The test holds for any number of contexts, where a bootstrap of few contexts gives too many false
alarms. Like the intervals of `kvbench.stats` it counts contexts, never questions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kvbench.stats import Key, by_cluster, checked

EXACT = 16
"""With at most so many contexts that differ, `paired_p` goes through all of their signs."""
DRAWS = 20_000
_AT_ONCE = 2_000_000  # signs drawn at a time: 16 MB


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
    score per context it is McNemar's exact test. At most `EXACT` contexts that differ are exchanged
    in all ways; of more, `n` exchanges are drawn, and the one that was seen is counted with them.

    Args:
        a: Score by key.
        b: The scores to compare with.
        clusters: Context by key; may hold more keys.
        seed: Seed of the draws.
        n: Draws. No p is below `1 / (n + 1)` where signs are drawn.

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
    # A context whose differences are 0 has no sign. What float sums leave over 0 is none either.
    totals = totals[np.abs(totals) > 1e-9 * np.abs(totals).max()]
    if not len(totals):
        return 1.0
    seen = abs(float(totals.sum())) * (1 - 1e-9)  # an exchange that gives the same sum counts
    if len(totals) <= EXACT:
        # The first sign can stay: an exchange and its opposite are equally far from 0.
        codes = np.arange(2 ** (len(totals) - 1))[:, None] >> np.arange(len(totals))
        return float(np.mean(np.abs((1.0 - 2.0 * (codes & 1)) @ totals) >= seen))
    rng = np.random.default_rng([seed, len(totals)])
    far, left = 0, n
    while left:
        rows = min(left, max(1, _AT_ONCE // len(totals)))
        signs = rng.integers(0, 2, size=(rows, len(totals)), dtype=np.int8) * 2.0 - 1.0
        far += int(np.count_nonzero(np.abs(signs @ totals) >= seen))
        left -= rows
    return (far + 1) / (n + 1)


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
