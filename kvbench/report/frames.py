"""The frames of a run in the shape that tables and figures share."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvbench.report.overall import CONFIG, group_means
from kvbench.report.samples import Samples
from kvbench.report.text import tokens

_QUESTIONS = ["model", "task", "length", "seed"]
_PLACE = ["model", "task", "length", "seed", *CONFIG]
_TELL_APART = [
    "model_revision",
    "dtype",
    "device",
    "attention",
    "data_hash",
    "task_version",
    "answers",
    "cell",
]
_COUNTS = ("repeats", "truncated", "think_end")


@dataclass(frozen=True)
class Variant:
    """A length, a moment and a seed of a model's results.

    Attributes:
        length: Tokens of prompt and answer.
        moment: When the cache was compressed.
        seed: Seed of data and policy noise.
        label: What distinguishes it from the model's other variants; empty if it is the only one.
    """

    length: int
    moment: str
    seed: int
    label: str


@dataclass(frozen=True)
class Results:
    """Everything a report is made from.

    Attributes:
        cells: The cells, full first. `model_id` is the model as the run names it; `model` adds what
            else distinguishes cells that would otherwise be the same. `share` is the live bytes
            over those of the full cache.
        samples: Their samples.
        overall: `group_means` of the cells, with `share`.
        policies: Policies without full in order of appearance, which fixes colours and markers.
    """

    cells: pd.DataFrame
    samples: Samples | None
    overall: pd.DataFrame
    policies: list[str]

    @property
    def models(self) -> list[str]:
        """Models in order of appearance."""
        return list(dict.fromkeys(self.cells["model"].astype(str)))

    def groups(self, model: str) -> list[str]:
        """Groups of a model's tasks in order of appearance."""
        mine = self.cells[self.cells["model"] == model]
        return list(dict.fromkeys(mine["group"].astype(str)))

    def tasks(self, model: str, group: str) -> list[str]:
        """Leaf tasks of a group in order of appearance."""
        mine = self.cells[(self.cells["model"] == model) & (self.cells["group"] == group)]
        return list(dict.fromkeys(mine["task"].astype(str)))

    def variants(self, model: str, group: str | None = None) -> list[Variant]:
        """The variants of a model's results, or of its results in one group.

        Full has no moment and belongs to all of them. A variant in which only full was run shows
        nothing, so it is left out unless nothing else was run at all.
        """
        mine = self.cells[self.cells["model"] == model]
        several = {name: mine[name].nunique() > 1 for name in ("length", "seed")}
        several["moment"] = len(_moments(mine)) > 1
        if group is not None:
            mine = mine[mine["group"] == group]
        found = []
        for seed in sorted(set(mine["seed"])):
            for moment in _moments(mine) or list(dict.fromkeys(mine["moment"].astype(str))):
                for length in sorted(set(mine["length"])):
                    parts = [tokens(length)] * several["length"]
                    parts += [moment] * (several["moment"] and bool(moment))
                    parts += [f"seed {seed}"] * several["seed"]
                    variant = Variant(int(length), moment, int(seed), ", ".join(parts))
                    if len(pick(mine, variant)):
                        found.append(variant)
        return [v for v in found if _compresses(pick(mine, v))] or found


def _moments(cells: pd.DataFrame) -> list[str]:
    return [str(m) for m in dict.fromkeys(cells.loc[cells["policy"] != "full", "moment"])]


def _compresses(cells: pd.DataFrame) -> bool:
    return bool((cells["policy"] != "full").any())


def pick(frame: pd.DataFrame, variant: Variant) -> pd.DataFrame:
    """The rows of a variant, including those of full."""
    here = (frame["length"] == variant.length) & (frame["seed"] == variant.seed)
    return frame[here & of_moment(frame, variant.moment)]


def of_moment(frame: pd.DataFrame, moment: str) -> pd.Series[bool]:
    """Which rows belong to a moment, including those of full (live dialogues have their own)."""
    full = (frame["policy"] == "full") & (frame["moment"] == "") & (moment != "turns")
    return (frame["moment"] == moment) | full


def prepare(cells: pd.DataFrame, samples: pd.DataFrame | Samples | None = None) -> Results:
    """Prepare the frames of one or several runs for a report.

    A cell that several runs have counts once, with the most samples. Cells with the same model,
    task and configuration that still differ, such as in dtype, are kept apart by a model name that
    says how they differ.

    Args:
        cells: The frame of `cells.parquet`; those of several runs are concatenated.
        samples: The frame of `samples.parquet`; a table in the terminal does not need it.
    """
    cells = cells.reset_index(drop=True).sort_values("samples", kind="stable")
    cells = cells.drop_duplicates("cell", keep="last").sort_index()
    cells = cells.sort_values("policy", key=lambda p: p != "full", kind="stable")
    cells = cells.reset_index(drop=True)
    cells["share"] = cells["kv_bytes_live"] / cells["kv_bytes_full"]
    cells["read_share"] = cells["kv_bytes_read"] / cells["kv_bytes_full"]
    cells["allocated_share"] = cells["kv_bytes_allocated"] / cells["kv_bytes_full"]
    cells["answers"] = cells["versions"].map(answers)
    cells["model_id"] = cells["model"].astype(str)
    cells["model"] = _model_names(cells)
    if isinstance(samples, pd.DataFrame):
        samples = Samples(samples)
    overall = group_means(cells, samples)
    if len(overall):
        overall["share"] = overall["kv_bytes_live"] / overall["kv_bytes_full"]
        overall["read_share"] = overall["kv_bytes_read"] / overall["kv_bytes_full"]
        overall["allocated_share"] = overall["kv_bytes_allocated"] / overall["kv_bytes_full"]
    policies = [str(p) for p in dict.fromkeys(cells["policy"]) if p != "full"]
    return Results(cells, samples, overall, policies)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as dictionaries."""
    return [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]


def unit_scale(frame: pd.DataFrame) -> bool:
    """Whether all scores lie in [0, 1], so that they are shown in points, 0 to 100."""
    scores = pd.concat([frame["score"], frame["full_score"]]).dropna()
    return bool(scores.between(0.0, 1.0).all())


def extras(samples: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The JSON object of every distinct text in the column `extra`, each parsed once."""
    return {text: json.loads(text or "{}") for text in samples["extra"].unique()}


def budget_order(budget: str) -> tuple[int, float]:
    """Orders shares of the context, numbers of tokens and visual budgets, from small to large."""
    kind, _, amount = budget.rpartition(":")
    try:
        return (2 * bool(kind) + amount.isdigit(), float(amount))
    except ValueError:
        return (4, math.inf)


def uncompared(cells: pd.DataFrame) -> list[str]:
    """Tasks that lack a score of full to compare with, at some length and seed."""
    found = []
    for place, part in cells.groupby([*_QUESTIONS, _live(cells)], sort=False):
        if not ((part["policy"] == "full") & (part["status"] == "ok")).any():
            found.append(str(place[_QUESTIONS.index("task")]))
    return list(dict.fromkeys(found))


def silent_tasks(cells: pd.DataFrame) -> list[str]:
    """Tasks on which full is not above chance; without a score of full that is unknown."""
    found = []
    ok = cells[cells["status"] == "ok"]
    for place, part in ok.groupby([*_QUESTIONS, _live(ok)], sort=False):
        full = part[part["policy"] == "full"]
        if len(full) and not full["discriminative"].all():
            found.append(str(place[_QUESTIONS.index("task")]))
    return list(dict.fromkeys(found))


def readers(cells: pd.DataFrame) -> list[str]:
    """Policies that read less in a decode step than they hold."""
    ok = cells[(cells["status"] == "ok") & (cells["policy"] != "full")]
    few = ok[ok["kv_bytes_read"] < ok["kv_bytes_live"]]
    return list(dict.fromkeys(few["policy"].astype(str)))


def holds_codes(cells: pd.DataFrame) -> bool:
    """Whether a policy does not store entries as they are: quantised, or with fewer channels."""
    return bool(cells["policy"].str.contains(":(?:bits|key_channels)=").any())


def falling(cells: pd.DataFrame) -> list[str]:
    """Tasks with a score for which less is better."""
    down = ~cells["higher_is_better"].astype(bool)
    return list(dict.fromkeys(cells.loc[down, "task"].astype(str)))


def judged(cells: pd.DataFrame) -> dict[str, list[str]]:
    """Tasks whose responses were judged, by the judge that `versions` records."""
    tasks: dict[str, list[str]] = {}
    for task, versions in dict.fromkeys(zip(cells["task"], cells["versions"], strict=True)):
        judge = recorded(versions).get("judge")
        if judge and str(task) not in tasks.setdefault(str(judge), []):
            tasks[str(judge)].append(str(task))
    return tasks


def answers(versions: str) -> str:
    """How a cell's answers were made, from its `versions`: "greedy", or "temperature 0.6"."""
    made = recorded(versions).get("generation", {})
    settings = [f"{name} {value}" for name, value in made.items() if name not in _COUNTS]
    return ", ".join(settings if "temperature" in made else ["greedy", *settings])


def recorded(versions: str) -> dict[str, Any]:
    """The JSON object that a cell records as its `versions`; empty if it is something else."""
    try:
        known = json.loads(versions)
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}


def _live(cells: pd.DataFrame) -> pd.Series[bool]:
    """Which cells are live dialogues, which have a full cache of their own."""
    return (cells["moment"] == "turns").rename("_live")


def _model_names(cells: pd.DataFrame) -> pd.Series[str]:
    names = cells["model"].astype(str)
    for model, part in cells.groupby("model", sort=False):
        if not part.duplicated(_PLACE).any():
            continue
        apart = [c for c in _TELL_APART if part[c].nunique() > 1]
        columns = [c for c in apart if c != "cell"] or apart
        extra = part[columns].astype(str).agg(", ".join, axis=1)
        names.loc[part.index] = str(model) + " (" + extra + ")"
    return names
