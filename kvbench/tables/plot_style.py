"""Plot style: fonts, sizes, a colour and marker per policy, deterministic files."""

from __future__ import annotations

import logging
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from kvbench.files import create_folder, replacing
from kvbench.tables.figure_files import DEFAULT_FORMATS, FORMATS
from kvbench.tables.text import plain, short

# Missing fonts and the font cache are irrelevant to users of a report.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

COLUMN = 3.5  # inches: one column of a two-column paper
PAGE = 7.0  # inches: both columns

# Colours of Okabe and Ito, which are distinct for any colour vision, with brown for their yellow, which is pale on
# white paper, and violet and wine red. None is grey, the colour of policies that are not on a front.
# Colours and markers repeat with periods 8 and 9, so that a pair repeats only after 72 policies.
_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#7A4A12", "#5B3FBF", "#882255",
)  # fmt: skip
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")

MOST_COLOURS = len(_COLOURS)
"""If there are more policies, a figure greys those that are not on the front."""
_LETTER = 0.063  # inches per letter of a name at 8 points
_MOST_LETTERS = 44  # of a name in the legend
_TITLE_LETTER = 0.058  # of running text, which is narrower
_MARKER_SIZE = {"P": 5.5, "X": 5.5, "D": 4.0}  # so that all look about equally large
GREY = "#777777"
GREY_BAND = "#e9e9e9"
PALE = "#b8b8b8"
SEQUENTIAL = ListedColormap(colormaps["plasma"](np.linspace(0.0, 0.64, 256)), "plasma_dark")
"""Colours from low (dark blue) to high (coral), with even steps of lightness for any colour vision and in grey.

The rest of plasma, orange to yellow, is left out: its contrast with white paper is below 3:1, the least that WCAG 2.2
(criterion 1.4.11) asks of graphics."""
FRONT: dict[str, Any] = {"color": "#222222", "lw": 1.1, "ls": (0, (1, 1))}

_RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib, so it is the same on every machine
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 0.9,
    "lines.markersize": 4.5,
    "svg.hashsalt": "kvbench",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,  # TrueType; publishers reject Type 3
    "path.simplify": False,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
}


def marker_styles(policies: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return colour and marker of each policy, by its index in the run."""
    return {
        policy: (_COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)])
        for index, policy in enumerate(policies)
    }


def marker_options(marker_style: tuple[str, str], **overrides: Any) -> dict[str, Any]:
    """Return line options for a colour and marker."""
    colour, marker = marker_style
    marker_size = _MARKER_SIZE.get(marker, 4.5)
    return {
        "color": colour,
        "marker": marker,
        "ms": marker_size,
        "mec": "white",
        "mew": 0.4,
    } | overrides


def legend_handle(marker_style: tuple[str, str]) -> Line2D:
    """Return the legend handle of a policy."""
    return Line2D([], [], **marker_options(marker_style, lw=0.8))


@contextmanager
def plot_style() -> Iterator[None]:
    """Apply the plot style, regardless of the user's matplotlibrc."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A letter that the font lacks is drawn as a box; matplotlib would warn for every label of every figure.
        warnings.filterwarnings("ignore", r"(?s)Glyph .* missing from (current )?font")
        warnings.filterwarnings("ignore", "Matplotlib currently does not support")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


@dataclass(frozen=True)
class FigureLayout:
    """A figure with a title, a grid of panels of fixed size and a legend below them.

    Sizes are set in inches without a layout engine, which is three times as fast and gives the panels of all figures
    the same size.

    Attributes:
        figure: The figure.
        axes: Axes, `[lines, columns]`.
        panel_width: Width of a panel in inches.
    """

    figure: Figure
    axes: Any
    panel_width: float

    @property
    def letters(self) -> int:
        """Number of letters that fit above a panel."""
        return max(4, int(self.panel_width / _LETTER))

    def used(self, panel_count: int) -> list[Axes]:
        """Return the first `panel_count` panels, line by line, and hide the others."""
        all_axes = list(self.axes.flat)
        for ax in all_axes[panel_count:]:
            ax.set_axis_off()
        return all_axes[:panel_count]

    def colour_bar(
        self,
        image: AxesImage,
        values: npt.ArrayLike,
        label: str = "",
        *,
        line_index: int = 0,
    ) -> None:
        """Draw a colour bar to the right of a line of panels.

        Args:
            image: Image with the colour scale.
            values: All numbers in these colours. The bar ends in an arrow if they exceed its limits, because such
                numbers share the last colour.
            label: Meaning of the colours.
            line_index: The line of panels.
        """
        lower_limit, upper_limit = image.get_clim()
        valid_values = np.ma.masked_invalid(values)
        rounding = 1e-9 * (upper_limit - lower_limit)  # limits are often computed from the numbers themselves
        out_of_limits = (
            bool((valid_values < lower_limit - rounding).any()),
            bool((valid_values > upper_limit + rounding).any()),
        )
        extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get(out_of_limits)
        figure_width = self.figure.get_size_inches()[0]
        first_box, last_box = (self.axes[line_index, panel_index].get_position() for panel_index in (0, -1))
        bar_axes = self.figure.add_axes(
            (last_box.x1 + 0.08 / figure_width, first_box.y0, 0.1 / figure_width, first_box.height)
        )
        colour_bar = self.figure.colorbar(image, cax=bar_axes, extend=extend or "neither")
        colour_bar.outline.set_visible(False)
        colour_bar.ax.tick_params(length=1.5, pad=2)
        if label:
            colour_bar.set_label(label, labelpad=2)


def lay_out_figure(
    line_count: int,
    column_count: int,
    *,
    title: str,
    width: float,
    panel_height: float,
    x_label: str,
    y_label: str,
    labels: Sequence[str] = (),
    handles: Sequence[Any] = (),
    left_margin: float = 0.48,
    top_margin: float = 0.1,
    panel_gap: tuple[float, float] = (0.12, 0.3),
    right_margin: float = 0.1,
    sharex: bool | Literal["col"] = False,
    sharey: bool = False,
) -> FigureLayout:
    """Lay out a figure on the Agg canvas, without display and pyplot state. All sizes are in inches.

    Args:
        line_count: Lines of panels.
        column_count: Columns of panels.
        title: Title of the figure, wrapped to its width; no title if empty.
        width: Width of the figure.
        panel_height: Height of a panel.
        x_label: Label below all panels, wrapped to their width.
        y_label: Label to the left of all panels.
        labels: Names in the legend, as the user wrote them.
        handles: Legend handles, one per label; no legend if empty.
        left_margin: Space for tick labels and `y_label`.
        top_margin: Space between the title and the first line of panels.
        panel_gap: Horizontal and vertical space between panels.
        right_margin: Space on the right.
        sharex: Whether panels share the x axis, or `col` to share it within a column.
        sharey: Whether panels share the y axis.
    """
    label_texts = [short(label, min(_MOST_LETTERS, int((width - 0.6) / _LETTER))) for label in labels]
    if len(set(label_texts)) < len(label_texts):
        label_texts = [plain(label) for label in labels]
    label_width = max((len(label_text) for label_text in label_texts), default=1) * _LETTER + 0.5
    labels_across = max(1, min(len(label_texts), int((width - 0.1) / label_width)))
    legend_rows = -(-len(label_texts) // labels_across)
    legend_height = (0.06 + 0.142 * legend_rows) if handles else 0.0
    x_label_width = width - 0.1 - abs(left_margin - right_margin)
    x_label_lines = textwrap.wrap(x_label, int(x_label_width / _TITLE_LETTER))
    bottom_margin = legend_height + 0.4 + 0.14 * max(0, len(x_label_lines) - 1)
    title_lines = textwrap.wrap(plain(title), int((width - 0.1) / _TITLE_LETTER))
    top_margin += 0.09 + 0.14 * len(title_lines)
    figure_height = top_margin + line_count * panel_height + (line_count - 1) * panel_gap[1] + bottom_margin
    figure = Figure(figsize=(width, figure_height))
    FigureCanvasAgg(figure)
    panel_width = (width - left_margin - right_margin - (column_count - 1) * panel_gap[0]) / column_count
    axes_grid = figure.subplots(
        line_count,
        column_count,
        squeeze=False,
        gridspec_kw={
            "left": left_margin / width,
            "right": 1 - right_margin / width,
            "top": 1 - top_margin / figure_height,
            "bottom": bottom_margin / figure_height,
            "wspace": panel_gap[0] / panel_width,
            "hspace": panel_gap[1] / panel_height,
        },
        sharex=sharex,
        sharey=sharey,
    )
    x_centre = (left_margin + width - right_margin) / 2 / width
    figure.text(x_centre, (legend_height + 0.05) / figure_height, "\n".join(x_label_lines), ha="center", va="bottom")
    y_centre = (bottom_margin + figure_height - top_margin) / 2 / figure_height
    figure.text(0.05 / width, y_centre, y_label, rotation=90, ha="left", va="center")
    figure.text(0.05 / width, 1 - 0.05 / figure_height, "\n".join(title_lines), ha="left", va="top")
    if handles:
        _legend(figure, handles, label_texts, labels_across, 0.02 / figure_height)
    return FigureLayout(figure, axes_grid, panel_width)


def _legend(
    figure: Figure,
    legend_handles: Sequence[Any],
    label_texts: Sequence[str],
    column_count: int,
    legend_bottom: float,
) -> None:
    column_count = -(-len(label_texts) // -(-len(label_texts) // column_count))
    # Labels are set later, because matplotlib drops a handle whose label starts with an underscore.
    legend = figure.legend(
        list(legend_handles),
        ["."] * len(label_texts),
        loc="lower center",
        bbox_to_anchor=(0.5, legend_bottom),
        ncols=column_count,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.2,
        handletextpad=0.5,
        labelspacing=0.25,
        borderpad=0.0,
        borderaxespad=0.0,
    )
    for legend_text, label_text in zip(legend.get_texts(), label_texts, strict=True):
        legend_text.set_text(label_text)


def save(figure: Figure, figure_stem: Path, formats: Sequence[str] = DEFAULT_FORMATS) -> list[Path]:
    """Write a file per format, such as `stem.png` (200 dpi), and their folder; the same figure gives the same bytes.

    Raises:
        UserError: A file cannot be written; an existing one is unchanged.
    """
    create_folder(figure_stem.parent)
    figure_paths = []
    for format_name in dict.fromkeys(formats):
        figure_path = figure_stem.with_name(f"{figure_stem.name}.{format_name}")
        with replacing(figure_path) as partial_path:
            figure.savefig(partial_path, format=format_name, **FORMATS[format_name])
        figure_paths.append(figure_path)
    return figure_paths
