"""Tables of a vision analysis, as data frames and for display."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from kvbench.analysis.scopes import distinct_values, ordered_budgets, scope_heading, scopes
from kvbench.analysis.vision.image_shares import (
    BOUNDARIES,
    CellRecord,
    ImagePrompt,
    TaskVision,
    VisionResult,
)
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.table import Column, Name, Table, TableRow
from kvbench.tables.text import counted

READING = (
    "Entries of one KV head, mean over layers and KV heads: all that it holds, and those of images "
    "and videos. The first decode step is the cache that the answer begins with.",
    "Every cell writes its own answer, greedily.",
)
_LABELS = ("model", "task", "length", "moment", "policy", "budget")


def frames(result: VisionResult) -> dict[str, pd.DataFrame]:
    """Return all non-empty tables by name (columns: docs/analysis.md)."""
    makers = {"answers": _answers, "steps": _steps, "usage": _usage, "tokens": _tokens}
    frames_by_name = {}
    for table_name, make_columns in makers.items():
        answer_frames = [
            pd.DataFrame({**_where(sample, record), **columns})
            for task in result.tasks
            for sample in task.samples
            for record in sample.records
            for columns in make_columns(task, sample, record)
        ]
        if answer_frames:
            frames_by_name[table_name] = pd.concat(answer_frames, ignore_index=True)
    return frames_by_name


def _where(sample: ImagePrompt, record: CellRecord) -> dict[str, Any]:
    request = sample.prompt.request
    cell_labels = {label: record.cell.labels[label] for label in _LABELS}
    return {**cell_labels, "sample_id": request.sample_id, "question_id": request.question_id}


def _answers(task: TaskVision, sample: ImagePrompt, record: CellRecord) -> Iterator[dict[str, Any]]:
    yield {
        "images": len([medium for medium in sample.prompt.media if medium.kind == "image"]),
        "prompt_tokens": record.prompt,
        "visual_tokens": int(sample.visual.sum()),
        "budget_entries": record.trace.budget,
        "steps": record.steps,
        "cuts": record.trace.eviction_count,
        "question": [sample.question],
        "answer": [record.answer],
        "target": ["\n".join(sample.prompt.request.target)],
    }


def _steps(task: TaskVision, sample: ImagePrompt, record: CellRecord) -> Iterator[dict[str, Any]]:
    mean_counts = {kind: entries.double().mean((0, 1)).numpy() for kind, entries in usage(sample, record).items()}
    yield {
        "step": np.arange(record.steps, dtype=np.int32),
        **_columns(mean_counts, np.float64, record.steps),
    }


def _usage(task: TaskVision, sample: ImagePrompt, record: CellRecord) -> Iterator[dict[str, Any]]:
    flat_counts = {kind: entries.flatten().numpy() for kind, entries in usage(sample, record).items()}
    index_columns = _index(task, record.trace.eviction_steps.shape[1], record.steps, "step")
    yield {**index_columns, **_columns(flat_counts, np.int32, len(index_columns["step"]))}


def _tokens(task: TaskVision, sample: ImagePrompt, record: CellRecord) -> Iterator[dict[str, Any]]:
    for image_number, view in enumerate(sample.views, 1):
        evicted_steps = record.evicted[..., view.positions]
        index_columns = _index(task, evicted_steps.shape[1], evicted_steps.shape[2], "cell")
        cell_index = index_columns.pop("cell")
        flat_steps = evicted_steps.flatten().numpy()
        yield {
            **index_columns,
            "image": image_number,
            "row": cell_index // view.columns,
            "column": cell_index % view.columns,
            "position": view.first + cell_index,
            "evicted": pd.arrays.IntegerArray(flat_steps, flat_steps == record.steps),
        }


def usage(sample: ImagePrompt, record: CellRecord) -> dict[str, Tensor]:
    """Return entries by kind, int64 `[L, H, steps]`: all, visual, and image boundaries."""
    kind_masks = {"visual": sample.visual, **sample.boundaries}
    return {
        "entries": record.counts(),
        **{kind: record.counts(kind_mask) for kind, kind_mask in kind_masks.items()},
    }


def _columns(counts: dict[str, Any], dtype: Any, row_count: int) -> dict[str, Any]:
    """Return counts as columns; boundaries that the model lacks are empty."""
    columns = {kind: entries.astype(dtype) for kind, entries in counts.items()}
    for boundary in BOUNDARIES:
        columns.setdefault(boundary, pd.array([pd.NA] * row_count, dtype=pd.Int32Dtype()))
    return columns


def _index(task: TaskVision, heads: int, item_count: int, index_name: str) -> dict[str, Any]:
    """Return layer, KV head and a third index of values `[L, H, each]`."""
    layers = np.array(task.layers, np.int32)
    return {
        "layer": np.repeat(layers, heads * item_count),
        "kv_head": np.tile(np.repeat(np.arange(heads, dtype=np.int32), item_count), len(layers)),
        index_name: np.tile(np.arange(item_count, dtype=np.int32), len(layers) * heads),
    }


# --- display --------------------------------------------------------------------------------------


def vision_tables(data_frames: dict[str, pd.DataFrame]) -> Iterator[Table]:
    """Yield a table per model, task, length and moment."""
    key_columns = ["policy", "budget", "sample_id", "question_id"]
    for scope, step_rows in scopes(data_frames["steps"]):
        answer_groups = step_rows.groupby(key_columns, sort=False, observed=True)
        answer_ends = answer_groups.first().join(answer_groups.last().add_suffix("_last")).reset_index()
        columns = [Column("policy"), Column("budget")]
        for column_group in ("first step", "last step"):
            columns += [Column(heading, NumberFormat.COUNT, column_group) for heading in ("all", "visual")]
        columns.append(Column("steps", NumberFormat.COUNT))
        table_rows = []
        for policy in distinct_values(answer_ends, "policy"):
            for budget in ordered_budgets(answer_ends):
                cell_rows = answer_ends[(answer_ends["policy"] == policy) & (answer_ends["budget"] == budget)]
                if len(cell_rows):
                    mean_columns = ["entries", "visual", "entries_last", "visual_last", "step_last"]
                    mean_values = cell_rows[mean_columns].mean().tolist()
                    mean_values[-1] += 1
                    table_rows.append(TableRow((Name(policy), Name(budget), *mean_values)))
        prompt_count = answer_ends.groupby(["policy", "budget"], observed=True).size().max()
        subtitle = f": entries per KV head, mean over {counted(int(prompt_count), 'prompt')}"
        yield Table((*scope_heading(scope), subtitle), tuple(columns), tuple(table_rows))
