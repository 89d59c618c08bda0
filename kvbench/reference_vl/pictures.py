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
    """What a picture shows.

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
        return [cell for cell, thing in enumerate(self.objects) if thing != EMPTY]

    def pixels(self) -> Pixels:
        """Draw the picture: uint8 `[side * CELL, side * CELL, 3]`."""
        cells = draw([self], np.random.default_rng(self.seed))
        grid = cells.reshape(self.side, self.side, CELL, CELL, 3).swapaxes(1, 2)
        return grid.reshape(self.side * CELL, self.side * CELL, 3)


def draw(pictures: list[Picture], rng: np.random.Generator) -> Pixels:
    """Draw all cells of some pictures, one after the other: uint8 `[cells, CELL, CELL, 3]`."""
    objects = np.array([thing for picture in pictures for thing in picture.objects])
    large = np.array([big for picture in pictures for big in picture.large])
    places = np.concatenate(
        [np.stack(np.divmod(np.arange(p.side**2), p.side), 1) for p in pictures]
    ).astype(np.float32)
    count = len(objects)
    paper = np.repeat((230 + rng.uniform(-4, 4, (count, 1))).astype(np.float32), 3, axis=1)
    paper[:, 0] -= _SHADE * places[:, 1]
    paper[:, 2] -= _SHADE * places[:, 0]
    cells = np.broadcast_to(paper[:, None, None], (count, CELL, CELL, 3)).copy()
    middle = (CELL / 2 + rng.uniform(-3, 3, (count, 2))).astype(np.float32)
    radius = rng.uniform(6.5, 9.5, count).astype(np.float32)
    middle[large] = CELL / 2
    radius[large] += 4
    ink = (_RGB[objects // len(SHAPES)] + rng.normal(0, 10, (count, 3))).astype(np.float32)
    grid = np.arange(CELL, dtype=np.float32) + 0.5
    for shape in range(len(SHAPES)):
        chosen = np.flatnonzero((objects != EMPTY) & (objects % len(SHAPES) == shape))
        dx = grid[None, None, :] - middle[chosen, 0, None, None]
        dy = grid[None, :, None] - middle[chosen, 1, None, None]
        inside = _inside(SHAPES[shape], dx, dy, radius[chosen, None, None])
        cells[chosen] = np.where(inside[..., None], ink[chosen, None, None], cells[chosen])
    cells += rng.integers(-9, 10, cells.shape, dtype=np.int8)
    return np.clip(cells, 0, 255).astype(np.uint8)


def _inside(
    shape: str,
    dx: npt.NDArray[np.float32],
    dy: npt.NDArray[np.float32],
    radius: npt.NDArray[np.float32],
) -> npt.NDArray[np.bool_]:
    """Return which pixels, at `dx` and `dy` from its middle, a shape covers."""
    x, y = abs(dx), abs(dy)
    if shape == "square":
        return (x < 0.85 * radius) & (y < 0.85 * radius)
    if shape == "diamond":
        return x + y < 1.15 * radius
    if shape == "cross":
        return ((x < 0.3 * radius) | (y < 0.3 * radius)) & (x < radius) & (y < radius)
    if shape == "triangle":
        return (dy < 0.8 * radius) & (x < (dy + radius) * 0.55)
    distance = np.hypot(dx, dy)
    if shape == "ring":
        return (distance < radius) & (distance > 0.55 * radius)
    return distance < radius
