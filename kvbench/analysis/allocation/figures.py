"""Figures of an allocation analysis: entries per layer and KV head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from kvbench.analysis.maps import MOST_ACROSS, Colours, figure_suffixes, head_maps, layer_head_map
from kvbench.analysis.scopes import distinct_values, ordered_budgets, scopes
from kvbench.tables.plot_style import plot_style
from kvbench.tables.text import counted, short, slug


def draw_allocation(allocation_frame: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw a map of entries per layer and KV head for every policy, one panel per budget.

    Args:
        allocation_frame: Table of an allocation analysis.
        folder: Existing output folder.

    Returns:
        The files written.
    """
    paths: list[Path] = []
    with plot_style():
        for scope, scope_rows in scopes(allocation_frame):
            suffix, subtitle = figure_suffixes(allocation_frame, scope)
            for policy in distinct_values(scope_rows, "policy"):
                policy_rows = scope_rows[scope_rows["policy"] == policy].sort_values(["layer", "kv_head"])
                title = f"{short(policy)}, entries per KV head · {subtitle}"
                paths += _map(policy_rows, title, folder / f"allocation-{slug(policy)}-{suffix}")
    return paths


def _map(policy_rows: pd.DataFrame, title: str, stem: Path) -> list[Path]:
    panels = []
    for budget in ordered_budgets(policy_rows):
        budget_rows = policy_rows[policy_rows["budget"] == budget]
        share_map = layer_head_map(policy_rows, budget_rows["share"].to_numpy(np.float64), "kv_head")
        panels.append((f"{budget}: mean {budget_rows['entries'].mean():.0f}", share_map))
    limit = max(0.05, *(float(np.abs(share_map - 1).max()) for _, share_map in panels))
    panel_rows = [panels[start : start + MOST_ACROSS] for start in range(0, len(panels), MOST_ACROSS)]
    colours = [Colours("RdBu_r", 1 - limit, 1 + limit, "entries over\nan even share")]
    # Every cell of a task compresses the same contexts (at `question`, the same questions).
    noun = "question" if (policy_rows["moment"] == "question").all() else "context"
    title += f", n = {counted(int(policy_rows['compressions'].iloc[0]), noun)} per KV head"
    return head_maps(panel_rows, colours, title, "KV head", sorted(set(policy_rows["layer"])), stem)
