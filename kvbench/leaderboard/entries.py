"""The entries of a leaderboard: the settings of several publications, and what is known of each."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import pandas as pd
import pyarrow as pa

from kvbench.errors import UserError
from kvbench.files import digest_of
from kvbench.leaderboard.agreement import Agreement, compare_publications
from kvbench.leaderboard.publication import Publication
from kvbench.progress import Reporter, Silent
from kvbench.report.frames import budget_order, prepare, recorded, records
from kvbench.report.front import HELD, READ, front, with_axis
from kvbench.report.page.data import escape_texts, setting_rows
from kvbench.report.panel import Panel, panels
from kvbench.report.sorted_samples import Samples
from kvbench.runs.command import command_line
from kvbench.runs.load import load_frames
from kvbench.runs.schema import CELLS_SCHEMA, SAMPLES_SCHEMA
from kvbench.tables.text import counted, listed

MARKS = {
    "failed": "The cell has no score.",
    "disagrees": "Another publication measured the same, and the 95% interval of the difference excludes zero.",
    "at chance": "The full cache is not above chance, so differences between policies mean nothing.",
    "no full cache": "Without the score of a full cache, nothing says what is lost or whether the task means anything.",
    "lower is better": "A lower score is better.",
    "not a mean": "The score is computed from all samples and is not a mean over them.",
    "frees no memory": "The whole cache is held, and the budget limits what a decode step reads.",
    "own file": "The policy is a file of whoever published the run.",
    "judged": "A judge scored the responses.",
    "informed": "The policy sees question and answer: a reference, not a method.",
}
"""Marks of entries, and what each means."""
_COLUMNS = ("cell", "sample_id", "question_id", "repeat", "context_id", "context_tokens", "held_entries", "score")
"""Columns of the samples that a leaderboard needs; a publication has no responses."""
_COSTS = {
    "held": HELD.bytes,
    "read": READ.bytes,
    "tokens": with_axis(HELD, "tokens").bytes,
    "read_tokens": with_axis(READ, "tokens").bytes,
}
"""Columns over which the page draws fronts, by the name of the choice."""
_OF_MODEL = ("model_revision", "dtype")
"""What tells models of the same name apart."""
_MADE_WITH = (*_OF_MODEL, "device", "attention", "task_version")
_PANEL = ("model", "group", "task", "length", "seed", "moment", "questions")
_IDENTITY = ["model", *_OF_MODEL]
_GREEDY = "greedy"


def leaderboard_data(publications: Sequence[Publication], reporter: Reporter | None = None) -> dict[str, Any]:
    """Return the data of a leaderboard, JSON-serialisable, with control characters escaped in every text.

    Nothing of a publication is run: its policies are not built, because a spelling may name a file to import.

    Args:
        publications: The publications, each of which `load_publication` has checked.
        reporter: Progress reporter.
    """
    reporter = reporter or Silent()
    reporter.start(len(publications), "publications")
    frames = [_load(publication) for publication in publications]
    agreement = compare_publications(frames)
    labels = _model_labels(pd.concat([cells for cells, _ in frames]))
    builder = _RowBuilder(agreement)
    for index, (publication, (cells, samples)) in enumerate(zip(publications, frames, strict=True)):
        model_names = [labels[tuple(identity)] for identity in cells[_IDENTITY].itertuples(index=False)]
        labelled_cells = cells.assign(own_model=cells["model"], model=model_names)
        for panel in panels(prepare(labelled_cells, Samples(samples))):
            builder.add(panel, index, publication)
        reporter.advance()
    rows = builder.rows
    _name_questions(rows)
    _mark_fronts(rows)
    rows = _ranked(rows)
    policies = list(dict.fromkeys(row["policy"] for row in rows if row["policy"] != "full"))
    page_data = {
        "facts": _facts(rows, publications, agreement),
        "policies": [{"name": policy} for policy in policies],
        "place": ["questions"],
        "rows": rows,
        "marks": {mark: meaning for mark, meaning in MARKS.items() if any(mark in row["marks"] for row in rows)},
        "versions": [json.loads(version_text) for version_text in builder.versions],
        "publications": [
            _publication(publication, cells) for publication, (cells, _) in zip(publications, frames, strict=True)
        ],
    }
    return dict(escape_texts(page_data))


def _load(publication: Publication) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Load the tables of a publication.

    Raises:
        UserError: A value is missing that every run has, so kvbench did not write the table.
    """
    cells, samples = load_frames(publication.folder, _COLUMNS, coded=True)
    for frame, schema in ((cells, CELLS_SCHEMA), (samples, SAMPLES_SCHEMA)):
        required = [name for name in frame.columns if not pa.types.is_floating(schema.field(name).type)]
        missing = [name for name in required if frame[name].isna().any()]
        if missing or not len(cells):
            lacking = (missing or ["cells"])[0]
            raise UserError(
                f"{publication.folder} was not written by kvbench publish: it lacks {lacking}; leave it out"
            )
    return cells, samples


def _model_labels(cells: pd.DataFrame) -> dict[tuple[str, ...], str]:
    """Return the label of each model: its name, and what tells it from others of that name."""
    labels: dict[tuple[str, ...], str] = {}
    for model, model_cells in cells[_IDENTITY].drop_duplicates().groupby("model", sort=False):
        differing = [column for column in _OF_MODEL if model_cells[column].nunique() > 1]
        for row in records(model_cells):
            details = ", ".join(str(row[column]) for column in differing)
            labels[tuple(row[column] for column in _IDENTITY)] = f"{model} ({details})" if details else str(model)
    return labels


class _RowBuilder:
    """Collects the rows of all publications.

    Attributes:
        rows: The rows, in the format of the report's page, with what a leaderboard adds.
        versions: Index of each set of versions, as JSON.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.rows: list[dict[str, Any]] = []
        self.versions: dict[str, int] = {}
        self._agreement = agreement

    def add(self, panel: Panel, index: int, publication: Publication) -> None:
        """Add the settings of a panel of a publication."""
        by_setting: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for cell in records(panel.cells):
            by_setting.setdefault((str(cell["policy"]), str(cell["budget"])), []).append(cell)
        for row in setting_rows(panel):
            cells = by_setting[row["policy"], row["budget"]]
            cells = [cell for cell in cells if row["task"] in ("", cell["task"])]
            disagreements = [
                {
                    "other": found.other,
                    "task": found.task,
                    "difference": found.difference.mean,
                    "lo": found.difference.lo,
                    "hi": found.difference.hi,
                    "paired": found.is_paired,
                    "settings": [[name, *values] for name, values in found.settings.items()],
                }
                for cell in cells
                for found in self._agreement.disagreements.get((index, str(cell["cell"])), [])
            ]
            self.rows.append(
                row
                | {
                    "publication": index,
                    "versions": [*dict.fromkeys(map(self._version_index, cells))],
                    "command": _command(row, cells, publication),
                    "disagreements": disagreements,
                    "marks": _marks(row, cells, bool(disagreements)),
                    "data": digest_of(sorted([str(cell["task"]), str(cell["data_hash"])] for cell in cells)),
                    "metric": listed(list(dict.fromkeys(str(cell["metric"]) for cell in cells))),
                    "questions": _questions(row, cells),
                }
            )

    def _version_index(self, cell: Mapping[str, Any]) -> int:
        made_with = {name: str(cell[name]) for name in _MADE_WITH} | {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in recorded(str(cell["versions"])).items()
        }
        return self.versions.setdefault(json.dumps(made_with, sort_keys=True), len(self.versions))


def _marks(row: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], disagrees: bool) -> list[str]:
    """Return the marks of a row, in the order of `MARKS`."""
    has_full = row["policy"] == "full" or row.get("diff") is not None
    is_scored = not row["error"]
    applies = {
        "failed": not is_scored,
        "disagrees": disagrees,
        "at chance": is_scored and has_full and not row["telling"],
        "no full cache": is_scored and not has_full,
        "lower is better": not row["higher"],
        "not a mean": not all(cell["is_mean"] for cell in cells),
        "frees no memory": row["policy"] != "full" and is_scored and row["kv_bytes_read"] < row["kv_bytes_live"],
        "own file": ".py:" in row["policy"],
        "informed": bool(cells[0]["informed"]),
        "judged": any("judge" in recorded(str(cell["versions"])) for cell in cells),
    }
    return [mark for mark in MARKS if applies[mark]]


def _command(row: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], publication: Publication) -> str:
    """Return the command that measures one row again, with the full cache beside it."""
    grid_tasks = publication.grid.get("tasks", [])
    tasks = list(dict.fromkeys(str(cell["task"]) for cell in cells))
    in_files = [task for task in grid_tasks if "/" in str(task)] if isinstance(grid_tasks, list) else []
    chosen = {
        "policies": [row["policy"]],
        "tasks": in_files or tasks,  # a task of a user's file is named by its file
        "models": [str(cells[0]["own_model"])],
        "budgets": [row["budget"]],
        "moments": [row["moment"] or "context"],
        "lengths": [row["length"]] if row["length"] else None,
        "seed": row["seed"],
    }
    return command_line({**publication.grid, **chosen})


def _questions(row: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """Return how many samples a task has in a row, and how answers are generated if not greedily."""
    sample_count = row["samples"] // max(1, row["tasks"])
    return ", ".join([counted(sample_count, "sample"), *({str(cell["answers"]) for cell in cells} - {_GREEDY})])


def _name_questions(rows: list[dict[str, Any]]) -> None:
    """Make `questions` differ between rows of a task that were asked or scored differently."""
    descriptions: list[Callable[[dict[str, Any]], str]] = [
        lambda row: counted(row["tasks"], "task"),
        lambda row: f"data {row['data']}",
        lambda row: f"metric {row['metric']}",
    ]
    for describe in descriptions:
        for same_label in _grouped(rows, [*_PANEL[:-2], "questions"]):
            details = [describe(row) for row in same_label]
            if len({(row["data"], row["metric"]) for row in same_label}) > 1 and len(set(details)) > 1:
                for row, detail in zip(same_label, details, strict=True):
                    row["questions"] += f", {detail}"


def _mark_fronts(rows: list[dict[str, Any]]) -> None:
    """Set, for each of `_COSTS`, such as `held_front`, whether rows are on the Pareto front of their panel."""
    for panel_rows in _grouped(rows, _PANEL):
        # Full is what a front is compared with; at chance, a front would be a row of accidents.
        # So is a policy that sees the answer.
        competing = [row for row in panel_rows if row["policy"] != "full" and not row["informed"]]
        ranked = [row for row in competing if not row["error"] and row["telling"]]
        values = [row["score"] if row["higher"] else -row["score"] for row in ranked]
        for name, column in _COSTS.items():
            optimal = front([row[column] for row in ranked], values)
            for row, is_optimal in zip(ranked, optimal, strict=True):
                row[f"{name}_front"] = bool(is_optimal)


def _grouped(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[dict[str, Any]]]:
    def key(row: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in names)

    return [list(same) for _, same in groupby(sorted(rows, key=key), key)]


def _ranked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows in their default order: by panel, the model with most rows first; in a panel by budget and score.

    The full cache is above the others, and failed cells are below.
    """
    counts = {name: Counter(row[name] for row in rows) for name in ("model", "group", "questions")}

    def rank(row: Mapping[str, Any]) -> tuple[Any, ...]:
        place = [(-counts[name][row[name]], row[name]) if name in counts else row[name] for name in _PANEL]
        sign = -1 if row["higher"] else 1
        order = math.inf if row["score"] is None else sign * row["score"]
        return (*place, row["policy"] != "full", budget_order(row["budget"]), order, row["policy"], row["publication"])

    return sorted(rows, key=rank)


def _facts(
    rows: Sequence[Mapping[str, Any]], publications: Sequence[Publication], agreement: Agreement
) -> list[list[str]]:
    """Return facts about the leaderboard, as pairs of name and text."""
    disagreement_count = sum(map(len, agreement.disagreements.values())) // 2
    facts = {
        "Models": listed(list(dict.fromkeys(row["model"] for row in rows))),
        "Tasks": str(len({row["task"] for row in rows} - {""})),
        "Policies": str(len({row["policy"] for row in rows} - {"full"})),
        "Published runs": str(len(publications)),
        "Measured more than once": f"{counted(agreement.compared_count, 'pair')}, {disagreement_count} disagree",
    }
    return [[name, text] for name, text in facts.items()]


def _publication(publication: Publication, cells: pd.DataFrame) -> dict[str, Any]:
    """Return what the leaderboard says of a publication."""
    return {
        "digest": publication.digest,
        "short": publication.short_digest,
        "models": list(dict.fromkeys(cells["model"].astype(str))),
        "tasks": list(dict.fromkeys(cells["task"].astype(str))),
        "policies": cells.loc[cells["policy"] != "full", "policy"].nunique(),
        "cells": len(cells),
        "hardware": ", ".join([*dict.fromkeys(cells["device"].astype(str)), *filter(None, [publication.hardware])]),
        "kvbench": publication.kvbench,
        "command": publication.command,
        "remarks": list(publication.remarks),
    }
