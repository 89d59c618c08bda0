"""Triton kernels of attention over ragged segments: split-KV decoding, and the mass of entries.

A segment is what one sequence holds for one KV head: entries in the prefill that it shares with other
sequences, by their columns there, and then rows of its own of a packed `[rows, d]`. K and V are read
where they lie, and once for all query heads of the group: the rows of a tile are the group's heads
times the new queries. Tiles are the same wherever entries lie, and so is the result; a shared entry
costs the read of its column as well.

The segment is cut in splits of `SPLIT` entries, one program each (`attend`), whose partial outputs are
then added up (`combine`). Where a segment is cut depends on nothing but the number of queries, so the
result of a sequence does not depend on the rest of the batch.

A second pass over the keys (`receive`) sums up the weights that every entry received, from logits
made anew and the logarithm of the sum of exponentials that the first pass leaves behind.

A soft cap bends the logits of both passes. An attention sink is one more exponential in the total of a
segment's first split, so that its logarithm of the sum, from which both `combine` and `receive`
proceed, has it already.

Logits are in base 2. There are no atomics: every number is written by one program. Kernels are not
specialised for lengths and columns: one serves all steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.engine.kernels.launch import (
    ASYNC_COPY,
    Compiled,
    dot_ready,
    interpreting,
    on_its_device,
)
from kvbench.view.softmax import cap_of, sinks_of

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)
"""Largest logit of no entries: finite, so that differences are."""


class AttentionTile(NamedTuple):
    """Rows of queries and entries of a block, warps, stages of the pipeline."""

    queries: int
    entries: int
    warps: int
    stages: int


# Of up to 16 rows of queries, the least that a tensor core multiplies, and of more. Chosen by
# register and shared memory use; not timed on a GPU.
HALF = {
    64: (AttentionTile(16, 64, 4, 3), AttentionTile(64, 64, 4, 3)),
    128: (AttentionTile(16, 64, 4, 3), AttentionTile(64, 64, 8, 3)),
    256: (AttentionTile(16, 32, 4, 3), AttentionTile(64, 32, 8, 2)),  # a third stage has no room on consumer GPUs
}
"""For 16-bit K and V, by head dimension, rounded up to a power of 2, at least 64."""
SINGLE = {
    64: (AttentionTile(16, 32, 4, 3), AttentionTile(32, 32, 4, 3)),
    128: (AttentionTile(16, 32, 4, 3), AttentionTile(16, 32, 4, 3)),  # 32x32 spills with shared entries
    256: (AttentionTile(16, 32, 8, 2), AttentionTile(16, 16, 8, 2)),
}
"""For float32."""
SPLIT, SMALL_SPLIT = 256, 64
"""Entries of a split with few queries; the small one of the interpreter, for short tests."""
PARTS = 32
"""Splits that `combine` adds up at once."""


# fmt: off
@triton.jit
def _queries(
    Q, b, h, r, n, q_b, q_h, q_n, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    """Load rows `r = query * G + head of the group` of a KV head, widened to DP; 0 outside."""
    d = tl.arange(0, DP)
    at = b.to(tl.int64) * q_b + (h * G + r % G).to(tl.int64) * q_h + (r // G).to(tl.int64) * q_n
    mask = (r < n * G)[:, None] & (d < D)[None, :]
    return tl.load(Q + at[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def _entries(X, j, end, D: tl.constexpr, DP: tl.constexpr):
    """Load entries `j` of a segment, widened to DP; 0 from `end` on."""
    d = tl.arange(0, DP)
    at = X + j[:, None] * D + d[None, :]
    if DP == D:
        return tl.load(at, mask=(j < end)[:, None], other=0.0)
    return tl.load(at, mask=(j < end)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _scattered(X, SHARED, index, in_shared, j, end, D: tl.constexpr, DP: tl.constexpr):
    """Load entries `j` of a segment, as `_entries` does: rows `index` of SHARED or of X.

    SHARED: an address in bytes.
    """
    size: tl.constexpr = X.dtype.element_ty.primitive_bitwidth // 8
    d = tl.arange(0, DP)
    at = (tl.where(in_shared, SHARED, X.to(tl.int64)) + index.to(tl.int64) * (D * size)).to(X.dtype)
    if D * size % 16 == 0:
        at = tl.multiple_of(at, 16)
    return tl.load(at[:, None] + d[None, :], mask=(j < end)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def soft_cap(z, cap):
    """Return `cap tanh(z / cap)`. Written with exponentials, as Triton's interpreter has no tanh."""
    return cap - 2 * cap / (tl.exp2(z * (2 * LOG2E / cap)) + 1)


@triton.jit
def _logits(
    q, k, COL, j, shared, end, column, scale, cap, CAUSAL: tl.constexpr, PRECISION: tl.constexpr
):
    """Logits of a tile in base 2; -inf for entries from `end` on or after the query's column.

    COL: columns of the entries, or of those from `shared` on; all queries see those before.
    """
    z = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if cap is None:
        z = z * (scale * LOG2E)
    else:
        z = soft_cap(z * scale, cap) * LOG2E
    seen = (j < end)[None, :]
    if CAUSAL:
        if shared is None:
            col = tl.load(COL + j, mask=j < end, other=0)
        else:
            col = tl.load(COL + j - shared, mask=(j >= shared) & (j < end), other=-1)
        seen = seen & (col[None, :] <= column[:, None])
    return tl.where(seen, z, -float("inf"))


@triton.jit(do_not_specialize=["n", "first", "split"])
def attend(
    Q, K, V, COL, START, LENGTH, SHARED, SINK, OUT, LSE, n, first, split, scale, cap, q_b, q_h, q_n,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Attention of a tile of queries over one split of a segment.

    The grid is (segments, splits, tiles). SHARED: int64 `[segments, 4]` or None. SINK: float32
    `[H G]` or None. LSE `[segments, splits, n G]`: log2 of the sum of exponentials. OUT: float32
    `[segments, splits, n G, D]`, or if segments are WHOLE the output itself, `[B, n, H G, D]`.
    CAUSAL: there are several queries, and columns decide.
    """
    segment = tl.program_id(0)
    b = segment // H
    h = segment % H
    s = tl.program_id(1)
    length = tl.load(LENGTH + segment).to(tl.int32)
    if SHARED is not None:
        SHARED += segment * 4
        shared = tl.load(SHARED + 3).to(tl.int32)
        length += shared
    j0 = s * split
    if j0 >= tl.maximum(length, 1):  # the first split of an empty segment writes its zeros
        return
    end = tl.minimum(j0 + split, length)
    row = tl.load(START + segment)
    K += row * D
    V += row * D
    COL += row
    if SHARED is not None:
        key_at = tl.load(SHARED)
        value_at = tl.load(SHARED + 1)
        columns = tl.load(SHARED + 2).to(COL.dtype)
    r = tl.program_id(2) * BM + tl.arange(0, BM)
    q = _queries(Q, b, h, r, n, q_b, q_h, q_n, G, D, DP)
    column = first + r // G
    top = tl.full((BM,), NOTHING, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DP), tl.float32)
    for i in range(j0, end, BN):
        j = i + tl.arange(0, BN)
        if SHARED is None:
            k = _entries(K, j, end, D, DP)
            z = _logits(q, k, COL, j, None, end, column, scale, cap, CAUSAL, PRECISION)
        else:
            in_shared = j < shared
            index = tl.where(in_shared, tl.load(columns + j, mask=in_shared, other=0), j - shared)
            k = _scattered(K, key_at, index, in_shared, j, end, D, DP)
            z = _logits(q, k, COL, j, shared, end, column, scale, cap, CAUSAL, PRECISION)
        higher = tl.maximum(top, tl.max(z, 1))
        p = tl.exp2(z - higher[:, None])
        shrink = tl.exp2(top - higher)
        if SHARED is None:
            v = _entries(V, j, end, D, DP)
        else:
            v = _scattered(V, value_at, index, in_shared, j, end, D, DP)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        total = total * shrink + tl.sum(p, 1)
        top = higher
    if SINK is not None:
        sink = tl.load(SINK + h * G + r % G) * LOG2E
        sink = tl.where(s == 0, sink, -float("inf"))
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sink - higher)
        top = higher
    total = tl.where(total > 0, total, 1.0)  # a query that sees nothing: acc is 0
    part = (segment.to(tl.int64) * tl.num_programs(1) + s) * (n * G) + r
    tl.store(LSE + part, top + tl.log2(total), mask=r < n * G)
    if WHOLE:
        part = ((b.to(tl.int64) * n + r // G) * H + h) * G + r % G
    d = tl.arange(0, DP)
    out = (acc / total[:, None]).to(OUT.dtype.element_ty)
    mask = (r < n * G)[:, None] & (d < D)[None, :]
    tl.store(OUT + part[:, None] * D + d[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["n", "split", "splits"])
def combine(
    PART, PART_LSE, LENGTH, SHARED, OUT, LSE, n, split, splits,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
):
    """Add up the splits of a segment: OUT `[B, n, H G, D]` and LSE `[segments, n G]`.

    The grid is (n G, segments): questions of a long prompt can be more than 65,535 rows.
    """
    segment = tl.program_id(1)
    r = tl.program_id(0)
    length = tl.load(LENGTH + segment).to(tl.int32)
    if SHARED is not None:
        length += tl.load(SHARED + segment * 4 + 3).to(tl.int32)
    own = tl.cdiv(length, split)
    d = tl.arange(0, DP)
    s = tl.arange(0, BS)
    part = segment.to(tl.int64) * splits * (n * G) + r
    highest = tl.full((BS,), NOTHING, tl.float32)
    for s0 in range(0, own, BS):
        there = s0 + s < own
        lse = tl.load(PART_LSE + part + (s0 + s) * (n * G), mask=there, other=NOTHING)
        highest = tl.maximum(highest, lse)
    top = tl.max(highest, 0)
    acc = tl.zeros((DP,), tl.float32)
    total = tl.zeros((BS,), tl.float32)
    for s0 in range(0, own, BS):
        there = s0 + s < own
        at = part + (s0 + s) * (n * G)
        lse = tl.load(PART_LSE + at, mask=there, other=-float("inf"))
        weight = tl.exp2(lse - top)
        mask = there[:, None] & (d < D)[None, :]
        x = tl.load(PART + at[:, None] * D + d[None, :], mask=mask, other=0.0)
        acc += tl.sum(weight[:, None] * x, 0)
        total += weight
    whole = tl.sum(total, 0)
    whole = tl.where(whole > 0, whole, 1.0)  # an empty segment
    out = ((segment // H).to(tl.int64) * n + r // G) * (H * G) + segment % H * G + r % G
    tl.store(OUT + out * D + d, (acc / whole).to(OUT.dtype.element_ty), mask=d < D)
    tl.store(LSE + segment.to(tl.int64) * (n * G) + r, top + tl.log2(whole))


@triton.jit(do_not_specialize=["n", "first", "entries"])
def receive(
    Q, K, COL, START, LENGTH, BEFORE, LSE, MASS, n, first, entries, scale, cap, q_b, q_h, q_n,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, POWERS: tl.constexpr, PRECISION: tl.constexpr,
):
    """MASS[k, entry, g] = sum over the queries of the weights from head g to the power POWERS[k].

    The grid is (segments, blocks of entries). MASS float32 `[powers, entries, G]`; BEFORE: entries
    of the segments before. A query with an infinite LSE does not count.
    """
    segment = tl.program_id(0)
    b = segment // H
    h = segment % H
    length = tl.load(LENGTH + segment).to(tl.int32)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    if tl.program_id(1) * BN >= length:
        return
    row = tl.load(START + segment)
    MASS += tl.load(BEFORE + segment) * G
    LSE += segment.to(tl.int64) * (n * G)
    k = _entries(K + row * D, j, length, D, DP)
    m = tl.arange(0, BM)
    for g in range(G):
        for p in tl.static_range(len(POWERS)):
            total = tl.zeros((BN,), tl.float32)
            for i0 in range(0, n, BM):
                i = i0 + m
                r = tl.where(i < n, i * G + g, n * G)
                q = _queries(Q, b, h, r, n, q_b, q_h, q_n, G, D, DP)
                z = _logits(
                    q, k, COL + row, j, None, length, first + i, scale, cap, CAUSAL, PRECISION
                )
                lse = tl.load(LSE + r, mask=i < n, other=float("inf"))
                total += tl.sum(tl.exp2((z - lse[:, None]) * POWERS[p]), 0)
            at = MASS + (p * entries + j.to(tl.int64)) * G + g
            tl.store(at, total, mask=j < length)
# fmt: on


@on_its_device
def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    col: Tensor,
    start: Tensor,
    length: Tensor,
    lengths: Sequence[int],
    shared: Tensor | None,
    first: int,
    scale: float,
    powers: Sequence[int] = (),
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `ref.ragged_attention` defines, in float32, on a GPU or in the interpreter.

    Nothing waits for the GPU, and neither K nor V is copied. There is no gradient.

    Args:
        query: `[B, H_q, n, d]`.
        key, value: `[rows, d]`, contiguous, of the query's dtype.
        col: Logical column of every row, ascending in a segment, int32 `[rows]`.
        start, length: First row and number of rows of every segment, int64 `[B, H, 1]`.
        lengths: Entries of every segment, on the CPU.
        shared: Addresses of shared keys, values and columns, and the number of shared entries, which come before the
            rows, int64 `[B * H, 4]`; None: nothing is shared, as it must be with `powers`.
        first: Logical column of the first query.
        scale: Factor of the logits, with a soft cap and sinks if the family has them.
        powers: Powers of the weights to sum over the queries.
        valid: Queries whose weights are summed, bool `[B, n]`; None: all.

    Returns:
        Output `[B, H_q, n, d]`, a view of `[B, n, H_q, d]`, and mass, float32
        `[powers, entries, G]`, segment by segment.
    """
    batch, query_heads, n, dim = query.shape
    heads = length.shape[1]
    group, longest, entries = query_heads // heads, max(lengths), sum(lengths)
    dtype = query.dtype
    query = query if query.stride(-1) == 1 else query.contiguous()
    assert key.is_contiguous() and value.is_contiguous()  # the interpreter's copies would hide it
    if interpreting():
        query, key, value = dot_ready(query), dot_ready(key), dot_ready(value)
    out = torch.empty(batch, n, query_heads, dim, dtype=query.dtype, device=query.device)
    single: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    mass = torch.empty(len(powers), entries, group, **single)
    size = {"H": heads, "G": group, "D": dim, "DP": _wide(dim)}
    how = {"CAUSAL": n > 1, "PRECISION": _precision(query.dtype.itemsize, size["DP"])}
    rows, segments = n * group, batch * heads
    tile = _tile(rows, query.dtype.itemsize, size["DP"])
    # With 4 entries a row, partial outputs take half as many bytes as keys of 16 bits.
    split = max(SMALL_SPLIT if interpreting() else SPLIT, 4 * rows)
    splits = max(1, triton.cdiv(longest, split))
    whole = splits == 1
    lse = torch.empty(segments, splits, rows, **single)
    part = out if whole else torch.empty(segments, splits, rows, dim, **single)
    strides, sinks, cap = query.stride()[:3], sinks_of(scale), cap_of(scale)
    sinks = None if sinks is None else sinks.to(query.device)
    scale = float(scale)
    attend[(segments, splits, triton.cdiv(rows, tile.queries))](
        query, key, value, col, start, length, shared, sinks, part, lse, n, first, split, scale, cap, *strides,
        **size, **how, BM=tile.queries, BN=tile.entries, WHOLE=whole,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if not whole:
        parts, lse = lse, torch.empty(segments, rows, **single)
        combine[(rows, segments)](
            part, parts, length, shared, out, lse, n, split, splits, **size, BS=PARTS, num_warps=4
        )
    if powers and entries:
        lse = lse.view(batch, heads, n, group)
        if valid is not None:
            lse = lse.masked_fill(~valid[:, None, :, None], torch.inf)
        before = length.flatten().cumsum(0) - length.flatten()
        tile = _tile(1, query.dtype.itemsize, size["DP"])
        receive[(segments, triton.cdiv(longest, tile.entries))](
            query, key, col, start, length, before, lse, mass, n, first, entries, scale, cap, *strides,
            **size, **how, BM=tile.queries, BN=tile.entries, POWERS=tuple(powers),
            num_warps=tile.warps, num_stages=2,
        )  # fmt: skip
    return out.to(dtype).transpose(1, 2), mass


def _wide(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _tile(rows: int, itemsize: int, wide: int) -> AttentionTile:
    """The tile for `n G` rows of queries."""
    few, many = (HALF if itemsize == 2 else SINGLE)[max(wide, 64)]
    tile = few if rows <= few.queries else many
    return tile._replace(entries=32) if interpreting() else tile


def _precision(itemsize: int, wide: int) -> str:
    """How products are made: of float32 from three of TF32, whose parts have to fit registers."""
    return "tf32x3" if itemsize == 4 and wide <= 128 else "ieee"


def compiled(arch: int) -> Iterator[Compiled]:
    """The kernels as launched on an architecture, for the offline compile gate."""
    strides = ("q_b", "q_h", "q_n")
    segments = {"START": "*i64", "LENGTH": "*i64", "COL": "*i32", "LSE": "*fp32", "n": "i32"}
    segments |= {"first": "i32", "scale": "fp32", "SINK": "*fp32", "cap": "fp32"} | dict.fromkeys(strides, "i32")
    choices = [("bf16", dim) for dim in (64, 80, 96, 128, 256)]
    choices += [("fp32", dim) for dim in (64, 128, 256)]
    # Sinks and a cap at once take more registers than either; with entries that are shared, they take the most.
    variants = (True, False), (False, False), (False, True)
    for (name, dim), rows, (is_plain, shares) in product(choices, (4, 256), variants):
        itemsize, wide = (2 if name == "bf16" else 4), _wide(dim)
        tile, precision = _tile(rows, itemsize, wide), _precision(itemsize, wide)
        inputs = segments | dict.fromkeys("QKV", f"*{name}")
        size = {"H": 8, "G": 4, "D": dim, "DP": wide, "PRECISION": precision}
        size |= {"BM": tile.queries, "BN": tile.entries, "CAUSAL": rows > 4}
        size |= {"cap": None} if is_plain else {}
        cores = ("HGMMA|HMMA",) if wide <= 128 or itemsize == 2 else ()
        shape = f"{name} d{dim} {tile.queries}x{tile.entries} w{tile.warps}{' causal' if rows > 4 else ''}"
        takes_most_memory = (name, dim, rows) == ("bf16", 256, 256) and is_plain and not shares
        variant = (name, dim) != ("bf16", 128) and not takes_most_memory
        yield Compiled(
            f"ragged_attention attend {shape}{' shared' if shares else ''}{'' if is_plain else ' sinks cap'}",
            attend,
            inputs | {"SHARED": "*i64", "OUT": "*fp32", "split": "i32"},
            size | {"WHOLE": False} | ({"SINK": None} if is_plain else {}) | ({} if shares else {"SHARED": None}),
            tile.warps,
            tile.stages,
            aligned=strides,
            expect=(*cores, ASYNC_COPY),
            variant=variant,
        )
        if rows == 4 and not shares:
            yield Compiled(
                f"ragged_attention receive {shape}{'' if is_plain else ' cap'}",
                receive,
                inputs | {"BEFORE": "*i64", "MASS": "*fp32", "entries": "i64"},
                size | {"POWERS": (1,)},
                tile.warps,
                2,
                aligned=strides,
                expect=cores,
                variant=variant,
            )
    yield Compiled(
        "ragged_attention combine d128 w4",
        combine,
        {"PART": "*fp32", "PART_LSE": "*fp32", "LENGTH": "*i64", "SHARED": "*i64", "OUT": "*bf16", "LSE": "*fp32"}
        | dict.fromkeys(("n", "split", "splits"), "i32"),
        {"H": 8, "G": 4, "D": 128, "DP": 128, "BS": PARTS},
        4,
    )
