"""A figure of a training: its losses, and the share of tokens that its gates retain, by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kvbench.report.style import marker_styles, plot_style

_TITLES = {
    "kl": "KL",
    "ntp": "next token",
    "capacity": "capacity",
    "fit": "fit",
    "smooth": "neighbours",
    "retained": "share retained at the end",
}


def draw(log: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw a log.

    Args:
        log: Its records, at least one.
        path: The PNG file.
        title: The title.
    """
    steps = [record["step"] for record in log]
    names = [name for name in _TITLES if name in log[0]]
    colour = marker_styles([title])[title][0]
    with plot_style():
        figure = Figure(figsize=(3.2 * len(names), 2.6), layout="constrained", dpi=120)
        axes = figure.subplots(1, len(names), squeeze=False)[0]
        for axis, name in zip(axes, names, strict=True):
            axis.plot(steps, [record[name] for record in log], color=colour)
            axis.set_title(_TITLES[name])
            axis.set_xlabel("step")
            axis.set_ylim(bottom=0)
        figure.suptitle(title)
        figure.savefig(path, metadata={"Software": None})
