"""The policies as slow, obvious loops in float64 numpy, written from their equations alone.

Nothing here imports kvbench. A sequence is given without padding: queries `q[layer][H_q, T, d]`
after RoPE, keys and values `[H, T, d]`, output slices `[H_q, d, D]`. Every oracle returns, for each
layer and KV head, the sorted list of tokens that are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

NEWEST, SINK, WINDOW, FREE = 3, 2, 1, 0  # the higher, the later it gives way


@dataclass
class Layer:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    w_o: np.ndarray
    theta: float = 10_000.0  # of RoPE

    def __post_init__(self) -> None:
        self.q, self.k, self.v, self.w_o = (np.asarray(x, dtype=np.float64) for x in (self.q, self.k, self.v, self.w_o))
        self.heads, self.tokens, self.dim = self.k.shape
        self.group = self.q.shape[0] // self.heads
        self.known: dict[tuple[object, ...], object] = {}  # what was computed once


@dataclass
class Ranked:
    """Values and classes of one layer, `[H][T]` each."""

    value: list[list[float]]
    classes: list[list[int]]


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute a function of a layer once for each of its arguments."""

    def call(layer: Layer, *arguments: Any) -> Any:
        key = (function.__name__, *arguments)
        if key not in layer.known:
            layer.known[key] = function(layer, *arguments)
        return layer.known[key]

    return call


def floor_of(ratio: float, count: float | Fraction) -> int:
    return math.floor(Fraction(str(ratio)) * Fraction(count))


@once
def attention(layer: Layer, query_head: int, t: int) -> np.ndarray:
    """Softmax attention of the query of token `t` on all tokens; zero on the future."""
    head = query_head // layer.group
    logits = [float(layer.q[query_head, t] @ layer.k[head, i]) / math.sqrt(layer.dim) for i in range(t + 1)]
    top = max(logits)
    weights = [math.exp(z - top) for z in logits]
    row = np.zeros(layer.tokens)
    row[: t + 1] = np.array(weights) / sum(weights)
    return row


def reduce_group(rows: list[np.ndarray], how: str) -> np.ndarray:
    if how == "max":
        return np.max(rows, axis=0)
    return np.sum(rows, axis=0) / (len(rows) if how == "mean" else 1)


def last_class(t: int, tokens: int, window: int) -> int:
    if t < tokens - window:
        return FREE
    return NEWEST if t == tokens - 1 else WINDOW


# --- scores ---------------------------------------------------------------------------------------


def window_score(layer: Layer, window: int = 32, kernel: int = 7, pool: str = "max", group: str = "mean") -> Ranked:
    tokens, value, classes = layer.tokens, [], []
    past = max(0, tokens - window)
    for h in range(layer.heads):
        per_query_head = []
        for g in range(h * layer.group, (h + 1) * layer.group):
            total = np.zeros(tokens)
            for t in range(past, tokens):
                total += attention(layer, g, t)
            per_query_head.append(total / window)
        raw = reduce_group(per_query_head, group)[:past]
        pooled = []
        for i in range(past):
            near = [raw[j] if 0 <= j < past else None for j in range(i - kernel // 2, i + kernel // 2 + 1)]
            inside = [x for x in near if x is not None]
            pooled.append(max(inside) if pool == "max" else sum(inside) / kernel)
        value.append([float(x) for x in pooled] + [0.0] * (tokens - past))
        classes.append([last_class(t, tokens, window) for t in range(tokens)])
    return Ranked(value, classes)


def mass_score(layer: Layer, b: int, recent: float = 0.5, observe: int | None = None, group: str = "mean") -> Ranked:
    tokens, value = layer.tokens, []
    first = 0 if observe is None else max(0, tokens - observe)
    for h in range(layer.heads):
        rows = []
        for g in range(h * layer.group, (h + 1) * layer.group):
            total = np.zeros(tokens)
            for t in range(first, tokens):
                total += attention(layer, g, t)
            rows.append(total)
        value.append([float(x) for x in reduce_group(rows, group)])
    window = floor_of(recent, b)
    classes = [[last_class(t, tokens, window) for t in range(tokens)] for _ in range(layer.heads)]
    return Ranked(value, classes)


def recency_score(layer: Layer, sinks: int = 0) -> Ranked:
    tokens = layer.tokens
    classes = []
    for t in range(tokens):
        sink = SINK if t < sinks else FREE
        classes.append(NEWEST if sinks and t == tokens - 1 else sink)
    value = [float(t) for t in range(tokens)]
    return Ranked([value] * layer.heads, [classes] * layer.heads)


def age_score(layer: Layer) -> Ranked:
    """`recency` without sinks as it is, 0 or less: what a product with norms depends on."""
    value = [float(t + 1 - layer.tokens) for t in range(layer.tokens)]
    return Ranked([value] * layer.heads, [[FREE] * layer.tokens] * layer.heads)


def knorm_score(layer: Layer) -> Ranked:
    value = [[-math.sqrt(sum(x * x for x in key)) for key in head] for head in layer.k]
    return Ranked(value, [[FREE] * layer.tokens] * layer.heads)


def keydiff_score(layer: Layer) -> Ranked:
    value = []
    for head in layer.k:
        units = [key / math.sqrt(sum(x * x for x in key)) for key in head]
        anchor = sum(units) / len(units)
        length = math.sqrt(sum(x * x for x in anchor))
        value.append([-float(u @ anchor) / length for u in units])
    return Ranked(value, [[FREE] * layer.tokens] * layer.heads)


def given_score(value: np.ndarray) -> Ranked:
    """Any values, nothing protected."""
    return Ranked([[float(x) for x in row] for row in value], [[FREE] * value.shape[1]] * value.shape[0])


# --- allocation -----------------------------------------------------------------------------------


def place(c: int, i: int) -> int:
    """Of equals the more recent goes last; of the sinks the first."""
    return -i if c == SINK else i


def order_head(ranked: Ranked, h: int) -> list[int]:
    def worth(i: int) -> tuple[float, ...]:
        c = ranked.classes[h][i]
        return (c, 0.0 if c else ranked.value[h][i], place(c, i))

    return sorted(range(len(ranked.value[h])), key=worth, reverse=True)


def joint(layers: list[Ranked], count: int, taken: set[tuple[int, int, int]]) -> list[list[int]]:
    """Counts per layer and head of `taken` and of the `count` best others of all heads."""
    rest = []
    for m, ranked in enumerate(layers):
        for h, classes in enumerate(ranked.classes):
            for i, c in enumerate(classes):
                if (m, h, i) not in taken:
                    rest.append((-c, -(0.0 if c else ranked.value[h][i]), -place(c, i), m, h))
    counts = [[0] * len(ranked.value) for ranked in layers]
    for m, h, _ in taken:
        counts[m][h] += 1
    for *_, m, h in sorted(rest)[:count]:
        counts[m][h] += 1
    return counts


def uniform(layers: list[Ranked], b: int) -> list[list[int]]:
    return [[b] * len(ranked.value) for ranked in layers]


def global_shares(layers: list[Ranked], b: int) -> list[list[int]]:
    return joint(layers, b * sum(len(ranked.value) for ranked in layers), set())


def head_adaptive(layers: list[Ranked], b: int, safeguard: float = 0.2) -> list[list[int]]:
    shares = []
    for ranked in layers:
        heads = len(ranked.value)
        floor = floor_of(safeguard, b)
        safe = {(0, h, i) for h in range(heads) for i in order_head(ranked, h)[:floor]}
        shares += joint([ranked], heads * b - heads * floor, safe)
    return shares


def head_adaptive_mix(layers: list[Ranked], b: int, window: int, safeguard: float = 0.2) -> list[list[int]]:
    """AdaKV's repository; the budget is larger than the window and smaller than the context."""
    shares = []
    for ranked in layers:
        heads = len(ranked.value)
        past = [
            Ranked([row[: len(row) - window]], [classes[: len(row) - window]])
            for row, classes in zip(ranked.value, ranked.classes, strict=True)
        ]
        free = Ranked([p.value[0] for p in past], [p.classes[0] for p in past])
        counts = joint([free], heads * (b - window), set())[0]
        alpha = Fraction(str(safeguard))
        real = [(1 - alpha) * c + floor_of(safeguard, b - window) + window for c in counts]
        whole = [math.floor(x) for x in real]
        left = heads * b - sum(whole)
        by_remainder = sorted(range(heads), key=lambda h: (-(real[h] - whole[h]), h))
        for turn in range(left):
            whole[by_remainder[turn % heads]] += 1
        shares.append(whole)
    return shares


# --- selection ------------------------------------------------------------------------------------


def top_k(layer: Layer, ranked: Ranked, shares: list[int]) -> list[list[int]]:
    return [sorted(order_head(ranked, h)[:n]) for h, n in enumerate(shares)]


@once
def value_norm(layer: Layer, h: int, i: int, norm: str) -> float:
    norms = []
    for g in range(h * layer.group, (h + 1) * layer.group):
        out = [float(layer.v[h, i] @ layer.w_o[g][:, j]) for j in range(layer.w_o.shape[2])]
        norms.append(sum(abs(x) for x in out) if norm == "l1" else math.sqrt(sum(x * x for x in out)))
    return sum(norms) / len(norms)


def two_stage(
    layer: Layer,
    ranked: Ranked,
    shares: list[int],
    first_stage: float = 0.5,
    eps: float = 1e-4,
    norm: str = "l1",
    release: float | None = None,
) -> list[list[int]]:
    """Algorithm 1, for scores that are 0 or more; others are shifted to be.

    `release`: the safeguard of the released code, whose best entries join stage 1; it shifts
    nothing.
    """
    kept = []
    for h, n in enumerate(shares):
        order = order_head(ranked, h)
        protected = [i for i in order if ranked.classes[h][i]][:n]
        others = [i for i in order if not ranked.classes[h][i]]
        stage1 = protected + others[: max(0, floor_of(first_stage, n) - len(protected))]
        shift = min(0.0, min(ranked.value[h]))
        if release is not None:
            safe = floor_of(release, Fraction(sum(shares), len(shares)))
            stage1 = list(dict.fromkeys(stage1 + order[: min(n, safe)]))
            shift = 0.0
        worth = {
            i: (ranked.value[h][i] - shift + eps) * value_norm(layer, h, i, norm) for i in order if i not in stage1
        }
        stage2 = sorted(worth, key=lambda i: (worth[i], i), reverse=True)[: n - len(stage1)]
        kept.append(sorted(stage1 + stage2))
    return kept


def keep(
    layers: list[Layer],
    score: Callable[[Layer], Ranked],
    allocate: Callable[[list[Ranked]], list[list[int]]],
    select: Callable[[Layer, Ranked, list[int]], list[list[int]]] = top_k,
) -> list[list[list[int]]]:
    """Kept tokens of every layer and head."""
    ranked = [score(layer) for layer in layers]
    shares = allocate(ranked)
    return [select(*row) for row in zip(layers, ranked, shares, strict=True)]
