"""LagKV, CurDKV, ExpectedAttention and others as slow, obvious loops in float64.

Scores that know no question, from their equations alone. Nothing here imports kvbench; layers, held
tokens and worth are those of `oracles_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from .oracles import Layer, value_norm
from .oracles_attention import (
    FREE,
    NEWEST,
    SINK,
    WINDOW,
    Held,
    Worth,
    last_tokens,
    query_heads,
    softmax,
    square,
)

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
    given: tuple[np.ndarray, np.ndarray] | None = None,
    sink_logits: Sequence[float] = (),
) -> Worth:
    """`given`: mean `[H_q, d]` and covariance `[H_q, d, d]` that were measured before; `sink_logits`: by query head."""
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
            mean, spread = moments(layer, g, sinks) if given is None else (x[g] for x in given)
            mean, spread = turn @ mean, turn @ spread @ turn.T
            logits = []
            for i in rest:
                k = layer.k[h, i]
                z = float(k @ mean) / math.sqrt(layer.dim)
                logits.append(z + float(k @ spread @ k) / (2 * layer.dim) * covariance)
            weights = softmax([*logits, *sink_logits[g : g + 1]]) if rest else []
            for i, a in zip(rest, weights[: len(rest)], strict=True):
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


# --- Compactor and its parts ----------------------------------------------------------------------


def leverage_of(layer: Layer, held: Held, noise: list[np.ndarray] | None) -> list[dict[int, float]]:
    """Leverage of the keys before RoPE; `noise[h]` is standard normal, `[d, sketch]`."""
    out = []
    for h, tokens in enumerate(held):
        rows = []
        for i in tokens:
            row = rotation(layer, i).T @ layer.k[h, i]
            rows.append(row if noise is None else row @ noise[h] / math.sqrt(noise[h].shape[1]))
        found: dict[int, float] = {}
        if rows:
            mean = sum(rows) / len(rows)
            rows = [row - mean for row in rows]
            gram = sum(np.outer(row, row) for row in rows) + 0.01 * np.eye(len(mean))
            inverse = np.linalg.inv(gram)
            found = {i: float(row @ inverse @ row) for i, row in zip(tokens, rows, strict=True)}
        out.append(found)
    return out


def chunk_attention(layer: Layer, chunk: int, first: int, last: int, padded: bool) -> list[list[float]]:
    """`[H][T]`: what tokens receive in their chunks, times the value's length, pooled."""
    stop = max(first, layer.tokens - last)
    out = []
    for h in range(layer.heads):
        plain = [0.0] * layer.tokens
        for start in range(first, stop, chunk):
            own = range(start, min(start + chunk, stop))
            missing = chunk - len(own) if padded else 0
            for g in query_heads(layer, h):
                for t in own:
                    logits = [float(layer.q[g, t] @ layer.k[h, i]) for i in own]
                    weights = softmax(logits + [0.0] * missing)
                    for i, a in zip(own, weights, strict=False):
                        plain[i] += a / layer.group
            for i in own:
                plain[i] = (plain[i] + missing / chunk) * math.sqrt(square(layer.v[h, i]))
        near = [0.0, *plain, 0.0]
        out.append([sum(near[i : i + 3]) / 3 for i in range(layer.tokens)])
    return out


def standardised(value: list[dict[int, float]]) -> list[dict[int, float]]:
    """Mean 0 and sample standard deviation 1 over all heads."""
    every = [x for head in value for x in head.values()]
    mean = sum(every) / max(1, len(every))
    std = math.sqrt(sum((x - mean) ** 2 for x in every) / max(1, len(every) - 1))
    return [{i: (x - mean) / max(std, 1e-6) for i, x in head.items()} for head in value]


def leverage(layer: Layer, held: Held, noise: list[np.ndarray] | None = None) -> Worth:
    value = standardised(leverage_of(layer, held, noise))
    return Worth([list(x.values()) for x in value], [[FREE] * len(x) for x in value])


def non_causal(layer: Layer, held: Held, chunk: int = 256, padded: bool = False) -> Worth:
    found = chunk_attention(layer, chunk, 0, 0, padded)
    value = standardised([{i: found[h][i] for i in tokens} for h, tokens in enumerate(held)])
    return Worth([list(x.values()) for x in value], [[FREE] * len(x) for x in value])


def compactor(
    layer: Layer,
    held: Held,
    noise: list[np.ndarray] | None,
    blend: float,
    sinks: int = 8,
    recent: int = 4,
    chunk: int = 256,
    padded: bool = False,
) -> Worth:
    newest = layer.tokens - 1
    rated = tuple(tuple(i for i in t if i >= sinks and newest - i >= recent) for t in held)
    outliers = standardised(leverage_of(layer, rated, noise))
    found = chunk_attention(layer, chunk, sinks, recent, padded)
    attention = standardised([{i: found[h][i] for i in tokens} for h, tokens in enumerate(rated)])
    value, classes = [], []
    for h, tokens in enumerate(held):
        value.append([blend * outliers[h][i] + attention[h][i] if i in rated[h] else 0.0 for i in tokens])
        row = []
        for i in tokens:
            c = WINDOW if newest - i < recent else FREE
            c = NEWEST if c and i == newest else c
            row.append(max(c, SINK) if i < sinks else c)
        classes.append(row)
    return Worth(value, classes)


# --- Q-Filters ------------------------------------------------------------------------------------


def qfilters(layer: Layer, held: Held, filters: np.ndarray, recent: int = 0) -> Worth:
    """`filters[h]` is the filter of a KV head."""
    value = [[-float(layer.k[h, i] @ filters[h].astype(float)) for i in tokens] for h, tokens in enumerate(held)]
    return Worth(value, [last_tokens(tokens, layer.tokens - 1, recent) for tokens in held])
