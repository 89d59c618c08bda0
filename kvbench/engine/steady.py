"""Whether a token gets the same bits in matrix products of different sizes.

A library for matrix products picks its algorithm by the shape of the operands, and another
algorithm can round differently. Most libraries add up the products of a row in one order from a few
rows on, but none promises it: what a batch may rely on is measured here.
"""

from __future__ import annotations

import torch
from torch import nn

from kvbench.engine.models import decoder_of

LEAST = 8
"""The smallest number of rows that is compared; with fewer, other algorithms are usual."""


class Steady:
    """Compares the matrix products of one model at different sizes.

    One layer stands for all of its shape. Mixtures of experts and quantised weights are never
    steady: their products are not those of a plain linear layer.

    Args:
        model: A causal language model.
    """

    def __init__(self, model: nn.Module) -> None:
        decoder = decoder_of(model)
        get = getattr(model, "get_output_embeddings", None)
        head = get() if callable(get) else None
        self._layers = _distinct(decoder)
        self._head = _distinct(head) if isinstance(head, nn.Module) else {}
        self._plain = all(map(_is_plain, (decoder, *([head] if head is not None else []))))
        self._known: dict[tuple[int, bool], bool] = {}

    def at(self, rows: int, head: bool = False) -> bool:
        """Whether products of so many rows give a row the bits that it has among `LEAST`.

        Args:
            rows: Rows of the products: sequences times tokens.
            head: Whether the output embedding is compared as well.
        """
        if not self._plain or rows < LEAST:
            return False
        if (rows, head) not in self._known:
            layers = [*self._layers.values(), *(self._head.values() if head else ())]
            self._known[rows, head] = all(_same(layer, rows) for layer in layers)
        return self._known[rows, head]


def _distinct(module: nn.Module) -> dict[tuple[object, ...], nn.Linear]:
    """The linear layers, one of each shape."""
    return {
        (*m.weight.shape, m.weight.dtype, m.bias is None): m
        for m in module.modules()
        if isinstance(m, nn.Linear)
    }


def _is_plain(module: nn.Module) -> bool:
    """Whether all matrices of a module belong to linear layers and embeddings."""
    return all(
        type(m) is nn.Linear
        or isinstance(m, nn.Embedding)
        or all(p.ndim < 2 for p in m.parameters(False))
        for m in module.modules()
    )


@torch.no_grad()
def _same(layer: nn.Linear, rows: int) -> bool:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, layer.in_features, generator=draw).to(layer.weight.dtype)
    found = layer(x)
    ends = (slice(0, LEAST), slice(rows - LEAST, rows))
    return all(torch.equal(found[end], layer(x[end])) for end in ends)
