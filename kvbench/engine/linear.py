"""Layers with a recurrent or convolution state, beside or instead of attention (hybrid models).

transformers writes these states in place, so every copy of a cache needs states of its own. They have a constant size,
nothing can be evicted from them, and padding between tokens would change them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvbench.engine.layer import RaggedLayer

LayerT = TypeVar("LayerT")

_STATES = ("conv_states", "recurrent_states")
_FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")


class RaggedHybridLayer(LinearAttentionLayer, RaggedLayer):  # type: ignore[misc, override]  # shared names
    """A ragged layer whose decoder layer also keeps a recurrent state (Falcon-H1, Zaya)."""

    def __init__(self, number_of_states: int = 1) -> None:
        RaggedLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialise K and V, which transformers passes by position, or a state."""
        base: Any = RaggedLayer if args else LinearAttentionLayer
        base.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        """Reset K and V; compression does so and must keep the state. `reset_states` resets the states."""
        RaggedLayer.reset(self)

    def fork(self) -> RaggedHybridLayer:
        """Return an independent copy; see `RaggedLayer.fork`."""
        forked = RaggedLayer.fork(self)
        assert isinstance(forked, RaggedHybridLayer)
        return copied(forked)

    crop = RaggedLayer.crop
    reorder_cache = RaggedLayer.reorder_cache


def reset_states(layer: LinearAttentionLayer) -> None:
    """Discard the states of a layer."""
    LinearAttentionLayer.__init__(layer, layer.number_of_states)


def combine_states(target: LayerT, sources: Sequence[Any], combine: Callable[[list[Tensor]], Tensor]) -> LayerT:
    """Give a layer new states, made from those of other layers; return it. A layer without states is left unchanged.

    Args:
        target: A copy of one of the sources.
        sources: Layers of the same kind.
        combine: Returns a new tensor from one state of every source.
    """
    if not isinstance(target, LinearAttentionLayer):
        return target
    for name in _STATES:
        states = {
            index: None if first is None else combine([getattr(source, name)[index] for source in sources])
            for index, first in getattr(sources[0], name).items()
        }
        setattr(target, name, states)
    for name in _FLAGS:
        setattr(target, name, dict(getattr(sources[0], name)))
    return target


def copied(layer: LayerT) -> LayerT:
    """Return a shallow copy of a layer with states of its own."""
    return combine_states(copy.copy(layer), [layer], lambda states: states[0].clone())


def states_of(layer: Any) -> list[Tensor]:
    """Return the states of a layer, `[B, ...]` each; empty for a layer without."""
    if not isinstance(layer, LinearAttentionLayer):
        return []
    return [state for name in _STATES for state in getattr(layer, name).values() if state is not None]
