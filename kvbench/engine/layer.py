"""One full-attention layer of the ragged cache: dense during the prefill, then packed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvbench.engine.channels import reordered, restored
from kvbench.engine.codes import Coded, Coding
from kvbench.engine.segments import gathered, runs, starts
from kvbench.view import Need

_UNSUPPORTED = "a kvbench cache does not support beam search or assisted decoding"


class RaggedLayer(CacheLayerMixin):
    """K and V of one full-attention layer, dense while the context is prefilled, then packed.

    Attributes:
        seen: Logical length: all columns so far, including padding and evicted ones.
        start, length, room: First row, live rows and owned rows of every segment (on the CPU).
        coded: Oldest rows of every segment that are quantised or pruned; empty without `coding`.
        key, value: `[B, H, S, d]` while dense, `[rows, d]` once packed.
        col: Logical column of every row, int32 `[rows]` (packed).
        extras: Per-entry state (packed): the policy's by name, `[rows]`, and ongoing observations
            by need, `[rows, G]`.
        state: State of a merger between cuts: for every sequence, tensors `[1, ...]` by name; empty
            before the first cut.
        scale: Factor of the attention logits.
        coding: How keys and values are stored once packed; None: as they are.
        order: The order in which packed keys have their channels, `[B, H, d]`; None: the model's.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.seen = 0
        self.packed = False
        self.batch = self.heads = self.dim = 0
        self.scale = 1.0
        self.coding: Coding | None = None
        self.order: Tensor | None = None
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.col = torch.empty(0, dtype=torch.int32)
        self.extras: dict[str | Need, Tensor] = {}
        self.state: list[dict[str, Tensor]] = []
        self.start: list[int] = []
        self.length: list[int] = []
        self.coded: list[int] = []
        self.room: list[int] = []
        self._bounds: tuple[Tensor, Tensor] | None = None
        self._appended: tuple[Tensor, Tensor | None] = (self.col, None)
        self.pending: tuple[Tensor, Tensor] | None = None
        self.is_initialized = False
        self.closed = False

    # -- what transformers calls ------------------------------------------------------------------
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Read shapes, dtype and device from the first keys."""
        self.batch, self.heads, _, self.dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hold the new K and V `[B, H, n, d]` until the attention function stores them."""
        if self.closed or self.pending is not None:
            raise ValueError("use this cache only inside its kvbench.attach(...) block")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.pending = (key_states, value_states)
        self.seen += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Logical length: positions and chunked prefill depend on it."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of columns and offset of a full mask."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def crop(self, tokens_to_remove: Any) -> None:
        """Refuse: evicted entries cannot be restored."""
        raise ValueError(_UNSUPPORTED)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Refuse: sequences hold different entries, so that beams cannot be reordered."""
        raise ValueError(_UNSUPPORTED)

    batch_repeat_interleave = reorder_cache
    batch_select_indices = reorder_cache

    # -- storing ----------------------------------------------------------------------------------
    def extend(self) -> tuple[Tensor, Tensor]:
        """Append the pending K and V to a dense layer; return all of them, `[B, H, S, d]`."""
        key, value = self.take_pending()
        # Contiguous: every cell picks its entries from them.
        self.key = key.contiguous() if self.key is None else torch.cat([self.key, key], dim=-2)
        old = self.value
        self.value = value.contiguous() if old is None else torch.cat([old, value], dim=-2)
        return self.key, self.value

    def take_pending(self) -> tuple[Tensor, Tensor]:
        """Return the new K and V of this forward, once."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending

    def pack(
        self,
        key: Tensor,
        value: Tensor,
        keep: Tensor,
        col: Tensor,
        extras: Mapping[str | Need, Tensor],
        reserve: int | None = None,
    ) -> None:
        """Keep only the chosen entries and free everything else.

        Args:
            key, value: `[B, H, n, d]`, or `[1, H, n, d]` if all sequences choose from the same;
                keys have their channels in `order`.
            keep: Entries to keep, bool `[B, H, n]`.
            col: Logical columns, `[B, H, n]` or `[1, H, n]`, ascending along the last axis.
            extras: Per-entry state, `[B, H, n, ...]` each.
            reserve: Free rows behind every segment; None derives a number from what is kept.
        """
        self.batch, self.heads, n = keep.shape
        flat = keep.reshape(-1, n)
        self.length = flat.sum(-1).tolist()
        chosen = flat.reshape(-1).nonzero().squeeze(-1)
        target = self._layout(reserve)
        # One gather fills the free rows too, with any entry: that is faster than to leave them out.
        index = torch.zeros(sum(self.room), dtype=torch.int64, device=key.device)
        index[target] = chosen
        of_shared = index % (self.heads * n) if len(key) < self.batch else index
        self.key, self.value = gathered(key, of_shared), gathered(value, of_shared)
        self.col = gathered(col[..., None].to(torch.int32), of_shared).squeeze(-1)
        self.extras = {name: gathered(held, index) for name, held in extras.items()}
        self.packed = True
        if self.coding is not None:
            self.coding.pack(self)

    def append(self, rank: Tensor, valid: Tensor | None, added: Sequence[int], first: int) -> None:
        """Store the pending K and V behind every segment of a packed layer.

        Args:
            rank: Index of every column among the new tokens of its sequence, int64 `[B, n]`.
            valid: New columns that are tokens, bool `[B, n]`; None: all.
            added: Number of new tokens of every sequence (on the CPU).
            first: Logical column of the first new token.
        """
        key, value = (x.detach() for x in self.take_pending())
        key = reordered(key, self.order)
        assert self.key is not None and self.value is not None
        n = key.shape[-2]
        new = [added[s // self.heads] for s in range(len(self.length))]
        self.make_room(new)
        start, length = self.bounds()
        target = (start + length + rank[:, None]).reshape(-1)
        col = torch.arange(first, first + n, dtype=torch.int32, device=key.device)
        col = col.expand(self.batch, self.heads, n).reshape(-1)
        flat_key, flat_value = key.reshape(-1, self.dim), value.reshape(-1, self.dim)
        if valid is not None:
            chosen = valid[:, None].expand(-1, self.heads, -1).reshape(-1)
            target, col = target[chosen], col[chosen]
            flat_key, flat_value = flat_key[chosen], flat_value[chosen]
        self._appended = (target, None if valid is None else chosen)
        self.key[target] = flat_key
        self.value[target] = flat_value
        self.col[target] = col
        for held in self.extras.values():
            held[target] = 0
        self.length = [a + m for a, m in zip(self.length, new, strict=True)]
        self._bounds = (start, length + (n if valid is None else valid.sum(-1)[:, None, None]))

    def evict(self, keep: Tensor, rows: Sequence[int] | None = None) -> None:
        """Free entries of a packed layer.

        Args:
            keep: Entries to keep, bool `[B, H, n]`, in the layout of `padded_rows`.
            rows: Sequences to cut; None: all.
        """
        assert self.key is not None and self.value is not None
        held, live = self.padded_rows()
        keep = keep & live
        if rows is not None:
            cut = torch.zeros(self.batch, 1, 1, dtype=torch.bool, device=keep.device)
            cut[list(rows)] = True
            keep = torch.where(cut, keep, live)
        extras = {name: x[held] for name, x in self.extras.items()}
        key, value, coded = self.key, self.value, self.coded
        self.pack(key[held], value[held], keep, self.col[held], extras)
        if self.coding is not None and rows is not None:  # only what was cut is encoded anew
            others = [row for row in range(self.batch) if row not in rows]
            for row in others:
                own_heads = slice(row * self.heads, (row + 1) * self.heads)
                self.coded[own_heads] = coded[own_heads]
            moved, own = self.padded_rows()
            source, target = held[others][live[others]], moved[others][own[others]]
            self.coding.carry(self, key, value, source, target)

    def overwrite(self, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Replace K and V `[m, d]` of some rows, int64 `[m]` (for mergers); K is in `order`."""
        assert self.key is not None and self.value is not None
        self.key[rows], self.value[rows] = key.detach(), value.detach()

    def read(self, at: Tensor, rows: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """K and V of a packed layer as the model knows them, `[B, H, n, d]` each.

        Args:
            at: Rows, int64 `[B, H, n]`.
            rows: The sequences they belong to; None: all.
        """
        assert self.key is not None and self.value is not None
        return restored(self.key[at], self.order_of(rows)), self.value[at]

    def order_of(self, rows: Sequence[int] | None) -> Tensor | None:
        """The order of the channels of some sequences; None as `rows`: all."""
        return self.order if self.order is None or rows is None else self.order[list(rows)]

    def store_extras(self, extras: Mapping[str, Tensor]) -> None:
        """Store per-entry state, `[B, H, n, ...]` each, in the layout of `padded_rows`."""
        width = max(self.length)
        first = [s * width for s in range(len(self.length))]
        source, target = runs(first, self.length, self.col.device), self.rows()
        for name, held in extras.items():
            self.extras[name][target] = held.detach().flatten(0, 2)[source]

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Start and length of every segment on the layer's device, int64 `[B, H, 1]` each.

        They are kept from step to step, so that a decode step copies nothing from the CPU.
        """
        if self._bounds is None:
            shape = (self.batch, self.heads, 1)
            start = torch.tensor(self.start, dtype=torch.int64, device=self.col.device)
            length = torch.tensor(self.length, dtype=torch.int64, device=self.col.device)
            self._bounds = (start.view(shape), length.view(shape))
        return self._bounds

    def accumulate(self, need: Need, received: Tensor) -> None:
        """Add the attention that live entries received, `[entries, G]` in the order of `rows()`."""
        self.extras[need][self.rows()] += received

    def write_new(self, need: Need, values: Tensor) -> None:
        """Store a number with every entry of the last append, `[B, H, n]`."""
        target, chosen = self._appended
        flat = values.detach().reshape(-1)
        self.extras[need][target] = flat if chosen is None else flat[chosen]

    def forget_bounds(self) -> None:
        """Discard the device copy of start and length after they changed on the CPU."""
        self._bounds = None

    def rows(self) -> Tensor:
        """Rows of all live entries, segment by segment, int64 `[entries]`."""
        return runs(self.start, self.length, self.col.device)

    def padded_rows(self, rows: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Rows of the live entries as a rectangle.

        Args:
            rows: Sequences to return; None: all.

        Returns:
            Row indices int64 `[B, H, n]` (any valid row in place of a missing entry) and a mask of
            the live ones, bool `[B, H, n]`; `n` is the longest segment of these sequences.
        """
        start, length = self.bounds()
        longest = max(self.length)
        if rows is not None:
            index = torch.tensor(rows, device=self.col.device)
            start, length = start[index], length[index]
            longest = max(max(self.length[r * self.heads : (r + 1) * self.heads]) for r in rows)
        offset = torch.arange(longest, device=self.col.device)
        live = offset < length
        found = start + torch.where(live, offset, 0)
        return found.clamp(max=max(len(self.col) - 1, 0)), live

    def _layout(self, reserve: int | list[int] | None) -> Tensor:
        """Place the segments for the current lengths; return the row of every entry."""
        if reserve is None:
            mean = sum(self.length) // max(1, len(self.length))
            reserve = min(64, max(8, mean // 8))
        if isinstance(reserve, int):
            reserve = [reserve] * len(self.length)
        self.room = [a + r for a, r in zip(self.length, reserve, strict=True)]
        self.start = starts(self.room)
        self._bounds = None
        return runs(self.start, self.length, self.device)

    def make_room(self, new: Sequence[int]) -> None:
        """Move everything if any segment has no room for its number of new entries."""
        if any(a + m > r for a, m, r in zip(self.length, new, self.room, strict=True)):
            self._grow(max(new))

    def _grow(self, n: int) -> None:
        source = self.rows()
        target = self._layout([max(n, 16, a // 8) for a in self.length])
        total = sum(self.room)

        def moved(x: Tensor) -> Tensor:
            with torch.inference_mode(False):
                out = x.new_zeros(total, *x.shape[1:])
            out[target] = x[source]
            return out

        assert self.key is not None and self.value is not None
        self.key, self.value, self.col = moved(self.key), moved(self.value), moved(self.col)
        self.extras = {name: moved(x) for name, x in self.extras.items()}

    # -- copies and sizes -------------------------------------------------------------------------
    def fork(self) -> RaggedLayer:
        """Return an independent layer; dense tensors are shared, packed ones copied."""
        other = copy.copy(self)
        other.start, other.length, other.room = [*self.start], [*self.length], [*self.room]
        other.state = [dict(held) for held in self.state]
        other.extras = dict(self.extras)
        if self.packed:
            assert self.key is not None and self.value is not None
            other.key, other.value = self.key.clone(), self.value.clone()
            other.col = self.col.clone()
            other.extras = {name: x.clone() for name, x in self.extras.items()}
        return other

    def sequence(self, row: int) -> RaggedLayer:
        """One sequence of a packed layer without per-entry state; it shares the memory."""
        assert self.key is not None and self.value is not None
        out = copy.copy(self)
        here = slice(row * self.heads, (row + 1) * self.heads)
        first = self.start[here.start]
        out.batch, out.length, out.room = 1, self.length[here], self.room[here]
        out.start = [s - first for s in self.start[here]]
        out.coded, out.order = self.coded[here], self.order_of([row])
        rows = slice(first, first + sum(out.room))
        out.key, out.value, out.col = self.key[rows], self.value[rows], self.col[rows]
        out.extras, out.state = {}, []
        out.forget_bounds()
        return out

    def among(self, rows: Sequence[int]) -> RaggedLayer:
        """Some sequences of a packed layer without per-entry state; they share the memory."""
        out = copy.copy(self)
        own = [row * self.heads + head for row in rows for head in range(self.heads)]
        out.start, out.length, out.room = (
            [counts[s] for s in own] for counts in (self.start, self.length, self.room)
        )
        out.batch, out.extras, out.state = len(rows), {}, []
        out.forget_bounds()
        return out

    def entries(self, row: int | None = None) -> int:
        """Live entries of one sequence or of all; a dense layer counts its columns."""
        if not self.packed:
            dense = 0 if self.key is None else self.heads * self.key.shape[-2]
            return dense * (self.batch if row is None else 1)
        if row is None:
            return sum(self.length)
        return sum(self.length[row * self.heads : (row + 1) * self.heads])

    def entries_among(self, columns: Tensor, row: int) -> Tensor:
        """Live entries of one sequence whose column is marked in `columns`, bool `[S]`."""
        if not self.packed:
            return self.heads * columns.sum()
        segments = range(row * self.heads, (row + 1) * self.heads)
        held = [self.col[self.start[s] : self.start[s] + self.length[s]] for s in segments]
        return columns.to(self.col.device)[torch.cat(held).long()].sum()

    @property
    def number_bytes(self) -> int:
        """Bytes of one number of K and V, as the model computes them."""
        return 0 if self.key is None else self.key.element_size()

    def entry_bytes(self) -> int:
        """Bytes of one entry: K, V and extras."""
        extras = sum(x.element_size() * x[0].numel() for x in self.extras.values() if len(x))
        return 2 * self.dim * self.number_bytes + extras

    def live_bytes(self, row: int | None = None) -> int:
        """Bytes of the live entries of one sequence or of all: K, V and extras."""
        if self.coding is None or not self.packed or self.key is None:
            return self.entries(row) * self.entry_bytes()
        size = self.number_bytes
        extras = self.entries(row) * (self.entry_bytes() - 2 * self.dim * size)
        here = slice(None) if row is None else slice(row * self.heads, (row + 1) * self.heads)
        counts = self.length[here], self.coded[here]
        return extras + self.coding.live_bytes(*counts, self.dim, size)

    def allocated_bytes(self, row: int | None = None) -> int:
        """Bytes that the layer owns for one sequence or for all, free room and columns included."""
        if row is not None and self.packed:
            rows = sum(self.room[row * self.heads : (row + 1) * self.heads])
            if self.coding is not None:
                return self.allocated_bytes() * rows // max(1, len(self.col))
            return rows * (self.entry_bytes() + self.col.element_size())
        owned = [t for t in (self.key, self.value, self.order) if t is not None]
        if self.packed:
            owned += [self.col, *self.extras.values()]
        return sum(
            t.owned_bytes if isinstance(t, Coded) else t.numel() * t.element_size() for t in owned
        )
