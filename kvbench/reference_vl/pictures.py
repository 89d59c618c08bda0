"""Pictures: square grids of cells, each empty or with one coloured shape.

A cell has 28 x 28 pixels, which is one visual token of the model. Every drawing of the same picture
differs in positions, sizes, shades and noise. The background darkens from left to right in red and
from top to bottom in blue, as on a shaded chart, so that a cell shows where it is.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvbench.reference_vl.words import SHAPES

CELL = 28
"""Width and height of a cell in pixels."""

EMPTY = -1
"""The object of an empty cell; other objects are `colour * len(SHAPES) + shape`."""

_RGB = np.array(
    [
        (220, 30, 30),
        (30, 170, 40),
        (40, 60, 220),
        (230, 210, 30),
        (140, 40, 170),
        (245, 140, 20),
        (40, 200, 210),
        (245, 130, 190),
    ],
    dtype=np.float32,
)
_SHADE = 14.0

Pixels = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class Picture:
    """Content of a picture.

    Attributes:
        name: Number by which the text refers to it, from 1.
        side: Cells per row and per column.
        objects: Object of each cell, row by row; see `EMPTY`.
        large: Whether the object fills its cell, for each cell.
        seed: Seed of the drawing.
    """

    name: int
    side: int
    objects: tuple[int, ...]
    large: tuple[bool, ...]
    seed: tuple[int, ...]

    def colour(self, cell: int) -> int:
        """Return the colour in a cell that is not empty: an index into `COLOURS`."""
        return self.objects[cell] // len(SHAPES)

    def shape(self, cell: int) -> int:
        """Return the shape in a cell that is not empty: an index into `SHAPES`."""
        return self.objects[cell] % len(SHAPES)

    def full(self) -> list[int]:
        """Return the cells that are not empty."""
        return [cell for cell, object_code in enumerate(self.objects) if object_code != EMPTY]

    def pixels(self) -> Pixels:
        """Draw the picture: uint8 `[side * CELL, side * CELL, 3]`."""
        cell_pixels = draw([self], np.random.default_rng(self.seed))
        pixel_grid = cell_pixels.reshape(self.side, self.side, CELL, CELL, 3).swapaxes(1, 2)
        return pixel_grid.reshape(self.side * CELL, self.side * CELL, 3)


def draw(pictures: list[Picture], generator: np.random.Generator) -> Pixels:
    """Draw all cells of some pictures, one after the other: uint8 `[cells, CELL, CELL, 3]`."""
    object_codes = np.array([object_code for picture in pictures for object_code in picture.objects])
    large_flags = np.array([is_large for picture in pictures for is_large in picture.large])
    cell_positions = np.concatenate([np.stack(np.divmod(np.arange(p.side**2), p.side), 1) for p in pictures]).astype(
        np.float32
    )
    cell_count = len(object_codes)
    background = np.repeat((230 + generator.uniform(-4, 4, (cell_count, 1))).astype(np.float32), 3, axis=1)
    background[:, 0] -= _SHADE * cell_positions[:, 1]
    background[:, 2] -= _SHADE * cell_positions[:, 0]
    cell_pixels = np.broadcast_to(background[:, None, None], (cell_count, CELL, CELL, 3)).copy()
    centres = (CELL / 2 + generator.uniform(-3, 3, (cell_count, 2))).astype(np.float32)
    radii = generator.uniform(6.5, 9.5, cell_count).astype(np.float32)
    centres[large_flags] = CELL / 2
    radii[large_flags] += 4
    object_colours = (_RGB[object_codes // len(SHAPES)] + generator.normal(0, 10, (cell_count, 3))).astype(np.float32)
    pixel_offsets = np.arange(CELL, dtype=np.float32) + 0.5
    for shape_index in range(len(SHAPES)):
        cell_indices = np.flatnonzero((object_codes != EMPTY) & (object_codes % len(SHAPES) == shape_index))
        x_offsets = pixel_offsets[None, None, :] - centres[cell_indices, 0, None, None]
        y_offsets = pixel_offsets[None, :, None] - centres[cell_indices, 1, None, None]
        inside_mask = _inside(SHAPES[shape_index], x_offsets, y_offsets, radii[cell_indices, None, None])
        cell_pixels[cell_indices] = np.where(
            inside_mask[..., None],
            object_colours[cell_indices, None, None],
            cell_pixels[cell_indices],
        )
    cell_pixels += generator.integers(-9, 10, cell_pixels.shape, dtype=np.int8)
    return np.clip(cell_pixels, 0, 255).astype(np.uint8)


def _inside(
    shape: str,
    dx: npt.NDArray[np.float32],
    dy: npt.NDArray[np.float32],
    radius: npt.NDArray[np.float32],
) -> npt.NDArray[np.bool_]:
    """Return which pixels, at `dx` and `dy` from its middle, a shape covers."""
    x_distance, y_distance = abs(dx), abs(dy)
    if shape == "square":
        return (x_distance < 0.85 * radius) & (y_distance < 0.85 * radius)
    if shape == "diamond":
        return x_distance + y_distance < 1.15 * radius
    if shape == "cross":
        return (
            ((x_distance < 0.3 * radius) | (y_distance < 0.3 * radius)) & (x_distance < radius) & (y_distance < radius)
        )
    if shape == "triangle":
        return (dy < 0.8 * radius) & (x_distance < (dy + radius) * 0.55)
    distance = np.hypot(dx, dy)
    if shape == "ring":
        return (distance < radius) & (distance > 0.55 * radius)
    return distance < radius
