"""CAKE, ZigZagKV and SimLayerKV as slow, obvious loops in float64, from their equations alone.

Nothing here imports kvbench. The attention, the window score and the ranking are those of
`oracles`.
"""

from __future__ import annotations

import math

from . import oracles as o

Shares = list[list[int]]


def variance(xs: list[float]) -> float:
    """Sample variance; 0 of one number."""
    mean = sum(xs) / len(xs)
    return sum((x - mean) ** 2 for x in xs) / (len(xs) - 1) if len(xs) > 1 else 0.0


@o.once
def columns(layer: o.Layer, g: int, window: int) -> list[list[float]]:
    """What every token of the past receives from each of the window's queries."""
    past = range(max(0, layer.tokens - window))
    rows = [o.attention(layer, g, t) for t in range(len(past), layer.tokens)]
    return [[float(row[i]) for row in rows] for i in past]


def spread_by_weight(weights: list[float], base: float, total: int, most: int, heads: int) -> Shares:
    """A base for all, the rest by weight, none above `most`; rounded by largest remainder."""
    flat = [w for w in weights for _ in range(heads)]
    if base * len(flat) >= total:
        flat, base = [1.0] * len(flat), 0.0
    capped: set[int] = set()
    while True:
        free = [i for i in range(len(flat)) if i not in capped]
        left = total - base * len(free) - most * len(capped)
        weight = sum(flat[i] for i in free)
        real = [float(most)] * len(flat)
        for i in free:
            real[i] = base + left * (flat[i] / weight if weight else 1 / len(free))
        over = {i for i in free if real[i] > most}
        if not over:
            break
        capped |= over
    real = [round(x) if abs(x - round(x)) < 1e-9 * max(1, x) else x for x in real]
    whole = [max(1, math.floor(x)) for x in real]
    order = sorted(range(len(flat)), key=lambda i: (-round((real[i] - whole[i]) * 2**30), i))
    sign = 1 if total > sum(whole) else -1
    for i in order[::sign][: abs(total - sum(whole))]:
        whole[i] += sign
    return [whole[n : n + heads] for n in range(0, len(whole), heads)]


# --- CAKE -----------------------------------------------------------------------------------------


def cake_score(layer: o.Layer, window: int = 32, kernel: int = 5, gamma: float = 200.0) -> o.Ranked:
    classes = [o.last_class(t, layer.tokens, window) for t in range(layer.tokens)]
    return o.Ranked(cake_values(layer, window, kernel, gamma), [classes] * layer.heads)


@o.once
def cake_values(layer: o.Layer, window: int, kernel: int, gamma: float) -> list[list[float]]:
    past = max(0, layer.tokens - window)
    value = []
    for h in range(layer.heads):
        raw = [0.0] * past
        for g in range(h * layer.group, (h + 1) * layer.group):
            for i, column in enumerate(columns(layer, g, window)):
                worth = sum(column) / len(column) + gamma * variance(column)
                raw[i] += worth / layer.group
        near = [range(i - kernel // 2, i + kernel // 2 + 1) for i in range(past)]
        pooled = [sum(raw[j] for j in js if 0 <= j < past) / kernel for js in near]
        value.append(pooled + [0.0] * (layer.tokens - past))
    return value


@o.once
def preference(layer: o.Layer, window: int, tau1: float, tau2: float) -> float:
    entropy = shift = 0.0
    for g in range(len(layer.q)):
        for column in columns(layer, g, window):
            entropy -= sum(a * math.log(a) for a in column)
            shift += variance(column)
    return float(entropy ** (1 / tau1) * shift ** (1 / tau2))


def cake(layers: list[o.Layer], b: int, window: int = 32, tau1: float = 1.0, tau2: float = 1.0) -> Shares:
    weights = [preference(layer, window, tau1, tau2) for layer in layers]
    heads, tokens = layers[0].heads, layers[0].tokens
    return spread_by_weight(weights, window, b * len(layers) * heads, tokens, heads)


# --- ZigZagKV -------------------------------------------------------------------------------------


@o.once
def entries(layer: o.Layer, window: int, mass: float) -> float:
    """Mean over query heads of how many tokens hold most of the attention."""
    counts = []
    first = max(0, layer.tokens - window)
    for g in range(len(layer.q)):
        rows = [o.attention(layer, g, t) for t in range(first, layer.tokens)]
        received = sorted((float(x) for x in sum(rows)), reverse=True)
        held, count = received[0], 1
        while held < mass * sum(received):
            held += received[count]
            count += 1
        counts.append(count)
    return sum(counts) / len(counts)


def zigzagkv(layers: list[o.Layer], b: int, window: int = 32, mass: float = 0.9, bound: float = 0.2) -> Shares:
    weights = [entries(layer, window, mass) for layer in layers]
    heads, tokens = layers[0].heads, layers[0].tokens
    return spread_by_weight(weights, bound * b, b * len(layers) * heads, tokens, heads)


# --- SimLayerKV -----------------------------------------------------------------------------------


@o.once
def laziness(layer: o.Layer, sinks: int, recent: int, window: int) -> float:
    first, total = max(0, layer.tokens - window), 0.0
    for g in range(len(layer.q)):
        for t in range(first, layer.tokens):
            row = o.attention(layer, g, t)
            near = [i for i in range(t + 1) if i < sinks or i >= layer.tokens - recent]
            total += sum(float(row[i]) for i in near)
    return total / (len(layer.q) * (layer.tokens - first))


def lazy_layers(layers: list[o.Layer], b: int, sinks: int = 4, recent: int = 1024, window: int = 32) -> Shares:
    heads, tokens = layers[0].heads, layers[0].tokens
    floor = min(sinks + recent, b, tokens)
    shares = [[floor] * heads for _ in layers]
    left = heads * len(layers) * (b - floor)
    lazy = [laziness(layer, sinks, recent, window) for layer in layers]
    for at in sorted(range(len(layers)), key=lambda at: (lazy[at], at)):
        given = min(left, heads * (tokens - floor))
        left -= given
        for h in range(heads):
            shares[at][h] += given // heads + (h < given % heads)
    return shares
