"""Gates of vision-language models: images in the sequences that they learn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.training.data import Item, collate
from tests import vision
from tests.sweeps import slow_but

from .test_student import _student

PIXELS = ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids")


def item(kind: str, color: str, words: str, size: tuple[int, int] = (64, 48)) -> Item:
    """A prompt with an image, of which the last five tokens are learned."""
    processor = vision.processor(kind)
    prompt = f"{processor.image_token}{words}"
    if kind.startswith("qwen"):
        prompt = f"<|vision_start|>{processor.image_token}<|vision_end|>{words}"
    made = processor(text=[prompt], images=[vision.picture(color, size)], return_tensors="pt")
    ids = made.pop("input_ids")[0]
    supervised = torch.zeros(len(ids), dtype=torch.bool)
    supervised[-6:-1] = True
    pixels = {k: v for k, v in made.items() if k in PIXELS}
    return {"input_ids": ids, "supervised": supervised, **pixels}


def _skip_without_torchvision(kind: str) -> None:
    if kind in vision.NEED_TORCHVISION and not vision.installed("torchvision"):
        pytest.skip(f"the processor of {kind} needs torchvision")


@pytest.mark.parametrize("kind", ["qwen2_vl", "llava", *slow_but(vision.WRAPPERS, "gemma4")])
def test_gates_that_forget_nothing_leave_the_model_with_its_images(kind: str) -> None:
    _skip_without_torchvision(kind)
    student = _student(vision.model(kind), bias=60.0)
    batch = collate([item(kind, "red", "what is that")])
    result = student(**batch)
    assert float(result["kl"]) == pytest.approx(0.0, abs=1e-5)
    ids, rows = batch["input_ids"], batch["supervised"][:, :-1]
    given: dict[str, Any] = {k: batch[k] for k in batch if k not in ("input_ids", "supervised")}
    if kind.startswith(("qwen", "gemma")):
        token = vision.processor(kind).image_token_id
        given["mm_token_type_ids"] = (ids == token).int()
    logits = vision.model(kind)(input_ids=ids, **given).logits[:, :-1][rows]
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:][rows]).detach()
    assert float(result["ntp"]) == pytest.approx(float(expected), rel=1e-4)
    blank = student(**collate([item(kind, "white", "what is that")]))
    assert abs(float(blank["ntp"]) - float(expected)) > 1e-3


@pytest.mark.parametrize("kind", ["qwen2_vl", "llava", "mistral3"])
def test_a_padded_batch_equals_its_sequences(kind: str) -> None:
    _skip_without_torchvision(kind)
    student = _student(vision.model(kind), bias=2.0)
    items = [
        item(kind, "red", "what is that"),
        item(kind, "blue", "and what is this one", (90, 40)),
    ]
    batch = collate(items)
    assert "valid" in batch
    together: dict[str, Tensor] = student(**batch)
    apart = [student(**collate([one])) for one in items]
    # Both sequences have five learned positions, so the means over positions are means of means.
    for name in ("kl", "ntp"):
        mean = sum(float(one[name]) for one in apart) / 2
        assert float(together[name]) == pytest.approx(mean, rel=1e-3, abs=1e-6)
