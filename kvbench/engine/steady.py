"""Measures whether matrix products and activations of different sizes give a token the same bits.

Matrix product libraries choose their algorithm by the shape of the operands, and another algorithm can round
differently. Most libraries sum the products of a row in one order from a few rows on, but none guarantees it: what a
batch may rely on is measured here. torch computes the last elements of a tensor, or of a thread's part of it, one by
one, and SiLU and GELU then round differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvbench.engine.mlp_parts import part_count, takes_parts
from kvbench.engine.models import decoder_of

LEAST = (8, 16, 32, 48)
"""Numbers of rows that larger products are compared with; with fewer than 8, other algorithms are usual.

On a CPU of AMD, MKL rounds alike from 8 rows on, on one of Intel from 16; in bfloat16 with AMX, oneDNN from 48.
"""

_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
"""Modules that define activations."""


class _Activation(NamedTuple):
    """An activation of the layers of one shape.

    Attributes:
        module: The activation.
        channels: Channels of its input.
        stride: Numbers from one token of its input to the next; gates can be a part of a product.
        value: An input, `[]`, whose output differs where elements are computed one by one.
        expected: The usual output, `[]`.
        takes_parts: Whether its MLP takes tokens in parts.
    """

    module: nn.Module
    channels: int
    stride: int
    value: Tensor
    expected: Tensor
    takes_parts: bool


class Steady:
    """Compares the matrix products and activations of one model at different sizes.

    One layer represents all layers of its shape. Mixtures of experts and quantised weights are never steady: their
    products are not those of a plain linear layer.
    """

    def __init__(self, model: nn.Module) -> None:
        decoder = decoder_of(model)
        get_head = getattr(model, "get_output_embeddings", None)
        output_head = get_head() if callable(get_head) else None
        self._device = next(decoder.parameters()).device
        mlp_modules = {id(module) for mlp in decoder.modules() if takes_parts(mlp) for module in mlp.modules()}
        self._layers = _distinct(module for module in decoder.modules() if id(module) not in mlp_modules)
        self._mlp_layers = _distinct(module for module in decoder.modules() if id(module) in mlp_modules)
        self._activations = _uneven_activations(decoder)
        self._head = _distinct(output_head.modules()) if isinstance(output_head, nn.Module) else []
        self._plain = all(map(_is_plain, (decoder, *([output_head] if output_head is not None else []))))
        self._probes: dict[tuple[nn.Linear, int], tuple[Tensor, Tensor] | None] = {}
        self._known: dict[tuple[nn.Linear, int, int], bool] = {}
        self._even: dict[tuple[nn.Module, int], bool] = {}

    def at(self, row_count: int, least: int, with_head: bool = False) -> bool:
        """Return whether a batch of `row_count` rows gives a row the same bits as one of `least` rows.

        Args:
            row_count: Rows of the products: sequences times tokens. MLPs take them in parts.
            least: One of `LEAST`.
            with_head: Whether to compare the output embedding as well.
        """
        if not self._plain or row_count < least:
            return False
        layers = [*self._layers, *(self._head if with_head else ())]
        products = [(layer, row_count) for layer in layers]
        products += [(layer, size) for layer in self._mlp_layers for size in self._part_sizes(row_count)]
        is_even = all(
            self._is_even(activation, size)
            for activation in self._activations
            for size in (self._part_sizes(row_count) if activation.takes_parts else [row_count])
        )
        return is_even and all(self._same_at(layer, size, least) for layer, size in products)

    def _same_at(self, layer: nn.Linear, size: int, least: int) -> bool:
        """Compare products of one size, once; many numbers of rows have parts of the same size."""
        if (layer, size, least) not in self._known:
            self._known[layer, size, least] = size >= least and self._same(layer, size, least)
        return self._known[layer, size, least]

    @torch.no_grad()
    def _same(self, layer: nn.Linear, row_count: int, least: int) -> bool:
        """Return whether `least` rows that repeat have the same bits wherever they are in a product."""
        if (layer, least) not in self._probes:
            self._probes[layer, least] = _probe(layer, least)
        if (probe := self._probes[layer, least]) is None:
            return False
        inputs, expected = probe
        repeats = -(-row_count // least)
        parts = layer(inputs.repeat(repeats, 1)[:row_count]).split(least)
        return all(torch.equal(part, expected[: len(part)]) for part in parts)

    @torch.no_grad()
    def _is_even(self, activation: _Activation, row_count: int) -> bool:
        """Return whether an activation computes all elements of an input the usual way."""
        if (activation.module, row_count) not in self._even:
            inputs = activation.value.repeat(row_count, activation.stride)[:, : activation.channels]
            outputs = activation.module(inputs)
            self._even[activation.module, row_count] = torch.equal(outputs, activation.expected.expand_as(outputs))
        return self._even[activation.module, row_count]

    def _part_sizes(self, row_count: int) -> set[int]:
        """Return the sizes of the parts in which MLPs take this many rows."""
        parts = part_count(row_count, self._device)
        return {row_count // parts, -(-row_count // parts)}


def _probe(layer: nn.Linear, least: int) -> tuple[Tensor, Tensor] | None:
    """Return `least` rows and their product; None if the bits of a row depend on its place there."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(least, layer.in_features, generator=generator).to(layer.weight.dtype)
    outputs = layer(inputs)
    return (inputs, outputs) if torch.equal(layer(inputs.roll(1, 0)), outputs.roll(1, 0)) else None


def _distinct(modules: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return the linear layers, one of each shape."""
    layers = [module for module in modules if isinstance(module, nn.Linear)]
    return list({(*layer.weight.shape, layer.weight.dtype, layer.bias is None): layer for layer in layers}.values())


def _uneven_activations(decoder: nn.Module) -> list[_Activation]:
    """Return the activations whose elements can be computed in two ways, one for each shape of their layers."""
    kinds: dict[tuple[type, int, int, bool], tuple[nn.Module, nn.Linear]] = {}
    for parent in decoder.modules():
        layers = [child for child in parent.children() if isinstance(child, nn.Linear)]
        for child in parent.children():
            if layers and type(child).__module__.startswith(_ACTIVATIONS) and not [*child.parameters()]:
                channels = layers[-1].in_features
                stride = max(channels, layers[0].out_features)
                kinds.setdefault((type(child), channels, stride, takes_parts(parent)), (child, layers[0]))
    return [
        _Activation(activation, channels, stride, *uneven, in_parts)
        for (_, channels, stride, in_parts), (activation, layer) in kinds.items()
        if (uneven := _uneven_value(activation, layer.weight)) is not None
    ]


@torch.no_grad()
def _uneven_value(activation: nn.Module, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return a number that an activation rounds differently at the end of a tensor, and its usual output.

    None if there is none among 256 of the dtype of `like`.
    """
    if not like.is_floating_point() or like.device.type != "cpu":
        return None
    for value in torch.randn(256, generator=torch.Generator().manual_seed(0)).to(like.dtype).unbind():
        outputs = activation(value.repeat(65))  # whole vectors, and one more
        if not torch.equal(outputs, outputs[:1].expand_as(outputs)):
            return value, outputs[0]
    return None


def _is_plain(module: nn.Module) -> bool:
    """Return whether all matrices of a module belong to linear layers and embeddings."""
    return all(
        type(submodule) is nn.Linear
        or isinstance(submodule, nn.Embedding)
        or all(parameter.ndim < 2 for parameter in submodule.parameters(False))
        for submodule in module.modules()
    )
