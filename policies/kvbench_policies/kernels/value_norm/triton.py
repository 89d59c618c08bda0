"""Triton kernel of `value_norm`: a matrix product whose result is summed up block by block.

A program handles `BM` tokens of one query head. The head's slice of the output projection is loaded
in blocks of `BN` output columns, `[BN, d]` with `d` contiguous as `nn.Linear` stores it. So only
the head dimension has to be contiguous and aligned for asynchronous copies, whatever the output
dimension. A block's `[BM, BN]` products are summed over the columns in float32 and dropped.

16-bit inputs are multiplied exactly, and the program reads its values once and holds them. Float32
inputs take three TF32 products (`tf32x3`), which agree with float32 to a few of its last bits;
their parts fill the registers, so `d` is loaded in blocks of `BK` as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.engine.kernels.launch import (
    ASYNC_COPY,
    TENSOR_CORES,
    Compiled,
    interpreting,
    on_its_device,
)


class ValueNormTile(NamedTuple):
    """Tokens, output columns and head dimensions of a block, warps, stages of the pipeline."""

    tokens: int
    columns: int
    depth: int
    warps: int
    stages: int


# Chosen by register and shared memory use; not timed on a GPU.
HALF = {
    64: ValueNormTile(128, 128, 64, 8, 3),
    128: ValueNormTile(128, 128, 128, 8, 3),
    256: ValueNormTile(128, 64, 256, 8, 2),
}
"""For 16-bit values, by head dimension, rounded up to a power of 2, at least 64."""
SINGLE = ValueNormTile(64, 64, 32, 8, 3)
"""For float32, and for 16-bit values of more than 256 dimensions."""
SMALL = ValueNormTile(64, 32, 16, 4, 1)
"""Of the interpreter, so that short tests have several."""


@triton.jit
def norms(
    VALUE,
    WEIGHT,
    OUT,
    n,
    columns,
    group,
    value_b,
    value_h,
    value_n,
    weight_h,
    weight_c,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SQUARED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """OUT[b, head, i] = norm of VALUE[b, head // group, i] @ WEIGHT[head].T, WEIGHT `[H_q, C, D]`.

    The grid is (blocks of tokens, query heads, batch). SQUARED: norm of order 2 instead of 1. BD: D
    rounded up to a power of 2. BK: head dimensions per step; BD holds the values.
    """
    head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, BK)
    VALUE += b * value_b + (head // group).to(tl.int64) * value_h
    WEIGHT += head.to(tl.int64) * weight_h
    values = VALUE + i[:, None].to(tl.int64) * value_n + d[None, :]
    total = tl.zeros((BM,), tl.float32)
    if BK == BD:
        value = tl.load(values, mask=(i < n)[:, None] & (d < D)[None, :], other=0.0)
    for c0 in range(0, columns, BN):
        c = c0 + tl.arange(0, BN)
        weights = WEIGHT + c[:, None] * weight_c + d[None, :]
        if BK == BD:
            here = (c < columns)[:, None] & (d < D)[None, :]
            weight = tl.load(weights, mask=here, other=0.0)
            x = tl.dot(value, tl.trans(weight), input_precision=PRECISION)
        else:
            x = tl.zeros((BM, BN), tl.float32)
            for d0 in range(0, D, BK):
                here = (d0 + d < D)[None, :]
                part = tl.load(values + d0, mask=(i < n)[:, None] & here, other=0.0)
                weight = tl.load(weights + d0, mask=(c < columns)[:, None] & here, other=0.0)
                x = tl.dot(part, tl.trans(weight), x, input_precision=PRECISION)
        total += tl.sum(x * x if SQUARED else tl.abs(x), 1)
    if SQUARED:
        total = tl.sqrt(total)
    OUT += (b * tl.num_programs(1) + head) * n
    tl.store(OUT + i, total, mask=i < n)


@on_its_device
def launch(value: Tensor, weight: Tensor, norm: str, out: Tensor) -> None:
    """Write the norms for every query head.

    Args:
        value: `[B, H, n, d]`, d contiguous.
        weight: `[H_q, D, d]`, d contiguous, of the same dtype.
        norm: `l1` or `l2`.
        out: float32 `[B, H_q, n]`, contiguous; all of it is written.
    """
    batch, heads, n, dim = value.shape
    query_heads, columns, _ = weight.shape
    wide = _wide(dim)
    tile = _tile(value.dtype.itemsize, wide)
    grid = (triton.cdiv(n, tile.tokens), query_heads, batch)
    norms[grid](
        value,
        weight,
        out,
        n,
        columns,
        query_heads // heads,
        *value.stride()[:3],
        *weight.stride()[:2],
        D=dim,
        BD=wide,
        BM=tile.tokens,
        BN=tile.columns,
        BK=tile.depth,
        SQUARED=norm == "l2",
        PRECISION=_precision(value.dtype.itemsize),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def value_norm(value: Tensor, weight: Tensor, norm: str) -> Tensor:
    """`op.value_norm` on a GPU, or in the interpreter."""
    dtype = torch.promote_types(value.dtype, weight.dtype)
    if interpreting() and dtype == torch.bfloat16:  # which it stores, and multiplies, as integers
        dtype = torch.float32
    value, weight = value.to(dtype), weight.to(dtype).mT
    value = value if value.stride(-1) == 1 else value.contiguous()
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    batch, heads, n, _ = value.shape
    out = torch.empty(batch, len(weight), n, dtype=torch.float32, device=value.device)
    if out.numel():
        launch(value, weight, norm, out)
    of_head: Tensor = out.view(batch, heads, len(weight) // heads, n).mean(2)
    return of_head


def _wide(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _tile(itemsize: int, wide: int) -> ValueNormTile:
    if interpreting():
        return SMALL
    tile = HALF[max(wide, 64)] if itemsize == 2 and wide <= 256 else SINGLE
    return tile._replace(depth=min(tile.depth, wide))


def _precision(itemsize: int) -> str:
    return "ieee" if itemsize == 2 else "tf32x3"


def compiled(arch: int) -> Iterator[Compiled]:
    """The kernel as launched on an architecture, for the offline compile gate."""
    strides = ("value_b", "value_h", "value_n", "weight_h", "weight_c")
    choices = [("bf16", dim, "l1") for dim in (64, 80, 128, 256)]
    choices += [("bf16", 128, "l2"), ("fp32", 64, "l1"), ("fp32", 128, "l1")]
    for name, dim, norm in choices:
        itemsize = 2 if name == "bf16" else 4
        tile = _tile(itemsize, _wide(dim))
        yield Compiled(
            f"value_norm {norm} {name} d{dim} {tile.tokens}x{tile.columns} w{tile.warps}",
            norms,
            {"VALUE": f"*{name}", "WEIGHT": f"*{name}", "OUT": "*fp32"}
            | dict.fromkeys(("n", "columns", "group", *strides), "i32"),
            {
                "D": dim,
                "BD": _wide(dim),
                "BM": tile.tokens,
                "BN": tile.columns,
                "BK": tile.depth,
                "SQUARED": norm == "l2",
                "PRECISION": _precision(itemsize),
            },
            tile.warps,
            tile.stages,
            aligned=strides,
            expect=(TENSOR_CORES[arch] if itemsize == 2 else "HGMMA|HMMA", ASYNC_COPY),
            variant=(dim, norm) != (128, "l1"),
        )
