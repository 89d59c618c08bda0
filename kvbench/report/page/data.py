"""The data of the page, JSON-serialisable."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from kvbench.progress import Reporter
from kvbench.report.choosing import Aim, PanelMemory, Serving, as_records
from kvbench.report.frames import Results, recorded, records, unit_scale, with_depth
from kvbench.report.overall import CONFIG
from kvbench.report.page.answers import Responses, answers
from kvbench.report.panel import Panel, panels
from kvbench.report.remarks import remarks
from kvbench.runs.schema import CELL_COLUMNS
from kvbench.tables.outputs import plain_text
from kvbench.tables.text import tokens
from kvbench.terminal import printable

WITHIN = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Tolerances in points that a reader can select, besides the requested one."""

_NUMBERS = (
    *("share", "read_share", "allocated_share", "held_tokens", "read_tokens"),
    *(column.name for column in CELL_COLUMNS if column.paged),
)
_HEAT = ["model", "task", "length", *CONFIG, "depth"]


def payload(
    results: Results,
    responses: Responses,
    aim: Aim,
    commands: Sequence[str] = (),
    reporter: Reporter | None = None,
    pairs: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the data of the page, with control and bidirectional characters escaped in every text.

    Args:
        results: The results.
        responses: Loads the responses of some samples.
        aim: Initial requirements for the choice of a setting.
        commands: Commands that made the runs.
        reporter: Progress reporter.
        pairs: Comparisons of all pairs of policies; panels without one are left out.
    """
    all_panels = list(panels(results))
    page_data = {
        "facts": _facts(results),
        "commands": [command for command in commands if command],
        "remarks": [plain_text(remark) for remark in remarks(results)],
        "policies": [{"name": policy, "colour": index, "shown": True} for index, policy in enumerate(results.policies)],
        "rows": [setting_row for panel in all_panels for setting_row in setting_rows(panel)],
        "pairs": [dict(pair_panel) for pair_panel in pairs if pair_panel["tests"] != []],
        "choices": _choices(results, all_panels, aim),
        "depths": _depths(results),
        "answers": answers(results, responses, reporter),
        "provenance": _provenance(results.cells),
    }
    return dict(escape_texts(page_data))


def setting_rows(panel: Panel) -> Iterator[dict[str, Any]]:
    """Yield the settings of a panel: means over tasks, if there are several, and every task."""
    has_mean = len(panel.tasks) > 1 and len(panel.overall)
    task_frames = [("", panel.overall)] * bool(has_mean)
    task_frames += [(task_name, panel.of_task(task_name)) for task_name in panel.tasks]
    for task_name, frame in task_frames:
        unit_scaled = unit_scale(frame)
        for frame_row in records(frame):
            yield {
                "model": panel.model,
                "group": panel.group,
                "task": task_name,
                "length": panel.variant.length,
                "moment": panel.variant.moment,
                "seed": panel.variant.seed,
                "policy": str(frame_row["policy"]),
                "budget": str(frame_row["budget"]),
                "cell": str(frame_row.get("cell", "")),
                "metric": str(frame_row.get("metric", "")),
                "tasks": int(frame_row.get("tasks", 1)),
                "samples": int(frame_row["samples"]),
                "unit": unit_scaled,
                "higher": bool(frame_row["higher_is_better"]),
                "telling": bool(frame_row["discriminative"]),
                "informed": bool(frame_row["informed"]),
                "error": str(frame_row.get("error", "")) or ("failed" * (frame_row["status"] != "ok")),
            } | {column_name: _number(frame_row[column_name]) for column_name in _NUMBERS if column_name in frame_row}


def _choices(results: Results, all_panels: list[Panel], aim: Aim) -> dict[str, Any]:
    """Return the cheapest settings for several tolerances, and the data for memory estimates."""
    panel_memories = [PanelMemory.of(panel, results.samples) for panel in all_panels]
    serving = aim.serving or Serving()
    known_contexts = [panel_memory.context for panel_memory in panel_memories if not math.isnan(panel_memory.context)]
    distances = sorted({*WITHIN, round(100 * aim.within, 6)})
    return {
        "within": 100 * aim.within,
        "batch": serving.batch,
        "context": serving.context or (round(max(known_contexts)) if known_contexts else None),
        "panels": [
            {
                "model": panel.model,
                "group": panel.group,
                "length": panel.variant.length,
                "moment": panel.variant.moment,
                "seed": panel.variant.seed,
                "token_bytes": _number(panel_memory.token_bytes),
                "measured": _number(panel_memory.context),
            }
            for panel, panel_memory in zip(all_panels, panel_memories, strict=True)
        ],
        "answers": [
            {
                "within": points,
                "found": [
                    {
                        field_name: _number(field_value) if isinstance(field_value, float) else field_value
                        for field_name, field_value in record.items()
                    }
                    | {"of_context": not str(record.get("budget", "")).isdigit()}
                    for record in as_records(results, Aim(points / 100))
                ],
            }
            for points in distances
        ],
    }


def _depths(results: Results) -> list[dict[str, Any]]:
    """Return mean scores by depth of the needle, length, policy and budget; seeds are pooled."""
    if results.samples is None:
        return []
    depth_samples = with_depth(results)
    # Full has no moment and belongs to all of them; without a depth there is nothing to group.
    mean_frame = depth_samples.groupby(_HEAT, sort=False)["score"].agg(["mean", "count"]).reset_index()
    unit_by_task = (
        depth_samples.assign(full_score=depth_samples["score"])
        .groupby("task")[["score", "full_score", "metric"]]
        .apply(unit_scale)
        .to_dict()
    )
    return [
        {column_name: mean_row[column_name] for column_name in _HEAT}
        | {
            "score": _number(mean_row["mean"]),
            "count": int(mean_row["count"]),
            "unit": unit_by_task[mean_row["task"]],
        }
        for mean_row in records(mean_frame)
    ]


def _facts(results: Results) -> list[list[str]]:
    """Return facts about the run, as pairs of name and text."""
    cells = results.cells
    compressed_cells = cells[cells["policy"] != "full"]
    failed_count = int((cells["status"] != "ok").sum())
    sample_counts = sorted({int(sample_count) for sample_count in cells.loc[cells["status"] == "ok", "samples"]})
    facts = {
        "Model": _listed(cells["model"]),
        "Benchmarks": _listed(cells["group"]),
        "Tasks": str(cells["task"].nunique()),
        "Policies": str(len(results.policies)),
        "Budgets": _listed(compressed_cells["budget"]),
        "Moments": _listed(compressed_cells["moment"]),
        "Prompts": ", ".join(tokens(length) for length in sorted(set(cells["length"]))),
        "Samples per cell": " to ".join(map(str, dict.fromkeys([*sample_counts[:1], *sample_counts[-1:]]))),
        "Device": ", ".join(dict.fromkeys(f"{cell[0]} ({cell[1]})" for cell in cells[["device", "dtype"]].to_numpy())),
        "Cells": f"{len(cells)}" + (f", {failed_count} failed" if failed_count else ""),
    }
    return [[fact_name, fact_text] for fact_name, fact_text in facts.items() if fact_text]


def _provenance(cells: pd.DataFrame) -> dict[str, list[dict[str, str]]]:
    """Return models, data and versions as tables: rows of texts by column."""
    table_columns = {
        "Models": ["model_id", "model_revision", "dtype", "device", "attention", "answers"],
        "Data": ["task", "group", "length", "seed", "task_version", "data_hash", "metric"],
    }
    tables = {
        table_title: [
            {str(column_name): str(cell_value) for column_name, cell_value in cell_row.items()}
            for cell_row in cells[column_names].drop_duplicates().to_dict("records")
        ]
        for table_title, column_names in table_columns.items()
    }
    return tables | _versions(cells)


def _versions(cells: pd.DataFrame) -> dict[str, list[dict[str, str]]]:
    """Return the recorded versions: common ones, and by policy and task those that differ."""
    version_rows = [
        {
            field_name: field_value if isinstance(field_value, str) else json.dumps(field_value)
            for field_name, field_value in (recorded(versions_json) or {"": versions_json}).items()
        }
        for versions_json in cells["versions"].astype(str)
    ]
    version_names = sorted({version_name for version_row in version_rows for version_name in version_row})
    shared_names = [
        version_name
        for version_name in version_names
        if len({version_row.get(version_name) for version_row in version_rows}) == 1
    ]
    differing_names = [version_name for version_name in version_names if version_name not in shared_names]
    cells_by_versions: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for version_row, policy, task_name in zip(version_rows, cells["policy"], cells["task"], strict=True):
        version_key = tuple(version_row.get(version_name, "") for version_name in differing_names)
        cells_by_versions.setdefault(version_key, []).append((str(policy), str(task_name)))
    tables = (
        {"Versions": [{version_name: version_rows[0][version_name] for version_name in shared_names}]}
        if shared_names
        else {}
    )
    if differing_names:
        tables["Versions that differ"] = [
            dict(zip(differing_names, version_key, strict=True))
            | {
                "policies": ", ".join(dict.fromkeys(policy for policy, _ in policy_tasks)),
                "tasks": ", ".join(dict.fromkeys(task_name for _, task_name in policy_tasks)),
            }
            for version_key, policy_tasks in cells_by_versions.items()
        ]
    return tables


def _listed(column: pd.Series) -> str:
    return ", ".join(dict.fromkeys(column.astype(str)))


def _number(value: float) -> float | None:
    """Round to six significant digits; None if the number is not finite, which JSON does not allow."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def escape_texts(value: Any) -> Any:
    """Return a JSON value with control and bidirectional characters escaped in every text."""
    match value:
        case str():
            return printable(value)
        case dict():
            return {escape_texts(key): escape_texts(item) for key, item in value.items()}
        case list():
            return [escape_texts(item) for item in value]
        case _:
            return value
