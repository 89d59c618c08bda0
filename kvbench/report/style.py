"""How every figure looks: fonts, sizes, one colour and marker per policy, deterministic files."""

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
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from kvbench.files import replacing
from kvbench.report.text import plain, short

# A font that is missing, and the building of its cache, are no news to whoever reads a report.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

COLUMN = 3.5  # inches: one column of a two-column paper
PAGE = 7.0  # inches: both columns

# Okabe and Ito's colours, which stay apart with any kind of colour vision, with the yellow darkened
# for white paper and a wine red as the eighth. Colours and markers repeat with different periods (8
# and 9), so that a pair repeats only after 72 policies.
_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B8860B", "#555555", "#882255",
)  # fmt: skip
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")

MOST_COLOURS = len(_COLOURS)
"""With more policies than this, a figure greys those that are not on the front."""
_LETTER = 0.063  # inches that a letter of a name takes at 8 points
_TITLE_LETTER = 0.058  # of running text, which is narrower
_MARKER_SIZE = {"P": 5.5, "X": 5.5, "D": 4.0}  # so that all look about as large
GREY = "#777777"
GREY_BAND = "#e9e9e9"
PALE = "#b8b8b8"
FRONT: dict[str, Any] = {"color": "#222222", "lw": 1.1, "ls": (0, (1, 1))}

_RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same file on every machine
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
    "path.simplify": False,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
}


def looks(policies: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each policy, by its place in the run."""
    return {
        policy: (_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)])
        for i, policy in enumerate(policies)
    }


def marked(look: tuple[str, str], **more: Any) -> dict[str, Any]:
    """How a line with markers of that colour and marker is drawn."""
    colour, marker = look
    size = _MARKER_SIZE.get(marker, 4.5)
    return {"color": colour, "marker": marker, "ms": size, "mec": "white", "mew": 0.4} | more


def handle(look: tuple[str, str]) -> Line2D:
    """What stands for a policy in a legend."""
    return Line2D([], [], **marked(look, lw=0.8))


@contextmanager
def house_style() -> Iterator[None]:
    """Draw with the settings of this page whatever the user's matplotlibrc says."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A letter that the font lacks is drawn as a box, which shows; matplotlib would say so
        # again for every label of every figure.
        warnings.filterwarnings("ignore", r"(?s)Glyph .* missing from (current )?font")
        warnings.filterwarnings("ignore", "Matplotlib currently does not support")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


@dataclass(frozen=True)
class Sheet:
    """A figure with a title, a grid of panels of known size and a legend below them.

    Sizes are set in inches rather than by a layout engine: that is three times as fast, and panels
    of different figures have the same size.

    Attributes:
        figure: The figure.
        axes: `[lines, columns]` of Axes.
        panel_width: Width of a panel in inches.
    """

    figure: Figure
    axes: Any
    panel_width: float

    def used(self, count: int) -> list[Axes]:
        """The first `count` panels, line by line; the others are hidden."""
        every = list(self.axes.flat)
        for ax in every[count:]:
            ax.set_axis_off()
        return every[:count]

    def colour_bar(
        self, image: AxesImage, values: npt.ArrayLike, label: str = "", *, line: int = 0
    ) -> None:
        """Draw a colour bar to the right of a line of panels.

        Args:
            image: What it explains.
            values: All numbers that are shown in these colours. The bar ends in an arrow where they
                go beyond its limits, because such numbers share the last colour.
            label: What the colours mean.
            line: The line of panels.
        """
        low, high = image.get_clim()
        shown = np.ma.masked_invalid(values)
        rounding = 1e-9 * (high - low)  # limits are often computed from the numbers themselves
        beyond = bool((shown < low - rounding).any()), bool((shown > high + rounding).any())
        extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get(beyond)
        width = self.figure.get_size_inches()[0]
        box, last = (self.axes[line, x].get_position() for x in (0, -1))
        axes = self.figure.add_axes((last.x1 + 0.08 / width, box.y0, 0.1 / width, box.height))
        bar = self.figure.colorbar(image, cax=axes, extend=extend or "neither")
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=6.5, length=1.5)
        if label:
            bar.set_label(label, fontsize=6.5, labelpad=2)


def sheet(
    lines: int,
    columns: int,
    *,
    title: str,
    width: float,
    panel: float,
    x_label: str,
    y_label: str,
    labels: Sequence[str] = (),
    handles: Sequence[Any] = (),
    left: float = 0.48,
    top: float = 0.1,
    gap: tuple[float, float] = (0.12, 0.3),
    right: float = 0.1,
    sharex: bool | Literal["col"] = False,
    sharey: bool = False,
) -> Sheet:
    """Lay out a figure on the Agg canvas: no display and no pyplot state.

    Args:
        lines: Lines of panels.
        columns: Columns of panels.
        title: What the figure shows; it is wrapped to the width.
        width: Width of the figure in inches, as are all sizes here.
        panel: Height of a panel.
        x_label: Below all panels.
        y_label: Beside all panels.
        labels: Names in the legend, as the user wrote them.
        handles: A handle for each; no legend if empty.
        left: Room for tick labels and `y_label`.
        top: Room between the title and the first line of panels.
        gap: Room between panels, across and down.
        right: Room at the right.
        sharex: Whether all panels have one x axis, or `col` for those of one column.
        sharey: Whether all panels have one y axis.
    """
    names = [short(label) for label in labels]
    if len(set(names)) < len(names):
        names = [plain(label) for label in labels]
    widest = max((len(name) for name in names), default=1) * _LETTER + 0.5
    across = max(1, min(len(names), int((width - 0.1) / widest)))
    rows = -(-len(names) // across)
    below = (0.06 + 0.142 * rows) if handles else 0.0
    bottom = below + 0.4
    titled = textwrap.wrap(plain(title), int((width - 0.1) / _TITLE_LETTER))
    top += 0.09 + 0.14 * len(titled)
    height = top + lines * panel + (lines - 1) * gap[1] + bottom
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    panel_width = (width - left - right - (columns - 1) * gap[0]) / columns
    axes = figure.subplots(
        lines,
        columns,
        squeeze=False,
        gridspec_kw={
            "left": left / width,
            "right": 1 - right / width,
            "top": 1 - top / height,
            "bottom": bottom / height,
            "wspace": gap[0] / panel_width,
            "hspace": gap[1] / panel,
        },
        sharex=sharex,
        sharey=sharey,
    )
    middle = (left + width - right) / 2 / width
    figure.text(middle, (below + 0.05) / height, x_label, ha="center", va="bottom")
    across_y = (bottom + height - top) / 2 / height
    figure.text(0.05 / width, across_y, y_label, rotation=90, ha="left", va="center")
    figure.text(0.05 / width, 1 - 0.05 / height, "\n".join(titled), ha="left", va="top")
    if handles:
        _legend(figure, handles, names, across, 0.02 / height)
    return Sheet(figure, axes, panel_width)


def _legend(
    figure: Figure, handles: Sequence[Any], names: Sequence[str], columns: int, bottom: float
) -> None:
    columns = -(-len(names) // -(-len(names) // columns))
    # Labels are set afterwards: matplotlib drops a handle whose label starts with an underscore.
    box = figure.legend(
        list(handles),
        ["."] * len(names),
        loc="lower center",
        bbox_to_anchor=(0.5, bottom),
        ncols=columns,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.2,
        handletextpad=0.5,
        labelspacing=0.25,
        borderpad=0.0,
        borderaxespad=0.0,
    )
    for text, name in zip(box.get_texts(), names, strict=True):
        text.set_text(name)


@dataclass(frozen=True)
class Drawn:
    """A figure that was written.

    Attributes:
        title: What it shows.
        paths: Its files, PNG and SVG.
        task: The only task that it is about; empty if it is about several.
    """

    title: str
    paths: list[Path]
    task: str = ""


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem.png` (200 dpi) and `stem.svg`; the same figure gives the same bytes.

    Raises:
        UserError: A file cannot be written; a file of that name is then as it was before.
    """
    paths = []
    for suffix, options in ((".png", {"dpi": 200}), (".svg", {"metadata": {"Date": None}})):
        path = stem.with_name(stem.name + suffix)
        with replacing(path) as part:
            figure.savefig(part, format=suffix[1:], **options)
        paths.append(path)
    return paths
