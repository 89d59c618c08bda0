"""Entries per layer and KV head for each policy's allocator, averaged over contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvbench.analysis.common import analysis_runner, contexts, kept_masks, stages
from kvbench.engine.models import full_layer_ids
from kvbench.progress import Reporter
from kvbench.runs.answers import Prompt
from kvbench.runs.cell import Cell
from kvbench.runs.grid import Grid
from kvbench.runs.worker import ModelRunner

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
