"""Training figure: losses and the fraction of tokens that the gates retain, by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kvbench.tables.plot_style import marker_styles, plot_style

_TITLES = {
    "kl": "KL",
    "ntp": "next token",
    "capacity": "capacity",
    "fit": "fit",
    "smooth": "neighbours",
    "retained": "fraction retained at the end",
}


def draw(log_records: Sequence[Mapping[str, Any]], figure_path: Path, title: str) -> None:
    """Draw a training log.

    Args:
        log_records: Log records, at least one.
        figure_path: Output PNG file.
        title: Figure title.
    """
    steps = [record["step"] for record in log_records]
    loss_names = [loss_name for loss_name in _TITLES if loss_name in log_records[0]]
    colour = marker_styles([title])[title][0]
    with plot_style():
        figure = Figure(figsize=(3.2 * len(loss_names), 2.6), layout="constrained", dpi=120)
        axes = figure.subplots(1, len(loss_names), squeeze=False)[0]
        for loss_axes, loss_name in zip(axes, loss_names, strict=True):
            loss_axes.plot(steps, [record[loss_name] for record in log_records], color=colour)
            loss_axes.set_title(_TITLES[loss_name])
            loss_axes.set_xlabel("step")
            loss_axes.set_ylim(bottom=0)
        figure.suptitle(title)
        figure.savefig(figure_path, metadata={"Software": None})
