"""The frames of a run brought into the shape that tables and figures share."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from kvbench.report.overall import CONFIG, group_means

_KEY = ["cell", "sample_id", "question_id", "repeat"]
_PLACE = ["model", "task", "length", "seed", *CONFIG]
_TELL_APART = [
    "model_revision",
    "dtype",
    "device",
    "attention",
    "data_hash",
    "task_version",
    "cell",
]


@dataclass(frozen=True)
class Variant:
    """One panel of a model's results: a length, a moment and a seed.

    Attributes:
        length: Tokens of prompt and answer.
        moment: When the cache was compressed.
        seed: Seed of data and policy noise.
        label: What tells it from the others of the same model; empty when it is the only one.
    """

    length: int
    moment: str
    seed: int
    label: str


@dataclass(frozen=True)
class Results:
    """Everything a report is made from.

    Attributes:
        cells: The cells, one row per place; `model` tells apart what else differs and
            `model_id` is the model as named; `share` is the
            live bytes over those of the full cache.
        samples: Their samples.
        overall: `group_means` of them, with `share`.
        policies: Policies in order of appearance, full apart; it fixes colours and markers.
    """

    cells: pd.DataFrame
    samples: pd.DataFrame | None
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

    def variants(self, model: str) -> list[Variant]:
        """The panels of a model's results. Full has no moment and belongs to all of them."""
        mine = self.cells[self.cells["model"] == model]
        moments = list(dict.fromkeys(mine.loc[mine["policy"] != "full", "moment"])) or [""]
        lengths, seeds = sorted(set(mine["length"])), sorted(set(mine["seed"]))
        found = []
        for seed in seeds:
            for moment in moments:
                for length in lengths:
                    parts = [f"{length} tokens"] * (len(lengths) > 1)
                    parts += [str(moment)] * (len(moments) > 1)
                    parts += [f"seed {seed}"] * (len(seeds) > 1)
                    variant = Variant(int(length), str(moment), int(seed), ", ".join(parts))
                    if len(pick(mine, variant)):
                        found.append(variant)
        return found


def pick(frame: pd.DataFrame, variant: Variant) -> pd.DataFrame:
    """The rows of a panel, full's among them."""
    here = (frame["length"] == variant.length) & (frame["seed"] == variant.seed)
    return frame[here & ((frame["moment"] == variant.moment) | (frame["policy"] == "full"))]


def prepare(cells: pd.DataFrame, samples: pd.DataFrame | None = None) -> Results:
    """Frames of one or several runs as the results of a report.

    A cell that several runs hold counts once, with the most samples. Cells that share model, task
    and configuration and still differ, for example in dtype, keep apart by a model name that says
    in what.

    Args:
        cells: The frame of `cells.parquet`, also of several runs, one under the other.
        samples: The frame of `samples.parquet`; a terminal table does without.
    """
    cells = cells.sort_values("samples", kind="stable").drop_duplicates("cell", keep="last")
    cells = cells.sort_index(kind="stable").reset_index(drop=True)
    cells["share"] = cells["kv_bytes_live"] / cells["kv_bytes_full"]
    cells["model_id"] = cells["model"].astype(str)
    cells["model"] = _model_names(cells)
    if samples is not None:
        samples = samples.drop_duplicates(_KEY, keep="last")
    overall = group_means(cells, samples)
    if len(overall):
        overall["share"] = overall["kv_bytes_live"] / overall["kv_bytes_full"]
    policies = [str(p) for p in dict.fromkeys(cells["policy"]) if p != "full"]
    return Results(cells, samples, overall, policies)


def unit_scale(frame: pd.DataFrame) -> bool:
    """Whether these scores lie in [0, 1] and are shown in points, 0 to 100."""
    scores = pd.concat([frame["score"], frame["full_score"]]).dropna()
    return bool(scores.between(0.0, 1.0).all())


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
