"""Measures whether matrix products of different sizes give a token the same bits.

Matrix product libraries choose their algorithm by the shape of the operands, and another algorithm can round
differently. Most libraries sum the products of a row in one order from a few rows on, but none guarantees it: what a
batch may rely on is measured here.
"""

from __future__ import annotations

import torch
from torch import nn

from kvbench.engine.mlp_parts import part_count
from kvbench.engine.models import decoder_of

LEAST = (8, 16, 32, 48)
"""Numbers of rows that larger products are compared with; with fewer than 8, other algorithms are usual.

On a CPU of AMD, MKL rounds alike from 8 rows on, on one of Intel from 16; in bfloat16 with AMX, oneDNN from 48.
"""


class Steady:
    """Compares the matrix products of one model at different sizes.

    One layer represents all layers of its shape. Mixtures of experts and quantised weights are never steady: their
    products are not those of a plain linear layer.
    """

    def __init__(self, model: nn.Module) -> None:
        decoder = decoder_of(model)
        get_head = getattr(model, "get_output_embeddings", None)
        output_head = get_head() if callable(get_head) else None
        self._device = next(decoder.parameters()).device
        self._layers = _distinct(decoder)
        self._head = _distinct(output_head) if isinstance(output_head, nn.Module) else {}
        self._plain = all(map(_is_plain, (decoder, *([output_head] if output_head is not None else []))))
        self._known: dict[tuple[int, int, bool], bool] = {}

    def at(self, row_count: int, least: int, with_head: bool = False) -> bool:
        """Return whether products of `row_count` rows give a row the same bits as products of `least` rows.

        Args:
            row_count: Rows of the products: sequences times tokens.
            least: One of `LEAST`.
            with_head: Whether to compare the output embedding as well.
        """
        if not self._plain or row_count < least:
            return False
        return all(self._same_at(size, least, with_head) for size in {row_count, *self._part_sizes(row_count)})

    def _same_at(self, size: int, least: int, with_head: bool) -> bool:
        """Compare products of one size, once; many numbers of rows have parts of the same size."""
        if (size, least, with_head) not in self._known:
            layers = [*self._layers.values(), *(self._head.values() if with_head else ())]
            self._known[size, least, with_head] = size >= least and all(_same(layer, size, least) for layer in layers)
        return self._known[size, least, with_head]

    def _part_sizes(self, row_count: int) -> set[int]:
        """Return the sizes of the parts in which MLPs take this many rows."""
        parts = part_count(row_count, self._device)
        return {row_count // parts, -(-row_count // parts)}


def _distinct(module: nn.Module) -> dict[tuple[object, ...], nn.Linear]:
    """Return the linear layers, one of each shape."""
    return {
        (*submodule.weight.shape, submodule.weight.dtype, submodule.bias is None): submodule
        for submodule in module.modules()
        if isinstance(submodule, nn.Linear)
    }


def _is_plain(module: nn.Module) -> bool:
    """Return whether all matrices of a module belong to linear layers and embeddings."""
    return all(
        type(submodule) is nn.Linear
        or isinstance(submodule, nn.Embedding)
        or all(parameter.ndim < 2 for parameter in submodule.parameters(False))
        for submodule in module.modules()
    )


@torch.no_grad()
def _same(layer: nn.Linear, row_count: int, least: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(row_count, layer.in_features, generator=generator).to(layer.weight.dtype)
    outputs = layer(inputs)
    end_slices = (slice(0, least), slice(row_count - least, row_count))
    return all(torch.equal(outputs[end_slice], layer(inputs[end_slice])) for end_slice in end_slices)
