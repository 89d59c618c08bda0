"""Draws which visual tokens are held over the images themselves (DBTrimKV, figures 13 and 14)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from PIL import Image

from kvbench.analysis.choosing import spread
from kvbench.analysis.vision.grids import Picture, View
from kvbench.analysis.vision.measure import Kept, OfTask, Shown
from kvbench.report.style import PAGE, save, sheet
from kvbench.report.text import short, slug
from kvbench.stats import Floats

_CANVAS = 480
"""Pixels of a panel's longer side; larger images are shrunk."""
_GAP = 0.06
"""Space between images, as a share of the largest image."""
_MOST_ACROSS = 4
_DIM = 0.8
"""How far an evicted cell is faded."""
_FADED = 225.0
_EDGE = "#D55E00"
"""The colour around what is held."""

Segment = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Placed:
    """An image on the canvas: its picture at that size, and where it is in pixels."""

    view: View
    picture: Picture
    top: int
    left: int


def draw_kept(
    task: OfTask, shown: Shown, kept: Kept, end: str, where: str, folder: Path
) -> Iterator[Path]:
    """Draw the images of a prompt with what one cell holds of them.

    The first panels show how many KV heads hold a cell, the others one KV head each. A cell that is
    held is clear and outlined, and one that is evicted is faded.
    """
    labels = kept.cell.labels
    steps = drawn_steps(kept, shown, task.draw_steps)
    heads = [(layer, head) for layer in task.draw_layers for head in task.draw_heads]
    placed, canvas = place(shown.views)
    count = len(steps) * (1 + len(heads))
    most = _MOST_ACROSS if len(heads) > 1 else 2
    across = len(steps) * min(max(1, most // len(steps)), 1 + len(heads))
    lines = -(-count // across)
    panel = (PAGE - 0.2 - 0.08 * (across - 1)) / across
    page = sheet(
        lines,
        across,
        title=_title(shown, kept, where),
        width=PAGE,
        panel=panel * canvas[0] / canvas[1],
        x_label="",
        y_label="",
        left=0.1,
        top=0.2,
        gap=(0.08, 0.2),
        right=0.1,
    )
    panels = iter(page.used(count))
    held = kept.held([step for step, _ in steps]).numpy()
    share: Floats = held.mean((0, 1))
    for i, (_, name) in enumerate(steps):
        _panel(next(panels), placed, canvas, share[i], f"all KV heads, {name}")
    for layer, head in heads:
        for i, (_, name) in enumerate(steps):
            title = f"layer {task.layers[layer]}, KV head {head}, {name}"
            _panel(next(panels), placed, canvas, held[layer, head, i].astype(np.float64), title)
    stem = f"kept-{slug(labels['policy'])}-{slug(labels['budget'])}-{labels['moment']}-{end}"
    yield from save(page.figure, folder / stem)


def _title(shown: Shown, kept: Kept, where: str) -> str:
    labels = kept.cell.labels
    said = f'question "{short(shown.question, 60)}", answer "{short(kept.answer.strip(), 60)}"'
    if target := ", ".join(shown.prompt.request.target):
        said += f', reference "{short(target, 60)}"'
    return (
        f"Visual tokens held, {short(labels['policy'])} at {labels['budget']}, "
        f"moment {labels['moment']} · {where} · {said}"
    )


def drawn_steps(kept: Kept, shown: Shown, most: int) -> list[tuple[int, str]]:
    """Decode steps to draw, with their names.

    Neighbouring steps between which no visual token was evicted share a panel.

    Args:
        kept: What a cell held.
        shown: The prompt.
        most: How many steps to choose, evenly spaced.
    """
    steps = spread(range(kept.steps), most)
    held = kept.held(steps)[..., shown.visual]
    groups: list[list[int]] = []
    for i, step in enumerate(steps):
        if i and bool((held[:, :, i] == held[:, :, i - 1]).all()):
            groups[-1].append(step)
        else:
            groups.append([step])
    return [
        (group[0], f"steps {group[0]} to {group[-1]}" if len(group) > 1 else f"step {group[0]}")
        for group in groups
    ]


# --- the canvas -----------------------------------------------------------------------------------


def place(views: Sequence[View]) -> tuple[list[Placed], tuple[int, int]]:
    """Lay images out row by row, each as large as its place allows.

    Returns:
        The images, and height and width of the canvas in pixels.
    """
    across = math.ceil(math.sqrt(len(views)))
    down = -(-len(views) // across)
    height = max(view.picture.shape[0] / max(view.picture.shape[:2]) for view in views)
    width = max(view.picture.shape[1] / max(view.picture.shape[:2]) for view in views)
    unit = _CANVAS / max(across * width + (across - 1) * _GAP, down * height + (down - 1) * _GAP)
    placed = []
    for i, view in enumerate(views):
        scale = unit / max(view.picture.shape[:2])
        size = [max(1, round(side * scale)) for side in view.picture.shape[:2]]
        row, column = divmod(i, across)
        top, left = (round(unit * n * (s + _GAP)) for n, s in ((row, height), (column, width)))
        resized = Image.fromarray(view.picture).resize((size[1], size[0]), Image.Resampling.LANCZOS)
        placed.append(Placed(view, np.asarray(resized), top, left))
    whole = (
        max(one.top + one.picture.shape[0] for one in placed),
        max(one.left + one.picture.shape[1] for one in placed),
    )
    return placed, whole


def paint(picture: Picture, share: Floats) -> Picture:
    """A picture whose cells are as clear as they are held.

    Args:
        picture: The picture, `[height, width, 3]`.
        share: How far each cell is held, from 0 to 1, `[rows, columns]`.
    """
    height, width = picture.shape[:2]
    clear = share[cell_of(height, share.shape[0])][:, cell_of(width, share.shape[1])][..., None]
    grey = picture @ np.array([0.299, 0.587, 0.114])
    faded = (grey * (1 - _DIM) + _FADED * _DIM)[..., None]
    painted: Picture = (clear * picture + (1 - clear) * faded).round().astype(np.uint8)
    return painted


def cell_of(pixels: int, cells: int) -> npt.NDArray[np.int64]:
    """The row or column of cells that each row or column of pixels is in."""
    return (np.arange(pixels) * cells) // pixels


def outline(held: npt.NDArray[np.bool_], height: float, width: float) -> list[Segment]:
    """Edges between cells that are held and cells that are not, as `((x, y), (x, y))` in pixels."""
    rows, columns = held.shape
    padded = np.pad(held, 1)
    tall, wide = height / rows, width / columns
    edges: list[Segment] = []
    for r, c in zip(*np.nonzero(padded[:-1, 1:-1] != padded[1:, 1:-1]), strict=True):
        edges.append(((c * wide, r * tall), ((c + 1) * wide, r * tall)))
    for r, c in zip(*np.nonzero(padded[1:-1, :-1] != padded[1:-1, 1:]), strict=True):
        edges.append(((c * wide, r * tall), (c * wide, (r + 1) * tall)))
    return edges


def _panel(
    ax: Axes, placed: Sequence[Placed], canvas: tuple[int, int], share: Floats, title: str
) -> None:
    """All images of a prompt, painted by the share of each token `[T]`."""
    whole = np.full((*canvas, 3), 255, np.uint8)
    edges: list[Segment] = []
    for one in placed:
        cells = one.view.cells(share)
        height, width = one.picture.shape[:2]
        part = (slice(one.top, one.top + height), slice(one.left, one.left + width))
        whole[part] = paint(one.picture, cells)
        edges += [
            ((a + one.left - 0.5, b + one.top - 0.5), (c + one.left - 0.5, d + one.top - 0.5))
            for (a, b), (c, d) in outline(cells == 1, height, width)
        ]
    if len(placed) > 1:
        for number, one in enumerate(placed, 1):
            ax.text(
                one.left, one.top, str(number), fontsize=5, va="top", ha="left", clip_on=False,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )  # fmt: skip
    ax.imshow(whole, interpolation="nearest")
    ax.add_collection(LineCollection(edges, colors=_EDGE, linewidths=0.6))
    ax.set_title(title, loc="left", fontsize=6.5, y=1.0, pad=2)
    ax.set_axis_off()
