"""LagKV, CurDKV, ExpectedAttention and others as slow, obvious loops in float64.

Scores that know no question, from their equations alone. Nothing here imports kvbench; layers, held
tokens and worth are those of `oracles_attention`.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from .oracles import Layer, value_norm
from .oracles_attention import FREE, NEWEST, SINK, WINDOW, Held, Worth, query_heads, softmax, square

# --- LagKV: spread of the channels on the scale of the next partition -----------------------------


def spread(vector: np.ndarray, following: list[np.ndarray]) -> float:
    """Sample standard deviation of a vector's channels on the scale of the following vectors."""
    scaled = []
    for c, x in enumerate(vector):
        low = min(float(f[c]) for f in following)
        high = max(float(f[c]) for f in following)
        scaled.append((float(x) - low) / (high - low) if high > low else 0.0)
    mean = sum(scaled) / len(scaled)
    return math.sqrt(sum((x - mean) ** 2 for x in scaled) / (len(scaled) - 1))


def lagkv(layer: Layer, held: Held, lag: int = 128, sinks: int = 16, cross: bool = False) -> Worth:
    newest = layer.tokens - 1
    value, classes = [], []
    for h, tokens in enumerate(held):
        rest = [i for i in tokens if i >= sinks]
        partitions = [rest[n : n + lag] for n in range(0, len(rest), lag)]
        partitions = [p for p in partitions if len(p) == lag]
        worth: dict[int, float] = {}
        for own, following in pairwise(partitions):
            total = [0.0] * lag
            for x in (layer.k[h], layer.v[h]):
                stds = [spread(x[i], [x[j] for j in following]) for i in own]
                total = [a + b for a, b in zip(total, softmax(stds), strict=True)]
            if cross:
                worth |= dict(zip(own, total, strict=True))
            else:
                order = sorted(range(lag), key=lambda n, total=total: (total[n], n))
                worth |= {own[n]: rank / lag for rank, n in enumerate(order)}
        value.append([worth.get(i, 0.0) for i in tokens])
        row = []
        for i in tokens:
            c = FREE if i in worth else WINDOW
            c = SINK if i < sinks else c
            row.append(NEWEST if i == newest and c != FREE else c)
        classes.append(row)
    return Worth(value, classes)


# --- CurDKV: leverage of keys and values ----------------------------------------------------------


def curdkv(
    layer: Layer,
    held: Held,
    projection: list[np.ndarray] | None = None,
    leverage: str = "product",
    local: int = 0,
    sinks: int = 4,
) -> Worth:
    """`projection[h]` is the head's `G`, `[d, r]` of variance 1/r; None projects nothing."""
    value, classes = [], []
    for h, tokens in enumerate(held):
        lengths = []
        for x in (layer.k[h], layer.v[h]):
            rows = [x[i] if projection is None else x[i] @ projection[h] for i in tokens]
            found = [square(row) for row in rows]
            if local:
                sums = [sum(found[n : n + local]) for n in range(0, len(found), local)]
                found = [x / sums[n // local] for n, x in enumerate(found)]
            lengths.append(found)
        of = {
            "product": lambda k, v: k * v,
            "mean": lambda k, v: (k + v) / 2,
            "key": lambda k, v: k,
            "value": lambda k, v: v,
        }[leverage]
        worth = [of(k, v) for k, v in zip(*lengths, strict=True)]
        value.append([x / sum(worth) for x in worth])
        classes.append([SINK if i < sinks else FREE for i in tokens])
    return Worth(value, classes)


# --- RoPE -----------------------------------------------------------------------------------------


def rotation(layer: Layer, position: int) -> np.ndarray:
    """The matrix `[d, d]` by which RoPE turns a query or a key."""
    half, d = layer.dim // 2, layer.dim
    matrix = np.zeros((d, d))
    for c in range(half):
        angle = position * layer.theta ** (-2 * c / d)
        matrix[c, c] = matrix[c + half, c + half] = math.cos(angle)
        matrix[c, c + half], matrix[c + half, c] = -math.sin(angle), math.sin(angle)
    return matrix


# --- ExpectedAttention ----------------------------------------------------------------------------


def moments(layer: Layer, g: int, sinks: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of a query head's queries before RoPE."""
    key = ("moments", g, sinks)
    if key not in layer.known:
        d = layer.dim
        rows = [rotation(layer, t).T @ layer.q[g, t] for t in range(sinks, layer.tokens)]
        mean, covariance = np.zeros(d), np.zeros((d, d))
        for row in rows:
            mean += row / len(rows)
        for row in rows:
            covariance += np.outer(row - mean, row - mean) / len(rows)
        layer.known[key] = mean, covariance
    return layer.known[key]  # type: ignore[return-value]


def expected_attention(
    layer: Layer,
    held: Held,
    future: int = 512,
    sinks: int = 4,
    covariance: bool = True,
    norm: str = "value",
    eps: float = 0.0,
) -> Worth:
    coming = ("coming", future)
    if coming not in layer.known:
        turns = [rotation(layer, layer.tokens + n) for n in range(future)]
        layer.known[coming] = sum(turns) / future
    turn: np.ndarray = layer.known[coming]  # type: ignore[assignment]
    value, classes = [], []
    for h, tokens in enumerate(held):
        rest = [i for i in tokens if i >= sinks]
        total = dict.fromkeys(rest, 0.0)
        for g in query_heads(layer, h):
            mean, spread = moments(layer, g, sinks)
            mean, spread = turn @ mean, turn @ spread @ turn.T
            logits = []
            for i in rest:
                k = layer.k[h, i]
                z = float(k @ mean) / math.sqrt(layer.dim)
                logits.append(z + float(k @ spread @ k) / (2 * layer.dim) * covariance)
            for i, a in zip(rest, softmax(logits) if rest else [], strict=True):
                total[i] += a / layer.group
        for i in rest:
            length = {
                "none": 1.0,
                "value": math.sqrt(square(layer.v[h, i])),
                "output": value_norm(layer, h, i, "l2") if norm == "output" else 0.0,
            }[norm]
            total[i] = (total[i] + eps) * length
        value.append([total.get(i, 0.0) for i in tokens])
        classes.append([SINK if i < sinks else FREE for i in tokens])
    return Worth(value, classes)
