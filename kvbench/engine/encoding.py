"""Outputs of a vision encoder, kept as long as the pixel values that they come from.

Cells that prune visual tokens prefill a context again, and so does every question of moment `question`. The encoder's
output is the same each time. `Vision.pixels` returns the same tensors for the same media.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from kvbench.benchmark import Medium
from kvbench.engine.pruning import TowerRows, watched_tower
from kvbench.engine.vision import QWEN, Pixels

_METHODS = ("get_image_features", "get_video_features")
_PIXELS = ("pixel_values", "pixel_values_videos")


@dataclass(frozen=True)
class _Encoded:
    """One call of an encoder.

    Attributes:
        output: What it returned.
        tower_rows: What was observed of its tower; None if it was not watched.
    """

    output: Any
    tower_rows: TowerRows | None


_KNOWN: WeakKeyDictionary[nn.Module, WeakTensorKeyDictionary] = WeakKeyDictionary()
"""Calls by the pixel values of media, for every model."""


def forget_encoded(model: nn.Module) -> None:
    """Forget all outputs of a model's encoder, because its parameters have changed."""
    _KNOWN.pop(model, None)


@contextmanager
def encoding_once(model: nn.Module) -> Iterator[None]:
    """Let a model encode pixel values within the block only if it has not done so before.

    If a pruning policy watches the vision tower, it gets the same facts as from a new call.
    """
    inner_model: Any = getattr(model, "model", model)
    known = _KNOWN.setdefault(model, WeakTensorKeyDictionary())
    is_encoding = False

    def wrapped(method: Any) -> Any:
        def encode(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_encoding
            pixel_values = args[0] if args else next((kwargs[name] for name in _PIXELS if name in kwargs), None)
            # Qwen3-VL encodes videos by its method for images.
            if is_encoding or torch.is_grad_enabled() or not isinstance(pixel_values, Tensor):
                return method(*args, **kwargs)
            tower = watched_tower()
            encoded = known.get(pixel_values)
            if encoded is None or (tower is not None and encoded.tower_rows is None):
                is_encoding = True
                try:
                    output = method(*args, **kwargs)
                finally:
                    is_encoding = False
                encoded = _Encoded(output, None if tower is None else tower.read_calls())
                known[pixel_values] = encoded
            if tower is not None and encoded.tower_rows is not None:
                tower.add(encoded.tower_rows)
            return encoded.output

        return encode

    methods = {name: getattr(inner_model, name) for name in _METHODS if hasattr(inner_model, name)}
    replaced = {name: inner_model.__dict__[name] for name in methods if name in inner_model.__dict__}
    inner_model.__dict__.update({name: wrapped(method) for name, method in methods.items()})
    try:
        yield
    finally:
        for name in methods:
            del inner_model.__dict__[name]
        inner_model.__dict__.update(replaced)


def joins_images(model: nn.Module, media: Sequence[Medium]) -> bool:
    """Return whether `join_pixels` supports these media of a model: images of Qwen's."""
    config: Any = model.config
    return config.model_type in QWEN and all(medium.kind == "image" for medium in media)


def join_pixels(model: nn.Module, sequences: Sequence[Pixels]) -> Pixels:
    """Return the pixel values of the images of several sequences, for one forward with a row for each.

    Each sequence's images are encoded alone, so that the bits of their features do not depend on the other sequences.

    Args:
        model: A model for which `joins_images` is true.
        sequences: At least one; the pixel values of every sequence that shows images, in order.
    """
    if len(sequences) == 1:
        return sequences[0]
    inner_model: Any = getattr(model, "model", model)
    with encoding_once(model):
        outputs = [
            inner_model.get_image_features(pixels["pixel_values"], pixels["image_grid_thw"], return_dict=True)
            for pixels in sequences
        ]
    fields = {"pooler_output": tuple(image for output in outputs for image in output.pooler_output)}
    if layers := getattr(outputs[0], "deepstack_features", None):  # Qwen3-VL: tensors of images, by layer
        fields["deepstack_features"] = tuple(
            tuple(image for output in outputs for image in output.deepstack_features[layer_index])
            for layer_index in range(len(layers))
        )
    joined = {name: torch.cat([pixels[name] for pixels in sequences]) for name in sequences[0]}
    _KNOWN[model][joined["pixel_values"]] = _Encoded(type(outputs[0])(**fields), None)
    return joined
