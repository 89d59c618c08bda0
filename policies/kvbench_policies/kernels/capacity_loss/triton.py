"""Triton kernels of the capacity loss. A row is one KV head of one layer of one sequence. The grid is
(rows, blocks), because a batch can have more rows than the 65,535 programs of a second axis.

Exponents are in base 2 and masked before `exp2`. `age * log2(beta)` first subtracts two integers,
which is exact in float32, and then multiplies: `t * log2(beta) - i * log2(beta)` would cancel. At
128K tokens a row's sum has 131072 terms of at most 1, so it is added up in blocks. Kernels are not
specialised for the length: one kernel serves all lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.engine.kernels.launch import Compiled, architecture, interpreting, on_its_device

LOG2E = tl.constexpr(1.4426950408889634)

# Steps and entries of a block, and warps. (Chosen by register use; not timed on a GPU.)
FORWARD = {80: (64, 64, 4), 90: (128, 128, 8)}
DIRECT = {80: (64, 64, 4), 90: (64, 64, 4)}
RUNS = {80: (256, 4), 90: (256, 4)}
SMALL = 64
"""Block size in the interpreter, so that short tests have several blocks."""


@triton.jit(do_not_specialize=["T", "rows_per_sequence"])
def forward(LOG_BETA, START, SUMS, T, rows_per_sequence, BT: tl.constexpr, BI: tl.constexpr):
    """SUMS[row, t] = sum of exp((t - i) log_beta[row, i]) over start <= i <= t; 0 before start."""
    row = tl.program_id(0)
    base = row.to(tl.int64) * T
    start = tl.load(START + row // rows_per_sequence)
    t0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BT  # the longest first
    t = t0 + tl.arange(0, BT)
    total = tl.zeros((BT,), tl.float32)
    # Blocks before all of these steps: an age is at least 1, so -inf masks an entry.
    for i0 in range(start // BI * BI, t0, BI):
        i = i0 + tl.arange(0, BI)
        rate = tl.load(LOG_BETA + base + i, mask=i >= start, other=-float("inf")) * LOG2E
        age = (t[:, None] - i[None, :]).to(tl.float32)
        total += tl.sum(tl.exp2(age * rate[None, :]), 1)
    # Blocks on the diagonal.
    for i0 in range(t0, tl.minimum(t0 + BT, T), BI):
        i = i0 + tl.arange(0, BI)
        inside = (i >= start) & (i < T)
        rate = tl.load(LOG_BETA + base + i, mask=inside, other=0.0) * LOG2E
        age = t[:, None] - i[None, :]
        exponent = age.to(tl.float32) * rate[None, :]
        exponent = tl.where((age >= 0) & inside[None, :], exponent, -float("inf"))
        total += tl.sum(tl.exp2(exponent), 1)
    tl.store(SUMS + base + t, total, mask=t < T)


@triton.jit(do_not_specialize=["T", "LIMIT", "rows_per_sequence", "heads"])
def backward_runs(
    LOG_BETA,
    START,
    GRAD,
    FIRST,
    END,
    COUNT,
    LIMIT,
    OUT,
    T,
    rows_per_sequence,
    heads,
    BI: tl.constexpr,
):
    """OUT[row, i] = sum over runs of g * sum of (t - i) exp((t - i) l) over the run's t >= i.

    A run is FIRST <= t < END, where the gradient has one nonzero value g. With `m` the age at the
    run's first step and `n` its number of steps, the inner sum is `q^m (m A_n + B_n)`,
    `q = exp(l)`, `A_n = sum_{a < n} q^a`, `B_n = sum_{a < n} a q^a`. Both follow the bits of n,

        A_2k = A_k (1 + q^k)    B_2k = B_k + q^k (k A_k + B_k)
        A_k+1 = A_k + q^k       B_k+1 = B_k + k q^k

    without subtractions, so no digit is lost however near 1 a beta is. Rows with more than LIMIT
    runs are left to `backward_direct`.
    """
    row = tl.program_id(0)
    sequence = row // rows_per_sequence
    lane = sequence * heads + row % rows_per_sequence % heads  # heads is 1 where rows share GRAD
    count = tl.load(COUNT + lane)
    if count <= LIMIT:
        base = row.to(tl.int64) * T
        start = tl.load(START + sequence)
        i0 = tl.program_id(1) * BI
        i = i0 + tl.arange(0, BI)
        inside = (i >= start) & (i < T)
        rate = tl.load(LOG_BETA + base + i, mask=inside, other=0.0) * LOG2E
        out = tl.zeros((BI,), tl.float32)
        for r in range(count):
            first = tl.load(FIRST + lane.to(tl.int64) * LIMIT + r)
            end = tl.load(END + lane.to(tl.int64) * LIMIT + r)
            if end > i0:
                g = tl.load(GRAD + lane.to(tl.int64) * T + first)
                begin = tl.maximum(first, i)
                n = tl.maximum(end - begin, 0)
                a = tl.zeros((BI,), tl.float32)
                b = tl.zeros((BI,), tl.float32)
                k = tl.zeros((BI,), tl.int32)
                most = end - tl.maximum(first, i0)
                shift = 0
                while (most >> shift) > 0:
                    shift += 1
                while shift > 0:
                    shift -= 1
                    kf = k.to(tl.float32)
                    w = tl.exp2(kf * rate)
                    b = b + w * (kf * a + b)
                    a = a * (1.0 + w)
                    k = n >> shift
                    odd = (k & 1) == 1
                    w = tl.where(odd, w * w, 0.0)
                    b = b + (k - 1).to(tl.float32) * w
                    a = a + w
                m = (begin - i).to(tl.float32)
                out += g * tl.exp2(m * rate) * (m * a + b)
        tl.store(OUT + base + i, tl.where(inside, out, 0.0), mask=i < T)


@triton.jit(do_not_specialize=["T", "LIMIT", "rows_per_sequence", "heads"])
def backward_direct(
    LOG_BETA,
    START,
    GRAD,
    COUNT,
    LIMIT,
    OUT,
    T,
    rows_per_sequence,
    heads,
    BT: tl.constexpr,
    BI: tl.constexpr,
):
    """OUT[row, i] = sum_{t >= i} g_t (t - i) exp((t - i) l_i) for rows of more than LIMIT runs."""
    row = tl.program_id(0)
    sequence = row // rows_per_sequence
    lane = sequence * heads + row % rows_per_sequence % heads
    if tl.load(COUNT + lane) > LIMIT:
        base = row.to(tl.int64) * T
        start = tl.load(START + sequence)
        i0 = tl.program_id(1) * BI
        i = i0 + tl.arange(0, BI)
        inside = (i >= start) & (i < T)
        rate = tl.load(LOG_BETA + base + i, mask=inside, other=0.0) * LOG2E
        out = tl.zeros((BI,), tl.float32)
        for t0 in range(i0 // BT * BT, T, BT):
            t = t0 + tl.arange(0, BT)
            g = tl.load(GRAD + lane.to(tl.int64) * T + t, mask=t < T, other=0.0)
            age = tl.maximum(t[:, None] - i[None, :], 0).to(tl.float32)  # at age 0 the term is 0
            out += tl.sum(g[:, None] * age * tl.exp2(age * rate[None, :]), 0)
        tl.store(OUT + base + i, tl.where(inside, out, 0.0), mask=i < T)


@on_its_device
def sums(log_beta: Tensor, start: Tensor) -> Tensor:
    """Entries retained at every step, float32 `[B, R, T]`, from float32 `[B, R, T]`."""
    batch, heads, length = log_beta.shape
    log_beta = log_beta.contiguous()
    out = torch.empty_like(log_beta)
    bt, bi, warps = FORWARD[architecture(log_beta.device)]
    if interpreting():
        bt, bi = SMALL, SMALL
    grid = (batch * heads, triton.cdiv(length, bt))
    forward[grid](log_beta, start, out, length, heads, BT=bt, BI=bi, num_warps=warps)
    return out


@on_its_device
def backward(grad: Tensor, log_beta: Tensor, start: Tensor, runs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Gradient of `sums`, float32 `[B, R, T]`.

    Args:
        grad: float32 `[B, R, T]`, or `[B, 1, T]` if all rows share it.
        log_beta: float32 `[B, R, T]`.
        start: int32 `[B]`.
        runs: First steps and ends int32 `[B, R or 1, limit]`, and counts int32 `[B, R or 1]`.
    """
    batch, heads, length = log_beta.shape
    log_beta, grad = log_beta.contiguous(), grad.contiguous()
    first, end, count = runs
    limit = first.shape[-1]
    out = torch.empty_like(log_beta)
    arch = architecture(log_beta.device)
    lanes = grad.shape[1]
    bi, warps = RUNS[arch]
    bi = SMALL if interpreting() else bi
    backward_runs[(batch * heads, triton.cdiv(length, bi))](
        log_beta, start, grad, first, end, count, limit, out, length, heads, lanes,
        BI=bi, num_warps=warps,
    )  # fmt: skip
    bt, bi, warps = DIRECT[arch]
    if interpreting():
        bt, bi = SMALL, SMALL
    backward_direct[(batch * heads, triton.cdiv(length, bi))](
        log_beta, start, grad, count, limit, out, length, heads, lanes,
        BT=bt, BI=bi, num_warps=warps,
    )  # fmt: skip
    return out


def compiled(arch: int) -> Iterator[Compiled]:
    """The kernels as launched on an architecture, for the offline compile gate."""
    rows = {"LOG_BETA": "*fp32", "START": "*i32", "T": "i32", "rows_per_sequence": "i32"}
    runs = {"GRAD": "*fp32", "COUNT": "*i32", "LIMIT": "i32", "OUT": "*fp32", "heads": "i32"}
    bt, bi, warps = FORWARD[arch]
    yield Compiled(
        f"capacity_loss forward {bt}x{bi} w{warps}",
        forward,
        {**rows, "SUMS": "*fp32"},
        {"BT": bt, "BI": bi},
        warps,
        expect=("MUFU.EX2",),
    )
    bi, warps = RUNS[arch]
    yield Compiled(
        f"capacity_loss backward_runs {bi} w{warps}",
        backward_runs,
        {**rows, **runs, "FIRST": "*i32", "END": "*i32"},
        {"BI": bi},
        warps,
        expect=("MUFU.EX2",),
    )
    bt, bi, warps = DIRECT[arch]
    yield Compiled(
        f"capacity_loss backward_direct {bt}x{bi} w{warps}",
        backward_direct,
        {**rows, **runs},
        {"BT": bt, "BI": bi},
        warps,
        expect=("MUFU.EX2",),
    )
