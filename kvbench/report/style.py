"""How every figure looks: fonts, sizes, one colour and marker per policy, deterministic files."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.report.text import plain, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN = 3.5  # inches: one column of a two-column paper
PAGE = 7.0  # inches: both columns

# Okabe and Ito's colours, which stay apart with any kind of colour vision; the yellow is darkened
# for white paper. Colours and markers repeat with different periods (7 and 9), so a pair repeats
# after 63 policies only.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B8860B", "#555555")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")

MARKER_SIZE = {"P": 5.5, "X": 5.5, "D": 4.0}  # so that all look about as large; others 4.5
GREY = "#777777"
GREY_BAND = "#e9e9e9"
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


@contextmanager
def house_style() -> Iterator[None]:
    """Draw with the settings of this page whatever the user's matplotlibrc says."""
    import matplotlib

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
    """A figure with a grid of panels of known size and a legend under it.

    Sizes are set in inches, not found by a layout engine: it is three times as fast, and panels of
    different figures have the same size.
    """

    figure: Figure
    axes: Any  # [lines, columns] of Axes
    panel_width: float


def sheet(
    lines: int,
    columns: int,
    *,
    width: float,
    panel: float,
    labels: Sequence[str],
    handles: Sequence[Any],
    x_label: str,
    y_label: str,
    left: float = 0.48,
    top: float = 0.24,
    gap: tuple[float, float] = (0.12, 0.3),
    right: float = 0.1,
    sharex: bool = False,
    sharey: bool = False,
) -> Sheet:
    """Lay out a figure on the Agg canvas: no display and no pyplot state.

    Args:
        lines: Lines of panels.
        columns: Columns of panels.
        width: Width of the figure, in inches as all sizes here.
        panel: Height of a panel.
        labels: Names in the legend, as the user wrote them.
        handles: A handle for each; no legend if empty.
        x_label: Under all panels.
        y_label: Beside all panels.
        left: Room for tick labels and `y_label`.
        top: Room above the first line of panels.
        gap: Room between panels, across and down.
        right: Room at the right.
        sharex: Whether all panels have one x axis.
        sharey: Whether all panels have one y axis.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [short(label) for label in labels]
    if len(set(names)) < len(names):
        names = [plain(label) for label in labels]
    widest = max((len(name) for name in names), default=1) * 0.063 + 0.5
    across = max(1, min(len(names), int((width - 0.1) / widest)))
    rows = -(-len(names) // across)
    below = (0.06 + 0.142 * rows) if handles else 0.0
    bottom = below + 0.4
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


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem.png` (200 dpi) and `stem.svg`; the same figure gives the same bytes."""
    paths = []
    for suffix, options in ((".png", {"dpi": 200}), (".svg", {"metadata": {"Date": None}})):
        path = stem.with_name(stem.name + suffix)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix[1:], **options)
        path.write_bytes(buffer.getvalue())
        paths.append(path)
    return paths
