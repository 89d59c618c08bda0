"""The tables of a vision analysis: as data frames, and as a reader sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from kvbench.analysis.scopes import budgets, names, scopes, title_of
from kvbench.analysis.vision.measure import BOUNDARIES, Found, Kept, OfTask, Shown
from kvbench.report.numbers import Kind
from kvbench.report.table import Column, Name, Row, Table
from kvbench.report.text import counted

READING = (
    "Entries of one KV head, mean over layers and KV heads: all that it holds, and those of images "
    "and videos. The first decode step is the cache that the answer begins with.",
    "Every cell writes its own answer, greedily.",
)
_LABELS = ("model", "task", "length", "moment", "policy", "budget")


def frames(found: Found) -> dict[str, pd.DataFrame]:
    """All tables by name (columns: docs/analysis.md); one that would be empty is left out."""
    makers = {"answers": _answers, "steps": _steps, "usage": _usage, "tokens": _tokens}
    made = {}
    for name, make in makers.items():
        parts = [
            pd.DataFrame({**_where(shown, kept), **columns})
            for task in found.tasks
            for shown in task.shown
            for kept in shown.kept
            for columns in make(task, shown, kept)
        ]
        if parts:
            made[name] = pd.concat(parts, ignore_index=True)
    return made


def _where(shown: Shown, kept: Kept) -> dict[str, Any]:
    request = shown.prompt.request
    labels = {name: kept.cell.labels[name] for name in _LABELS}
    return {**labels, "sample_id": request.sample_id, "question_id": request.question_id}


def _answers(task: OfTask, shown: Shown, kept: Kept) -> Iterator[dict[str, Any]]:
    yield {
        "images": len([m for m in shown.prompt.media if m.kind == "image"]),
        "prompt_tokens": kept.prompt,
        "visual_tokens": int(shown.visual.sum()),
        "budget_entries": kept.trace.budget,
        "steps": kept.steps,
        "cuts": kept.trace.cuts,
        "question": [shown.question],
        "answer": [kept.answer],
        "target": ["\n".join(shown.prompt.request.target)],
    }


def _steps(task: OfTask, shown: Shown, kept: Kept) -> Iterator[dict[str, Any]]:
    means = {k: v.double().mean((0, 1)).numpy() for k, v in usage(shown, kept).items()}
    yield {"step": np.arange(kept.steps, dtype=np.int32), **_columns(means, np.float64, kept.steps)}


def _usage(task: OfTask, shown: Shown, kept: Kept) -> Iterator[dict[str, Any]]:
    counts = {k: v.flatten().numpy() for k, v in usage(shown, kept).items()}
    index = _index(task, kept.trace.gone.shape[1], kept.steps, "step")
    yield {**index, **_columns(counts, np.int32, len(index["step"]))}


def _tokens(task: OfTask, shown: Shown, kept: Kept) -> Iterator[dict[str, Any]]:
    for number, view in enumerate(shown.views, 1):
        gone = kept.evicted[..., view.positions]
        index = _index(task, gone.shape[1], gone.shape[2], "cell")
        cell = index.pop("cell")
        flat = gone.flatten().numpy()
        yield {
            **index,
            "image": number,
            "row": cell // view.columns,
            "column": cell % view.columns,
            "position": view.first + cell,
            "evicted": pd.arrays.IntegerArray(flat, flat == kept.steps),
        }


def usage(shown: Shown, kept: Kept) -> dict[str, Tensor]:
    """Entries by kind, int64 `[L, H, steps]`: all, visual ones, and the boundaries of images."""
    kinds = {"visual": shown.visual, **shown.boundaries}
    return {"entries": kept.counts(), **{k: kept.counts(where) for k, where in kinds.items()}}


def _columns(values: dict[str, Any], dtype: Any, rows: int) -> dict[str, Any]:
    """Counts as columns; those of boundaries that a model lacks are empty."""
    found = {k: v.astype(dtype) for k, v in values.items()}
    for name in BOUNDARIES:
        found.setdefault(name, pd.array([pd.NA] * rows, dtype=pd.Int32Dtype()))
    return found


def _index(task: OfTask, heads: int, each: int, name: str) -> dict[str, Any]:
    """Layer, KV head and a third index of numbers `[L, H, each]`."""
    layers = np.array(task.layers, np.int32)
    return {
        "layer": np.repeat(layers, heads * each),
        "kv_head": np.tile(np.repeat(np.arange(heads, dtype=np.int32), each), len(layers)),
        name: np.tile(np.arange(each, dtype=np.int32), len(layers) * heads),
    }


# --- what is shown --------------------------------------------------------------------------------


def vision_tables(data: dict[str, pd.DataFrame]) -> Iterator[Table]:
    """A table for each model, task, length and moment."""
    keys = ["policy", "budget", "sample_id", "question_id"]
    for scope, steps in scopes(data["steps"]):
        groups = steps.groupby(keys, sort=False, observed=True)
        ends = groups.first().join(groups.last().add_suffix("_last")).reset_index()
        columns = [Column("policy"), Column("budget")]
        for group in ("first step", "last step"):
            columns += [Column(name, Kind.COUNT, group) for name in ("all", "visual")]
        columns.append(Column("steps", Kind.COUNT))
        rows = []
        for policy in names(ends, "policy"):
            for budget in budgets(ends):
                here = ends[(ends["policy"] == policy) & (ends["budget"] == budget)]
                if len(here):
                    shown = ["entries", "visual", "entries_last", "visual_last", "step_last"]
                    means = here[shown].mean().tolist()
                    means[-1] += 1
                    rows.append(Row((Name(policy), Name(budget), *means)))
        count = ends.groupby(["policy", "budget"], observed=True).size().max()
        what = f": entries per KV head, mean over {counted(int(count), 'prompt')}"
        yield Table((*title_of(scope), what), tuple(columns), tuple(rows))
