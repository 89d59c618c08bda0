"""Shares by a head profile, as slow loops over exact fractions, written from their equations alone.

Nothing here imports kvbench. A profile is `p[l][h]`, not necessarily normalised.
"""

from __future__ import annotations

import math
from fractions import Fraction

from .oracles import Layer, Ranked

Profile = list[list[float]]


def normalised(values: list[Fraction]) -> list[Fraction]:
    return [x / sum(values) for x in values]


def rounded(real: list[Fraction], total: int) -> list[int]:
    """Largest remainder: the largest fractions are rounded up, of equal ones the first."""
    whole = [math.floor(x) for x in real]
    by_remainder = sorted(range(len(real)), key=lambda i: (-(real[i] - whole[i]), i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    assert sum(whole) == total
    return whole


def head_profile(
    p: Profile, b: int, tokens: int, beta: str = "1.01", temp: int = 1, window: int = 32
) -> list[list[int]]:
    """HeadKV: `n[l,h] = (b' - b'/beta) + (b'/beta) L H p^temp[l,h] + w`, capped at `tokens`."""
    layers, heads = len(p), len(p[0])
    flat = normalised([Fraction(x) for row in p for x in row])
    flat = normalised([x**temp for x in flat])
    w = min(window, b)  # a window that does not fit shrinks
    free = b - w
    pool = free / Fraction(beta)
    n = [(free - pool) + pool * layers * heads * x + w for x in flat]
    while any(x > tokens for x in n):
        excess = sum((x - tokens for x in n if x > tokens), Fraction(0))
        n = [min(x, Fraction(tokens)) for x in n]
        below = [i for i, x in enumerate(n) if x < tokens]
        weight = sum(flat[i] for i in below)
        for i in below:
            n[i] += excess * (flat[i] / weight if weight else Fraction(1, len(below)))
    shares = rounded(n, layers * heads * b)
    return [shares[i * heads : (i + 1) * heads] for i in range(layers)]


def retrieval(p: Profile, b: int, tokens: int, sinks: int = 64, recent: int = 256) -> list[list[int]]:
    """DuoAttention: a reserve for every head, then the top heads keep all until N is spent."""
    layers, heads = len(p), len(p[0])
    reserve = min(sinks + recent, b, tokens)
    left = layers * heads * (b - reserve)
    shares = [[reserve] * heads for _ in range(layers)]
    ranked = sorted((-p[i][h], i, h) for i in range(layers) for h in range(heads))
    for _, i, h in ranked:
        given = min(left, tokens - reserve)
        shares[i][h] += given
        left -= given
    assert left == 0
    return shares


def sinks_and_recent(layer: Layer, ranked: Ranked, shares: list[int], sinks: int) -> list[list[int]]:
    """The first `sinks` tokens, then the most recent ones; the last token stays before any sink."""
    kept = []
    for n in shares:
        first = min(sinks, n - 1)
        kept.append([*range(first), *range(layer.tokens - (n - first), layer.tokens)])
    return kept
