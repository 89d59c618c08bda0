"""Pyramid shares, defensive scores with a first stage by mass, surprisal: slow loops in float64.

Written from the equations alone, as `oracles.py`, of which it uses the attention, the window score,
the head-adaptive counts and the projected value's norm. Nothing here imports kvbench.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from . import oracles as o

Kept = list[list[list[int]]]


# --- pyramid --------------------------------------------------------------------------------------


def pyramid(layers: int, tokens: int, b: int, window: int, steepness: float = 20) -> list[int]:
    """Entries that a head of every layer keeps."""
    inner = b - window
    if layers == 1 or inner <= 0 or tokens < 2 * inner:
        return [b] * layers
    least = Fraction(inner) / Fraction(str(steepness))
    most = 2 * inner - least
    if most > tokens - window:
        most = Fraction(tokens - window)
        least = 2 * inner - most
    real = [most - at * (most - least) / (layers - 1) + window for at in range(layers)]
    assert sum(real) == layers * b
    whole = [math.floor(x) for x in real]
    by_remainder = sorted(range(layers), key=lambda at: (-(real[at] - whole[at]), at))
    for at in by_remainder[: layers * b - sum(whole)]:
        whole[at] += 1
    return whole


def pyramidkv(layers: list[o.Layer], b: int, window: int, steepness: float = 20) -> Kept:
    shares = pyramid(len(layers), layers[0].tokens, b, window, steepness)
    kept = []
    for layer, share in zip(layers, shares, strict=True):
        kept.append(o.top_k(layer, o.window_score(layer, window), [share] * layer.heads))
    return kept


def ada_pyramidkv(layers: list[o.Layer], b: int, window: int, steepness: float = 20, safeguard: float = 0.2) -> Kept:
    shares = pyramid(len(layers), layers[0].tokens, b, window, steepness)
    kept = []
    for layer, share in zip(layers, shares, strict=True):
        ranked = o.window_score(layer, window)
        (counts,) = o.head_adaptive([ranked], share, safeguard)
        kept.append(o.top_k(layer, ranked, counts))
    return kept


# --- defensive ------------------------------------------------------------------------------------


def query_heads(layer: o.Layer, h: int) -> range:
    return range(h * layer.group, (h + 1) * layer.group)


@o.once
def defensive_score(layer: o.Layer, window: int, kernel: int = 5) -> list[list[float]]:
    """Scores `[H][T - window]` of the past."""
    past = max(0, layer.tokens - window)
    rows: list[list[float]] = []
    for h in range(layer.heads):
        largest = [0.0] * past
        for g in query_heads(layer, h):
            for t in range(past, layer.tokens):
                row = o.attention(layer, g, t)[:past]
                pooled = []
                for i in range(past):
                    near = range(i - kernel // 2, i + kernel // 2 + 1)
                    pooled.append(sum(row[j] for j in near if 0 <= j < past) / kernel)
                factor = sum(row) / sum(pooled) if sum(pooled) > 0 else 0.0
                largest = [max(m, x * factor) for m, x in zip(largest, pooled, strict=True)]
        rows.append(largest)
    scores = []
    for h in range(layer.heads):
        score = []
        for i in range(past):
            worst = max(rows[h][i], sum(rows[h]) / past)
            sizes = [o.value_norm(layer, other, i, "l1") for other in range(layer.heads)]
            score.append(worst * sizes[h] / sum(sizes))
        scores.append(score)
    return scores


@o.once
def window_mean(layer: o.Layer, h: int, window: int) -> np.ndarray:
    """Mean attention of a KV head's group and of the window's queries on all tokens."""
    first = max(0, layer.tokens - window)
    total = np.zeros(layer.tokens)
    for g in query_heads(layer, h):
        for t in range(first, layer.tokens):
            total += o.attention(layer, g, t)
    return total / (layer.group * (layer.tokens - first))


def first_stage(
    layer: o.Layer,
    held: list[list[int]],
    b: int,
    window: int,
    mass: float,
    variant: str = "paper",
) -> list[dict[int, float]]:
    """What stage 1 keeps of every head, with its share of the attention.

    `held[h]` are the tokens that the score protects: the window, for the defensive score.
    """
    plain = [window_mean(layer, h, window) for h in range(layer.heads)]
    last = range(max(0, layer.tokens - 2 * window), max(0, layer.tokens - window))
    slip = sum(plain[h][i] for h in range(layer.heads) for i in last) / layer.heads
    chosen = []
    for h in range(layer.heads):
        own = slip if variant == "release" else sum(plain[h][i] for i in held[h])
        past = [i for i in range(layer.tokens) if i not in held[h]]
        total = sum(plain[h][i] for i in past)
        most = b - len(held[h])
        if variant == "release":  # the kept fraction is taken of the length without the window
            most = int(Fraction(b, layer.tokens) * len(past) - len(held[h]))
            if most < 0:  # used as the end of a slice
                order = sorted(past, key=lambda i: (plain[h][i], i), reverse=True)[:most]
                chosen.append({i: plain[h][i] / total for i in order})
                continue
        taken: dict[int, float] = {}
        reached = 0.0
        for i in sorted(past, key=lambda i: (plain[h][i], i), reverse=True):
            reached += plain[h][i] / total
            if reached >= mass - own or len(taken) >= most:
                break
            taken[i] = plain[h][i] / total
        chosen.append(taken)
    return chosen


def best(entries: list[tuple[int, float, int, int, int]], count: int, shape: list[int]) -> Kept:
    """Keep the `count` largest (class, value, token), ties to the lower (layer, head)."""
    kept: Kept = [[[] for _ in range(heads)] for heads in shape]
    order = sorted(entries, key=lambda e: (-e[0], -e[1], -e[2], e[3], e[4]))
    for _, _, i, at, h in order[:count]:
        kept[at][h].append(i)
    return [[sorted(head) for head in layer] for layer in kept]


def defensive_entries(
    layer: o.Layer,
    at: int,
    b: int,
    window: int,
    mass: float = 0.9,
    variant: str = "paper",
    kernel: int = 5,
) -> list[tuple[int, float, int, int, int]]:
    """All entries of a layer as (class, value, token, layer, head), the larger the better."""
    tokens, entries = layer.tokens, []
    past = max(0, tokens - window)
    held = [list(range(past, tokens)) for _ in range(layer.heads)]
    scores = defensive_score(layer, window, kernel)
    stage1 = first_stage(layer, held, b, window, mass, variant)
    for h in range(layer.heads):
        for i in range(tokens):
            if i >= past:
                entries.append((3 if i == tokens - 1 else 2, 0.0, i, at, h))
            elif i in stage1[h]:
                entries.append((1, stage1[h][i], i, at, h))
            else:
                entries.append((0, scores[h][i], i, at, h))
    return entries


def defensivekv(layers: list[o.Layer], b: int, window: int = 32, **how: object) -> Kept:
    kept = []
    for layer in layers:
        entries = defensive_entries(layer, 0, b, window, **how)  # type: ignore[arg-type]
        kept += best(entries, layer.heads * b, [layer.heads])
    return kept


def layer_defensivekv(layers: list[o.Layer], b: int, window: int = 32, **how: object) -> Kept:
    entries = []
    for at, layer in enumerate(layers):
        entries += defensive_entries(layer, at, b, window, **how)  # type: ignore[arg-type]
    heads = [layer.heads for layer in layers]
    return best(entries, sum(heads) * b, heads)


def by_mass(
    layer: o.Layer, ranked: o.Ranked, shares: list[int], b: int, window: int, mass: float = 0.9
) -> list[list[int]]:
    """Stage 1 by mass, then the largest of any score, for shares that are at least `b`."""
    held = [[i for i, c in enumerate(classes) if c] for classes in ranked.classes]
    stage1 = first_stage(layer, held, b, window, mass)
    kept = []
    for h, share in enumerate(shares):
        order = o.order_head(ranked, h)
        first = [i for i in order if i in held[h]] + list(stage1[h])
        rest = [i for i in order if i not in first]
        kept.append(sorted((first + rest)[:share]))
    return kept


# --- surprisal ------------------------------------------------------------------------------------


def sirllm(
    surprisal: list[float],
    turns_ago: list[int],
    b: int,
    layers: int,
    heads: int,
    decay: float = 1.0,
    sinks: int = 4,
    variant: str = "paper",
) -> Kept:
    """Surprisal with decay and sinks; sinks that leave no room make way for the last token.

    `release`: the largest of all, sinks or not, and the sinks; then tokens from the text's end.
    """
    tokens = len(surprisal)
    worth = [x * decay**turns for x, turns in zip(surprisal, turns_ago, strict=True)]
    first = range(min(sinks, tokens))
    if b <= sinks:
        order = [tokens - 1, *(i for i in first if i != tokens - 1)]
    elif variant == "release":
        order = sorted({*sorted(range(tokens), key=lambda i: -worth[i])[: b - sinks], *first})
        order += [i for i in reversed(range(tokens)) if i not in order]
    else:
        others = sorted(range(len(first), tokens), key=lambda i: (worth[i], i), reverse=True)
        order = [*first, *others]
    kept = sorted(order[:b])
    return [[kept] * heads] * layers
