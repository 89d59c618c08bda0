"""Runs that fill the layouts of published tables, made up as those of the report's tests."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from kvbench.papers.layouts.from_papers import LENGTHS, published_layout, task_weights
from kvbench.papers.layouts.measures import Measures, merged
from kvbench.papers.published.beside import MOMENTS
from kvbench.runs.store import RunStore

from ...report.conftest import Frames, make_run

_KINDS = ("multi-session", "knowledge-update", "single-session-user")
_KINDS += ("single-session-preference", "single-session-assistant", "temporal-reasoning")
_FIELDS = {
    "longmemeval_s": [{"question_type": kind} for kind in _KINDS],
    "longbench_v2": [
        {"length": length, "difficulty": difficulty}
        for length in ("short", "medium", "long")
        for difficulty in ("easy", "hard")
    ],
}


@functools.cache
def layout_run(name: str, model: str = "tiny_llama", samples: int = 12) -> Frames:
    """A run of everything that a layout shows, with the moment and the lengths that it needs."""
    figures = published_layout(name).figures
    weights = [task_weights(f, ()) for f in figures]
    tasks = list(dict.fromkeys(source.task for one in weights for source, _ in one))
    budgets = {f.kept for f in figures} - {"", "full"}
    moments = {MOMENTS.get(f.setting, "context") for f in figures}
    lengths = sorted(LENGTHS[f.setting][0] for f in figures[:2] if f.setting in LENGTHS)
    cells, rows = make_run(
        list(dict.fromkeys(f.policy for f in figures if f.policy not in ("", "full"))),
        sorted(budgets, key=lambda budget: float(budget.removeprefix("visual:"))),
        tasks,
        model=model,
        group="ruler" if name == "criticalkv-1" else "longbench",
        lengths=lengths or (1024 if name == "criticalkv-1" else 0,),
        moments=tuple(moments),
        samples=samples,
        # At budgets in tokens the made-up policies lose nothing; this full cache leaves room.
        full_level=0.9,
    )
    if moments == {"turns"}:  # a live dialogue has a full cache of its own
        cells.loc[cells["policy"] == "full", "moment"] = "turns"
        rows.loc[rows["policy"] == "full", "moment"] = "turns"
    for task, fields in _FIELDS.items():
        mine = rows["task"] == task
        rows.loc[mine, "extra"] = [json.dumps(fields[i % len(fields)]) for i in rows.loc[mine, "doc_id"]]
    return cells, rows


def measures_of(frames: Frames, by_metric: Mapping[str, Frames] | None = None) -> Measures:
    """The measures of a run, and of the same cells by other metrics, which have the same scores by default."""
    cells, samples = frames
    others = by_metric or {}

    def measured(metric: str) -> Measures | None:
        return measures_of(others.get(metric, frames)) if others or by_metric is None else None

    return Measures(merged(cells), samples, measured)


def write_run(frames: Frames, folder: Path) -> Path:
    """Write a made-up run as a folder."""
    with RunStore(folder) as store:
        store.save_grid({})
        store.write(*frames)
    return folder


def together(*frames: Frames) -> Frames:
    cells, samples = zip(*frames, strict=True)
    return pd.concat(cells, ignore_index=True), pd.concat(samples, ignore_index=True)
