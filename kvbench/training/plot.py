"""A picture of a training: its losses and what the gates retain, by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SHOWN = {
    "kl": "KL",
    "ntp": "next token",
    "capacity": "capacity",
    "fit": "fit",
    "smooth": "neighbours",
}


def draw(log: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw a log.

    Args:
        log: Its records, one at least.
        path: The PNG.
        title: What was trained.
    """
    from matplotlib.figure import Figure

    from kvbench.report.style import house_style, looks

    steps = [record["step"] for record in log]
    parts = [name for name in _SHOWN if name in log[0]]
    panels = [[name] for name in parts] + ([["retained"]] if "retained" in log[0] else [])
    colour = looks([title])[title][0]
    with house_style():
        figure = Figure(figsize=(3.2 * len(panels), 2.6), layout="constrained", dpi=120)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, names in zip(axes, panels, strict=True):
            for name in names:
                axis.plot(steps, [record[name] for record in log], color=colour)
            axis.set_title(_SHOWN.get(names[0], "share retained at the end"))
            axis.set_xlabel("step")
            axis.set_ylim(bottom=0)
        figure.suptitle(title)
        figure.savefig(path, metadata={"Software": None})
