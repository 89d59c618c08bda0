"""`global_select`: the N best entries of a whole cache, and `packed_rows`: where they go.

What the allocator `global` needs (DBTrimKV; Layer-DefensiveKV, arXiv 2510.13334): one threshold
over all layers and heads. Every entry has one integer that is larger the more it is worth keeping
(`kvbench.parts.entry_key`, 63 bits). On a CPU a partial sort finds the threshold; on CUDA a radix
select does, in 6 passes over the keys and without waiting for the GPU. Nothing has a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.parts import best, entry_key

from ..launch import by_triton


def global_select(
    score: Tensor, position: Tensor, valid: Tensor, count: Tensor, protect: Tensor | None = None
) -> Tensor:
    """Mark the `count` best entries of every sequence, all layers and heads together.

    By score; ties go to the more recent entry, then to the lower head. The order does not depend on
    the device.

    Args:
        score: `[B, K, n]`, K = layers times heads, read as float32; finite where valid.
        position: Distinct within a head, below 2^28, int64 `[B, K, n]`.
        valid: Which entries exist, bool `[B, K, n]`.
        count: int64 `[B]`, not more than there are.
        protect: Classes of `kvbench.plugin.Scores`, int8 `[B, K, n]`; None: nothing is protected.

    Returns:
        bool `[B, K, n]`.

    Raises:
        UserError: The shapes differ.
    """
    given = {"score": score, "position": position, "valid": valid}
    for name, x in given.items() if protect is None else (given | {"protect": protect}).items():
        if x.dim() != 3 or x.shape != score.shape:
            raise UserError(f"{name} is {list(x.shape)}: [B, K, n] for all would be right")
    if protect is None:
        protect = torch.zeros_like(valid, dtype=torch.int8)
    return select_largest(entry_key(score.detach(), protect, position, valid), count)


def select_largest(key: Tensor, count: Tensor) -> Tensor:
    """Mark the `count` largest keys of every sequence, ties to the first; negative never counts.

    What `kvbench.parts.best` does to the flattened rows.

    Args:
        key: int64 `[B, K, n]`.
        count: int64 `[B]`, not more than there are.

    Returns:
        bool `[B, K, n]`.

    Raises:
        UserError: Another shape or type.
    """
    if key.dim() != 3 or key.dtype != torch.int64 or count.shape != key.shape[:1]:
        raise UserError(
            f"key is {key.dtype} {list(key.shape)}, count {list(count.shape)}: int64 [B, K, n] and "
            "[B] would be right"
        )
    keep: Tensor = largest(key, count)
    return keep


def packed_rows(keep: Tensor, start: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Say which row of a ragged cache every kept entry goes to, without waiting for a GPU.

    Segment `s = b * K + k` is the kept entries of head `k` of sequence `b` in order, and lies at
    `start[s]` of the packed rows: `packed[target] = dense.flatten(0, 2)[source]`, as
    `RaggedLayer.pack` lays them out.

    Args:
        keep: bool `[B, K, n]`.
        start: First row of every segment, int64 `[B * K]`.
        entries: How many are kept in all, known from the budgets (checked on a CPU only).

    Returns:
        `source`, into the flattened `[B * K * n]`, and `target`, rows: int64 `[entries]` each.

    Raises:
        UserError: The shapes do not fit, or another number is kept.
    """
    if keep.dim() != 3 or keep.dtype != torch.bool or start.shape != (len(keep) * keep.shape[1],):
        raise UserError(
            f"keep is {keep.dtype} {list(keep.shape)}, start {list(start.shape)}: bool [B, K, n] "
            "and [B * K] would be right"
        )
    source, target = compaction(keep, start, entries)
    return source, target


@torch.library.custom_op("kvbench::select_largest", mutates_args=())
def largest(key: Tensor, count: Tensor) -> Tensor:
    """`select_largest`, its arguments checked."""
    if by_triton(key):
        from .triton import largest as kernel

        return kernel(key, count)
    return best(key.flatten(1), count).view(key.shape)


@largest.register_fake
def _(key: Tensor, count: Tensor) -> Tensor:
    return key.new_empty(key.shape, dtype=torch.bool)


@torch.library.custom_op("kvbench::packed_rows", mutates_args=())
def compaction(keep: Tensor, start: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """`packed_rows`, its arguments checked."""
    if by_triton(keep):
        from .triton import compaction as kernel

        return kernel(keep, start, entries)
    segment, column = keep.flatten(0, 1).nonzero(as_tuple=True)
    if len(segment) != entries:
        raise UserError(f"entries={entries}: {len(segment)}, as many as are kept, would be right")
    rank = keep.flatten(0, 1).cumsum(-1)[segment, column] - 1
    return segment * keep.shape[-1] + column, start[segment] + rank


@compaction.register_fake
def _(keep: Tensor, start: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    return start.new_empty(entries), start.new_empty(entries)
