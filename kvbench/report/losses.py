"""Bars of the loss against the full cache, a panel per budget (as in figure 1 of CriticalKV, arXiv 2502.03805)."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from kvbench.errors import UserError
from kvbench.report.figure_options import DEFAULT_FIGURES, FigureOptions
from kvbench.report.frames import Results, budget_order
from kvbench.tables.plot_style import COLUMN, PAGE, lay_out_figure, marker_styles, plot_style, save
from kvbench.tables.text import mean_of, short, slug

_SCOPE = ["model", "group", "length", "moment", "seed"]
_MOST_ACROSS = 3
_LEAST_PANEL = 1.1  # inches


def losses(results: Results) -> pd.DataFrame:
    """Return the loss of every policy and budget, averaged over the tasks of a group.

    Returns:
        A row per model, group, length, moment, seed, policy and budget: `loss`, the fraction by which the sum of its
            scores is below that of the full cache on the same tasks (negative if it is above), and `tasks`. Tasks whose
            score is better if lower, or 0 with the full cache in all of them, are left out.
    """
    cells = results.cells
    is_counted = (cells["status"] == "ok") & cells["higher_is_better"] & cells["full_score"].notna()
    counted_cells = cells[is_counted & (cells["policy"] != "full")]
    rows = []
    for key, group in counted_cells.groupby([*_SCOPE, "policy", "budget"], sort=False, observed=True):
        full_score = float(group["full_score"].sum())
        if full_score > 0:
            loss = 1 - float(group["score"].sum()) / full_score
            rows.append(
                dict(zip([*_SCOPE, "policy", "budget"], key, strict=True)) | {"loss": loss, "tasks": len(group)}
            )
    return pd.DataFrame(rows)


def draw_losses(results: Results, folder: Path, options: FigureOptions = DEFAULT_FIGURES) -> list[Path]:
    """Draw the losses of every model and group of tasks.

    Args:
        results: The results.
        folder: Folder of the figures, created if needed.
        options: Formats, sizes and policies of the figures.

    Returns:
        The files written.

    Raises:
        UserError: No policy can be compared with the full cache.
    """
    results = options.select(results)
    frame = losses(results)
    if not len(frame):
        raise UserError(
            "there is no loss to draw: no policy has a score beside that of the full cache; run without --no-full"
        )
    styles = marker_styles(results.policies)
    paths: list[Path] = []
    with plot_style():
        for _, rows in frame.groupby(_SCOPE, sort=False):
            scope = rows.iloc[0]
            parts = [scope["group"], *(scope[name] for name in _SCOPE if name != "group" and frame[name].nunique() > 1)]
            budgets = sorted(dict.fromkeys(map(str, rows["budget"])), key=budget_order)
            across = options.panels_across(
                min(len(budgets), _MOST_ACROSS), margins=1.4, gap=0.15, least_width=_LEAST_PANEL
            )
            title = f"loss against the full cache, {short(str(scope['group']))}, {mean_of(int(rows['tasks'].max()))}"
            layout = lay_out_figure(
                -(-len(budgets) // across),
                across,
                title=f"{title} · {short(str(scope['model']))}" * options.has_title,
                width=options.width or (COLUMN if across == 1 else PAGE),
                panel_height=0.25 + 0.2 * rows["policy"].nunique(),
                x_label="loss, % of the full cache's score",
                y_label="",
                left_margin=1.3,
                top_margin=0.2,
                panel_gap=(0.15, 0.35),
                sharey=True,
            )
            policies = [policy for policy in results.policies if (rows["policy"] == policy).any()]
            for axes, budget in zip(layout.used(len(budgets)), budgets, strict=True):
                by_policy = rows[rows["budget"] == budget].set_index("policy")["loss"]
                for place, policy in enumerate(policies):
                    if policy in by_policy.index:
                        loss = 100 * float(by_policy[policy])
                        axes.barh(place, loss, height=0.7, color=styles[policy][0])
                        axes.annotate(
                            f" {loss:.1f}", (max(loss, 0.0), place), va="center", ha="left", annotation_clip=False
                        )
                axes.axvline(0, color="black", lw=0.6)
                axes.set_title(f"budget {budget}", loc="left", y=1.0, pad=3)
                axes.margins(x=0.18)
            axes = layout.axes[0, 0]
            axes.set_yticks(range(len(policies)), [short(options.label(policy), 18) for policy in policies])
            axes.set_ylim(len(policies) - 0.4, -0.6)
            stem = folder / f"losses-{'-'.join(slug(part) for part in parts)}"
            paths += save(layout.figure, stem, options.formats)
    return paths
