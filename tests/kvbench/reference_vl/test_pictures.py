"""Pictures show what they say, in the pixels that the image processor passes on."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import Qwen2VLImageProcessorPil

from kvbench import reference_vl
from kvbench.reference_vl.pictures import CELL, EMPTY, Picture, draw
from kvbench.reference_vl.words import COLOURS, SHAPES
from scripts.reference_vl.batches import patchify
from scripts.reference_vl.model import image_settings


def picture(objects: list[int], seed: int = 0, large: bool = False) -> Picture:
    return Picture(1, int(len(objects) ** 0.5), tuple(objects), (large,) * len(objects), (seed,))


def test_a_drawing_depends_on_picture_and_seed_alone() -> None:
    objects = [EMPTY, 3, 17, 40]
    assert np.array_equal(picture(objects).pixels(), picture(objects).pixels())
    assert not np.array_equal(picture(objects).pixels(), picture(objects, seed=1).pixels())


@pytest.mark.parametrize("side", [1, 2, 3, 4])
def test_cells_stand_row_by_row(side: int) -> None:
    objects = [EMPTY] * side**2
    objects[-1] = 0
    pixels = picture(objects).pixels()
    assert pixels.shape == (side * CELL, side * CELL, 3)
    inked = pixels[..., 0].astype(int) - pixels[..., 1] > 100
    rows, columns = np.nonzero(inked)
    assert rows.min() >= (side - 1) * CELL
    assert columns.min() >= (side - 1) * CELL


def test_objects_differ_in_colour_and_shape_and_size() -> None:
    means, areas = [], []
    for thing in range(len(COLOURS) * len(SHAPES)):
        pixels = picture([thing]).pixels().astype(float)
        inked = abs(pixels - picture([EMPTY]).pixels()).max(-1) > 40
        means.append(pixels[inked].mean(0))
        areas.append(inked.sum())
        large = picture([thing], large=True).pixels().astype(float)
        assert (abs(large - picture([EMPTY]).pixels()).max(-1) > 40).sum() > areas[-1]
    by_colour = np.array(means).reshape(len(COLOURS), len(SHAPES), 3)
    within = np.linalg.norm(by_colour - by_colour.mean(1, keepdims=True), axis=-1).max()
    centres = by_colour.mean(1)
    apart = np.linalg.norm(centres[:, None] - centres[None], axis=-1)
    assert within < apart[apart > 0].min()


def test_patches_equal_those_of_the_image_processor() -> None:
    shown = [picture([5, EMPTY, 7, 30], 1), picture([EMPTY, 40, *range(7)], 2), picture([9], 3)]
    shipped = json.loads((reference_vl.path() / "preprocessor_config.json").read_text())
    assert shipped == image_settings()
    processor = Qwen2VLImageProcessorPil(**shipped)
    output = processor(images=[each.pixels() for each in shown], return_tensors="pt")
    assert output["image_grid_thw"].tolist() == [[1, 4, 4], [1, 6, 6], [1, 2, 2]]
    cells = np.concatenate([draw([each], np.random.default_rng(each.seed)) for each in shown])
    torch.testing.assert_close(patchify(cells).flatten(0, 1), output["pixel_values"], rtol=0, atol=1e-6)
