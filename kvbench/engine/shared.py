"""Entries that packed layers read in the K and V of a prefill instead of copying them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench import native
from kvbench.engine.kernels.ragged_attention import kernel_fits, reads_in_place
from kvbench.view.softmax import is_plain


@dataclass(frozen=True)
class SharedEntries:
    """Entries of one sequence in the K and V of a prefill, which other sequences read as well.

    Attributes:
        key, value: `[1, H, S, d]` and `[1, H, S, d_v]`, never written.
        columns: Columns of the entries, head by head, int32 `[entries]`.
        lengths: Entries of every head.
        count: Entries of all heads.
        addresses: The same for kernels, int64 `[H, 4]`; see `kvbench.native.ragged_attention`.
    """

    key: Tensor
    value: Tensor
    columns: Tensor
    lengths: list[int]
    count: int
    addresses: Tensor

    def rows(self) -> Tensor:
        """Return the index of every entry among the `H * S` of the prefill, int64 `[entries]`."""
        lengths = torch.tensor(self.lengths, device=self.columns.device)
        heads = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=self.count)
        return heads * self.key.shape[2] + self.columns


def can_share(key: Tensor, value: Tensor, scale: float) -> bool:
    """Return whether attention can read entries in place in a dense K and V, `[1, H, S, d]`."""
    if len(key) != 1 or not key.is_contiguous() or not value.is_contiguous():
        return False
    if kernel_fits(key, value):
        return reads_in_place(key)
    return is_plain(scale) and native.can_attend(key.detach(), key, value)


def shared_entries(key: Tensor, value: Tensor, entry_mask: Tensor) -> list[SharedEntries]:
    """Return the entries of several sequences in one prefill.

    Args:
        key, value: `[1, H, S, d]` and `[1, H, S, d_v]`; see `can_share`.
        entry_mask: Entries of every sequence, bool `[B, H, S]`.
    """
    batch_size, kv_heads, column_count = entry_mask.shape
    columns, lengths = _marked_columns(entry_mask.flatten(0, 1))
    ends = lengths.cumsum(0)
    head_indices = torch.arange(kv_heads, device=key.device).repeat(batch_size) * column_count
    addresses = torch.stack(
        [
            *(x.data_ptr() + head_indices * x.shape[-1] * x.element_size() for x in (key, value)),
            columns.data_ptr() + (ends - lengths) * columns.element_size(),
            lengths,
        ],
        1,
    )
    head_lengths = lengths.view(batch_size, kv_heads)
    counts = head_lengths.sum(1).tolist()
    sequences = zip(columns.split(counts), head_lengths.tolist(), counts, addresses.split(kv_heads), strict=True)
    key, value = key.detach(), value.detach()
    return [SharedEntries(key, value, *sequence) for sequence in sequences]


def _marked_columns(marks: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `native.marked_columns` does, on any device."""
    if marks.device.type == "cpu" and native.library() is not None:
        return native.marked_columns(marks)
    return marks.nonzero()[:, 1].to(torch.int32), marks.sum(1)
