"""Drawings of held visual tokens over the images (DBTrimKV, figures 13 and 14)."""

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

from kvbench.analysis.choosing import evenly_spaced
from kvbench.analysis.vision.grids import ImageView, Picture
from kvbench.analysis.vision.image_shares import CellRecord, ImagePrompt, TaskVision
from kvbench.report.figure_options import FigureOptions
from kvbench.stats import Floats
from kvbench.tables.plot_style import PAGE, lay_out_figure, save
from kvbench.tables.text import short, slug

_CANVAS = 480
"""Pixels of a panel's longer side; larger images are downscaled."""
_GAP = 0.06
"""Space between images, as a fraction of the largest image."""
_MOST_ACROSS = 4
_LEAST_PANEL = 1.5  # inches, with room for its title
_DIM = 0.8
"""Fading of evicted cells."""
_FADED = 225.0
_EDGE = "#D55E00"
"""Outline colour of held cells."""

Segment = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class PlacedImage:
    """An image on the canvas: the scaled picture and its position in pixels."""

    view: ImageView
    picture: Picture
    top_offset: int
    left_offset: int


def draw_kept(
    task: TaskVision,
    sample: ImagePrompt,
    record: CellRecord,
    suffix: str,
    subtitle: str,
    folder: Path,
    options: FigureOptions,
) -> Iterator[Path]:
    """Draw the images of a prompt with the visual tokens that one cell holds.

    The first panels show how many KV heads hold a token, the others one KV head each. Held tokens are clear and
    outlined, evicted ones are faded.
    """
    labels = record.cell.labels
    named_steps = drawn_steps(record, sample, task.draw_steps)
    drawn_heads = [(layer, head) for layer in task.draw_layers for head in task.draw_heads]
    images, canvas = arrange_images(sample.views)
    panel_count = len(named_steps) * (1 + len(drawn_heads))
    width = options.width or PAGE
    max_columns = min(_MOST_ACROSS if len(drawn_heads) > 1 else 2, max(1, int(width / _LEAST_PANEL)))
    across = len(named_steps) * min(max(1, max_columns // len(named_steps)), 1 + len(drawn_heads))
    row_count = -(-panel_count // across)
    panel_width = (width - 0.2 - 0.08 * (across - 1)) / across
    layout = lay_out_figure(
        row_count,
        across,
        title=_title(sample, record, subtitle, options) if options.has_title else "",
        width=width,
        panel_height=panel_width * canvas[0] / canvas[1],
        x_label="",
        y_label="",
        left_margin=0.1,
        top_margin=0.34,
        panel_gap=(0.08, 0.34),
        right_margin=0.1,
    )
    panel_axes = iter(layout.used(panel_count))
    held_mask = record.held([step for step, _ in named_steps]).numpy()
    held_share: Floats = held_mask.mean((0, 1))
    for step_index, (_, step_name) in enumerate(named_steps):
        _panel(next(panel_axes), images, canvas, held_share[step_index], f"all KV heads\n{step_name}")
    for layer, head in drawn_heads:
        for step_index, (_, step_name) in enumerate(named_steps):
            panel_title = f"layer {task.layers[layer]}, KV head {head}\n{step_name}"
            _panel(
                next(panel_axes),
                images,
                canvas,
                held_mask[layer, head, step_index].astype(np.float64),
                panel_title,
            )
    file_name = f"kept-{slug(labels['policy'])}-{slug(labels['budget'])}-{labels['moment']}-{suffix}"
    yield from save(layout.figure, folder / file_name, options.formats)


def _title(sample: ImagePrompt, record: CellRecord, subtitle: str, options: FigureOptions) -> str:
    cell_labels = record.cell.labels
    quotation = f'question "{short(sample.question, 60)}", answer "{short(record.answer.strip(), 60)}"'
    if reference := ", ".join(sample.prompt.request.target):
        quotation += f', reference "{short(reference, 60)}"'
    return (
        f"Visual tokens held, {short(options.label(str(cell_labels['policy'])))} at {cell_labels['budget']}, "
        f"moment {cell_labels['moment']} · {subtitle} · {quotation}"
    )


def drawn_steps(record: CellRecord, sample: ImagePrompt, max_steps: int) -> list[tuple[int, str]]:
    """Return the decode steps to draw, with their names.

    Neighbouring steps without evictions of visual tokens share a panel.

    Args:
        record: Entries held by a cell.
        sample: The prompt.
        max_steps: Number of steps to select, evenly spaced.
    """
    steps = evenly_spaced(range(record.steps), max_steps)
    held_mask = record.held(steps)[..., sample.visual]
    step_groups: list[list[int]] = []
    for step_index, step in enumerate(steps):
        if step_index and bool((held_mask[:, :, step_index] == held_mask[:, :, step_index - 1]).all()):
            step_groups[-1].append(step)
        else:
            step_groups.append([step])
    return [
        (
            step_group[0],
            f"steps {step_group[0]} to {step_group[-1]}" if len(step_group) > 1 else f"step {step_group[0]}",
        )
        for step_group in step_groups
    ]


# --- the canvas -----------------------------------------------------------------------------------


def arrange_images(views: Sequence[ImageView]) -> tuple[list[PlacedImage], tuple[int, int]]:
    """Arrange images in rows, each as large as its place allows.

    Returns:
        The images, and height and width of the canvas in pixels.
    """
    across = math.ceil(math.sqrt(len(views)))
    row_count = -(-len(views) // across)
    height = max(view.picture.shape[0] / max(view.picture.shape[:2]) for view in views)
    width = max(view.picture.shape[1] / max(view.picture.shape[:2]) for view in views)
    pixel_scale = _CANVAS / max(across * width + (across - 1) * _GAP, row_count * height + (row_count - 1) * _GAP)
    images = []
    for image_index, view in enumerate(views):
        scale = pixel_scale / max(view.picture.shape[:2])
        image_size = [max(1, round(side * scale)) for side in view.picture.shape[:2]]
        grid_row, grid_column = divmod(image_index, across)
        top_offset, left_offset = (
            round(pixel_scale * cell_index * (cell_side + _GAP))
            for cell_index, cell_side in ((grid_row, height), (grid_column, width))
        )
        resized = Image.fromarray(view.picture).resize((image_size[1], image_size[0]), Image.Resampling.LANCZOS)
        images.append(PlacedImage(view, np.asarray(resized), top_offset, left_offset))
    canvas = (
        max(placed.top_offset + placed.picture.shape[0] for placed in images),
        max(placed.left_offset + placed.picture.shape[1] for placed in images),
    )
    return images, canvas


def paint(picture: Picture, held_share: Floats) -> Picture:
    """Fade a picture's cells by how much they are held.

    Args:
        picture: `[height, width, 3]`.
        held_share: Fraction of heads that hold each cell, `[rows, columns]`.
    """
    height, width = picture.shape[:2]
    clarity = held_share[cell_of(height, held_share.shape[0])][:, cell_of(width, held_share.shape[1])][..., None]
    greyscale = picture @ np.array([0.299, 0.587, 0.114])
    faded = (greyscale * (1 - _DIM) + _FADED * _DIM)[..., None]
    painted: Picture = (clarity * picture + (1 - clarity) * faded).round().astype(np.uint8)
    return painted


def cell_of(pixel_count: int, cell_count: int) -> npt.NDArray[np.int64]:
    """Return the cell row or column of each pixel row or column."""
    return (np.arange(pixel_count) * cell_count) // pixel_count


def outline(held_cells: npt.NDArray[np.bool_], height: float, width: float) -> list[Segment]:
    """Return the edges between held and evicted cells, as `((x, y), (x, y))` in pixels."""
    row_count, column_count = held_cells.shape
    padded = np.pad(held_cells, 1)
    cell_height, cell_width = height / row_count, width / column_count
    edges: list[Segment] = []
    for line_index, column in zip(*np.nonzero(padded[:-1, 1:-1] != padded[1:, 1:-1]), strict=True):
        edges.append(
            (
                (column * cell_width, line_index * cell_height),
                ((column + 1) * cell_width, line_index * cell_height),
            )
        )
    for line_index, column in zip(*np.nonzero(padded[1:-1, :-1] != padded[1:-1, 1:]), strict=True):
        edges.append(
            (
                (column * cell_width, line_index * cell_height),
                (column * cell_width, (line_index + 1) * cell_height),
            )
        )
    return edges


def _panel(
    axes: Axes,
    images: Sequence[PlacedImage],
    canvas: tuple[int, int],
    held_share: Floats,
    panel_title: str,
) -> None:
    """Draw all images of a prompt, faded by the held fraction of each token `[T]`."""
    canvas_pixels = np.full((*canvas, 3), 255, np.uint8)
    edges: list[Segment] = []
    for placed in images:
        cell_shares = placed.view.cells(held_share)
        height, width = placed.picture.shape[:2]
        image_region = (
            slice(placed.top_offset, placed.top_offset + height),
            slice(placed.left_offset, placed.left_offset + width),
        )
        canvas_pixels[image_region] = paint(placed.picture, cell_shares)
        edges += [
            (
                (x_start + placed.left_offset - 0.5, y_start + placed.top_offset - 0.5),
                (x_end + placed.left_offset - 0.5, y_end + placed.top_offset - 0.5),
            )
            for (x_start, y_start), (x_end, y_end) in outline(cell_shares == 1, height, width)
        ]
    if len(images) > 1:
        for image_number, placed in enumerate(images, 1):
            axes.text(
                placed.left_offset,
                placed.top_offset,
                str(image_number),
                va="top",
                ha="left",
                clip_on=False,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.2},
            )
    axes.imshow(canvas_pixels, interpolation="nearest")
    axes.add_collection(LineCollection(edges, colors=_EDGE, linewidths=0.6))
    axes.set_title(panel_title, loc="left", y=1.0, pad=2)
    axes.set_axis_off()
