"""Quantised and pruned keys and values of packed layers: codes with scales, and fewer channels.

The layout is that of KIVI (Liu, Yuan, Jin, Zhong, Xu, Braverman, Chen, Hu, arXiv 2402.02750): keys
are quantised per channel in groups of neighbouring entries, values per entry in groups of channels,
and a head's newest entries stay as they are. Keys can have fewer channels besides, or instead (see
`kvbench.engine.channels`). A tensor of `Coded` stands for the keys or values of a layer. It holds
codes, or the kept channels, only; what reads it gets decoded rows, with zeros in pruned channels.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from kvbench.engine.block_quantizers import QUANTIZERS, Codes
from kvbench.engine.channels import order_dtype
from kvbench.engine.segments import runs
from kvbench.plugin import Policy

if TYPE_CHECKING:  # a layer calls this module
    from kvbench.engine.layer import RaggedLayer


@dataclass(frozen=True)
class Coding:
    """How the keys and values of a packed layer are stored.

    Attributes:
        bits: Bits of a code; None: nothing is quantised.
        group_size: Entries, and channels, that share a scale and a zero.
        residual: Newest entries of a head that stay as they are.
        key_channels: The share of a key's channels that is stored.
        quantizer: What makes codes of blocks, by its name in `QUANTIZERS`.
    """

    bits: int | None
    group_size: int
    residual: int
    key_channels: float = 1.0
    quantizer: str = "kivi"

    @classmethod
    def of(cls, policy: Policy) -> Self | None:
        """The coding of a policy's caches; None if entries are stored as they are."""
        if not policy.recodes:
            return None
        own = (policy.bits, policy.group_size, policy.residual, policy.key_channels)
        return cls(*own, policy.quantizer)

    @property
    def entries(self) -> int:
        """Entries that are coded together."""
        return 1 if self.bits is None else self.group_size

    def coded(self, entries: int) -> int:
        """How many of a head's entries are coded, the oldest: as many whole groups as fit."""
        return max(0, entries - self.residual) // self.entries * self.entries

    def width(self, dim: int) -> int:
        """Channels of a key that are stored, rounded up."""
        return ceil(Fraction(str(self.key_channels)) * dim)

    def channels(self, dim: int) -> int:
        """Channels of a value that share a scale: a group, or all if groups do not fit."""
        return self.group_size if dim % self.group_size == 0 else dim

    def live_bytes(
        self, entries: Sequence[int], coded_entries: Sequence[int], dim: int, size: int
    ) -> int:
        """Bytes of the keys and values of some heads.

        Args:
            entries: Live entries of every head.
            coded_entries: How many of them are coded.
            dim: Head dim.
            size: Bytes of a number that is not quantised, and of a scale or zero.
        """
        coded, width = sum(coded_entries), self.width(dim)
        order = len(entries) * dim * order_dtype(dim).itemsize if width < dim else 0
        whole = (sum(entries) - coded) * 2 * dim * size + order
        if self.bits is None:
            return whole + coded * (width + dim) * size
        blocks = coded // self.group_size * width + coded * dim // self.channels(dim)
        codes = coded * (_code_bytes(width, self.bits) + _code_bytes(dim, self.bits))
        return whole + codes + 2 * size * blocks

    def pack(self, layer: RaggedLayer) -> None:
        """Encode the keys and values of a layer that was packed just now."""
        assert layer.key is not None and layer.value is not None
        layer.coded = [self.coded(n) for n in layer.length]
        rows = runs(layer.start, layer.coded, layer.key.device)
        live, dim = layer.rows(), layer.dim
        how = (self.entries, self.quantizer)
        kind = Kind(self.bits, self.entries, 1, self.width(dim), *how)
        layer.key = _encoded(kind, layer.key, live, rows)
        if self.bits is not None:
            kind = Kind(self.bits, 1, self.channels(dim), dim, *how)
            layer.value = _encoded(kind, layer.value, live, rows)

    def decoded(self, layer: RaggedLayer) -> RaggedLayer:
        """A layer to attend to, with all rows as numbers; it must not be written to."""
        assert isinstance(layer.key, Coded)
        out = copy.copy(layer)
        out.key = layer.key.decode()
        if isinstance(layer.value, Coded):
            out.value = layer.value.decode()
        return out

    def age(self, layer: RaggedLayer) -> None:
        """Quantise the groups that have left the residual with the last append.

        Called after the attention of a forward, whose own tokens see one another as they are. Keys
        that are pruned but not quantised stay whole until the next cut, as in ThinK.
        """
        if self.bits is None:
            return
        assert isinstance(layer.key, Coded) and isinstance(layer.value, Coded)
        before, layer.coded = layer.coded, [self.coded(n) for n in layer.length]
        if before != layer.coded:
            first = [s + n for s, n in zip(layer.start, before, strict=True)]
            more = [b - a for a, b in zip(before, layer.coded, strict=True)]
            rows = runs(first, more, layer.col.device)
            layer.key.freeze(rows)
            layer.value.freeze(rows)

    def carry(
        self, layer: RaggedLayer, key: Tensor, value: Tensor, source: Tensor, target: Tensor
    ) -> None:
        """Copy codes of rows that a cut has moved but not changed, int64 `[m]` each."""
        assert layer.key is not None and layer.value is not None
        layer.key[target], layer.value[target] = key[source], value[source]


class Kind(NamedTuple):
    """What the coded rows of a tensor look like.

    Attributes:
        bits: Bits of a code; None: numbers are not quantised.
        entries, channels: Rows and channels of a block, which shares a scale and a zero.
        width: First channels of a row that are stored; the others are zero.
        together: Rows of one head that become codes at the same time.
        quantizer: What makes codes of blocks, by its name in `QUANTIZERS`.
    """

    bits: int | None
    entries: int
    channels: int
    width: int
    together: int
    quantizer: str


def _code_bytes(channels: int, bits: int) -> int:
    """Bytes of the codes of one row."""
    return -(-channels * bits // 8)


def _encoded(kind: Kind, x: Tensor, live: Tensor, rows: Tensor) -> Coded:
    out = Coded.empty(len(x), x, kind)
    out[live] = x[live]
    if len(rows):
        out.freeze(rows)
    return out


def _writing(change: Callable[..., None]) -> Callable[..., None]:
    """Let a method make tensors that forwards in any mode can write to."""

    @functools.wraps(change)
    def run(*args: Any) -> None:
        with torch.inference_mode(False), torch.no_grad():
            change(*args)

    return run


class Coded(Tensor):
    """Keys or values `[rows, d]` as codes; to everything that reads it, a tensor of decoded rows.

    A row is empty (it decodes to zeros), exact, or part of a group of rows whose blocks share a
    scale and a zero; what they mean is up to the quantizer. Without bits a group is one row, and
    its numbers are the zeros of blocks of one number each.

    Attributes:
        kind: Bits, blocks and width of the rows that are not exact.
        code: Codes, packed along the channels, uint8 `[rows, bytes]`.
        place: 0 for an empty row, `g` for a row of group `g`, `-1 - e` for exact row `e`, int32.
        scale, zero: `[groups, width / channels]`, in the model's dtype; row 0 is not used.
        exact: Exact rows, `[e, d]`.
    """

    code: Tensor
    place: Tensor
    scale: Tensor
    zero: Tensor
    exact: Tensor
    kind: Kind

    @staticmethod
    def _make(kind: Kind, **tensors: Tensor) -> Coded:
        exact = tensors["exact"]
        shape = (len(tensors["place"]), exact.shape[1])
        out: Coded = Tensor._make_wrapper_subclass(
            Coded, shape, dtype=exact.dtype, device=exact.device
        )
        out.kind = kind
        for name, tensor in tensors.items():
            setattr(out, name, tensor)
        return out

    @classmethod
    def empty(cls, rows: int, like: Tensor, kind: Kind) -> Coded:
        """Rows that hold nothing, with the channels, dtype and device of a tensor."""
        codes = 0 if kind.bits is None else _code_bytes(kind.width, kind.bits)
        blocks = kind.width // kind.channels
        scales = 0 if kind.bits is None else blocks
        with torch.inference_mode(False):  # later forwards write to it in any mode
            return cls._make(
                kind,
                code=torch.zeros(rows, codes, dtype=torch.uint8, device=like.device),
                place=torch.zeros(rows, dtype=torch.int32, device=like.device),
                scale=torch.zeros(1, scales, dtype=like.dtype, device=like.device),
                zero=torch.zeros(1, blocks, dtype=like.dtype, device=like.device),
                exact=torch.zeros(0, like.shape[1], dtype=like.dtype, device=like.device),
            )

    def _with(self, **changes: Tensor) -> Coded:
        names = ("code", "place", "scale", "zero", "exact")
        tensors = {name: getattr(self, name) for name in names} | changes
        return self._make(self.kind, **tensors)

    # -- reading ----------------------------------------------------------------------------------
    def decode(self) -> Tensor:
        """All rows as numbers, `[rows, d]`."""
        bits, channels, width = self.kind.bits, self.kind.channels, self.kind.width
        group = self.place.clamp(min=0).long()
        numbers = self.zero[group]
        if bits is not None:
            shift = torch.arange(0, 8, bits, dtype=torch.uint8, device=self.code.device)
            code = (self.code[..., None] >> shift & (1 << bits) - 1).flatten(1)[:, :width]
            scale, zero = self.scale[group].flatten(), numbers.flatten()
            blocks = Codes(code.reshape(-1, channels), scale, zero)
            numbers = QUANTIZERS[self.kind.quantizer].decode(blocks).view(len(group), width)
        numbers = pad(numbers, (0, self.exact.shape[1] - width))
        rows = (self.place < 0).nonzero()[:, 0]
        numbers[rows] = self.exact[-1 - self.place[rows].long()]
        return numbers

    def __getitem__(self, index: Any) -> Tensor:
        """Rows: still coded for a slice or a list of rows, decoded for any other index."""
        if isinstance(index, slice) or index.dim() == 1:
            return self._with(code=self.code[index], place=self.place[index])
        code, place = self.code[index], self.place[index]
        rows: Tensor = self._with(code=code.flatten(0, -2), place=place.flatten()).decode()
        out: Tensor = rows.view(*place.shape, self.exact.shape[1])
        return out

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Decode whatever an operation reads; only joining keeps codes."""
        if func is torch.ops.aten.cat.default and not (len(args) > 1 and args[1]):
            return _joined(args[0])
        if func._schema.is_mutable:
            raise TypeError(f"{func} cannot write to quantised rows")
        plain = tree_map_only(Coded, Coded.decode, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    # -- writing ----------------------------------------------------------------------------------
    @_writing
    def __setitem__(self, index: Any, value: Any) -> None:
        """Store rows: numbers become exact rows, coded rows are copied with their groups."""
        if isinstance(value, Coded):
            joined = _joined([self, value])
            rows = len(self.place)
            place, code = joined.place[:rows], joined.code[:rows]
            place[index], code[index] = joined.place[rows:], joined.code[rows:]
            self.scale, self.zero, self.exact = joined.scale, joined.zero, joined.exact
            self.place, self.code = place, code
            self._tidy()
            return
        held = len(self.exact)
        self.exact = torch.cat([self.exact, value.to(self.exact.dtype)])
        new = torch.arange(held, len(self.exact), dtype=torch.int32, device=self.place.device)
        self.place[index] = -1 - new

    @_writing
    def freeze(self, rows: Tensor) -> None:
        """Encode exact rows, int64 `[m]`, group by group; `m` is a multiple of `entries`."""
        bits, entries, width = self.kind.bits, self.kind.entries, self.kind.width
        x = self.exact[-1 - self.place[rows].long()][:, :width]
        first = len(self.zero)
        if bits is None:
            self.zero = torch.cat([self.zero, x])
            self.scale = self.zero[:, :0]
        else:
            self._quantise(rows, x, bits)
        group = torch.arange(first, len(self.zero), dtype=torch.int32, device=rows.device)
        self.place[rows] = group.repeat_interleave(entries)
        self._tidy()

    def _quantise(self, rows: Tensor, x: Tensor, bits: int) -> None:
        """Store the codes, scales and zeros of rows `[m, width]`."""
        _, entries, channels, width, together, name = self.kind
        quantizer, per_row = QUANTIZERS[name], width // channels
        blocks = x.reshape(-1, entries, per_row, channels).transpose(1, 2)
        # Contiguous whatever their number is: a sum over other strides can have other bits.
        blocks = blocks.reshape(-1, entries * channels).contiguous()
        # What a head holds must not depend on what else is cached.
        calls = blocks.split(together // entries * per_row) if quantizer.joint else [blocks]
        found = [quantizer.encode(call, bits) for call in calls]
        code, scale, zero = (torch.cat(made) for made in zip(*found, strict=True))
        code = code.view(-1, per_row, entries, channels).transpose(1, 2).reshape(len(rows), -1)
        code = pad(code, (0, -code.shape[1] % (8 // bits))).unflatten(1, (-1, 8 // bits))
        shift = torch.arange(0, 8, bits, dtype=torch.uint8, device=code.device)
        self.code[rows] = (code << shift).sum(-1, dtype=torch.uint8)
        self.scale = torch.cat([self.scale, scale.view(-1, per_row)])
        self.zero = torch.cat([self.zero, zero.view(-1, per_row)])

    def _tidy(self) -> None:
        """Forget groups and exact rows that no row refers to any more."""
        place = self.place.long()
        used, self.exact = _kept(-place, self.exact, 1)
        groups, self.scale = _kept(place, self.scale, 0)
        _, self.zero = _kept(place, self.zero, 0)
        self.place = torch.where(place > 0, groups, torch.where(place < 0, -used, 0)).int()

    # -- memory -----------------------------------------------------------------------------------
    def clone(self, **_: Any) -> Coded:
        """An independent copy."""
        held = ("code", "place", "scale", "zero", "exact")
        return self._with(**{name: getattr(self, name).clone() for name in held})

    def new_zeros(self, rows: int, *_: int, **__: Any) -> Coded:  # type: ignore[override]
        """Empty rows of the same kind."""
        return self.empty(rows, self.exact, self.kind)

    @property
    def owned_bytes(self) -> int:
        """Bytes that are allocated for codes, scales, zeros, exact rows and their places."""
        held = (self.code, self.place, self.scale, self.zero, self.exact)
        return sum(x.numel() * x.element_size() for x in held)


def _kept(place: Tensor, table: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Keep the rows of a table that positive places refer to (place `p` to row `p - first`).

    Returns:
        The new places, and the table; its unused row 0, where `first` is 0, stays.
    """
    used = torch.zeros(len(table) + first, dtype=torch.bool, device=place.device)
    used[place.clamp(min=0)] = True
    used[0] = True
    number = used.long().cumsum(0) - 1
    return number[place.clamp(min=0)], table[used[first:]]


def _joined(parts: Sequence[Any]) -> Coded:
    """Rows of several coded tensors of one kind, one after the other."""
    first = parts[0]
    places, groups, exact = [], 0, 0
    for part in parts:
        place = part.place
        place = torch.where(place > 0, place + groups, torch.where(place < 0, place - exact, 0))
        places.append(place)
        groups += len(part.zero) - 1
        exact += len(part.exact)
    return first._with(  # type: ignore[no-any-return]
        code=torch.cat([p.code for p in parts]),
        place=torch.cat(places).int(),
        scale=torch.cat([first.scale[:1], *(p.scale[1:] for p in parts)]),
        zero=torch.cat([first.zero[:1], *(p.zero[1:] for p in parts)]),
        exact=torch.cat([p.exact for p in parts]),
    )
