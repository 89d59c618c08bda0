"""The scores of a run beside what papers print for the same policy, task and budget."""

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
from kvbench.published.figures import SCORES, Figure, all_figures
from kvbench.report.frames import prepare, records, unit_scale
from kvbench.report.numbers import Kind
from kvbench.report.outputs import csv, latex, markdown
from kvbench.report.overall import group_means
from kvbench.report.table import Cell, Column, Name, Phrase, Table, beside
from kvbench.report.text import listed, md, tokens

MOMENTS = {
    "question-agnostic": "context",
    "question-aware": "question",
    "decoding": "decode",
    "chunked prefill": "chunked",
    "multi-turn": "turns",
}
"""The moment that a published setting amounts to, where that is known."""

_OF_RUN = ("model", "length", "moment", "seed", "task", "policy", "budget")

_READING = (
    "Published scores are of other models, prompts, lengths and data, unless a row says "
    '"same model". Compare how much of the full cache\'s score a policy keeps (of full), and '
    "which of two policies keeps more, rather than the scores."
)


@dataclass(frozen=True)
class Pair:
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
        full_score: The run's score of the full cache; NaN without it.
        figure: The published figure.
        published_full: What the paper prints for the full cache; NaN if it does not.
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
        """Whether both are of the same model, by its name."""
        return _bare(self.model) == _bare(self.figure.model)

    @property
    def published_for(self) -> str:
        """The published score's model, and whether it is the run's."""
        return (self.figure.model or "not stated") + " (same model)" * self.same_model

    @property
    def setting(self) -> str:
        """The published setting, and whether it is known to be another moment than the run's."""
        name = self.figure.setting or "not stated"
        moment = self.moment.partition(":")[0]
        return name + " (another moment)" * (MOMENTS.get(name, moment) != moment)


def pairs(cells: pd.DataFrame) -> list[Pair]:
    """Pair the scores of runs with published ones by policy, task and budget.

    Only scores in [0, 1] are paired. The mean of a group or a subset is paired if all of its tasks
    were run and tell policies apart. All figures of one cell are given, but what several tables of
    a paper print alike only once.

    Args:
        cells: The frame of `cells.parquet`.
    """
    figures: dict[tuple[str, str, str], dict[tuple[str, ...], Figure]] = {}
    for f in _scores():
        alike = (f.paper, f.model, f.setting, f.value)
        figures.setdefault((f.policy, f.task, f.kept), {}).setdefault(alike, f)
    full = _Full()
    return [
        Pair(**ours, figure=f, published_full=full.of(f))
        for ours in _ours(cells)
        for f in figures.get((ours["policy"], ours["task"], ours["budget"]), {}).values()
    ]


def beside_table(found: Sequence[Pair]) -> Table:
    """The pairs, at least one, as a table; what all of them share is said above or below it."""
    place: list[tuple[Column, list[Phrase]]] = [
        (Column("model"), [Name(p.model) for p in found]),
        (Column("length"), [tokens(p.length) for p in found]),
        (Column("moment"), [p.moment for p in found]),
        (Column("seed"), [f"seed {p.seed}" for p in found]),
        (Column("budget"), [("budget ", Name(p.budget)) for p in found]),
    ]
    setting: list[Phrase] = [p.setting for p in found]
    columns: list[tuple[Column, Sequence[Cell]]] = [
        (Column("task"), [Name(p.task) for p in found]),
        *((head, cells) for head, cells in place if _vary(cells)),
        (Column("policy"), [Name(p.policy) for p in found]),
        (Column("published for"), [p.published_for for p in found]),
        *[(Column("setting"), setting)] * _vary(setting),
        (Column("ours", Kind.POINTS), [p.score for p in found]),
        (Column("published", Kind.POINTS), [p.published for p in found]),
        (Column("difference", Kind.POINTS, signed=True), [p.score - p.published for p in found]),
        (Column("ours, of full", Kind.PERCENT), [_share(p.score, p.full_score) for p in found]),
        (
            Column("published, of full", Kind.PERCENT),
            [_share(p.published, p.published_full) for p in found],
        ),
        (Column("printed in"), [f"{p.figure.paper} {p.figure.table}" for p in found]),
    ]
    notes: list[Phrase] = [_READING]
    notes += [("Setting of the published scores: ", setting[0], ".")] * (not _vary(setting))
    shared = [part for _, cells in place if not _vary(cells) for part in (cells[0], ", ")]
    groups = [p.task for p in found]
    return beside((*shared, "beside published scores"), columns, groups=groups, notes=notes)


def unmatched(cells: pd.DataFrame) -> str:
    """One line about runs that nothing published fits: what they have, and what there is."""
    cut = cells[cells["policy"] != "full"]
    policies, budgets, tasks = (
        list(map(str, dict.fromkeys(cut[name]))) for name in ("policy", "budget", "task")
    )
    run = f"{listed(policies, 6)} at {listed(budgets, 6)} on {listed(tasks, 6)}"
    wanted = {*tasks, *(ours["task"] for ours in _ours(cells))}
    there: dict[str, list[Figure]] = {}
    for f in _scores():
        if f.task in wanted:
            there.setdefault(f"{f.paper} Table {f.table}", []).append(f)
    known = [
        f"{listed(list(dict.fromkeys(f.policy for f in own)), 6)} at "
        f"{', '.join(dict.fromkeys(f.kept for f in own))} ({place})"
        for place, own in there.items()
    ]
    some = (
        f"published for these tasks: {'; '.join(known[:3])}"
        if known
        else "no paper has these tasks"
    )
    more = f"; {len(known) - 3} more tables (kvbench published --task)" if len(known) > 3 else ""
    return f"nothing published fits: the run has {run}; {some}{more}"


def write(found: list[Pair], line: str, folder: Path) -> list[Path]:
    """Write the pairs beside the other files of a report.

    Args:
        found: The pairs.
        line: What to write instead if there are none.
        folder: The report's folder, with its folder `tables`.

    Returns:
        `published.md`; and if there are pairs, their table as CSV and as LaTeX.

    Raises:
        UserError: A file cannot be written.
    """
    page = markdown(beside_table(found)) if found else md(line)
    texts = {folder / "published.md": f"# Published scores\n\n{page}\n"}
    if found:
        texts[folder / "tables" / "published.csv"] = csv(beside_table(found))
        texts[folder / "tables" / "published.tex"] = latex(beside_table(found))
    for path, text in texts.items():
        with replacing(path) as aside:
            aside.write_text(text, encoding="utf-8")
    return list(texts)


def as_records(found: list[Pair]) -> list[dict[str, Any]]:
    """The pairs as JSON can hold them; numbers that are not known are null."""
    return [
        {
            **{name: getattr(p, name) for name in _OF_RUN},
            "score": p.score,
            "full_score": _known(p.full_score),
            "published": p.published,
            "published_full": _known(p.published_full),
            "diff": p.score - p.published,
            "paper": p.figure.paper,
            "table": p.figure.table,
            "published_model": p.figure.model,
            "same_model": p.same_model,
            "setting": p.figure.setting,
            "metric": p.figure.metric,
        }
        for p in found
    ]


class _Full:
    """What papers print for the full cache."""

    def __init__(self) -> None:
        self.in_table: dict[tuple[object, ...], set[float]] = {}
        self.in_paper: dict[tuple[object, ...], set[float]] = {}
        for f in all_figures():
            if f.policy == "full" and f.metric in SCORES:
                self.in_table.setdefault((f.table, *self._key(f)), set()).add(f.number)
                self.in_paper.setdefault(self._key(f), set()).add(f.number)

    def of(self, figure: Figure) -> float:
        """The full cache's score beside a figure, in [0, 1].

        It is that of the same table; if that has none, that of the paper's other tables, unless
        they differ.
        """
        own = self.in_table.get((figure.table, *self._key(figure)), set())
        known = own or self.in_paper.get(self._key(figure), set())
        return next(iter(known)) / 100 if len(known) == 1 else math.nan

    @staticmethod
    def _key(f: Figure) -> tuple[object, ...]:
        # Columns of one task in one table differ in length (D2O, Table 20), and rows with a star
        # are copied from another paper and have a full cache of their own (TRIM-KV, Table 8).
        copied = f.method.endswith("*")
        return f.paper, f.model, f.task, f.setting, copied, f.metric


def _scores() -> Iterator[Figure]:
    """Published scores of policies and tasks that kvbench has, at known budgets."""
    for f in all_figures():
        if f.metric in SCORES and f.policy not in ("", "full") and f.task and f.kept:
            yield f


def _ours(cells: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The scores of runs: of every task, and of sets of tasks that were run whole."""
    results = prepare(cells)
    done = results.cells[(results.cells["status"] == "ok") & (results.cells["policy"] != "full")]
    for _, part in done.groupby("task", sort=False):
        if unit_scale(part):
            yield from map(_named, records(part))
    published = {f.task for f in _scores()}
    for name, leaves in catalogue.task_sets().items():
        if name not in published or name in leaves:
            continue
        part = results.cells[results.cells["task"].isin(leaves)]
        if {*leaves} <= {*part["task"]} and unit_scale(part[part["status"] == "ok"]):
            for row in records(group_means(part)):
                if row["status"] == "ok" and row["tasks"] == len(leaves):
                    yield _named(row | {"task": name})


def _named(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": str(row["model"]),
        "length": int(row["length"]),
        "moment": str(row["moment"]),
        "seed": int(row["seed"]),
        "task": str(row["task"]),
        "policy": str(row["policy"]),
        "budget": str(row["budget"]),
        "score": float(row["score"]),
        "full_score": float(row["full_score"]),
    }


def _bare(model: str) -> str:
    """A model's name without its owner, in lower case, without punctuation."""
    return re.sub(r"[^a-z0-9]", "", model.rstrip("/").rpartition("/")[2].lower())


def _share(score: float, full: float) -> float:
    return score / full if full > 0 else math.nan


def _vary(cells: Sequence[object]) -> bool:
    return any(cell != cells[0] for cell in cells)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
