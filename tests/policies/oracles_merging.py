"""D2O, CaM and LoCoCo as slow, obvious loops in float64 numpy, written from their equations alone.

Nothing here imports kvbench. A head is a list of entries in the order of their positions: `keys`
and `values` `[n][d]`, `mass` `[n]` (accumulated attention), `positions` `[n]`. What is kept is a
set of indices into those lists.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

Vectors = list[np.ndarray]


# --- inverse variance -----------------------------------------------------------------------------


def variance(column_sums: np.ndarray) -> float:
    mean = sum(float(x) for x in column_sums) / len(column_sums)
    return sum((float(x) - mean) ** 2 for x in column_sums) / len(column_sums)


def density(mass: list[list[np.ndarray]], scale: str) -> list[float]:
    """`F_l` of every layer from the column sums of every head."""
    found = []
    for layer in mass:
        variances = [variance(head) for head in layer]
        if scale == "release":
            low, high = min(variances), max(variances)
            variances = [(x - low) / (high - low + 1e-6) for x in variances]
        found.append(sum(variances) / len(variances))
    if scale == "standardized":
        mean = sum(found) / len(found)
        spread = math.sqrt(sum((f - mean) ** 2 for f in found) / len(found))
        found = [(f - mean) / spread if spread > 0 else 0.0 for f in found]
    return found


def layer_logs(mass: list[list[np.ndarray]], scale: str, share: str) -> list[float]:
    """Logarithms of the layers' shares, up to a constant."""
    layers = len(mass)
    if share == "uniform":
        return [0.0] * layers
    if share == "layer_decay":
        return [-layer / layers for layer in range(layers)]
    f = density(mass, scale)
    if share == "reciprocal":
        return [-math.log(max(x, 1e-12)) for x in f]
    return [-x for x in f]


def spread(logs: list[float], total: int, low: list[int], high: list[int]) -> list[int]:
    """Integers `clip(exp(log + c))` that sum to the total, by bisection on `c`."""

    def at(c: float) -> list[float]:
        return [min(max(math.exp(min(x + c, 60.0)), a), z) for x, a, z in zip(logs, low, high, strict=True)]

    below, above = -max(logs) - 60.0, -min(logs) + 60.0
    for _ in range(300):
        middle = (below + above) / 2
        if sum(at(middle)) < total:
            below = middle
        else:
            above = middle
    real = [round(x) if abs(x - round(x)) < 1e-7 else x for x in at(above)]
    whole = [math.floor(x) for x in real]
    order = sorted(range(len(real)), key=lambda k: (-(real[k] - whole[k]), k))
    for k in order[: total - sum(whole)]:
        whole[k] += 1
    return whole


def inverse_variance(
    mass: list[list[np.ndarray]],
    tokens: int,
    b: int,
    scale: str = "release",
    share: str = "inverse_variance",
    whole: tuple[int, ...] = (),
    kv_heads: int = 0,
    held: list[list[int]] | None = None,
) -> list[list[int]] | None:
    """Shares of every layer and KV head; None where the layers `whole` alone hold too much.

    `mass` is of any heads whose variances are averaged; there are as many KV heads, or `kv_heads`.
    Heads hold all tokens, or `held`.
    """
    layers, heads = len(mass), kv_heads or len(mass[0])
    logs = layer_logs(mass, scale, share)
    rest = [layer for layer in range(layers) if layer not in whole]
    left = layers * heads * b - heads * tokens * len(whole)
    if left < heads * len(rest) or (not rest and left != 0):
        return None
    floor = min(max(1, tokens // 100), left // (heads * len(rest))) if rest else 0
    units = [layer for layer in rest for _ in range(heads)]
    most = [held[x][h] if held else tokens for x in rest for h in range(heads)]
    low = [min(floor, x) for x in most]
    counts = spread([logs[x] for x in units], left, low, most)
    of_rest = {layer: counts[k * heads : (k + 1) * heads] for k, layer in enumerate(rest)}
    return [of_rest.get(layer, [tokens] * heads) for layer in range(layers)]


# --- selection ------------------------------------------------------------------------------------


def important_recent(
    mass: np.ndarray, positions: list[int], tokens: int, share: int, recent: float, sinks: int
) -> set[int]:
    """Newest token, sinks, the rest of the recent window, then what got most attention."""
    window = math.floor(Fraction(str(recent)) * share)
    if recent > 0 or sinks > 0:
        window = max(1, window)

    def rank(i: int) -> tuple[int, float, int]:
        p = positions[i]
        if p == tokens - 1 and window:
            return (3, 0.0, p)
        if p < sinks:
            return (2, 0.0, -p)  # position 0 gives way last
        if p >= tokens - window:
            return (1, 0.0, p)
        return (0, float(mass[i]), p)

    return set(sorted(range(len(positions)), key=rank, reverse=True)[:share])


# --- EMA-gated merging ----------------------------------------------------------------------------


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b) / (math.sqrt(float(a @ a)) * math.sqrt(float(b @ b)))


def nearest(keys: Vectors, kept: set[int]) -> dict[int, tuple[int, float]]:
    """For every evicted entry its nearest kept one and the similarity."""
    found = {}
    for i in range(len(keys)):
        if i in kept or not kept:
            continue
        best = max(sorted(kept, reverse=True), key=lambda j: cosine(keys[i], keys[j]))
        found[i] = (best, cosine(keys[i], keys[best]))
    return found


def average(before: float | None, similarities: list[float], ema: float) -> float | None:
    """The threshold after a cut; unchanged where nothing was evicted."""
    if not similarities:
        return before
    mean = sum(similarities) / len(similarities)
    return mean if before is None else ema * mean + (1 - ema) * before


def ema_merge(
    keys: Vectors, values: Vectors, kept: set[int], tau: float | None, ema: float = 0.7
) -> tuple[Vectors, Vectors, float | None]:
    """One head at one cut, as in the paper."""
    near = nearest(keys, kept)
    tau = average(tau, [u for _, u in near.values()], ema)
    keys_after, values_after = list(keys), list(values)
    for j in kept:
        into = [(i, u) for i, (to, u) in near.items() if to == j and u >= tau - 1e-12]
        if not into:
            continue
        below = math.e + sum(math.exp(u) for _, u in into)
        keys_after[j] = math.e / below * keys[j]
        values_after[j] = math.e / below * values[j]
        for i, u in into:
            keys_after[j] = keys_after[j] + math.exp(u) / below * keys[i]
            values_after[j] = values_after[j] + math.exp(u) / below * values[i]
    return keys_after, values_after, tau


def ema_merge_release(
    keys: list[Vectors],
    values: list[Vectors],
    kept: list[set[int]],
    tau: float | None,
    ema: float = 0.5,
) -> tuple[list[Vectors], list[Vectors], float | None]:
    """All heads of a layer at one cut, as in the authors' code."""
    near = [nearest(k, c) for k, c in zip(keys, kept, strict=True)]
    tau = average(tau, [u for head in near for _, u in head.values()], ema)
    slots = [sorted(head) for head in near]  # the s-th evicted entry of every head
    merged = []
    for s in range(max(len(x) for x in slots)):
        seen = [near[h][x[s]][1] for h, x in enumerate(slots) if s < len(x)]
        merged.append(sum(seen) / len(seen) >= tau - 1e-12)
    keys_after, values_after = [list(x) for x in keys], [list(x) for x in values]
    for h, head in enumerate(near):
        going = [i for s, i in enumerate(slots[h]) if merged[s]]
        for j in kept[h]:
            into = [i for i in going if head[i][0] == j]
            if not into:
                continue
            for source, after in ((keys[h], keys_after[h]), (values[h], values_after[h])):
                total = source[j]
                for i in into:
                    total = total + head[i][1] * source[i]
                after[j] = total / (1 + len(into))
    return keys_after, values_after, tau


def merge_as_asked(
    keys: Vectors, values: Vectors, kept: set[int], tau: list[float | None], weights: str, threshold: str, on: str
) -> tuple[Vectors, Vectors, list[float | None]]:
    """One head at one cut with the alternatives of the paper's tables 6 to 8, EMA 0.7; `tau` for keys and values."""
    after = []
    for number, rows in enumerate((keys, values)):
        measured = {"keys": keys, "values": values, "separate": rows}[on]
        near = nearest(measured, kept)
        now = average(tau[number], [u for _, u in near.values()], 0.7)
        tau = [now if k == number else old for k, old in enumerate(tau)]
        new = list(rows)
        for j in kept:
            group = [(1.0, j)]
            for i, (to, u) in near.items():
                if to == j and (threshold == "none" or u >= now - 1e-12):
                    group.append((u, i))
            shares = [1.0 if weights == "uniform" else math.exp(u) for u, _ in group]
            if len(group) > 1:
                new[j] = sum(s * rows[i] for s, (_, i) in zip(shares, group, strict=True)) / sum(shares)
        after.append(new)
    return after[0], after[1], tau


# --- value merging --------------------------------------------------------------------------------


def value_merge(
    values: Vectors,
    mass: np.ndarray,
    positions: list[int],
    kept: set[int],
    last_cut: int,
    noise: np.ndarray,
    m: int = 32,
) -> Vectors:
    """One head at one cut; `last_cut` is how many tokens had been seen at the cut before."""
    after = list(values)
    for i in range(len(values)):  # oldest first
        if i in kept or positions[i] < last_cut:
            continue
        behind = [j for j, p in enumerate(positions) if positions[i] < p <= positions[i] + m]
        if not behind:
            continue
        mean = sum(float(mass[j]) for j in behind) / len(behind)
        chance = min(1.0, float(mass[i]) / mean)
        if float(noise[i]) < chance:
            for j in behind:
                if j in kept:
                    after[j] = after[j] + values[i] / m
    return after


# --- merging by a convolution ---------------------------------------------------------------------


def channels(rows: Vectors, weight: np.ndarray, bias: np.ndarray, kernel_size: int) -> list[list[float]]:
    """`relu` of a convolution along rows, `[S][len(rows)]`; beyond the ends there are zeros."""
    out = []
    for s in range(len(bias)):
        line = []
        for t in range(len(rows)):
            total = float(bias[s])
            for tap in range(kernel_size):
                at = t + tap - kernel_size // 2
                if 0 <= at < len(rows):
                    total += float(weight[s, :, tap] @ rows[at])
            line.append(max(total, 0.0))
        out.append(line)
    return out


def convolution_merge(
    keys: Vectors,
    values: Vectors,
    mass: np.ndarray,
    kept: set[int],
    weight: np.ndarray,
    bias: np.ndarray,
    share: float,
    keep_rate: float = 0.5,
) -> tuple[Vectors, Vectors]:
    """One head at one cut: `weight` is `[S, 2d, taps]`, `bias` `[S]`."""
    keys_after, values_after = list(keys), list(values)
    count = math.floor((1 - Fraction(str(keep_rate))) * len(kept))
    if len(kept) == len(keys) or count == 0:
        return keys_after, values_after
    ranked = sorted(kept, key=lambda i: (float(mass[i]), i))
    slots = sorted(ranked[:count])
    rest = [i for i in range(len(keys)) if i not in ranked[count:]]
    rows = [np.concatenate([keys[i], values[i]]) for i in rest]
    logits = channels(rows, weight, bias, weight.shape[2])
    for j, own in enumerate(slots):
        line = logits[math.floor(j * len(bias) / len(slots))]
        top = max(line)
        exponentials = [math.exp(x - top) for x in line]
        below = sum(exponentials)
        keys_after[own] = (1 - share) * keys[own]
        values_after[own] = (1 - share) * values[own]
        for i, e in zip(rest, exponentials, strict=True):
            keys_after[own] = keys_after[own] + share * e / below * keys[i]
            values_after[own] = values_after[own] + share * e / below * values[i]
    return keys_after, values_after
