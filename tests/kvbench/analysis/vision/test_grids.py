"""Where the tokens of an image lie, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from kvbench.analysis.vision.grids import ImageView, drawable, views
from kvbench.benchmark import Medium
from kvbench.engine.vision import Vision
from kvbench.errors import UserError
from tests import vision

from .conftest import medium, noise

GRIDS = [(3, 2), (2, 4), (2, 2)]
"""Rows and columns of 28 x 28 pixels."""


def prompt(kind: str, numbers: list[int], models: dict[str, str]) -> tuple[Any, list[int], Any]:
    """What `views` needs: a model's configuration, and a prompt with words between images."""
    processor = vision.processor(kind)
    eyes = Vision(processor, kind)
    media = [medium(i) for i in numbers]
    text = eyes.expand(f" and {processor.image_token}" * len(numbers) + " end", media)
    ids = processor.tokenizer(text)["input_ids"]
    model = SimpleNamespace(config=AutoConfig.from_pretrained(models[kind]))
    return model, ids, (eyes, ids, media, eyes.pixels(media, torch.device("cpu")))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_merged_tokens_divide_each_image_row_by_row(kind: str, models: dict[str, str]) -> None:
    model, ids, rest = prompt(kind, [0, 1, 2], models)
    assert drawable(model)
    found = views(model, *rest)
    side = 28 if kind == "qwen2_vl" else 32
    first = len(" and ")
    for view, (rows, columns), number in zip(found, GRIDS, range(3), strict=True):
        picture = np.asarray(noise(number))
        if kind == "qwen3_vl":  # its patches are larger, and sizes are rounded
            rows, columns = (round(pixels / side) for pixels in picture.shape[:2])
        assert (view.rows, view.columns, view.first) == (rows, columns, first)
        assert np.array_equal(view.picture, picture)
        first += rows * columns + len(" and ")
    assert first == len(ids) - len(" end") + len(" and ")


def test_a_cell_of_the_image_is_the_token_that_sees_it(models: dict[str, str]) -> None:
    """Changing one cell changes the four patches that are merged into its token, and no others."""
    model, _, (eyes, ids, media, pixels) = prompt("qwen2_vl", [0], models)
    (view,) = views(model, eyes, ids, media, pixels)
    for row, column in [(0, 1), (2, 0)]:
        changed = np.asarray(noise(0)).copy()
        height, width = changed.shape[0] // view.rows, changed.shape[1] // view.columns
        changed[row * height : (row + 1) * height, column * width : (column + 1) * width] = 0
        other = Medium("image", f"without {row}, {column}", lambda made=changed: vision.Image.fromarray(made))
        seen = eyes.pixels([other], torch.device("cpu"))["pixel_values"]
        patches = (seen != pixels["pixel_values"]).any(-1).nonzero().flatten()
        (token,) = set((patches // 4).tolist())
        assert len(patches) == 4
        positions = np.arange(len(ids))
        assert view.cells(positions)[row, column] == view.first + token


def test_cells_follow_the_positions_of_the_prompt() -> None:
    view = ImageView(np.zeros((3, 2, 3), np.uint8), 3, 2, first=4)
    cells = view.cells(np.arange(20))
    assert cells.tolist() == [[4, 5], [6, 7], [8, 9]]
    assert view.cells(np.arange(60).reshape(2, 3, 10)).shape == (2, 3, 3, 2)


def test_llava_sees_the_middle_square(models: dict[str, str]) -> None:
    model, ids, rest = prompt("llava", [1, 2], models)
    wide, square = views(model, *rest)
    assert (wide.rows, wide.columns, square.rows, square.columns) == (4, 4, 4, 4)
    image = rest[0].processor.tokenizer.convert_tokens_to_ids("<image>")
    starts = [i for i, t in enumerate(ids) if t == image and ids[i - 1] != image]
    assert [wide.first, square.first] == starts
    middle = np.asarray(noise(1))[:, 28:84].astype(int)
    assert abs(wide.picture.astype(int) - middle).max() <= 1
    assert abs(square.picture.astype(int) - np.asarray(noise(2)).astype(int)).max() <= 1


def stub(count: int, **more: Any) -> tuple[Any, Any, list[int], list[Medium], Any]:
    """A model that sees two views of an image, 9 x 14 in patches of 4, as `count` tokens."""
    config = SimpleNamespace(
        model_type="llava_onevision",
        image_token_id=7,
        video_token_id=8,
        vision_config=SimpleNamespace(patch_size=4),
        vision_feature_select_strategy=more.get("strategy", "default"),
    )
    scaling = SimpleNamespace(
        do_normalize=True, image_mean=[0.5] * 3, image_std=[0.5] * 3, do_rescale=True,
        rescale_factor=1 / 255,
    )  # fmt: skip
    eyes = SimpleNamespace(
        counts=lambda media: [count],
        processor=SimpleNamespace(image_processor=scaling),
        model="stub",
    )
    shown = torch.rand(1, 2, 3, 9, 14, generator=torch.Generator().manual_seed(0))
    ids = [1, 1, *[7] * count, 1]
    return SimpleNamespace(config=config), eyes, ids, [medium(0)], {"pixel_values": 2 * shown - 1}


@pytest.mark.parametrize(("strategy", "first"), [("default", 2), ("full", 3)])
def test_of_tiles_only_the_view_of_the_whole_image_is_drawn(strategy: str, first: int) -> None:
    model, eyes, ids, media, pixels = stub(19, strategy=strategy)
    (view,) = views(model, eyes, ids, media, pixels)
    assert (view.rows, view.columns, view.first) == (2, 3, first)
    shown = (pixels["pixel_values"][0, 0, :, :8, :12] + 1) / 2 * 255
    assert np.array_equal(view.picture, shown.round().permute(1, 2, 0).byte().numpy())


def test_an_image_without_the_tokens_of_its_grid_is_refused() -> None:
    with pytest.raises(UserError, match="5 tokens, which are not a grid of 2 x 3"):
        views(*stub(5))
