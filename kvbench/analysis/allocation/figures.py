"""The figures of an allocation analysis: entries per layer and KV head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from kvbench.analysis.maps import MOST_ACROSS, Colours, head_maps, naming, picture
from kvbench.analysis.scopes import budgets, names, scopes
from kvbench.report.style import house_style
from kvbench.report.text import counted, short, slug


def draw_allocation(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw a map of entries per layer and KV head for every policy, a panel per budget.

    Args:
        table: The table of an allocation analysis.
        folder: Where to; it exists.

    Returns:
        The files written.
    """
    paths: list[Path] = []
    with house_style():
        for scope, part in scopes(table):
            end, where = naming(table, scope)
            for policy in names(part, "policy"):
                here = part[part["policy"] == policy].sort_values(["layer", "kv_head"])
                title = f"{short(policy)}, entries per KV head · {where}"
                paths += _map(here, title, folder / f"allocation-{slug(policy)}-{end}")
    return paths


def _map(part: pd.DataFrame, title: str, stem: Path) -> list[Path]:
    panels = []
    for budget in budgets(part):
        here = part[part["budget"] == budget]
        share = picture(part, here["share"].to_numpy(np.float64), "kv_head")
        panels.append((f"{budget}: mean {here['entries'].mean():.0f}", share))
    limit = max(0.05, *(float(np.abs(share - 1).max()) for _, share in panels))
    lines = [panels[i : i + MOST_ACROSS] for i in range(0, len(panels), MOST_ACROSS)]
    colours = [Colours("RdBu_r", 1 - limit, 1 + limit, "entries over\nan even share")]
    # Every cell of a task compresses the same contexts, or at `question` the same questions.
    noun = "question" if (part["moment"] == "question").all() else "context"
    title += f", n = {counted(int(part['compressions'].iloc[0]), noun)} per KV head"
    return head_maps(lines, colours, title, "KV head", sorted(set(part["layer"])), stem)
