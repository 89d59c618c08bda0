"""Entries that a policy's allocator gives to each layer and KV head, as means over contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvbench.analysis.common import Bench, contexts, held, loaded, stages
from kvbench.engine.models import full_layer_ids
from kvbench.progress import Reporter
from kvbench.runs.answers import Prompt
from kvbench.runs.cell import Cell
from kvbench.runs.grid import Grid

_LABELS = ("model", "task", "length", "moment", "policy", "budget")


@dataclass(frozen=True)
class Allocation:
    """Result: a row per cell, layer and KV head (columns: docs/analysis.md)."""

    table: pd.DataFrame
    failed: dict[str, str]


def analyze(grid: Grid, reporter: Reporter) -> Allocation:
    """Count what every cell of a grid keeps in each layer and KV head.

    Args:
        grid: Policies, budgets, models, tasks, moments, lengths and samples.
        reporter: Told of the progress.

    Raises:
        UserError: Something in the grid is unknown or out of range.
    """
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for stage in stages(grid, reporter.message):
        with loaded(stage, grid, reporter.message) as model:
            bench = Bench(model, reporter, failed, stage.vision)
            layers = full_layer_ids(model)
            reporter.start(
                sum(len(job.prompts) * len(job.cells) for job in stage.jobs), stage.model
            )
            try:
                for job in stage.jobs:
                    counts: dict[str, list[Tensor]] = {cell.cell: [] for cell in job.cells}
                    sizes: dict[str, list[int]] = {cell.cell: [] for cell in job.cells}
                    for prompts in contexts(job):
                        _count(bench, prompts, job.cells, counts, sizes)
                        reporter.advance(len(prompts) * len(job.cells))
                    for cell in job.cells:
                        if cell.cell not in failed:
                            size = sizes[cell.cell]
                            found = torch.stack(counts[cell.cell]).double()
                            rows += _rows(cell, layers, found, size)
            finally:
                reporter.stop()
    return Allocation(pd.DataFrame(rows), failed)


def _count(
    bench: Bench,
    prompts: list[Prompt],
    cells: list[Cell],
    counts: dict[str, list[Tensor]],
    sizes: dict[str, list[int]],
) -> None:
    """Compress one context for all cells, once per question for those of moment `question`."""
    needs = frozenset(need for cell in cells for need in cell.policy.needs)
    first = prompts[0]
    prefix = bench.prefill(first.context_ids, needs, first.media)
    asked: list[tuple[int, ...]] = [()]
    asked += dict.fromkeys(p.question_ids for p in prompts)
    for question in asked:
        due = [c for c in cells if (c.moment == "question") == bool(question)]
        due = [c for c in due if c.cell not in bench.failed]
        if not due:
            continue

        def taken(question: tuple[int, ...] = question, fresh: bool = False) -> Any:
            base = bench.prefill(first.context_ids, needs, first.media) if fresh else prefix
            if not question:
                return base
            longer = base.fork()
            longer.extend(bench.tensor(question))
            return longer

        whole = taken()
        for cell in due:
            cache = bench.compress(whole, cell, cell.policy, 1)
            if cache is None:
                if whole.spoiled:
                    whole = taken(fresh=True)
                continue
            kept = torch.stack([layer.sum(-1) for layer in held(cache)])
            counts[cell.cell].append(kept.cpu())
            sizes[cell.cell].append(len(first.context_ids) + len(question))


def _rows(cell: Cell, layers: list[int], counts: Tensor, sizes: list[int]) -> list[dict[str, Any]]:
    """Rows of one cell from its counts `[compressions, L, H]`."""
    even = counts.mean((1, 2), keepdim=True)
    share = (counts / even).mean(0).tolist()
    spread = counts.std(0, correction=1) if len(counts) > 1 else torch.zeros_like(counts[0])
    mean, least, most = counts.mean(0), counts.amin(0), counts.amax(0)
    return [
        {
            "cell": cell.cell,
            **{name: cell.labels[name] for name in _LABELS},
            "layer": layer,
            "kv_head": head,
            "entries": float(mean[i, head]),
            "entries_sd": float(spread[i, head]),
            "entries_min": int(least[i, head]),
            "entries_max": int(most[i, head]),
            "share": share[i][head],
            "tokens": sum(sizes) / len(sizes),
            "compressions": len(counts),
        }
        for i, layer in enumerate(layers)
        for head in range(counts.shape[2])
    ]
