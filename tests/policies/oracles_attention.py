"""TOVA, RoCo, OBCache and R-KV as slow, obvious loops in float64, from their equations alone.

Nothing here imports kvbench. A layer is one sequence without padding (see `oracles.Layer`); `held`
names the tokens that each KV head still holds at a later cut, in order, and is everything at the
first. A score is `Worth`: `[H][len(held)]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .oracles import Layer, floor_of

FREE, CHOSEN, WINDOW, SINK, NEWEST = range(5)  # the higher, the later it gives way
Held = tuple[tuple[int, ...], ...]


@dataclass
class Worth:
    value: list[list[float]]
    classes: list[list[int]]


def everything(layer: Layer) -> Held:
    return (tuple(range(layer.tokens)),) * layer.heads


def kept(worth: Worth, held: Held, share: int) -> list[list[int]]:
    """The `share` tokens of every head that go last."""
    out = []
    for values, classes, tokens in zip(worth.value, worth.classes, held, strict=True):
        order = []
        for value, c, token in zip(values, classes, tokens, strict=True):
            place = -token if c == SINK else token  # of the sinks the first goes last
            order.append((c, value if c in (FREE, CHOSEN) else 0.0, place, token))
        out.append(sorted(token for *_, token in sorted(order, reverse=True)[:share]))
    return out


def query_heads(layer: Layer, h: int) -> range:
    return range(h * layer.group, (h + 1) * layer.group)


def logit(layer: Layer, g: int, t: int, i: int) -> float:
    """Scaled logit of query head `g` at token `t` on token `i`."""
    key = layer.k[g // layer.group, i]
    return sum(float(a) * float(b) for a, b in zip(layer.q[g, t], key, strict=True)) / math.sqrt(layer.dim)


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(z - top) for z in logits]
    return [w / sum(weights) for w in weights]


def square(x: np.ndarray) -> float:
    return sum(float(c) * float(c) for c in x)


def last_tokens(tokens: tuple[int, ...], newest: int, window: int) -> list[int]:
    classes = []
    for i in tokens:
        c = WINDOW if newest - i < window else FREE
        classes.append(NEWEST if c and i == newest else c)
    return classes


# --- TOVA: attention of the last query, mean over all heads of the layer --------------------------


def tova(layer: Layer, held: Held) -> Worth:
    newest = layer.tokens - 1
    mean = [0.0] * layer.tokens  # what a head does not hold it gives nothing
    for g in range(layer.heads * layer.group):
        tokens = held[g // layer.group]
        weights = softmax([logit(layer, g, newest, i) for i in tokens])
        for i, a in zip(tokens, weights, strict=True):
            mean[i] += a / (layer.heads * layer.group)
    value = [[mean[i] for i in tokens] for tokens in held]
    return Worth(value, [[FREE] * len(tokens) for tokens in held])


# --- RoCo: mean attention, the entries of largest std protected -----------------------------------


def received(layer: Layer) -> list[list[list[float]]]:
    """`[H_q][T]`: the attention that every token got from each query that could see it."""
    out: list[list[list[float]]] = []
    for g in range(layer.heads * layer.group):
        rows: list[list[float]] = [[] for _ in range(layer.tokens)]
        for t in range(layer.tokens):
            weights = softmax([logit(layer, g, t, i) for i in range(t + 1)])
            for i, a in enumerate(weights):
                rows[i].append(a)
        out.append(rows)
    return out


def mean_and_std(layer: Layer) -> tuple[list[list[float]], list[list[float]]]:
    """Per KV head and token: mean attention per query that could see it, and its std."""
    key = ("mean_and_std",)
    if key not in layer.known:
        rows = received(layer)
        means, stds = [], []
        for h in range(layer.heads):
            mean, std = [], []
            for i in range(layer.tokens):
                averages, spreads = [], []
                for g in query_heads(layer, h):
                    seen = rows[g][i]
                    average = sum(seen) / len(seen)
                    averages.append(average)
                    spreads.append(math.sqrt(sum((a - average) ** 2 for a in seen) / len(seen)))
                mean.append(sum(averages) / len(averages))
                std.append(sum(spreads) / len(spreads))
            means.append(mean)
            stds.append(std)
        layer.known[key] = means, stds
    return layer.known[key]  # type: ignore[return-value]


def roco_protection(
    std: list[float],
    tokens: tuple[int, ...],
    newest: int,
    b: int,
    b_std: float,
    window: int,
    sinks: int,
) -> list[int]:
    """Classes of the tokens of one head."""
    by_std = sorted(zip(std, tokens, strict=True), reverse=True)
    varied = {token for _, token in by_std[: floor_of(b_std, b)]}
    classes = last_tokens(tokens, newest, window)
    for n, i in enumerate(tokens):
        if i in varied:
            classes[n] = max(classes[n], CHOSEN)
        if i < sinks:
            classes[n] = max(classes[n], SINK)
    return classes


def roco(layer: Layer, held: Held, b: int, b_std: float = 0.1, window: int = 10, sinks: int = 4) -> Worth:
    mean, std = mean_and_std(layer)
    newest, tokens = layer.tokens - 1, tuple(range(layer.tokens))
    classes = [roco_protection(s, tokens, newest, b, b_std, window, sinks) for s in std]
    return Worth(mean, classes)


# --- OBCache: what the output loses ---------------------------------------------------------------


def pooled(values: list[float], kernel: int, pool: str) -> list[float]:
    """Over what is there; the average counts the places beyond the ends as zeros."""
    out = []
    for i in range(len(values)):
        near = values[max(0, i - kernel // 2) : i + kernel // 2 + 1]
        out.append(max(near) if pool == "max" else sum(near) / kernel)
    return out


def obcache(
    layer: Layer,
    held: Held,
    variant: str = "joint",
    window: int = 32,
    kernel: int = 1,
    pool: str = "max",
    group: str = "sum",
) -> Worth:
    key = ("obcache", held, variant, window, group)
    newest = layer.tokens - 1
    if key not in layer.known:
        raw = []
        for h, tokens in enumerate(held):
            per_head = []
            for g in query_heads(layer, h):
                score = dict.fromkeys(tokens, 0.0)
                for t in range(max(0, newest - window + 1), newest + 1):
                    visible = [i for i in tokens if i <= t]
                    z = [logit(layer, g, t, i) for i in visible]
                    a = softmax(z)
                    o = sum(w * layer.v[h, i] for w, i in zip(a, visible, strict=True))
                    for i, weight, x in zip(visible, a, z, strict=True):
                        v = layer.v[h, i]
                        if variant == "joint":
                            score[i] += weight**2 * square(v + x * (v - o))
                        elif variant == "value":
                            score[i] += weight**2 * square(v)
                        else:
                            score[i] += (weight * x) ** 2 * square(v - o)
                per_head.append([score[i] for i in tokens])
            columns = list(zip(*per_head, strict=True))
            if group == "max":
                raw.append([max(c) for c in columns])
            else:
                raw.append([sum(c) / (len(c) if group == "mean" else 1) for c in columns])
        layer.known[key] = raw
    value, classes = [], []
    for tokens, row in zip(held, layer.known[key], strict=True):  # type: ignore[call-overload]
        c = last_tokens(tokens, newest, window)
        past = [x for x, where in zip(row, c, strict=True) if where == FREE]
        value.append(pooled(past, kernel, pool) + [0.0] * (len(tokens) - len(past)))
        classes.append(c)
    return Worth(value, classes)


# --- R-KV: attention less redundancy --------------------------------------------------------------


def redundancy_of(keys: list[np.ndarray], spare_oldest: bool = False) -> list[float]:
    """`softmax_j( mean_i c_ij )`, for every `i` its most recent like `j` spared.

    `spare_oldest`: where no `j` is like `i`, the oldest is spared.
    """
    n = len(keys)
    total = [0.0] * n
    for i in range(n):
        row = []
        for j in range(n):
            dot = sum(float(a) * float(b) for a, b in zip(keys[i], keys[j], strict=True))
            row.append(0.0 if i == j else dot / math.sqrt(square(keys[i]) * square(keys[j])))
        alike = [j for j in range(n) if row[j] > 0.5]
        if alike or spare_oldest:
            row[alike[-1] if alike else 0] = 0.0
        for j in range(n):
            total[j] += row[j]
    return softmax([x / n for x in total])


def rkv(
    layer: Layer,
    held: Held,
    redundancy: float = 0.9,
    window: int = 8,
    kernel: int = 7,
    group: str = "max",
    variant: str = "paper",
    cap: float | None = None,
) -> Worth:
    newest = layer.tokens - 1
    value, classes = [], []
    for h, tokens in enumerate(held):
        c = last_tokens(tokens, newest, window)
        past = [i for i, where in zip(tokens, c, strict=True) if where == FREE]
        key = ("rkv", h, tuple(past), window, group, variant, cap)
        if past and key not in layer.known:
            mean = [0.0] * len(past)
            for t in range(newest - window + 1, newest + 1):
                row = []
                for i in past:
                    z = [logit(layer, g, t, i) for g in query_heads(layer, h)]
                    z = z if cap is None else [cap * math.tanh(x / cap) for x in z]
                    row.append(max(z) if group == "max" else sum(z) / len(z))
                for n, a in enumerate(softmax(row)):
                    mean[n] += a / window
            compared = past if variant == "paper" else tokens
            repeats = redundancy_of([layer.k[h, i] for i in compared], variant == "release")
            layer.known[key] = mean, repeats[: len(past)]
        row = []
        if past:
            mean, alike = layer.known[key]  # type: ignore[misc]
            best = pooled(mean, kernel, "max")
            row = [(1 - redundancy) * a - redundancy * r for a, r in zip(best, alike, strict=True)]
        value.append(row + [0.0] * (len(tokens) - len(past)))
        classes.append(c)
    return Worth(value, classes)
