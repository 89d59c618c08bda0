"""Limits of pixels: the tokens and pixels of processors that transformers builds with the same limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from kvbench.benchmark import Medium
from kvbench.engine.vision import PixelLimits, Vision, images_only
from kvbench.errors import UserError

from ... import vision

PATCH = {"qwen2_vl": 14, "qwen3_vl": 16}
SIZES = ((64, 48), (300, 200), (40, 90))
CPU = torch.device("cpu")


def image(size: tuple[int, int]) -> Medium:
    return Medium("image", f"{size}", lambda: vision.picture("red", size))


def video(size: tuple[int, int], frames: int) -> Medium:
    pictures = [vision.picture("red", size)] * frames
    return Medium("video", f"{size}/{frames}", lambda: pictures, 2.0)


def built(kind: str, **limits: Any) -> Any:
    """A processor that transformers builds with limits, in place of those of the test's processor."""
    stock = vision.processor(kind)
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=PATCH[kind], merge_size=2, size=dict(stock.image_processor.size), **limits
    )
    return images_only(kind, images, stock.tokenizer)


@pytest.mark.parametrize("kind", PATCH)
@pytest.mark.parametrize("cells", [(4, 8), (16, None), (None, 2), (9, 9)])
def test_images_have_the_tokens_of_the_processor_with_the_same_limits(
    kind: str, cells: tuple[int | None, int | None]
) -> None:
    area = (2 * PATCH[kind]) ** 2
    lowest, highest = (None if count is None else count * area for count in cells)
    limits = {name: value for name, value in (("min_pixels", lowest), ("max_pixels", highest)) if value is not None}
    media = [image(size) for size in SIZES]
    limited = Vision(vision.processor(kind), "tiny", PixelLimits(lowest, highest))
    oracle, stock = Vision(built(kind, **limits), "tiny"), Vision(vision.processor(kind), "tiny")
    assert limited.counts(media) == oracle.counts(media) != stock.counts(media)
    # Rounding to whole cells can miss a narrow range, as it does in transformers.
    pixels, expected = limited.pixels(media, CPU), oracle.pixels(media, CPU)
    assert pixels.keys() == expected.keys()
    assert all(torch.equal(pixels[name], expected[name]) for name in expected)
    no_limits = Vision(vision.processor(kind), "tiny", PixelLimits())
    assert no_limits.counts(media) == stock.counts(media)


@pytest.mark.skipif(not vision.installed("torchvision"), reason="videos need torchvision")
@pytest.mark.parametrize("kind", PATCH)
def test_each_frame_of_a_video_has_the_limits_whatever_the_number_of_frames(kind: str) -> None:
    patch, stock = PATCH[kind], vision.processor(kind)
    made: Any = transformers.Qwen2VLVideoProcessor if kind == "qwen2_vl" else transformers.Qwen3VLVideoProcessor
    processor_class: Any = transformers.Qwen2VLProcessor if kind == "qwen2_vl" else transformers.Qwen3VLProcessor
    processor = processor_class(
        stock.image_processor, stock.tokenizer, made(patch_size=patch, merge_size=2), chat_template=vision.QWEN_TEMPLATE
    )
    area = (2 * patch) ** 2
    limited = Vision(processor, "tiny", PixelLimits(4 * area, 9 * area))
    media = [video((300, 200), 4), video((300, 200), 8), image((300, 200)), video((20, 20), 4)]
    counts = limited.counts(media)
    # Two frames share their tokens: 3 x 2 cells for 300 x 200 pixels, 2 x 2 for a small square.
    assert counts == [2 * 6, 4 * 6, 6, 2 * 4]
    pixels = limited.pixels(media, CPU)
    grids = pixels["video_grid_thw"].prod(-1) // 4
    assert grids.tolist() == [12, 24, 8]
    assert len(pixels["pixel_values_videos"]) == 4 * sum(grids)


def test_a_frame_has_at_most_the_tokens_that_qwen_vl_utils_allows() -> None:
    processor = transformers.Qwen2VLImageProcessorPil(patch_size=16, merge_size=2)
    lmms_eval_limits = PixelLimits(256 * 28 * 28, 1605632)
    assert lmms_eval_limits.video_size(processor, 32) == {"shortest_edge": 200704, "longest_edge": 768 * 32 * 32}
    assert PixelLimits(1_000_000).video_size(processor, 32)["longest_edge"] == 1_000_000


def test_limits_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(UserError, match="at least 50000 and at most 1000 pixels; change --min-pixels"):
        Vision(vision.processor("qwen2_vl"), "tiny", PixelLimits(50_000, 1000))
    with pytest.raises(UserError, match="are for Qwen-VL models, not for tiny; leave them out"):
        Vision(vision.processor("llava"), "tiny", PixelLimits(maximum=1000))
