"""Comparison of a run's scores with published scores for the same policy, task and budget."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.files import replacing
from kvbench.harness import catalogue
from kvbench.papers.published.results import SCORES, Figure, all_figures, published_spelling
from kvbench.report.frames import prepare, records, unit_scale
from kvbench.report.overall import group_means
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.outputs import Format, csv, format_table, latex, markdown
from kvbench.tables.table import Column, Name, Phrase, Table, TableCell, beside
from kvbench.tables.text import listed, md, tokens

MOMENTS = {
    "question-agnostic": "context",
    "question-agnostic, multi-turn": "context",
    "same context, different queries": "context",
    "question-aware": "question",
    "decoding": "decode",
    "chunked prefill": "chunked",
    "multi-turn": "turns",
}
"""Moments that correspond to published settings, if known."""

_OF_RUN = ("model", "length", "moment", "seed", "task", "policy", "budget")

_READING = (
    'Published scores are for other models (unless a row says "same model"), prompts, lengths and data. Rather than '
    "scores, compare which fraction of the full cache's score a policy retains (of full), and which of two policies "
    "retains more."
)


@dataclass(frozen=True)
class PublishedPair:
    """A score of a run and a published one. Scores are in [0, 1].

    Attributes:
        model: The run's model.
        length: The run's length; 0 for data that kvbench does not resize.
        moment: When the run compressed the cache.
        seed: The run's seed.
        task: Task, subset or group; a mean only if all of its tasks were run.
        policy: The policy.
        budget: The budget.
        score: The run's score.
        full_score: The run's full-cache score; NaN if there is none.
        figure: The published result.
        published_full: The paper's full-cache score; NaN if there is none.
    """

    model: str
    length: int
    moment: str
    seed: int
    task: str
    policy: str
    budget: str
    score: float
    full_score: float
    figure: Figure
    published_full: float

    @property
    def published(self) -> float:
        """The published score."""
        return self.figure.number / 100

    @property
    def same_model(self) -> bool:
        """Whether both scores have the same model name."""
        return is_same_model(self.model, self.figure.model)

    @property
    def published_for(self) -> str:
        """The published score's model, and whether it is the run's."""
        return (self.figure.model or "not stated") + " (same model)" * self.same_model

    @property
    def setting(self) -> str:
        """The published setting, and whether it is known to be another moment than the run's."""
        setting_name = self.figure.setting or "not stated"
        moment = self.moment.partition(":")[0]
        return setting_name + " (another moment)" * (MOMENTS.get(setting_name, moment) != moment)


def pairs(cells: pd.DataFrame) -> list[PublishedPair]:
    """Pair the scores of runs with published ones by policy (whatever its buffer), task and budget.

    Only scores in [0, 1] are paired. The mean of a group or a subset is paired if all of its tasks were run and are
    informative. All published results for a cell are paired, except repetitions in other tables of a paper.

    Args:
        cells: The frame of `cells.parquet`.
    """
    figures_by_cell: dict[tuple[str, str, str], dict[tuple[str, ...], Figure]] = {}
    for figure in _scores():
        figure_key = (figure.paper, figure.model, figure.setting, figure.value)
        figures_by_cell.setdefault((figure.policy, figure.task, figure.kept), {}).setdefault(figure_key, figure)
    full_scores = _FullScores()
    return [
        PublishedPair(**run_score, figure=figure, published_full=full_scores.of(figure))
        for run_score in _run_scores(cells)
        for figure in figures_by_cell.get(
            (published_spelling(run_score["policy"]), run_score["task"], run_score["budget"]), {}
        ).values()
    ]


def beside_table(score_pairs: Sequence[PublishedPair]) -> Table:
    """Return at least one pair as a table, with common values in the title or a note."""
    place_columns: list[tuple[Column, list[Phrase]]] = [
        (Column("model"), [Name(pair.model) for pair in score_pairs]),
        (Column("length"), [tokens(pair.length) for pair in score_pairs]),
        (Column("moment"), [pair.moment for pair in score_pairs]),
        (Column("seed"), [f"seed {pair.seed}" for pair in score_pairs]),
        (Column("budget"), [("budget ", Name(pair.budget)) for pair in score_pairs]),
    ]
    setting_cells: list[Phrase] = [pair.setting for pair in score_pairs]
    table_columns: list[tuple[Column, Sequence[TableCell]]] = [
        (Column("task"), [Name(pair.task) for pair in score_pairs]),
        *((head_column, column_cells) for head_column, column_cells in place_columns if _vary(column_cells)),
        (Column("policy"), [Name(pair.policy) for pair in score_pairs]),
        (Column("published for"), [pair.published_for for pair in score_pairs]),
        *[(Column("setting"), setting_cells)] * _vary(setting_cells),
        (Column("ours", NumberFormat.POINTS), [pair.score for pair in score_pairs]),
        (Column("published", NumberFormat.POINTS), [pair.published for pair in score_pairs]),
        (
            Column("difference", NumberFormat.POINTS, signed=True),
            [pair.score - pair.published for pair in score_pairs],
        ),
        (
            Column("ours, of full", NumberFormat.PERCENT),
            [_share(pair.score, pair.full_score) for pair in score_pairs],
        ),
        (
            Column("published, of full", NumberFormat.PERCENT),
            [_share(pair.published, pair.published_full) for pair in score_pairs],
        ),
        (
            Column("printed in"),
            [f"{pair.figure.paper} {pair.figure.table}" for pair in score_pairs],
        ),
    ]
    notes: list[Phrase] = [_READING]
    notes += [("Setting of the published scores: ", setting_cells[0], ".")] * (not _vary(setting_cells))
    shared_phrases = [
        phrase for _, column_cells in place_columns if not _vary(column_cells) for phrase in (column_cells[0], ", ")
    ]
    task_groups = [pair.task for pair in score_pairs]
    return beside((*shared_phrases, "compared with published scores"), table_columns, groups=task_groups, notes=notes)


def unmatched(cells: pd.DataFrame) -> str:
    """Return a line about runs without published counterparts: the runs' settings and the published ones."""
    compressed_cells = cells[cells["policy"] != "full"]
    policy_names, budgets, task_names = (
        list(map(str, dict.fromkeys(compressed_cells[column_name]))) for column_name in ("policy", "budget", "task")
    )
    run_text = f"{listed(policy_names, 6)} at {listed(budgets, 6)} on {listed(task_names, 6)}"
    wanted_tasks = {*task_names, *(run_score["task"] for run_score in _run_scores(cells))}
    figures_by_table: dict[str, list[Figure]] = {}
    for figure in _scores():
        if figure.task in wanted_tasks:
            figures_by_table.setdefault(f"{figure.paper} Table {figure.table}", []).append(figure)
    table_texts = [
        f"{listed(list(dict.fromkeys(figure.policy for figure in table_figures)), 6)} at "
        f"{', '.join(dict.fromkeys(figure.kept for figure in table_figures))} ({table_name})"
        for table_name, table_figures in figures_by_table.items()
    ]
    published_text = (
        f"published for these tasks: {'; '.join(table_texts[:3])}" if table_texts else "no paper has these tasks"
    )
    more_text = f"; {len(table_texts) - 3} more tables (kvbench published --task)" if len(table_texts) > 3 else ""
    return f"no published result matches: the run has {run_text}; {published_text}{more_text}"


def write(score_pairs: list[PublishedPair], empty_text: str, folder: Path, laid_out: Mapping[str, Table]) -> list[Path]:
    """Write the pairs to the folder of a report.

    Args:
        score_pairs: The pairs.
        empty_text: Text to write if there are none.
        folder: The report's folder, with its folder `tables`.
        laid_out: Tables in the layout of papers, by layout.

    Returns:
        `published.md` and, if there are pairs, their table as CSV and LaTeX, and so for every laid-out table.

    Raises:
        UserError: A file cannot be written.
    """
    page_text = markdown(beside_table(score_pairs)) if score_pairs else md(empty_text)
    page_text = "\n\n".join([page_text, *map(markdown, laid_out.values())])
    text_by_path = {folder / "published.md": f"# Published scores\n\n{page_text}\n"}
    if score_pairs:
        text_by_path[folder / "tables" / "published.csv"] = csv(beside_table(score_pairs))
        text_by_path[folder / "tables" / "published.tex"] = latex(beside_table(score_pairs))
    for layout_name, table in laid_out.items():
        text_by_path[folder / "tables" / f"published-{layout_name}.csv"] = csv(table)
        text_by_path[folder / "tables" / f"published-{layout_name}.tex"] = format_table(table, Format.LATEX)
    for file_path, file_text in text_by_path.items():
        with replacing(file_path) as partial_path:
            partial_path.write_text(file_text, encoding="utf-8")
    return list(text_by_path)


def as_records(score_pairs: list[PublishedPair]) -> list[dict[str, Any]]:
    """Return the pairs as JSON-serialisable data; unknown numbers become null."""
    return [
        {
            **{field_name: getattr(pair, field_name) for field_name in _OF_RUN},
            "score": pair.score,
            "full_score": _known(pair.full_score),
            "published": pair.published,
            "published_full": _known(pair.published_full),
            "diff": pair.score - pair.published,
            "paper": pair.figure.paper,
            "table": pair.figure.table,
            "published_model": pair.figure.model,
            "same_model": pair.same_model,
            "setting": pair.figure.setting,
            "metric": pair.figure.metric,
        }
        for pair in score_pairs
    ]


class _FullScores:
    """Published scores of the full cache."""

    def __init__(self) -> None:
        self.in_table: dict[tuple[object, ...], set[float]] = {}
        self.in_paper: dict[tuple[object, ...], set[float]] = {}
        for figure in all_figures():
            if figure.policy == "full" and figure.metric in SCORES:
                self.in_table.setdefault((figure.table, *self._key(figure)), set()).add(figure.number)
                self.in_paper.setdefault(self._key(figure), set()).add(figure.number)

    def of(self, figure: Figure) -> float:
        """Return the full-cache score for a published result, in [0, 1].

        It is from the same table or, failing that, from other tables of the paper, unless they differ.
        """
        table_scores = self.in_table.get((figure.table, *self._key(figure)), set())
        known_scores = table_scores or self.in_paper.get(self._key(figure), set())
        return next(iter(known_scores)) / 100 if len(known_scores) == 1 else math.nan

    @staticmethod
    def _key(figure: Figure) -> tuple[object, ...]:
        # Columns of one task in one table differ in length (D2O, Table 20), and rows with a star are copied from
        # another paper and have a separate full cache (TRIM-KV, Table 8).
        is_copied = figure.method.endswith("*")
        return figure.paper, figure.model, figure.task, figure.setting, is_copied, figure.metric


def _scores() -> Iterator[Figure]:
    """Yield published scores of policies and tasks in kvbench, at known budgets."""
    for figure in all_figures():
        if figure.metric in SCORES and figure.policy not in ("", "full") and figure.task and figure.kept:
            yield figure


def _run_scores(cells: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the scores of runs: of every task, and of complete sets of tasks."""
    results = prepare(cells)
    ok_cells = results.cells[(results.cells["status"] == "ok") & (results.cells["policy"] != "full")]
    for _, task_cells in ok_cells.groupby("task", sort=False):
        if unit_scale(task_cells):
            yield from map(_named, records(task_cells))
    published_tasks = {figure.task for figure in _scores()}
    for set_name, set_tasks in catalogue.task_sets().items():
        if set_name not in published_tasks or set_name in set_tasks:
            continue
        task_cells = results.cells[results.cells["task"].isin(set_tasks)]
        if {*set_tasks} <= {*task_cells["task"]} and unit_scale(task_cells[task_cells["status"] == "ok"]):
            for mean_row in records(group_means(task_cells)):
                if mean_row["status"] == "ok" and mean_row["tasks"] == len(set_tasks):
                    yield _named(mean_row | {"task": set_name})


def _named(score_row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": str(score_row["model"]),
        "length": int(score_row["length"]),
        "moment": str(score_row["moment"]),
        "seed": int(score_row["seed"]),
        "task": str(score_row["task"]),
        "policy": str(score_row["policy"]),
        "budget": str(score_row["budget"]),
        "score": float(score_row["score"]),
        "full_score": float(score_row["full_score"]),
    }


def is_same_model(run_model: str, published_model: str) -> bool:
    """Return whether the name of a run's model and a published one agree, without owner and punctuation."""
    return _bare(run_model) == _bare(published_model)


def _bare(model_name: str) -> str:
    """Return a model's name without owner and punctuation, in lower case."""
    return re.sub(r"[^a-z0-9]", "", model_name.rstrip("/").rpartition("/")[2].lower())


def _share(score: float, full_score: float) -> float:
    return score / full_score if full_score > 0 else math.nan


def _vary(column_cells: Sequence[object]) -> bool:
    return any(cell != column_cells[0] for cell in column_cells)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
