"""Location of visual tokens: the image as the model sees it, with one cell per token.

Qwen2-VL, Qwen2.5-VL and Qwen3-VL stretch an image to a grid of patches and merge patches into tokens, row by row
(`image_grid_thw`). LLaVA-1.5 sees a square, one token per patch. LLaVA-NeXT and LLaVA-OneVision see such a square of
the whole image first, then its tiles, which are not drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from kvbench.benchmark import Medium
from kvbench.engine.models import visual_ids
from kvbench.engine.vision import Pixels, Vision
from kvbench.errors import UserError

Picture = npt.NDArray[np.uint8]
"""An RGB picture, `[height, width, 3]`."""

MERGED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SQUARE = ("llava", "llava_next", "llava_onevision")
"""Model types with a square token grid."""


@dataclass(frozen=True)
class ImageView:
    """An image as the model sees it.

    Attributes:
        picture: Image area covered by its tokens.
        rows, columns: Number of tokens down and across.
        first: Position of the first token in the prompt; tokens follow row by row.
    """

    picture: Picture
    rows: int
    columns: int
    first: int

    @property
    def positions(self) -> slice:
        """Return the positions of its tokens in the prompt."""
        return slice(self.first, self.first + self.rows * self.columns)

    def cells(self, token_values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Select the image's cells `[..., rows, columns]` from values of all prompt positions `[..., T]`."""
        image_values = token_values[..., self.positions]
        return image_values.reshape(*token_values.shape[:-1], self.rows, self.columns)


def drawable(model: nn.Module) -> bool:
    """Return whether the token locations of this model's images are known."""
    config: Any = model.config
    return config.model_type in (*MERGED, *SQUARE)


def views(
    model: nn.Module,
    vision: Vision,
    token_ids: Sequence[int],
    media: Sequence[Medium],
    pixels: Pixels,
) -> list[ImageView]:
    """Return the images of a prompt; videos have tokens but are not drawn.

    Args:
        model: A model that is `drawable`.
        vision: Processor of the prompt and its pixels.
        token_ids: Tokens of the prompt.
        media: Images and videos of the prompt.
        pixels: The model's inputs for them.

    Raises:
        UserError: An image's token count does not match its grid.
    """
    config: Any = model.config
    visual_tokens = set(visual_ids(model))
    positions = [position for position, token in enumerate(token_ids) if token in visual_tokens]
    image_views, offset, image_index = [], 0, 0
    for medium, count in zip(media, vision.counts(media), strict=True):
        if medium.kind == "image":
            if config.model_type in MERGED:
                view = _merged(config, pixels["image_grid_thw"][image_index], medium, positions[offset])
            else:
                view = _square(config, pixels["pixel_values"][image_index], vision, positions[offset])
            drawn_positions = {*range(view.first, view.positions.stop)}
            if not drawn_positions <= {*positions[offset : offset + count]}:
                raise UserError(
                    f"an image of model {vision.model} has {count} tokens, which are not a grid "
                    f"of {view.rows} x {view.columns}; it cannot be drawn"
                )
            image_views.append(view)
            image_index += 1
        offset += count
    return image_views


def _merged(config: Any, patch_grid: Tensor, medium: Medium, first_position: int) -> ImageView:
    """Return the view of an image with merged patches, divided evenly by its tokens."""
    merge_size = int(config.vision_config.spatial_merge_size)
    _, rows, columns = (int(side) for side in patch_grid.tolist())
    return ImageView(np.asarray(medium.load()), rows // merge_size, columns // merge_size, first_position)


def _square(config: Any, pixel_values: Tensor, vision: Vision, first_position: int) -> ImageView:
    """Return the view of a whole, possibly cropped image with one token per patch.

    Args:
        config: The model's configuration.
        pixel_values: Pixel values of the image, `[3, h, w]`, or of its views, `[views, 3, h, w]`.
        vision: Knows how the values were scaled.
        first_position: Position of its first token.
    """
    pixel_values = pixel_values[0] if pixel_values.dim() == 4 else pixel_values
    patch_size = int(config.vision_config.patch_size)
    rows, columns = (side // patch_size for side in pixel_values.shape[-2:])
    image_processor = vision.processor.image_processor
    unscaled = pixel_values.double().cpu().numpy().transpose(1, 2, 0)
    if image_processor.do_normalize:
        unscaled = unscaled * np.array(image_processor.image_std) + np.array(image_processor.image_mean)
    scale = 1 / image_processor.rescale_factor if image_processor.do_rescale else 1.0
    picture = (unscaled * scale).round().clip(0, 255).astype(np.uint8)
    # With the strategy `full`, the class token comes before the patches.
    first_position += config.vision_feature_select_strategy == "full"
    return ImageView(picture[: rows * patch_size, : columns * patch_size], rows, columns, first_position)
