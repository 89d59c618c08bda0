"""Quantised and pruned keys and values of packed layers: codes with scales, and fewer channels.

The layout is that of KIVI (Liu, Yuan, Jin, Zhong, Xu, Braverman, Chen, Hu, arXiv 2402.02750): keys are quantised per
channel in groups of neighbouring entries, values per entry in groups of channels, and a head's newest entries stay
unquantised. Keys can also, or instead, have fewer channels (see `kvbench.engine.channels`). A `Coded` tensor represents
the keys or values of a layer. It stores only codes or the kept channels; readers get decoded rows, with zeros in pruned
channels.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from kvbench.engine.block_quantizers import QUANTIZERS, Codes
from kvbench.engine.channels import order_dtype
from kvbench.engine.segments import runs
from kvbench.plugin import Policy


class PackedLayer(Protocol):
    """The part of a packed layer that coding reads and writes; see `kvbench.engine.layer`."""

    key: Any
    value: Any
    col: Tensor
    start: list[int]
    length: list[int]
    coded: list[int]
    dim: int

    def rows(self) -> Tensor:
        """Return the rows that hold entries, int64 `[m]`."""
        ...


_Layer = TypeVar("_Layer", bound=PackedLayer)


@dataclass(frozen=True)
class Coding:
    """Storage format of the keys and values of a packed layer.

    Attributes:
        bits: Bits per code; None: not quantised.
        group_size: Number of entries, and of channels, that share a scale and a zero.
        residual: Number of newest entries of a head that stay unquantised.
        key_channels: Fraction of a key's channels that is stored.
        quantizer: Block quantizer by its name in `QUANTIZERS`.
    """

    bits: int | None
    group_size: int
    residual: int
    key_channels: float = 1.0
    quantizer: str = "kivi"

    @classmethod
    def of(cls, policy: Policy) -> Self | None:
        """Return the coding of a policy's caches; None if entries are stored unchanged."""
        if not policy.recodes:
            return None
        settings = (policy.bits, policy.group_size, policy.residual, policy.key_channels)
        return cls(*settings, policy.quantizer)

    @property
    def entries(self) -> int:
        """Return the number of entries encoded together."""
        return 1 if self.bits is None else self.group_size

    def coded(self, entry_count: int) -> int:
        """Return how many of a head's oldest entries are encoded: as many whole groups as fit."""
        return max(0, entry_count - self.residual) // self.entries * self.entries

    def width(self, head_dim: int) -> int:
        """Return the number of stored channels of a key, rounded up."""
        return ceil(Fraction(str(self.key_channels)) * head_dim)

    def channels(self, head_dim: int) -> int:
        """Return the number of value channels that share a scale: a group, or all if groups do not fit."""
        return self.group_size if head_dim % self.group_size == 0 else head_dim

    def live_bytes(
        self,
        entry_counts: Sequence[int],
        coded_counts: Sequence[int],
        head_dim: int,
        number_bytes: int,
    ) -> int:
        """Return the bytes of the keys and values of some heads.

        Args:
            entry_counts: Live entries of every head.
            coded_counts: Encoded entries among them.
            head_dim: Channels per head.
            number_bytes: Bytes of an unquantised number, a scale or a zero.
        """
        coded_total, key_width = sum(coded_counts), self.width(head_dim)
        order_bytes = len(entry_counts) * head_dim * order_dtype(head_dim).itemsize if key_width < head_dim else 0
        exact_bytes = (sum(entry_counts) - coded_total) * 2 * head_dim * number_bytes + order_bytes
        if self.bits is None:
            return exact_bytes + coded_total * (key_width + head_dim) * number_bytes
        block_count = coded_total // self.group_size * key_width + coded_total * head_dim // self.channels(head_dim)
        code_bytes = coded_total * (_code_bytes(key_width, self.bits) + _code_bytes(head_dim, self.bits))
        return exact_bytes + code_bytes + 2 * number_bytes * block_count

    def pack(self, layer: PackedLayer) -> None:
        """Encode the keys and values of a newly packed layer."""
        assert layer.key is not None and layer.value is not None
        layer.coded = [self.coded(entry_count) for entry_count in layer.length]
        coded_rows = runs(layer.start, layer.coded, layer.key.device)
        live_rows, head_dim = layer.rows(), layer.dim
        block_settings = (self.entries, self.quantizer)
        code_layout = CodeLayout(self.bits, self.entries, 1, self.width(head_dim), *block_settings)
        layer.key = _encoded(code_layout, layer.key, live_rows, coded_rows)
        if self.bits is not None:
            code_layout = CodeLayout(self.bits, 1, self.channels(head_dim), head_dim, *block_settings)
            layer.value = _encoded(code_layout, layer.value, live_rows, coded_rows)

    def decoded(self, layer: _Layer) -> _Layer:
        """Return a read-only layer to attend to, with all rows decoded."""
        assert isinstance(layer.key, Coded)
        decoded_layer = copy.copy(layer)
        decoded_layer.key = layer.key.decode()
        if isinstance(layer.value, Coded):
            decoded_layer.value = layer.value.decode()
        return decoded_layer

    def age(self, layer: PackedLayer) -> None:
        """Quantise the groups that have left the residual with the last append.

        Called after the attention of a forward, whose own tokens see one another unquantised. Keys that are pruned but
        not quantised keep all channels until the next eviction step, as in ThinK.
        """
        if self.bits is None:
            return
        assert isinstance(layer.key, Coded) and isinstance(layer.value, Coded)
        previous_counts, layer.coded = layer.coded, [self.coded(entry_count) for entry_count in layer.length]
        if previous_counts != layer.coded:
            first_rows = [
                first_row + entry_count for first_row, entry_count in zip(layer.start, previous_counts, strict=True)
            ]
            added_counts = [
                new_count - old_count for old_count, new_count in zip(previous_counts, layer.coded, strict=True)
            ]
            coded_rows = runs(first_rows, added_counts, layer.col.device)
            layer.key.freeze(coded_rows)
            layer.value.freeze(coded_rows)

    def carry(
        self,
        layer: PackedLayer,
        key: Tensor,
        value: Tensor,
        source_rows: Tensor,
        target_rows: Tensor,
    ) -> None:
        """Copy the codes of rows that eviction moved but did not change, int64 `[m]` each."""
        assert layer.key is not None and layer.value is not None
        layer.key[target_rows], layer.value[target_rows] = key[source_rows], value[source_rows]


class CodeLayout(NamedTuple):
    """Layout of the coded rows of a tensor.

    Attributes:
        bits: Bits per code; None: not quantised.
        entries, channels: Rows and channels of a block, which shares a scale and a zero.
        width: Number of leading channels of a row that are stored; the others are zero.
        together: Rows of one head that are encoded at the same time.
        quantizer: Block quantizer by its name in `QUANTIZERS`.
    """

    bits: int | None
    entries: int
    channels: int
    width: int
    together: int
    quantizer: str


def _code_bytes(channel_count: int, bits: int) -> int:
    """Return the bytes of the codes of one row."""
    return -(-channel_count * bits // 8)


def _encoded(code_layout: CodeLayout, numbers: Tensor, live_rows: Tensor, coded_rows: Tensor) -> Coded:
    coded_tensor = Coded.empty(len(numbers), numbers, code_layout)
    coded_tensor[live_rows] = numbers[live_rows]
    if len(coded_rows):
        coded_tensor.freeze(coded_rows)
    return coded_tensor


def _writing(method: Callable[..., None]) -> Callable[..., None]:
    """Make the tensors created by a method writable for forwards in any mode."""

    @functools.wraps(method)
    def run_writable(*args: Any) -> None:
        with torch.inference_mode(False), torch.no_grad():
            method(*args)

    return run_writable


class Coded(Tensor):
    """Keys or values `[rows, d]` as codes; every reader sees a tensor of decoded rows.

    A row is empty (it decodes to zeros), exact, or part of a group of rows whose blocks share a scale and a zero, as
    interpreted by the quantizer. Without bits a group is one row, and its numbers are the zeros of one-number blocks.

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
    kind: CodeLayout

    @staticmethod
    def _make(code_layout: CodeLayout, **tensors: Tensor) -> Coded:
        exact = tensors["exact"]
        shape = (len(tensors["place"]), exact.shape[1])
        coded_tensor: Coded = Tensor._make_wrapper_subclass(Coded, shape, dtype=exact.dtype, device=exact.device)
        coded_tensor.kind = code_layout
        for field_name, tensor in tensors.items():
            setattr(coded_tensor, field_name, tensor)
        return coded_tensor

    @classmethod
    def empty(cls, row_count: int, reference: Tensor, code_layout: CodeLayout) -> Coded:
        """Return empty rows with the channels, dtype and device of a tensor."""
        code_bytes = 0 if code_layout.bits is None else _code_bytes(code_layout.width, code_layout.bits)
        block_count = code_layout.width // code_layout.channels
        scale_count = 0 if code_layout.bits is None else block_count
        with torch.inference_mode(False):  # later forwards write to it in any mode
            return cls._make(
                code_layout,
                code=torch.zeros(row_count, code_bytes, dtype=torch.uint8, device=reference.device),
                place=torch.zeros(row_count, dtype=torch.int32, device=reference.device),
                scale=torch.zeros(1, scale_count, dtype=reference.dtype, device=reference.device),
                zero=torch.zeros(1, block_count, dtype=reference.dtype, device=reference.device),
                exact=torch.zeros(0, reference.shape[1], dtype=reference.dtype, device=reference.device),
            )

    def _with(self, **changes: Tensor) -> Coded:
        field_names = ("code", "place", "scale", "zero", "exact")
        tensors = {field_name: getattr(self, field_name) for field_name in field_names} | changes
        return self._make(self.kind, **tensors)

    # -- reading ----------------------------------------------------------------------------------
    def decode(self) -> Tensor:
        """Decode all rows, `[rows, d]`."""
        bits, block_channels, width = self.kind.bits, self.kind.channels, self.kind.width
        group_indices = self.place.clamp(min=0).long()
        numbers = self.zero[group_indices]
        if bits is not None:
            bit_shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=self.code.device)
            code_values = (self.code[..., None] >> bit_shifts & (1 << bits) - 1).flatten(1)[:, :width]
            scales, zero_points = self.scale[group_indices].flatten(), numbers.flatten()
            coded_blocks = Codes(code_values.reshape(-1, block_channels), scales, zero_points)
            numbers = QUANTIZERS[self.kind.quantizer].decode(coded_blocks).view(len(group_indices), width)
        numbers = pad(numbers, (0, self.exact.shape[1] - width))
        exact_rows = (self.place < 0).nonzero()[:, 0]
        numbers[exact_rows] = self.exact[-1 - self.place[exact_rows].long()]
        return numbers

    def __getitem__(self, index: Any) -> Tensor:
        """Return rows: still coded for a slice or a list of rows, decoded for any other index."""
        if isinstance(index, slice) or index.dim() == 1:
            return self._with(code=self.code[index], place=self.place[index])
        code_rows, row_places = self.code[index], self.place[index]
        decoded_rows: Tensor = self._with(code=code_rows.flatten(0, -2), place=row_places.flatten()).decode()
        decoded: Tensor = decoded_rows.view(*row_places.shape, self.exact.shape[1])
        return decoded

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Decode the inputs of an operation; only concatenation keeps codes."""
        if func is torch.ops.aten.cat.default and not (len(args) > 1 and args[1]):
            return _join_coded(args[0])
        if func._schema.is_mutable:
            raise TypeError(f"{func} cannot write to quantised rows")
        decoded_inputs = tree_map_only(Coded, Coded.decode, (args, kwargs or {}))
        return func(*decoded_inputs[0], **decoded_inputs[1])

    # -- writing ----------------------------------------------------------------------------------
    @_writing
    def __setitem__(self, index: Any, value: Any) -> None:
        """Store rows: numbers become exact rows, coded rows are copied with their groups."""
        if isinstance(value, Coded):
            joined = _join_coded([self, value])
            row_count = len(self.place)
            row_places, code_rows = joined.place[:row_count], joined.code[:row_count]
            row_places[index], code_rows[index] = joined.place[row_count:], joined.code[row_count:]
            self.scale, self.zero, self.exact = joined.scale, joined.zero, joined.exact
            self.place, self.code = row_places, code_rows
            self._tidy()
            return
        exact_count = len(self.exact)
        self.exact = torch.cat([self.exact, value.to(self.exact.dtype)])
        exact_indices = torch.arange(exact_count, len(self.exact), dtype=torch.int32, device=self.place.device)
        self.place[index] = -1 - exact_indices

    @_writing
    def freeze(self, row_indices: Tensor) -> None:
        """Encode exact rows, int64 `[m]`, group by group; `m` is a multiple of `entries`."""
        bits, entries, width = self.kind.bits, self.kind.entries, self.kind.width
        numbers = self.exact[-1 - self.place[row_indices].long()][:, :width]
        first_group = len(self.zero)
        if bits is None:
            self.zero = torch.cat([self.zero, numbers])
            self.scale = self.zero[:, :0]
        else:
            self._quantise(row_indices, numbers, bits)
        group_indices = torch.arange(first_group, len(self.zero), dtype=torch.int32, device=row_indices.device)
        self.place[row_indices] = group_indices.repeat_interleave(entries)
        self._tidy()

    def _quantise(self, row_indices: Tensor, numbers: Tensor, bits: int) -> None:
        """Store the codes, scales and zeros of rows `[m, width]`."""
        _, entries, channels, width, rows_per_call, quantizer_name = self.kind
        quantizer, blocks_per_row = QUANTIZERS[quantizer_name], width // channels
        blocks = numbers.reshape(-1, entries, blocks_per_row, channels).transpose(1, 2)
        # Contiguous for every block count, because a sum over other strides can have other bits.
        blocks = blocks.reshape(-1, entries * channels).contiguous()
        # A head's codes must not depend on what else is cached.
        block_calls = blocks.split(rows_per_call // entries * blocks_per_row) if quantizer.joint else [blocks]
        encoded_calls = [quantizer.encode(call_blocks, bits) for call_blocks in block_calls]
        code_values, scales, zero_points = (
            torch.cat(encoded_parts) for encoded_parts in zip(*encoded_calls, strict=True)
        )
        code_values = (
            code_values.view(-1, blocks_per_row, entries, channels).transpose(1, 2).reshape(len(row_indices), -1)
        )
        code_values = pad(code_values, (0, -code_values.shape[1] % (8 // bits))).unflatten(1, (-1, 8 // bits))
        bit_shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=code_values.device)
        self.code[row_indices] = (code_values << bit_shifts).sum(-1, dtype=torch.uint8)
        self.scale = torch.cat([self.scale, scales.view(-1, blocks_per_row)])
        self.zero = torch.cat([self.zero, zero_points.view(-1, blocks_per_row)])

    def _tidy(self) -> None:
        """Discard groups and exact rows that no row refers to any more."""
        row_places = self.place.long()
        exact_places, self.exact = _drop_unused(-row_places, self.exact, 1)
        group_places, self.scale = _drop_unused(row_places, self.scale, 0)
        _, self.zero = _drop_unused(row_places, self.zero, 0)
        self.place = torch.where(row_places > 0, group_places, torch.where(row_places < 0, -exact_places, 0)).int()

    # -- memory -----------------------------------------------------------------------------------
    def clone(self, **_: Any) -> Coded:
        """Return an independent copy."""
        field_names = ("code", "place", "scale", "zero", "exact")
        return self._with(**{field_name: getattr(self, field_name).clone() for field_name in field_names})

    def new_zeros(self, rows: int, *_: int, **__: Any) -> Coded:  # type: ignore[override]
        """Return empty rows of the same kind."""
        return self.empty(rows, self.exact, self.kind)

    @property
    def owned_bytes(self) -> int:
        """Return the bytes allocated for codes, scales, zeros, exact rows and their places."""
        tensors = (self.code, self.place, self.scale, self.zero, self.exact)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _drop_unused(places: Tensor, stored_rows: Tensor, row_offset: int) -> tuple[Tensor, Tensor]:
    """Keep the table rows that positive places refer to (place `p` to row `p - row_offset`).

    Returns:
        The new places and the table; its unused row 0, where `row_offset` is 0, stays.
    """
    is_used = torch.zeros(len(stored_rows) + row_offset, dtype=torch.bool, device=places.device)
    is_used[places.clamp(min=0)] = True
    is_used[0] = True
    new_places = is_used.long().cumsum(0) - 1
    return new_places[places.clamp(min=0)], stored_rows[is_used[row_offset:]]


def _join_coded(coded_parts: Sequence[Any]) -> Coded:
    """Concatenate the rows of several coded tensors of one kind."""
    first_part = coded_parts[0]
    joined_places, group_count, exact_count = [], 0, 0
    for coded_part in coded_parts:
        part_places = coded_part.place
        part_places = torch.where(
            part_places > 0,
            part_places + group_count,
            torch.where(part_places < 0, part_places - exact_count, 0),
        )
        joined_places.append(part_places)
        group_count += len(coded_part.zero) - 1
        exact_count += len(coded_part.exact)
    return first_part._with(  # type: ignore[no-any-return]
        code=torch.cat([source.code for source in coded_parts]),
        place=torch.cat(joined_places).int(),
        scale=torch.cat([first_part.scale[:1], *(source.scale[1:] for source in coded_parts)]),
        zero=torch.cat([first_part.zero[:1], *(source.zero[1:] for source in coded_parts)]),
        exact=torch.cat([source.exact for source in coded_parts]),
    )
