"""The methods of `test_window_methods` as slow, obvious loops in float64, from their equations.

Nothing here imports kvbench. A layer is one sequence without padding; see `oracles.Layer`.
"""

from __future__ import annotations

import math
from fractions import Fraction

from . import oracles as o

Kept = list[list[list[int]]]


def chunkkv(layers: list[o.Layer], b: int, window: int = 32, chunk_length: int = 10, joint: bool = True) -> Kept:
    out = []
    for layer in layers:
        ranked = o.window_score(layer, window=window, kernel=1)
        out.append(chunked(ranked, [b] * layer.heads, chunk_length, joint))
    return out


def chunked(ranked: o.Ranked, shares: list[int], chunk_length: int, joint: bool) -> list[list[int]]:
    """Protected tokens first, then chunk after chunk; of the last chunk the newest tokens."""
    heads, tokens = range(len(ranked.value)), range(len(ranked.value[0]))
    kept = []
    for h in heads:
        order = [t for t in o.order_head(ranked, h) if ranked.classes[h][t]]
        worth = {}
        for chunk in {t // chunk_length for t in tokens}:
            numbers = [
                ranked.value[other][t]
                for other in (heads if joint else [h])
                for t in tokens
                if t // chunk_length == chunk and not ranked.classes[other][t]
            ]
            if numbers:
                worth[chunk] = sum(numbers) / len(numbers)
        for chunk in sorted(worth, key=lambda c: (worth[c], c), reverse=True):
            order += [t for t in reversed(tokens) if t // chunk_length == chunk and not ranked.classes[h][t]]
        kept.append(sorted(order[: shares[h]]))
    return kept


@o.once
def pyramidinfer_score(layer: o.Layer, window: int, sinks: int, distance_weight: float) -> o.Ranked:
    tokens = layer.tokens
    value = [0.0] * tokens
    for back in range(min(window, tokens)):
        step = 0.0 if window == 1 else (distance_weight - 1) / (window - 1)
        weight = 1 + step * (window - 1 - back)
        for g in range(layer.q.shape[0]):
            row = o.attention(layer, g, tokens - 1 - back)
            for i in range(tokens):
                value[i] += weight * float(row[i]) / window / layer.q.shape[0]
    classes = []
    for t in range(tokens):
        near = o.last_class(t, tokens, window)
        classes.append(near if near == o.NEWEST else o.SINK if t < sinks else near)
    return o.Ranked([value] * layer.heads, [classes] * layer.heads)


def cosine_shares(layers: int, tokens: int, b: int, window: int, ratio: float) -> list[int]:
    """Entries of a head in every layer: products of the ratios below, largest remainder to `b`."""
    inner = max(0, b - window)
    even = b - inner
    weights, kept = [], 1.0
    for layer in range(layers):
        weights.append(kept)
        kept *= ratio + (1 - ratio) * (1 + math.cos(math.pi * layer / layers)) / 2
    full: set[int] = set()  # layers whose share would be above what there is
    while True:
        left = layers * inner - len(full) * (tokens - even)
        free = sum(w for i, w in enumerate(weights) if i not in full)
        real = [float(tokens - even) if i in full else left * w / free for i, w in enumerate(weights)]
        above = {i for i, x in enumerate(real) if x > tokens - even + 1e-9}
        if not above:
            break
        full |= above
    shares = [math.floor(x + 1e-9) for x in real]
    by_fraction = sorted((i for i in range(layers) if i not in full), key=lambda i: (-(real[i] - shares[i]), i))
    for i in by_fraction[: layers * inner - sum(shares)]:
        shares[i] += 1
    return [share + even for share in shares]


def pyramidinfer(
    layers: list[o.Layer],
    b: int,
    window: int = 32,
    sinks: int = 4,
    distance_weight: float = 1.2,
    decay_ratio: float = 0.9,
) -> Kept:
    shares = cosine_shares(len(layers), layers[0].tokens, b, window, decay_ratio)
    ranked = [pyramidinfer_score(x, window, sinks, distance_weight) for x in layers]
    return [
        o.top_k(layer, own, [share] * layer.heads) for layer, own, share in zip(layers, ranked, shares, strict=True)
    ]


@o.once
def missed(layer: o.Layer, history: int, window: int, group: str) -> o.Ranked:
    value = []
    for h in range(layer.heads):
        of_head = []
        for i in range(layer.tokens):
            counts = [
                sum(
                    o.attention(layer, g, t)[i] < 1 / (t + 1)
                    for t in range(max(i, layer.tokens - history), layer.tokens)
                )
                for g in range(h * layer.group, (h + 1) * layer.group)
            ]
            fewest = {"mean": Fraction(sum(counts), len(counts)), "max": min(counts)}
            of_head.append(-float(fewest.get(group, sum(counts))))
        value.append(of_head)
    classes = [o.last_class(t, layer.tokens, window) for t in range(layer.tokens)]
    return o.Ranked(value, [classes] * layer.heads)


def scissorhands(layers: list[o.Layer], b: int, history: int = 400, window: int = 10, group: str = "mean") -> Kept:
    ranked = [missed(layer, history, window, group) for layer in layers]
    return [o.top_k(x, own, [b] * x.heads) for x, own in zip(layers, ranked, strict=True)]


@o.once
def finch_score(layer: o.Layer, question: int, longest: int, release: bool) -> o.Ranked:
    tokens = layer.tokens
    by_query_head = []
    size = min(question, longest)
    for g in range(layer.q.shape[0]):
        total = [0.0] * tokens
        for t in range(max(0, tokens - size), tokens):
            row = o.attention(layer, g, t)
            for i in range(tokens):
                total[i] += (1 if release else t + 1) * float(row[i]) / size
        by_query_head.append(total)
    value = []
    for h in range(layer.heads):
        own = by_query_head[h * layer.group : (h + 1) * layer.group]
        among = by_query_head if release else own
        value.append([sum(x[i] for x in among) / layer.group for i in range(tokens)])
    classes = [o.last_class(t, tokens, question) for t in range(tokens)]
    return o.Ranked(value, [classes] * layer.heads)


def every_chunk(ranked: o.Ranked, shares: list[int], chunk_length: int) -> list[list[int]]:
    """Protected tokens, then every chunk's best ones, in proportion to what the chunk holds."""
    kept = []
    for h, share in enumerate(shares):
        order = o.order_head(ranked, h)
        protected = [t for t in order if ranked.classes[h][t]][:share]
        free = [t for t in order if not ranked.classes[h][t]]
        left = share - len(protected)
        chunks: dict[int, list[int]] = {}
        for t in free:
            chunks.setdefault(t // chunk_length, []).append(t)
        real = {c: Fraction(left * len(own), len(free)) for c, own in chunks.items()}
        quota = {c: math.floor(x) for c, x in real.items()}
        by_fraction = sorted(real, key=lambda c: (quota[c] - real[c], c))
        for c in by_fraction[: left - sum(quota.values())]:
            quota[c] += 1
        chosen = [t for c, own in chunks.items() for t in own[: quota[c]]]
        kept.append(sorted(protected + chosen))
    return kept


def finch(
    layers: list[o.Layer],
    b: int,
    question: int = 32,
    longest: int = 256,
    chunk_length: int = 10**6,
    release: bool = False,
) -> Kept:
    ranked = [finch_score(layer, question, longest, release) for layer in layers]
    return [every_chunk(own, [b] * len(own.value), chunk_length) for own in ranked]
