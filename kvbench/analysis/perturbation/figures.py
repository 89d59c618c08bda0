"""The figures of a perturbation analysis: maps of heads, curves over layers and over budgets."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kvbench.analysis.maps import MOST_ACROSS, Colours, head_maps, naming, picture
from kvbench.analysis.perturbation.compare import curve, matrix
from kvbench.analysis.scopes import budgets, names, scopes, within
from kvbench.report.style import (
    COLUMN,
    PAGE,
    Sheet,
    handle,
    house_style,
    looks,
    marked,
    save,
    sheet,
)
from kvbench.report.text import counted, short, slug
from kvbench.stats import Floats

MOST_PAIRS = 10


def shown_pairs(pairs: pd.DataFrame) -> list[tuple[str, str]]:
    """The pairs that tables and figures show: all, or of many those against the first policy."""
    if not len(pairs):
        return []
    found = list(dict.fromkeys(zip(pairs["policy"], pairs["against"], strict=True)))
    if len(found) <= MOST_PAIRS:
        return found
    return [pair for pair in found if pair[1] == found[0][1]]


def draw_perturbation(
    heads: pd.DataFrame,
    layers: pd.DataFrame,
    pairs: pd.DataFrame,
    cells: pd.DataFrame,
    folder: Path,
) -> list[Path]:
    """Draw maps of heads for every pair, and curves over layers and over budgets.

    Args:
        heads, layers: The tables of an analysis.
        pairs, cells: What `compare` makes of the table of heads.
        folder: Where to; it exists.

    Returns:
        The files written.
    """
    paths: list[Path] = []
    curves = _Curves(names(heads, "policy"))
    with house_style():
        for scope, part in scopes(heads):
            end, where = naming(heads, scope)
            for pair in shown_pairs(pairs):
                here = part[part["policy"].isin(pair)]
                name = f"heads-{slug(pair[0])}-vs-{slug(pair[1])}-{end}"
                paths += _maps(here, pair, where, folder / name)
            mine = within(layers, scope)
            for column, name, on in (
                ("l1", "layers", ""),
                ("l1_forward", "layers-forward", " in a forward on the kept cache"),
            ):
                found = curve(mine, column)
                if len(found) and found["layer"].nunique() > 1:
                    title = f"L1 change of the attention output{on} · {where}"
                    paths += curves.over_layers(found, title, folder / f"{name}-{end}")
            rows = within(cells, scope)
            if rows["budget"].nunique() > 1:
                title = f"L1 change of a head's output, mean over heads and layers · {where}"
                paths += curves.over_budgets(rows, title, folder / f"budgets-{end}")
    return paths


def _maps(part: pd.DataFrame, pair: tuple[str, str], where: str, stem: Path) -> list[Path]:
    """Above: share of questions where the policy perturbs less; below: its change of mean l1."""
    columns: list[tuple[str, Floats, Floats]] = []
    questions = 0
    for budget in budgets(part):
        both = [part[(part["policy"] == p) & (part["budget"] == budget)] for p in pair]
        if not all(len(x) for x in both):
            continue
        (a, _), (b, _) = (matrix(x) for x in both)
        questions = len(a)
        share = 100 * ((a < b) + 0.5 * (a == b)).mean(0)
        old = b.mean(0)
        change = 100 * (a.mean(0) - old) / np.where(old > 0, old, 1.0)
        columns.append((budget, picture(part, share, "head"), picture(part, change, "head")))
    if not columns:
        return []
    widest = max(float(np.abs(c).max()) for _, _, c in columns)
    limit = min(100.0, max(1.0, math.ceil(widest)))
    lines: list[list[tuple[str, Floats]]] = []
    for start in range(0, len(columns), MOST_ACROSS):
        chunk = columns[start : start + MOST_ACROSS]
        lines.append([(f"budget {b}", share) for b, share, _ in chunk])
        lines.append([("", change) for _, _, change in chunk])
    colours = [
        Colours("RdBu", 0.0, 100.0, "smaller l1,\n% of questions"),
        Colours("RdBu_r", -limit, limit, "change of\nmean l1, %"),
    ]
    title = f"{short(pair[0])} against {short(pair[1])}, l1 of a head's output · {where}"
    title += f", n = {counted(questions, 'question')} per head"
    return head_maps(lines, colours, title, "query head", sorted(set(part["layer"])), stem)


class _Curves:
    """Curves with 95% intervals, a colour and marker for each policy.

    Args:
        policies: All policies of the analysis, in order.
    """

    def __init__(self, policies: list[str]) -> None:
        self.looks_of = looks(policies)

    def over_layers(self, found: pd.DataFrame, title: str, stem: Path) -> list[Path]:
        """Draw the mean of every layer, a panel per budget."""
        shown = budgets(found)
        across = min(len(shown), 3)
        page = self._page(found, title, math.ceil(len(shown) / across), across, "layer")
        for ax, budget in zip(page.used(len(shown)), shown, strict=True):
            here = found[found["budget"] == budget]
            ax.set_title(f"budget {budget}", loc="left", y=1.0, pad=3)
            self._lines(ax, here, lambda rows: rows["layer"].to_numpy(np.float64))
            ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        page.axes[0, 0].set_ylim(bottom=0)  # after all panels: they share the axis
        return save(page.figure, stem)

    def over_budgets(self, rows: pd.DataFrame, title: str, stem: Path) -> list[Path]:
        """Draw the mean over heads and layers by budget, a panel for shares and one for tokens."""
        found = rows.rename(columns={"l1": "mean", "l1_lo": "lo", "l1_hi": "hi"})
        kinds = [k for k in (False, True) if (found["budget"].str.isdigit() == k).any()]
        page = self._page(found, title, 1, len(kinds), "budget, log scale")
        for ax, absolute in zip(page.used(len(kinds)), kinds, strict=True):
            here = found[found["budget"].str.isdigit() == absolute]
            here = here.assign(at=here["budget"].astype(float) * (1 if absolute else 100))
            here = here.sort_values("at")
            self._lines(ax, here, lambda part: part["at"].to_numpy(np.float64))
            ax.set_xscale("log")
            ticks = sorted(set(here["at"]))
            ax.set_xticks(ticks, [f"{t:g}" + "%" * (not absolute) for t in ticks])
            ax.minorticks_off()
            ax.set_title("tokens kept" if absolute else "share kept", loc="left", y=1.0, pad=3)
        page.axes[0, 0].set_ylim(bottom=0)
        return save(page.figure, stem)

    def _page(
        self, found: pd.DataFrame, title: str, lines: int, across: int, x_label: str
    ) -> Sheet:
        known = np.isfinite(found[["lo", "hi"]].to_numpy(dtype=np.float64)).all()
        shown = [policy for policy in self.looks_of if (found["policy"] == policy).any()]
        return sheet(
            lines,
            across,
            title=title + ("; bands: 95% intervals" if known else ""),
            width=COLUMN if across == 1 else PAGE,
            panel=2.0 if across == 1 else 1.6,
            x_label=x_label,
            y_label="L1 change",
            labels=shown,
            handles=[handle(self.looks_of[policy]) for policy in shown],
            left=0.62,
            top=0.22,
            gap=(0.2, 0.35),
            sharey=True,
        )

    def _lines(self, ax: Axes, here: pd.DataFrame, at: Callable[[pd.DataFrame], Floats]) -> None:
        for policy, look in self.looks_of.items():
            rows = here[here["policy"] == policy]
            if not len(rows):
                continue
            x = at(rows)
            low, high = (rows[end].to_numpy(np.float64) for end in ("lo", "hi"))
            if np.isfinite([low, high]).all():
                ax.fill_between(x, low, high, color=look[0], alpha=0.12, lw=0)
                # Edges tell apart bands that cover each other.
                for end in (low, high):
                    ax.plot(x, end, color=look[0], lw=0.4, alpha=0.7)
            ax.plot(x, rows["mean"], **marked(look))
