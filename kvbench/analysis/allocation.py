"""Entries per layer and KV head for each policy's allocator, averaged over contexts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvbench.analysis.common import analysis_runner, contexts, kept_masks, make_grid, stages
from kvbench.analysis.maps import Colours, figure_suffixes, head_maps, layer_head_map, panels_across
from kvbench.analysis.output import AnalysisOutput, Findings, prepare_output, require_results, write_all
from kvbench.analysis.scopes import distinct_values, ordered_budgets, scope_heading, scopes
from kvbench.analysis.summary import notes
from kvbench.engine.models import full_layer_ids
from kvbench.progress import Reporter
from kvbench.report.figure_flags import DEFAULT_FLAGS, FigureFlags
from kvbench.report.figure_options import DEFAULT_FIGURES, FigureOptions
from kvbench.runs.answers import Prompt
from kvbench.runs.cell import Cell
from kvbench.runs.grid import Grid
from kvbench.runs.worker import ModelRunner
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.plot_style import plot_style
from kvbench.tables.table import Column, Name, Table, TableCell, TableRow
from kvbench.tables.text import counted, short, slug

_LABELS = ("model", "task", "length", "moment", "policy", "budget")


@dataclass(frozen=True)
class Allocation:
    """Allocation result: a row per cell, layer and KV head (columns: docs/analysis.md)."""

    table: pd.DataFrame
    failed: dict[str, str]


def analyze(grid: Grid, reporter: Reporter) -> Allocation:
    """Count the entries that every cell of a grid keeps per layer and KV head.

    Args:
        grid: Policies, budgets, models, tasks, moments, lengths and samples.
        reporter: Progress reporter.

    Raises:
        UserError: A value in the grid is unknown or out of range.
    """
    table_rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for stage in stages(grid, reporter.message):
        with analysis_runner(stage, grid, reporter, failures) as runner:
            layers = full_layer_ids(runner.model)
            reporter.start(sum(len(job.prompts) * len(job.cells) for job in stage.jobs), stage.model)
            for job in stage.jobs:
                entry_counts: dict[str, list[Tensor]] = {cell.cell: [] for cell in job.cells}
                context_lengths: dict[str, list[int]] = {cell.cell: [] for cell in job.cells}
                for prompts in contexts(job):
                    _count(runner, prompts, job.cells, entry_counts, context_lengths)
                    reporter.advance(len(prompts) * len(job.cells))
                for cell in job.cells:
                    if cell.cell not in failures:
                        cell_lengths = context_lengths[cell.cell]
                        cell_counts = torch.stack(entry_counts[cell.cell]).double()
                        table_rows += _rows(cell, layers, cell_counts, cell_lengths)
    return Allocation(pd.DataFrame(table_rows), failures)


def _count(
    runner: ModelRunner,
    prompts: list[Prompt],
    cells: list[Cell],
    entry_counts: dict[str, list[Tensor]],
    context_lengths: dict[str, list[int]],
) -> None:
    """Compress one context for all cells; for moment `question`, once per question."""
    needs = frozenset(need for cell in cells for need in cell.policy.needs)
    first_prompt = prompts[0]
    prefix, _ = runner.prefill(first_prompt.context_ids, needs, first_prompt.media)
    questions: list[tuple[int, ...]] = [()]
    questions += dict.fromkeys(prompt.question_ids for prompt in prompts)
    for question in questions:
        due_cells = [candidate for candidate in cells if (candidate.moment == "question") == bool(question)]
        due_cells = [candidate for candidate in due_cells if candidate.cell not in runner.failed]
        if not due_cells:
            continue
        compressed_prefix = runner.ask(prefix, question)[0] if question else prefix
        for cell in due_cells:
            cache = runner.compress(compressed_prefix, cell, first_prompt, 1)
            if cache is None:
                continue
            kept_counts = torch.stack([layer_mask.sum(-1) for layer_mask in kept_masks(cache)])
            entry_counts[cell.cell].append(kept_counts.cpu())
            context_lengths[cell.cell].append(len(first_prompt.context_ids) + len(question))


def _rows(cell: Cell, layers: list[int], entry_counts: Tensor, context_lengths: list[int]) -> list[dict[str, Any]]:
    """Return the rows of one cell from its counts `[compressions, L, H]`."""
    even_share = entry_counts.mean((1, 2), keepdim=True)
    relative_share = (entry_counts / even_share).mean(0).tolist()
    deviations = entry_counts.std(0, correction=1) if len(entry_counts) > 1 else torch.zeros_like(entry_counts[0])
    mean_counts, min_counts, max_counts = (
        entry_counts.mean(0),
        entry_counts.amin(0),
        entry_counts.amax(0),
    )
    return [
        {
            "cell": cell.cell,
            **{label: cell.labels[label] for label in _LABELS},
            "layer": layer,
            "kv_head": head,
            "entries": float(mean_counts[layer_index, head]),
            "entries_sd": float(deviations[layer_index, head]),
            "entries_min": int(min_counts[layer_index, head]),
            "entries_max": int(max_counts[layer_index, head]),
            "share": relative_share[layer_index][head],
            "tokens": sum(context_lengths) / len(context_lengths),
            "compressions": len(entry_counts),
        }
        for layer_index, layer in enumerate(layers)
        for head in range(entry_counts.shape[2])
    ]


_MOST_LAYERS = 12
"""For models with more layers, only those with the fewest and most entries are shown."""


def allocation_tables(allocation_frame: pd.DataFrame) -> Iterator[Table]:
    """Yield one table per model, task, length and moment."""
    for scope, scope_rows in scopes(allocation_frame):
        layers = list(dict.fromkeys(scope_rows["layer"]))
        shows_all = len(layers) <= _MOST_LAYERS
        titles = [f"layer {layer}" for layer in layers] if shows_all else ["least layer", "most layer"]
        columns = [Column("policy"), Column("budget")]
        count_titles = ("mean", "least KV head", "most KV head", *titles)
        columns += [Column(heading, NumberFormat.COUNT) for heading in count_titles]
        table_rows = []
        for policy in distinct_values(scope_rows, "policy"):
            for budget in ordered_budgets(scope_rows):
                cell_rows = scope_rows[(scope_rows["policy"] == policy) & (scope_rows["budget"] == budget)]
                if not len(cell_rows):
                    continue
                entries = cell_rows["entries"]
                layer_means = cell_rows.groupby("layer", observed=True)["entries"].mean()
                layer_cells: list[TableCell] = (
                    [*layer_means[layers]] if shows_all else [layer_means.min(), layer_means.max()]
                )
                numbers = (entries.mean(), entries.min(), entries.max())
                table_rows.append(TableRow((Name(policy), Name(budget), *numbers, *layer_cells)))
        heading = (*scope_heading(scope), ": entries per layer and KV head, mean over contexts")
        yield Table(heading, tuple(columns), tuple(table_rows))


def draw_allocation(
    allocation_frame: pd.DataFrame, folder: Path, options: FigureOptions = DEFAULT_FIGURES
) -> list[Path]:
    """Draw a map of entries per layer and KV head for every policy, one panel per budget.

    Args:
        allocation_frame: Table of an allocation analysis.
        folder: Existing output folder.
        options: Formats, size and labels of the figures.

    Returns:
        The files written.
    """
    paths: list[Path] = []
    with plot_style():
        for scope, scope_rows in scopes(allocation_frame):
            suffix, subtitle = figure_suffixes(allocation_frame, scope)
            for policy in distinct_values(scope_rows, "policy"):
                policy_rows = scope_rows[scope_rows["policy"] == policy].sort_values(["layer", "kv_head"])
                title = f"{short(options.label(policy))}, entries per KV head · {subtitle}"
                paths += _map(policy_rows, title, folder / f"allocation-{slug(policy)}-{suffix}", options)
    return paths


def _map(policy_rows: pd.DataFrame, title: str, stem: Path, options: FigureOptions) -> list[Path]:
    panels = []
    for budget in ordered_budgets(policy_rows):
        budget_rows = policy_rows[policy_rows["budget"] == budget]
        share_map = layer_head_map(policy_rows, budget_rows["share"].to_numpy(np.float64), "kv_head")
        panels.append((f"{budget}: mean {budget_rows['entries'].mean():.0f}", share_map))
    limit = max(0.05, *(float(np.abs(share_map - 1).max()) for _, share_map in panels))
    across = panels_across(options)
    panel_rows = [panels[start : start + across] for start in range(0, len(panels), across)]
    colours = [Colours("RdBu_r", 1 - limit, 1 + limit, "entries over\nan even share")]
    # Every cell of a task compresses the same contexts (at `question`, the same questions).
    noun = "question" if (policy_rows["moment"] == "question").all() else "context"
    title += f", n = {counted(int(policy_rows['compressions'].iloc[0]), noun)} per KV head"
    return head_maps(panel_rows, colours, title, "KV head", sorted(set(policy_rows["layer"])), stem, options)


def write_allocation(
    grid_options: Mapping[str, Any],
    reporter: Reporter,
    *,
    figures: FigureFlags = DEFAULT_FLAGS,
    command: str = "kvbench analyze allocation",
) -> AnalysisOutput:
    """Run the allocation analysis and write `allocation.parquet`.

    Args:
        grid_options: Grid options, in the format of `Grid.from_dict`.
        reporter: Progress reporter.
        figures: Options of the figures.
        command: Command shown in the summary.

    Raises:
        UserError: A value in the grid is unknown or out of range, or the output is not writable.
    """
    grid = make_grid(grid_options)
    folder, figure_settings = prepare_output(grid, "allocation", figures)
    allocation = analyze(grid, reporter)
    require_results(allocation.table, allocation.failed)
    findings = Findings(
        {"allocation": allocation.table},
        list(allocation_tables(allocation.table)),
        notes(allocation.table, allocation.failed),
        draw_allocation(allocation.table, folder / "figures", figure_settings),
        allocation.failed,
    )
    return write_all(folder, grid, {"analysis": "allocation"}, findings, command)
