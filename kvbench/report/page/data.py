"""What the page shows, as JSON can hold it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from kvbench.report.choosing import Aim, PanelMemory, Serving, as_records
from kvbench.report.frames import Results, recorded, records, unit_scale
from kvbench.report.heatmap import with_depth
from kvbench.report.outputs import plain_text
from kvbench.report.overall import CONFIG
from kvbench.report.page.answers import Responses, answers
from kvbench.report.panel import Panel, panels
from kvbench.report.remarks import remarks
from kvbench.report.style import looks
from kvbench.report.text import tokens
from kvbench.terminal import printable

WITHIN = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Points within which a reader can look for the cheapest setting, besides those asked for."""

_NUMBERS = (
    "share read_share allocated_share kv_bytes_live kv_bytes_read kv_bytes_full score score_lo "
    "score_hi diff diff_lo diff_hi prefill_s compress_s decode_s"
).split()
_HEAT = ["model", "task", "length", *CONFIG, "depth"]


def payload(results: Results, responses: Responses, aim: Aim) -> dict[str, Any]:
    """Everything that the page shows.

    Control characters, bidirectional marks and their like are spelled out in every text.

    Args:
        results: What was run.
        responses: Reads the responses that the page shows.
        aim: What a setting is looked for when the page opens.
    """
    found = list(panels(results))
    data = {
        "facts": _facts(results),
        "remarks": [plain_text(remark) for remark in remarks(results)],
        "policies": [
            {"name": policy, "colour": index, "shown": True}
            for index, policy in enumerate(looks(results.policies))
        ],
        "rows": [row for panel in found for row in _rows(panel)],
        "choices": _choices(results, found, aim),
        "depths": _depths(results),
        "answers": answers(results, responses),
        "provenance": _provenance(results.cells),
    }
    return dict(_clean(data))


def _rows(panel: Panel) -> Iterator[dict[str, Any]]:
    """A panel's settings: their means over tasks, where there are several, and every task."""
    several = len(panel.tasks) > 1 and len(panel.overall)
    frames = [("", panel.overall)] * bool(several)
    frames += [(task, panel.of_task(task)) for task in panel.tasks]
    for task, frame in frames:
        unit = unit_scale(frame)
        for row in records(frame):
            yield {
                "model": panel.model,
                "group": panel.group,
                "task": task,
                "length": panel.variant.length,
                "moment": panel.variant.moment,
                "seed": panel.variant.seed,
                "policy": str(row["policy"]),
                "budget": str(row["budget"]),
                "cell": str(row.get("cell", "")),
                "metric": str(row.get("metric", "")),
                "tasks": int(row.get("tasks", 1)),
                "samples": int(row["samples"]),
                "unit": unit,
                "higher": bool(row["higher_is_better"]),
                "telling": bool(row["discriminative"]),
                "error": str(row.get("error", "")) or ("failed" * (row["status"] != "ok")),
            } | {name: _number(row[name]) for name in _NUMBERS if name in row}


def _choices(results: Results, found: list[Panel], aim: Aim) -> dict[str, Any]:
    """The cheapest settings for several distances, and what their memory follows from."""
    memory = [PanelMemory.of(panel, results.samples) for panel in found]
    serving = aim.serving or Serving()
    known = [facts.context for facts in memory if not math.isnan(facts.context)]
    distances = sorted({*WITHIN, round(100 * aim.within, 6)})
    return {
        "within": 100 * aim.within,
        "batch": serving.batch,
        "context": serving.context or (round(max(known)) if known else None),
        "panels": [
            {
                "model": panel.model,
                "group": panel.group,
                "length": panel.variant.length,
                "moment": panel.variant.moment,
                "seed": panel.variant.seed,
                "token_bytes": _number(facts.token_bytes),
                "measured": _number(facts.context),
            }
            for panel, facts in zip(found, memory, strict=True)
        ],
        "answers": [
            {
                "within": points,
                "found": [
                    {key: _number(v) if isinstance(v, float) else v for key, v in record.items()}
                    | {"of_context": not str(record.get("budget", "")).isdigit()}
                    for record in as_records(results, Aim(points / 100))
                ],
            }
            for points in distances
        ],
    }


def _depths(results: Results) -> list[dict[str, Any]]:
    """Mean score by depth of the needle, length, policy and budget; seeds are pooled."""
    if results.samples is None:
        return []
    samples = with_depth(results)
    # Full has no moment and belongs to all of them; without a depth there is nothing to group.
    means = samples.groupby(_HEAT, sort=False)["score"].agg(["mean", "count"]).reset_index()
    units = samples.groupby("task")["score"].agg(lambda s: bool(s.between(0, 1).all())).to_dict()
    return [
        {name: row[name] for name in _HEAT}
        | {"score": _number(row["mean"]), "count": int(row["count"]), "unit": units[row["task"]]}
        for row in records(means)
    ]


def _facts(results: Results) -> list[list[str]]:
    """What was run, as pairs of a name and a text."""
    cells = results.cells
    cut = cells[cells["policy"] != "full"]
    failed = int((cells["status"] != "ok").sum())
    counts = sorted({int(n) for n in cells.loc[cells["status"] == "ok", "samples"]})
    facts = {
        "Model": _listed(cells["model"]),
        "Benchmarks": _listed(cells["group"]),
        "Tasks": str(cells["task"].nunique()),
        "Policies": str(len(results.policies)),
        "Budgets": _listed(cut["budget"]),
        "Moments": _listed(cut["moment"]),
        "Prompts": ", ".join(tokens(length) for length in sorted(set(cells["length"]))),
        "Samples per cell": " to ".join(map(str, dict.fromkeys([*counts[:1], *counts[-1:]]))),
        "Cells": f"{len(cells)}" + (f", {failed} failed" if failed else ""),
    }
    return [[name, text] for name, text in facts.items() if text]


def _provenance(cells: pd.DataFrame) -> dict[str, list[dict[str, str]]]:
    """What the cells were made with, as tables: rows of texts by column."""
    made = {
        "Models": ["model_id", "model_revision", "dtype", "device", "attention", "answers"],
        "Data": ["task", "group", "length", "seed", "task_version", "data_hash", "metric"],
    }
    tables = {
        title: [
            {str(key): str(value) for key, value in row.items()}
            for row in cells[columns].drop_duplicates().to_dict("records")
        ]
        for title, columns in made.items()
    }
    return tables | _versions(cells)


def _versions(cells: pd.DataFrame) -> dict[str, list[dict[str, str]]]:
    """The recorded versions: those of all cells, and by policy and task those that differ."""
    told = [
        {
            k: v if isinstance(v, str) else json.dumps(v)
            for k, v in (recorded(text) or {"": text}).items()
        }
        for text in cells["versions"].astype(str)
    ]
    names = sorted({name for row in told for name in row})
    shared = [name for name in names if len({row.get(name) for row in told}) == 1]
    others = [name for name in names if name not in shared]
    differing: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for row, policy, task in zip(told, cells["policy"], cells["task"], strict=True):
        key = tuple(row.get(name, "") for name in others)
        differing.setdefault(key, []).append((str(policy), str(task)))
    tables = {"Versions": [{name: told[0][name] for name in shared}]} if shared else {}
    if others:
        tables["Versions that differ"] = [
            dict(zip(others, key, strict=True))
            | {
                "policies": ", ".join(dict.fromkeys(policy for policy, _ in where)),
                "tasks": ", ".join(dict.fromkeys(task for _, task in where)),
            }
            for key, where in differing.items()
        ]
    return tables


def _listed(column: pd.Series) -> str:
    return ", ".join(dict.fromkeys(column.astype(str)))


def _number(value: float) -> float | None:
    """A number with six significant digits; None if it is not finite, which JSON cannot hold."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _clean(value: Any) -> Any:
    match value:
        case str():
            return printable(value)
        case dict():
            return {_clean(key): _clean(each) for key, each in value.items()}
        case list():
            return [_clean(each) for each in value]
        case _:
            return value
