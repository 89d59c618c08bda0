"""Triton kernels of `global_select`: a radix select over 63-bit keys.

The threshold is found digit by digit from the top, by radix selection: count the keys that share
the threshold's leading digits by their next digit (`histogram`), then read off that digit and how
many keys are still to be kept (`pick`). Both stay on the GPU. `tally` and `mark` then go through
the keys segment by segment (a segment is one head of one layer), so that keys equal to the
threshold are taken in order. Counts are integers, so the result does not depend on the order of the
programs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.engine.kernels.launch import Compiled, interpreting, on_its_device

DIGITS = ((52, 11), (41, 11), (30, 11), (20, 10), (10, 10), (0, 10))
"""Lowest bit and number of bits of every pass, 63 in all."""
BLOCK, ROUNDS, WARPS = 2048, 8, 8
"""Keys that a program loads at once, how often per pass of the histogram, and its warps."""
SMALL = 128
"""Block size in the interpreter, so that short tests have several blocks."""


@triton.jit
def histogram(
    KEY,
    PREFIX,
    COUNTS,
    m,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
):
    """COUNTS[b, digit] += keys of KEY[b, :m] that begin with PREFIX[b], by their next digit."""
    b = tl.program_id(1)
    KEY += b.to(tl.int64) * m
    prefix = tl.load(PREFIX + b)
    bins = tl.arange(0, 1 << BITS)
    found = tl.zeros((1 << BITS,), tl.int32)
    first = tl.program_id(0) * (B * R)
    for i0 in range(first, tl.minimum(first + B * R, m), B):
        i = i0 + tl.arange(0, B)
        key = tl.load(KEY + i, mask=i < m, other=-1)
        here = (key >= 0) & ((key >> (SHIFT + BITS)) == prefix)
        digit = ((key >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
        found += tl.histogram(digit, 1 << BITS, mask=here)
    tl.atomic_add(COUNTS + b * (1 << BITS) + bins, found, mask=found > 0, sem="relaxed")


@triton.jit
def pick(COUNTS, PREFIX, WANTED, BITS: tl.constexpr):
    """Append the threshold's next digit to PREFIX[b], and take the keys above it off WANTED[b].

    WANTED[b] is how many of the keys that begin with PREFIX[b] are to be kept.
    """
    b = tl.program_id(0)
    bins = tl.arange(0, 1 << BITS)
    found = tl.load(COUNTS + b * (1 << BITS) + bins).to(tl.int64)
    wanted = tl.load(WANTED + b)
    from_here = tl.sum(found, 0) - tl.cumsum(found, 0) + found
    digit = tl.maximum(tl.sum((from_here >= wanted).to(tl.int64), 0) - 1, 0)
    tl.store(WANTED + b, wanted - tl.sum(tl.where(bins > digit, found, 0), 0))
    tl.store(PREFIX + b, (tl.load(PREFIX + b) << BITS) + digit)


@triton.jit
def tally(KEY, PREFIX, EQUAL, n, B: tl.constexpr):
    """EQUAL[b, k] = how many of KEY[b, k, :n] are the threshold PREFIX[b]."""
    segment = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    threshold = tl.load(PREFIX + tl.program_id(1))
    KEY += segment.to(tl.int64) * n
    found = tl.zeros((B,), tl.int32)
    for i0 in range(0, n, B):
        i = i0 + tl.arange(0, B)
        key = tl.load(KEY + i, mask=i < n, other=-1)
        found += (key == threshold).to(tl.int32)
    tl.store(EQUAL + segment, tl.sum(found, 0).to(tl.int64))


@triton.jit
def mark(KEY, PREFIX, WANTED, BEFORE, OUT, n, B: tl.constexpr):
    """OUT[b, k, :n]: above the threshold, or one of the first WANTED[b] that equal it.

    BEFORE[b, k]: how many equal it in the heads before this one.
    """
    segment = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    threshold = tl.load(PREFIX + tl.program_id(1))
    left = tl.load(WANTED + tl.program_id(1)) - tl.load(BEFORE + segment)
    base = segment.to(tl.int64) * n
    for i0 in range(0, n, B):
        i = i0 + tl.arange(0, B)
        key = tl.load(KEY + base + i, mask=i < n, other=-1)
        equal = (key == threshold).to(tl.int32)
        keep = (key > threshold) | ((equal > 0) & (tl.cumsum(equal, 0) <= left))
        tl.store(OUT + base + i, keep.to(tl.int8), mask=i < n)
        left -= tl.sum(equal, 0)


@on_its_device
def launch(key: Tensor, count: Tensor, out: Tensor) -> None:
    """Mark the `count` (int64 `[B]`) largest of key int64 `[B, K, n]` in `out`, int8 `[B, K, n]`.

    All are contiguous; all of `out` is written.
    """
    batch, heads, n = key.shape
    block = SMALL if interpreting() else BLOCK
    prefix, wanted = torch.zeros_like(count), count.clone()
    grid = (triton.cdiv(heads * n, block * ROUNDS), batch)
    for shift, bits in DIGITS:
        counts = torch.zeros(batch, 1 << bits, dtype=torch.int32, device=key.device)
        size = {"SHIFT": shift, "BITS": bits, "B": block, "R": ROUNDS}
        histogram[grid](key, prefix, counts, heads * n, **size, num_warps=WARPS)
        pick[(batch,)](counts, prefix, wanted, BITS=bits, num_warps=WARPS)
    equal = torch.empty(batch, heads, dtype=torch.int64, device=key.device)
    tally[(heads, batch)](key, prefix, equal, n, B=block, num_warps=WARPS)
    before = equal.cumsum(1) - equal
    mark[(heads, batch)](key, prefix, wanted, before, out, n, B=block, num_warps=WARPS)


def largest(key: Tensor, count: Tensor) -> Tensor:
    """`op.select_largest` on a GPU, or in the interpreter."""
    out = torch.empty(key.shape, dtype=torch.int8, device=key.device)
    if out.numel():
        launch(key.contiguous(), count.to(device=key.device).contiguous(), out)
    return out.view(torch.bool)


def compiled(arch: int) -> Iterator[Compiled]:
    """The kernels as launched on an architecture, for the offline compile gate."""
    state = {"PREFIX": "*i64"}
    for shift, bits in DIGITS[2:4]:
        yield Compiled(
            f"global_select histogram {bits} bits w{WARPS}",
            histogram,
            {**state, "KEY": "*i64", "COUNTS": "*i32", "m": "i32"},
            {"SHIFT": shift, "BITS": bits, "B": BLOCK, "R": ROUNDS},
            WARPS,
            variant=bits == 10,
        )
        yield Compiled(
            f"global_select pick {bits} bits w{WARPS}",
            pick,
            {**state, "COUNTS": "*i32", "WANTED": "*i64"},
            {"BITS": bits},
            WARPS,
            variant=bits == 10,
        )
    segments = {**state, "KEY": "*i64", "n": "i32"}
    yield Compiled(f"global_select tally w{WARPS}", tally, {**segments, "EQUAL": "*i64"}, {"B": BLOCK}, WARPS)
    yield Compiled(
        f"global_select mark w{WARPS}",
        mark,
        {**segments, "WANTED": "*i64", "BEFORE": "*i64", "OUT": "*i8"},
        {"B": BLOCK},
        WARPS,
    )
