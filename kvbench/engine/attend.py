"""Attention of new queries over the ragged segments of a packed layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.engine.kernels.launch import by_triton
from kvbench.engine.layer import RaggedLayer

_WIDEST = 256
"""Largest head dimension that the kernel has a tile for."""
_BLOCK = 1 << 23
"""Most float32 attention weights held at once per sequence, if weights are materialised."""


def attend(
    query: Tensor,
    layer: RaggedLayer,
    first: int,
    scale: float,
    powers: Sequence[int] = (),
    valid: Tensor | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Attention of new queries over a packed layer that already holds their own entries.

    Logical columns decide causality among new tokens. An NVIDIA GPU runs a kernel that reads the
    segments where they lie, unless a gradient is wanted or triton is not installed.

    Args:
        query: `[B, H_q, n, d]`.
        layer: A packed layer.
        first: Logical column of the first new query.
        scale: Factor of the logits.
        powers: Also sum these powers of the attention weights over the queries.
        valid: New queries that are tokens, bool `[B, n]`; None: all. Padding adds no mass.

    Returns:
        Output `[B, H_q, n, d]`, and by power the mass that every entry received from each query
        head, float32 `[entries, G]` in the order of `layer.rows()`.
    """
    learning = torch.is_grad_enabled() and query.requires_grad
    if by_triton(query) and query.shape[-1] <= _WIDEST and not learning:
        return _attend_kernel(query, layer, first, scale, powers, valid)
    if query.device.type != "cpu":
        return _attend_padded(query, layer, first, scale, powers, valid)
    if powers:
        return _attend_segments_mass(query, layer, first, scale, powers, valid)
    return _attend_segments(query, layer, first, scale), {}


def _attend_kernel(
    query: Tensor,
    layer: RaggedLayer,
    first: int,
    scale: float,
    powers: Sequence[int],
    valid: Tensor | None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """The Triton kernel. The result of a sequence does not depend on the rest of the batch."""
    from kvbench.engine.kernels.ragged_attention.triton import ragged_attention

    assert layer.key is not None and layer.value is not None
    rows, bounds = (layer.key, layer.value, layer.col), layer.bounds()
    out, mass = ragged_attention(query, *rows, *bounds, layer.length, first, scale, powers, valid)
    return out, dict(zip(powers, mass, strict=True))


def _attend_segments(query: Tensor, layer: RaggedLayer, first: int, scale: float) -> Tensor:
    """One SDPA call per segment without copying K or V, which is fastest on a CPU.

    The heads of a sequence share a call if they hold equally many entries. The result of a sequence
    does not depend on the rest of the batch.
    """
    b, hq, n, d = query.shape
    heads, group = layer.heads, hq // layer.heads
    key, value, col = layer.key, layer.value, layer.col
    assert key is not None and value is not None
    q = query.reshape(b, heads, group * n, d)
    column = torch.arange(first, first + n, dtype=torch.int32).repeat(group)[:, None]
    origin = [x.storage_offset() for x in (key, value, col)]  # a layer can be a part of another
    out = []
    for row, own in enumerate(q.split(1)):
        here = slice(row * heads, (row + 1) * heads)
        start, length, room = layer.start[here], layer.length[here], layer.room[here]
        if length.count(length[0]) == room.count(room[0]) == heads:
            calls = [(own, start[0], length[0], room[0])]
        else:
            calls = [*zip(own.split(1, 1), start, length, length, strict=True)]
        for mine, at, held, width in calls:
            if held == 0:
                out.append(torch.zeros_like(mine[0]))
                continue
            count, mask = mine.shape[1], None
            # Slices would be several operations, which add up to half the time of a decode step.
            shape, stride = (1, count, held, d), (0, width * d, d, 1)
            k = key.as_strided(shape, stride, origin[0] + at * d)
            v = value.as_strided(shape, stride, origin[1] + at * d)
            if n > 1:
                entry = col.as_strided((count, 1, held), (width, 0, 1), origin[2] + at)
                # A padding query precedes every entry of its row; its output is never read.
                mask = ((entry <= column) | (column < entry[..., :1]))[None]
            out.append(F.scaled_dot_product_attention(mine, k, v, mask, scale=scale)[0])
    return torch.cat(out).view(b, hq, n, d)


def _attend_segments_mass(
    query: Tensor,
    layer: RaggedLayer,
    first: int,
    scale: float,
    powers: Sequence[int],
    valid: Tensor | None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Segment by segment with materialised weights; also independent of the batch."""
    b, hq, n, d = query.shape
    group = hq // layer.heads
    assert layer.key is not None and layer.value is not None
    q = query.reshape(b * layer.heads, group, n, d).float().unbind(0)
    out = torch.zeros(b * layer.heads, group, n, d, dtype=query.dtype)
    mass: dict[int, list[Tensor]] = {p: [] for p in powers}
    column = torch.arange(first, first + n, dtype=torch.int32)[:, None]
    for s, (a, length) in enumerate(zip(layer.start, layer.length, strict=True)):
        key = layer.key[a : a + length].float()
        value = layer.value[a : a + length].float()
        held = layer.col[a : a + length]
        total = {p: torch.zeros(group, length) for p in powers}
        block = max(1, _BLOCK // (group * max(1, length)))
        for start in range(0, n if length else 0, block):
            rows = slice(start, min(start + block, n))
            hidden = (held > column[rows]) & (column[rows] >= held[0])
            logits = (q[s][:, rows] @ key.T * scale).masked_fill_(hidden, float("-inf"))
            weights = logits.softmax(-1)
            out[s][:, rows] = (weights @ value).to(query.dtype)
            real = column[rows] >= held[0]
            if valid is not None:
                real = real & valid[s // layer.heads, rows, None]
            for p in powers:
                total[p] += (weights.pow(p) * real).sum(1)
        for p in powers:
            mass[p].append(total[p].T)
    return out.view(b, hq, n, d), {p: torch.cat(found) for p, found in mass.items()}


def _attend_padded(
    query: Tensor,
    layer: RaggedLayer,
    first: int,
    scale: float,
    powers: Sequence[int],
    valid: Tensor | None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Gather the segments into a rectangle (on a GPU without the kernel); weights by blocks."""
    b, hq, n, d = query.shape
    group = hq // layer.heads
    assert layer.key is not None and layer.value is not None
    rows, live = layer.padded_rows()
    key, value, held = layer.key[rows], layer.value[rows], layer.col[rows]
    column = torch.arange(first, first + n, dtype=torch.int32, device=query.device)[:, None]
    seen = (held[:, :, None] <= column) & live[:, :, None]
    # Queries without any entry (padding, an empty segment) see everything; they are never read.
    blind = ~seen.any(-1, keepdim=True)
    mask = (seen | blind)[:, :, None]
    if not powers:
        whole = mask.expand(-1, -1, group, -1, -1).flatten(2, 3)
        q = query.reshape(b, layer.heads, group * n, d)
        out = F.scaled_dot_product_attention(q, key, value, attn_mask=whole, scale=scale)
        return out.view(b, hq, n, d), {}
    q = query.reshape(b, layer.heads, group, n, d)
    real = ~blind
    if valid is not None:
        real = real & valid[:, None, :, None]
    wide_key, wide_value = key.float()[:, :, None], value.float()[:, :, None]
    total = {p: wide_key.new_zeros(b, layer.heads, group, key.shape[2]) for p in powers}
    parts = []
    block = max(1, _BLOCK // (hq * max(1, key.shape[2])))
    for start in range(0, n, block):
        part = slice(start, start + block)
        logits = (q[:, :, :, part].float() @ wide_key.transpose(-1, -2)) * scale
        weights = logits.masked_fill_(~mask[:, :, :, part], float("-inf")).softmax(-1)
        parts.append(weights @ wide_value)
        for p in powers:
            total[p] += (weights.pow(p) * real[:, :, None, part]).sum(3)
    out = torch.cat(parts, 3).to(query.dtype).view(b, hq, n, d)
    return out, {p: x.transpose(2, 3)[live] for p, x in total.items()}
