"""Triton kernels of retention-gated attention, in the manner of FlashAttention.

Logits are in base 2. Padding, which must be finite, is masked by a bias of 0 or -inf per key that
is added with the gate's term at no extra cost; only blocks on the diagonal compare. In
`age * log2(beta)`, age is a difference of integers, which is exact in float32.

There are no atomics: one program owns a block of keys with its dk, dv and dlog_beta over all query
heads of the group, another a block of queries with its dq, so results do not vary. Kernels are not
specialised for the length: one kernel serves all lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.engine.kernels.launch import (
    ASYNC_COPY,
    TENSOR_CORES,
    Compiled,
    architecture,
    dot_ready,
    interpreting,
    on_its_device,
)
from kvbench.engine.kernels.ragged_attention.triton import soft_cap

LOG2E = tl.constexpr(1.4426950408889634)

# Queries and keys of a block, warps, stages. Chosen by register use; not timed on a GPU.
Block = tuple[int, int, int, int]
FORWARD: dict[int, Block] = {80: (64, 64, 8, 2), 90: (128, 64, 8, 3)}
BACKWARD_KEYS: dict[int, Block] = {80: (32, 64, 8, 2), 90: (32, 128, 8, 2)}
BACKWARD_QUERIES: dict[int, Block] = {80: (64, 64, 8, 2), 90: (128, 64, 8, 2)}
# Multiplicative gating holds one more block, with which warp-group products of 128 dims spill: those of keys, and
# with a soft cap those of queries.
WIDE_MULTIPLICATIVE: dict[int, Block] = {80: (64, 64, 8, 2), 90: (128, 32, 8, 2)}
SINGLE: dict[bool, Block] = {False: (32, 32, 8, 1), True: (32, 16, 8, 1)}
"""For float32, up to 64 dims and above: larger blocks spill, or have no room in the 99 KiB of consumer GPUs."""
SMALL = 64
"""Block of the interpreter, so that short tests have several."""


# fmt: off
@triton.jit
def _rows(X, first, row, T, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """Load rows `row` of a matrix `[T, D]` that begins at row `first`, widened to DP; 0 outside."""
    d = tl.arange(0, DP)
    at = X + first * D + (row[:, None] * D + d[None, :])  # T D < 2^31
    if DP == D:
        if MASKED:
            return tl.load(at, mask=(row < T)[:, None], other=0.0)
        return tl.load(at)
    return tl.load(at, mask=(row < T)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _put(X, value, first, row, T, D: tl.constexpr, DP: tl.constexpr):
    """Store what `_rows` would load."""
    d = tl.arange(0, DP)
    at = X + first * D + (row[:, None] * D + d[None, :])  # T D < 2^31
    mask = (row < T)[:, None] & (d < D)[None, :]
    tl.store(at, value.to(X.dtype.element_ty), mask=mask)


@triton.jit
def _logit(z, scale, cap):
    """Logits of the model in base 2, before the gates, from products of queries and keys."""
    if cap is None:
        return z * (scale * LOG2E)
    else:
        return soft_cap(z * scale, cap) * LOG2E


@triton.jit
def _step(
    q, K, V, LOG_BETA, kv, m, n0, start, T, scale, cap, acc, total, top,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    MULTIPLICATIVE: tl.constexpr, DIAGONAL: tl.constexpr,
):
    """One block of keys under an online softmax. Off the diagonal all keys precede all queries."""
    n = n0 + tl.arange(0, BN)
    k = _rows(K, kv, n, T, D, DP, DIAGONAL)
    if DIAGONAL:
        rate = tl.load(LOG_BETA + kv + n, mask=n < T, other=0.0) * LOG2E
    else:
        rate = tl.load(LOG_BETA + kv + n) * LOG2E
    bias = tl.where(n >= start, 0.0, -float("inf"))
    z = tl.dot(q, tl.trans(k), input_precision="ieee")
    age = (m[:, None] - n[None, :]).to(tl.float32)
    if DIAGONAL:
        age = tl.maximum(age, 0.0)
    z = _logit(z, scale, cap)
    if MULTIPLICATIVE:
        s = z * tl.exp2(age * rate[None, :]) + bias[None, :]
    else:
        s = z + (age * rate[None, :] + bias[None, :])
    if DIAGONAL:
        s = tl.where(m[:, None] >= n[None, :], s, -float("inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - higher[:, None])
    shrink = tl.exp2(top - higher)
    v = _rows(V, kv, n, T, D, DP, DIAGONAL)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total * shrink + tl.sum(p, 1), higher


@triton.jit(do_not_specialize=["T"])
def forward(
    Q, K, V, LOG_BETA, START, SINK, OUT, LSE, T, scale, cap,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MULTIPLICATIVE: tl.constexpr,
):
    """OUT [B, G H, T, D] and LSE [B, G H, T], log2 of the sum of exponentials, of some queries.

    SINK: float32 [G H] or None. BM is a multiple of BN, DP the next power of two from D on.
    """
    lane = tl.program_id(1)  # b * Hq + query head
    b = lane // (G * H)
    kv = (b * H + lane % (G * H) // G).to(tl.int64) * T
    row = lane.to(tl.int64) * T
    start = tl.load(START + b)
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # the longest first
    m = m0 + tl.arange(0, BM)
    q = _rows(Q, row, m, T, D, DP, True)
    top = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DP), tl.float32)
    for n0 in range(start // BN * BN, m0, BN):
        acc, total, top = _step(
            q, K, V, LOG_BETA, kv, m, n0, start, T, scale, cap, acc, total, top,
            D, DP, BN, MULTIPLICATIVE, False,
        )
    for n0 in range(m0, tl.minimum(m0 + BM, T), BN):
        acc, total, top = _step(
            q, K, V, LOG_BETA, kv, m, n0, start, T, scale, cap, acc, total, top,
            D, DP, BN, MULTIPLICATIVE, True,
        )
    if SINK is not None:
        sink = tl.load(SINK + lane % (G * H)) * LOG2E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sink - higher)
        top = higher
    total = tl.where(total > 0, total, 1.0)  # a padded query sees nothing: acc is 0
    _put(OUT, acc / total[:, None], row, m, T, D, DP)
    tl.store(LSE + row + m, top + tl.log2(total), mask=m < T)


@triton.jit(do_not_specialize=["N"])
def row_products(OUT, GRAD, DELTA, N, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr):
    """DELTA[row] = sum over d of OUT[row, d] GRAD[row, d], float32, of N rows."""
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    out = _rows(OUT, 0, m, N, D, DP, True).to(tl.float32)
    grad = _rows(GRAD, 0, m, N, D, DP, True).to(tl.float32)
    tl.store(DELTA + m, tl.sum(out * grad, 1), mask=m < N)


@triton.jit
def _slopes(
    z, dp, m, n, rate, shift, delta, scale, cap,
    MULTIPLICATIVE: tl.constexpr, DIAGONAL: tl.constexpr,
):
    """Weights, gradients of the products, and of the rates, from products `z` and `dp = grad . v`.

    All arguments broadcast to the block in either orientation. `shift` is added to the logits.
    """
    age = (m - n).to(tl.float32)
    if DIAGONAL:
        age = tl.maximum(age, 0.0)
    z = _logit(z, scale, cap)
    if MULTIPLICATIVE:
        fade = tl.exp2(age * rate)
        faded = z * fade
        s = faded + shift
    else:
        s = z + (age * rate + shift)
    if DIAGONAL:
        s = tl.where(m >= n, s, -float("inf"))
    p = tl.exp2(s)
    ds = p * (dp - delta)
    dz = ds
    if MULTIPLICATIVE:
        dz = ds * fade
    if cap is not None:
        bent = z * (1.0 / LOG2E) / cap  # the hyperbolic tangent
        dz = dz * (1 - bent * bent)
    if MULTIPLICATIVE:
        return p, dz, ds * age * faded
    return p, dz, ds * age


@triton.jit
def _keys_step(
    k, v, rate, Q, GRAD, LSE, DELTA, row, m0, n, T, scale, cap, dk, dv, drate,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    MULTIPLICATIVE: tl.constexpr,
):
    """One block of queries; a separate loop for those off the diagonal would spill registers."""
    m = m0 + tl.arange(0, BM)
    there = tl.minimum(m, T - 1)  # beyond the end the last row is read, and its weight is 0
    q = _rows(Q, row, there, T, D, DP, False)
    grad = _rows(GRAD, row, there, T, D, DP, False)
    lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
    delta = tl.load(DELTA + row + there)
    z = tl.dot(k, tl.trans(q), input_precision="ieee")  # [BN, BM]
    dp = tl.dot(v, tl.trans(grad), input_precision="ieee")
    p, ds, dr = _slopes(
        z, dp, m[None, :], n[:, None], rate[:, None], -lse[None, :], delta[None, :],
        scale, cap, MULTIPLICATIVE, True,
    )
    dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv, drate + tl.sum(dr, 1)


@triton.jit(do_not_specialize=["T"])
def backward_keys(
    Q, K, V, LOG_BETA, START, GRAD, LSE, DELTA, DK, DV, DLOG_BETA, T, scale, cap,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MULTIPLICATIVE: tl.constexpr,
):
    """DK, DV and DLOG_BETA of a block of keys, over all later queries of the group's heads."""
    n0 = tl.program_id(0) * BN
    lane = tl.program_id(1)  # b * H + KV head
    kv = lane.to(tl.int64) * T
    n = n0 + tl.arange(0, BN)
    k = _rows(K, kv, n, T, D, DP, True)
    v = _rows(V, kv, n, T, D, DP, True)
    rate = tl.load(LOG_BETA + kv + n, mask=n < T, other=0.0) * LOG2E
    dk = tl.zeros((BN, DP), tl.float32)
    dv = tl.zeros((BN, DP), tl.float32)
    drate = tl.zeros((BN,), tl.float32)
    for g in range(G):
        row = (lane * G + g).to(tl.int64) * T
        for m0 in range(n0 // BM * BM, T, BM):
            dk, dv, drate = _keys_step(
                k, v, rate, Q, GRAD, LSE, DELTA, row, m0, n, T, scale, cap, dk, dv, drate,
                D, DP, BM, MULTIPLICATIVE,
            )
    if MULTIPLICATIVE:
        drate = drate * (1.0 / LOG2E)
    real = n >= tl.load(START + lane // H)  # what a padded key was given stayed with it
    _put(DK, tl.where(real[:, None], dk * scale, 0.0), kv, n, T, D, DP)
    _put(DV, tl.where(real[:, None], dv, 0.0), kv, n, T, D, DP)
    tl.store(DLOG_BETA + kv + n, tl.where(real, drate, 0.0), mask=n < T)


@triton.jit
def _queries_step(
    q, grad, lse, delta, K, V, LOG_BETA, kv, m, n0, start, T, scale, cap, dq,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    MULTIPLICATIVE: tl.constexpr, DIAGONAL: tl.constexpr,
):
    """One block of keys. Off the diagonal all of them precede all of the queries."""
    n = n0 + tl.arange(0, BN)
    k = _rows(K, kv, n, T, D, DP, DIAGONAL)
    v = _rows(V, kv, n, T, D, DP, DIAGONAL)
    if DIAGONAL:
        rate = tl.load(LOG_BETA + kv + n, mask=n < T, other=0.0) * LOG2E
    else:
        rate = tl.load(LOG_BETA + kv + n) * LOG2E
    bias = tl.where(n >= start, 0.0, -float("inf"))
    z = tl.dot(q, tl.trans(k), input_precision="ieee")
    dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
    _p, ds, _dr = _slopes(
        z, dp, m[:, None], n[None, :], rate[None, :], bias[None, :] - lse[:, None],
        delta[:, None], scale, cap, MULTIPLICATIVE, DIAGONAL,
    )
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["T"])
def backward_queries(
    Q, K, V, LOG_BETA, START, GRAD, LSE, DELTA, DQ, T, scale, cap,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MULTIPLICATIVE: tl.constexpr,
):
    """DQ of a block of queries, over all earlier keys. BM is a multiple of BN."""
    lane = tl.program_id(1)
    b = lane // (G * H)
    kv = (b * H + lane % (G * H) // G).to(tl.int64) * T
    row = lane.to(tl.int64) * T
    start = tl.load(START + b)
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    m = m0 + tl.arange(0, BM)
    q = _rows(Q, row, m, T, D, DP, True)
    grad = _rows(GRAD, row, m, T, D, DP, True)
    lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
    delta = tl.load(DELTA + row + m, mask=m < T, other=0.0)
    dq = tl.zeros((BM, DP), tl.float32)
    for n0 in range(start // BN * BN, m0, BN):
        dq = _queries_step(
            q, grad, lse, delta, K, V, LOG_BETA, kv, m, n0, start, T, scale, cap, dq,
            D, DP, BN, MULTIPLICATIVE, False,
        )
    for n0 in range(m0, tl.minimum(m0 + BM, T), BN):
        dq = _queries_step(
            q, grad, lse, delta, K, V, LOG_BETA, kv, m, n0, start, T, scale, cap, dq,
            D, DP, BN, MULTIPLICATIVE, True,
        )
    _put(DQ, dq * scale, row, m, T, D, DP)
# fmt: on


def _table(kernel: Any, itemsize: int, wide: bool, mult: bool, capped: bool) -> dict[int, Block]:
    """The block sizes of a kernel by architecture; `wide` above 64 dims."""
    if itemsize == 4:
        return dict.fromkeys((80, 90), SINGLE[wide])
    if wide and mult and (kernel is backward_keys or (kernel is backward_queries and capped)):
        return WIDE_MULTIPLICATIVE
    return {forward: FORWARD, backward_keys: BACKWARD_KEYS, backward_queries: BACKWARD_QUERIES}[kernel]


def _block(kernel: Any, q: Tensor, mult: bool, cap: float | None) -> dict[str, int]:
    table = _table(kernel, q.dtype.itemsize, q.shape[-1] > 64, mult, cap is not None)
    bm, bn, warps, stages = table[architecture(q.device)]
    if interpreting():
        bm, bn = SMALL, SMALL
    return {"BM": bm, "BN": bn, "num_warps": warps, "num_stages": stages}


def _shape(q: Tensor, k: Tensor, multiplicative: bool) -> dict[str, object]:
    dim = q.shape[-1]
    return {
        "G": q.shape[1] // k.shape[1],
        "H": k.shape[1],
        "D": dim,
        "DP": max(16, triton.next_power_of_2(dim)),
        "MULTIPLICATIVE": multiplicative,
    }


@on_its_device
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    start: Tensor,
    scale: float,
    mult: bool,
    sinks: Tensor | None,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Outputs like `q` and log2 of the sums of exponentials, float32 `[B, Hq, T]`."""
    kind = q.dtype
    q, k, v, log_beta = dot_ready(q), dot_ready(k), dot_ready(v), log_beta.contiguous()
    batch, heads, length = q.shape[:3]
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=q.device)
    block = _block(forward, q, mult, cap)
    forward[(triton.cdiv(length, block["BM"]), batch * heads)](
        q, k, v, log_beta, start, sinks, out, lse, length, scale, cap, **_shape(q, k, mult), **block
    )
    return out.to(kind), lse


@on_its_device
def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    start: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mult: bool,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and log_beta."""
    kind = q.dtype
    q, k, v, grad, out = (dot_ready(x) for x in (q, k, v, grad, out))
    log_beta = log_beta.contiguous()
    batch, heads, length, dim = q.shape
    rows = batch * heads * length
    shape = _shape(q, k, mult)
    delta = torch.empty_like(lse)
    row_products[(triton.cdiv(rows, 64),)](out, grad, delta, rows, D=dim, DP=shape["DP"], BM=64)
    dq, dk, dv, dlog_beta = (torch.empty_like(x) for x in (q, k, v, log_beta))
    given = (q, k, v, log_beta, start, grad, lse, delta)
    block = _block(backward_keys, q, mult, cap)
    backward_keys[(triton.cdiv(length, block["BN"]), batch * k.shape[1])](
        *given, dk, dv, dlog_beta, length, scale, cap, **shape, **block
    )
    block = _block(backward_queries, q, mult, cap)
    backward_queries[(triton.cdiv(length, block["BM"]), batch * heads)](
        *given, dq, length, scale, cap, **shape, **block
    )
    return dq.to(kind), dk.to(kind), dv.to(kind), dlog_beta


def compiled(arch: int) -> Iterator[Compiled]:
    """The kernels as launched on an architecture, for the offline compile gate."""
    given = dict.fromkeys(("LOG_BETA", "LSE", "DELTA", "DLOG_BETA"), "*fp32")
    given |= {"START": "*i32", "T": "i32", "N": "i32", "scale": "fp32", "SINK": "*fp32", "cap": "fp32"}
    inputs = ("Q", "K", "V", "GRAD", "OUT", "DQ", "DK", "DV")
    sizes = [("bf16", 64), ("bf16", 96), ("bf16", 128), ("fp32", 64), ("fp32", 128)]
    for (kind, dim), mult, is_plain in product(sizes, (False, True), (True, False)):
        for kernel in (forward, backward_keys, backward_queries):
            itemsize = 2 if kind == "bf16" else 4
            bm, bn, warps, stages = _table(kernel, itemsize, dim > 64, mult, not is_plain)[arch]
            wide = triton.next_power_of_2(dim)
            constants: dict[str, int | None] = {"G": 4, "H": 8, "D": dim, "DP": wide, "BM": bm, "BN": bn}
            if is_plain:
                constants |= {"cap": None} | ({"SINK": None} if kernel is forward else {})
            name, gating = kernel.__name__, "multiplicative" if mult else "additive"
            # A warp group's product has 64 rows: keys, for `backward_keys`.
            rows = bn if kernel is backward_keys else bm
            fast = (TENSOR_CORES[arch if rows >= 64 else 80], ASYNC_COPY) if itemsize == 2 else ()
            yield Compiled(
                f"retention_attention {name} {gating}{'' if itemsize == 2 else ' fp32'} d{dim} {bm}x{bn} w{warps}"
                + ("" if is_plain else " sinks cap" if kernel is forward else " cap"),
                kernel,
                given | dict.fromkeys(inputs, f"*{kind}"),
                {**constants, "MULTIPLICATIVE": mult},
                warps,
                stages,
                expect=(*fast, "MUFU.EX2"),
                variant=(kind, dim) != ("bf16", 128) or mult != (kernel is backward_keys) or not is_plain,
            )
    yield Compiled(
        "retention_attention row_products d128",
        row_products,
        given | dict.fromkeys(inputs, "*bf16"),
        {"D": 128, "DP": 128, "BM": 64},
    )
