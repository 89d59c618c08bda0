"""Figures of an analysis of causes: verdicts, maps of heads, and what is held where answers are right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.patches import Patch

from kvbench.analysis.causes.diagnosis import NOT_FOUND, RIGHT, UNSTABLE, VERDICTS, WORDING
from kvbench.analysis.causes.frames import layer_gains, verdict_order
from kvbench.analysis.causes.study import CausesResult, budget_shares
from kvbench.analysis.maps import Colours, figure_suffixes, head_maps, layer_head_map
from kvbench.analysis.scopes import Row, ordered_budgets, rows_in_scope, scopes
from kvbench.report.figure_options import FigureOptions
from kvbench.report.frames import INFORMED, informed_policies
from kvbench.tables.plot_style import (
    COLUMN,
    GREY,
    GREY_BAND,
    PAGE,
    PALE,
    SEQUENTIAL,
    lay_out_figure,
    marker_styles,
    plot_style,
    save,
)
from kvbench.tables.text import slug

_GREYS = {RIGHT: GREY_BAND, WORDING: PALE, UNSTABLE: GREY, NOT_FOUND: "#444444"}
"""Colours of verdicts that name no cause."""


def draw_causes(
    result: CausesResult, samples: pd.DataFrame, heads: pd.DataFrame, folder: Path, options: FigureOptions
) -> list[Path]:
    """Draw all figures.

    Args:
        result: Result of the analysis.
        samples, heads: Its data frames.
        folder: Existing output folder.
        options: Formats, size and labels of the figures.

    Returns:
        The files written.
    """
    paths: list[Path] = []
    with plot_style():
        for scope, rows in scopes(samples):
            suffix, subtitle = figure_suffixes(samples, scope)
            paths += _verdicts(rows, f"Why samples are lost · {subtitle}", folder / f"verdicts-{suffix}", options)
            title = f"Answers by the heads that hold them · {subtitle}"
            paths += _held(rows, title, folder / f"held-{suffix}", options)
            if len(heads):
                paths += _maps(result, rows_in_scope(heads, scope), scope, suffix, subtitle, folder, options)
    return paths


def _verdicts(rows: pd.DataFrame, title: str, stem: Path, options: FigureOptions) -> list[Path]:
    """Draw a stacked bar per policy and budget: shares of the samples that the full cache answers."""
    cells = [
        (policy, budget) for budget in ordered_budgets(rows) for policy in rows["policy"].drop_duplicates()
        if ((rows["policy"] == policy) & (rows["budget"] == budget)).any()
    ]  # fmt: skip
    verdicts = verdict_order(rows)
    coloured = [verdict for verdict in VERDICTS if verdict not in _GREYS]
    colours = {verdict: colour for verdict, (colour, _) in marker_styles(coloured).items()} | _GREYS
    informed = informed_policies(rows)
    labels = [f"{options.label(policy)}{INFORMED * (policy in informed)} at {budget}" for policy, budget in cells]
    layout = lay_out_figure(
        1,
        1,
        title=title if options.has_title else "",
        width=options.width or PAGE,
        panel_height=0.16 * len(cells) + 0.1,
        x_label="share of the samples that the full cache answers",
        y_label="",
        labels=verdicts,
        handles=[Patch(facecolor=colours[verdict]) for verdict in verdicts],
        left_margin=min(2.6, 0.25 + 0.063 * max(map(len, labels))),
    )
    axes = layout.axes[0, 0]
    for position, (policy, budget) in enumerate(cells):
        counts = rows.loc[(rows["policy"] == policy) & (rows["budget"] == budget), "verdict"].value_counts(
            normalize=True
        )
        left = 0.0
        for verdict in verdicts:
            share = float(counts.get(verdict, 0.0))
            axes.barh(position, share, left=left, height=0.78, color=colours[verdict], edgecolor="white", linewidth=0.4)
            left += share
    axes.set_yticks(range(len(cells)), labels)
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    return save(layout.figure, stem, options.formats)


def _held(rows: pd.DataFrame, title: str, stem: Path, options: FigureOptions) -> list[Path]:
    """Draw how many KV heads hold the whole answer where it is right and where it is not."""
    held = rows.dropna(subset=["whole_heads"])
    if not len(held):
        return []
    is_right = held["verdict"] == RIGHT
    counts = held["whole_heads"].astype(int)
    edges = np.unique(np.concatenate([[0, 1], np.geomspace(1, max(2, counts.max() + 1), 6).round()])).astype(int)
    colours = [colour for colour, _ in marker_styles(["right", "lost"]).values()]
    layout = lay_out_figure(
        1,
        1,
        title=title if options.has_title else "",
        width=options.width or COLUMN,
        panel_height=1.5,
        x_label="KV heads that hold the whole answer",
        y_label="samples of all cells",
        labels=["right", "lost"],
        handles=[Patch(facecolor=colour) for colour in colours],
    )
    axes = layout.axes[0, 0]
    bottoms = np.zeros(len(edges) - 1)
    for chosen, colour in ((is_right, colours[0]), (~is_right, colours[1])):
        heights, _ = np.histogram(counts[chosen], edges)
        axes.bar(range(len(heights)), heights, bottom=bottoms, width=0.8, color=colour)
        bottoms += heights
    bins = pairwise(edges.tolist())
    labels = [f"{low}" if high - low == 1 else f"{low}-{high - 1}" for low, high in bins]
    axes.set_xticks(range(len(labels)), labels)
    return save(layout.figure, stem, options.formats)


def _maps(
    result: CausesResult,
    heads: pd.DataFrame,
    scope: Row,
    suffix: str,
    subtitle: str,
    folder: Path,
    options: FigureOptions,
) -> Iterator[Path]:
    """Draw, for every policy, the gain of each layer and head beside the policy's shares; a column per budget."""
    layers, informed = result.layers[scope["model"]], informed_policies(heads)
    for policy, policy_rows in heads.groupby("policy", sort=False):
        panels: list[list[tuple[str, np.ndarray]]] = [[], [], [], []]
        for budget in ordered_budgets(policy_rows):
            cell_rows = policy_rows[policy_rows["budget"] == budget]
            chosen = [
                sample for sample in result.samples
                if all(sample.cell.labels[column] == scope[column] for column in scope)
                and (str(sample.cell.policy), str(sample.cell.budget)) == (policy, budget)
            ]  # fmt: skip
            shape = budget_shares(chosen[0]).shape
            columns = ("needed", "share", "target_held")
            needed, share, held = (
                layer_head_map(cell_rows, cell_rows[column].to_numpy(), "kv_head") for column in columns
            )
            for row, image in zip(panels, (layer_gains(chosen, shape), needed, share, held), strict=True):
                row.append((f"budget {budget}", image))
        # A policy that loses nothing has no gains; nobody holds an answer that the contexts do not contain.
        shown = [
            (row, label)
            for row, label in zip(panels, _LABELS, strict=True)
            if label == "share"
            or any((np.isfinite(image) if label == "holds answer" else np.nan_to_num(image)).any() for _, image in row)
        ]
        scales = [_colours(row, label) for row, label in shown]
        mark = INFORMED * (policy in informed)
        title = f"{options.label(str(policy))}{mark}: evidence by layer and KV head · {subtitle}"
        stem = folder / f"heads-{slug(str(policy))}-{suffix}"
        yield from head_maps([row for row, _ in shown], scales, title, "KV head", layers, stem, options)


_LABELS = ("gain (nats)", "times needed", "share", "holds answer")
"""Colour bars: gain of the layer's evidence given alone, samples that need the head, entries over the mean, samples in
which the head holds the whole answer."""


def _colours(panels: Sequence[tuple[str, np.ndarray]], label: str) -> Colours:
    """Return the colour scale of a row of maps, from 0."""
    highest = max(float(np.nanmax(image, initial=0.0)) for _, image in panels)
    return Colours(SEQUENTIAL, 0.0, 1.0 if label == "holds answer" else max(highest, 1e-9), label)
