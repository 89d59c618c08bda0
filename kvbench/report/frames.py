"""Preparation of a run's frames for tables and figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from kvbench.report.overall import CONFIG, group_means
from kvbench.report.sorted_samples import Samples
from kvbench.runs.schema import LOG_KL, UNBOUNDED
from kvbench.tables.table import Name, Phrase
from kvbench.tables.text import tokens

_QUESTIONS = ["model", "task", "length", "seed"]
_PLACE = ["model", "task", "length", "seed", *CONFIG]
_OF_MODEL = ["model_revision", "dtype", "device", "attention", "answers"]
_OF_TASK = ["data_hash", "task_version"]
INFORMED = " (informed)"
"""Mark behind the name of a policy that sees the answer."""
FIDELITY_NAMES = {
    "kl": ("KL", "nats"),
    LOG_KL: ("log(KL + 0.001)", ""),
    "agreement": ("agreement", ""),
    "nll_diff": ("difference in NLL", "nats"),
    "first_difference": ("first difference", "tokens"),
}
"""Name and unit of the metrics of fidelity."""
SAMPLE_KEY = ["sample_id", "question_id"]
"""Columns that identify a question of a cell."""
_COUNTS = ("repeats", "truncated", "think_end")


@dataclass(frozen=True)
class ResultVariant:
    """A length, a moment and a seed of a model's results.

    Attributes:
        length: Tokens of prompt and answer.
        moment: When the cache was compressed.
        seed: Seed of data and policy noise.
        label: Difference from the model's other variants; empty if it is the only one.
    """

    length: int
    moment: str
    seed: int
    label: str


@dataclass(frozen=True)
class Results:
    """The data of a report.

    Attributes:
        cells: The cells, full first. `model_id` is the model as the run names it; `model` adds whatever distinguishes
            cells that would otherwise be the same. `share` is live bytes divided by those of the full cache,
            `held_tokens` the entries held per KV head (NaN without a full cache of the model, or without samples).
        samples: Samples of the cells.
        overall: `group_means` of the cells, with the same columns.
        policies: Policies except full in order of appearance, which determines colours and markers.
    """

    cells: pd.DataFrame
    samples: Samples | None
    overall: pd.DataFrame
    policies: list[str]

    @property
    def models(self) -> list[str]:
        """Models in order of appearance."""
        return list(dict.fromkeys(self.cells["model"].astype(str)))

    def groups(self, model_name: str) -> list[str]:
        """Return the groups of a model's tasks in order of appearance."""
        model_cells = self.cells[self.cells["model"] == model_name]
        return list(dict.fromkeys(model_cells["group"].astype(str)))

    def tasks(self, model_name: str, group_name: str) -> list[str]:
        """Return the tasks of a group in order of appearance."""
        group_cells = self.cells[(self.cells["model"] == model_name) & (self.cells["group"] == group_name)]
        return list(dict.fromkeys(group_cells["task"].astype(str)))

    def variants(self, model_name: str, group_name: str | None = None) -> list[ResultVariant]:
        """Return the variants of a model's results, or of its results in one group.

        Full has no moment and belongs to all variants. Variants with only full are left out unless there are no others.
        """
        model_cells = self.cells[self.cells["model"] == model_name]
        varies = {field_name: model_cells[field_name].nunique() > 1 for field_name in ("length", "seed")}
        varies["moment"] = len(_moments(model_cells)) > 1
        if group_name is not None:
            model_cells = model_cells[model_cells["group"] == group_name]
        variants = []
        for seed in sorted(set(model_cells["seed"])):
            for moment in _moments(model_cells) or list(dict.fromkeys(model_cells["moment"].astype(str))):
                for length in sorted(set(model_cells["length"])):
                    label_parts = [tokens(length)] * varies["length"]
                    label_parts += [moment] * (varies["moment"] and bool(moment))
                    label_parts += [f"seed {seed}"] * varies["seed"]
                    variant = ResultVariant(int(length), moment, int(seed), ", ".join(label_parts))
                    if len(pick(model_cells, variant)):
                        variants.append(variant)
        return [candidate for candidate in variants if _compresses(pick(model_cells, candidate))] or variants


def _moments(cells: pd.DataFrame) -> list[str]:
    return [str(moment) for moment in dict.fromkeys(cells.loc[cells["policy"] != "full", "moment"])]


def _compresses(cells: pd.DataFrame) -> bool:
    return bool((cells["policy"] != "full").any())


def pick(frame: pd.DataFrame, variant: ResultVariant) -> pd.DataFrame:
    """Return the rows of a variant, including those of full."""
    is_variant = (frame["length"] == variant.length) & (frame["seed"] == variant.seed)
    return frame[is_variant & of_moment(frame, variant.moment)]


def of_moment(frame: pd.DataFrame, moment: str) -> pd.Series[bool]:
    """Return which rows belong to a moment, including those of full (live dialogues have a separate full)."""
    is_full = (frame["policy"] == "full") & (frame["moment"] == "") & (moment != "turns")
    return (frame["moment"] == moment) | is_full


def prepare(cells: pd.DataFrame, samples: pd.DataFrame | Samples | None = None) -> Results:
    """Prepare the frames of one or several runs for a report.

    A cell in several runs counts once, with the most samples. Cells with the same model, task and configuration that
    still differ, such as in dtype, get distinct names of models, or of policies if only the policy's code differs.

    Args:
        cells: The frame of `cells.parquet`; for several runs, concatenated.
        samples: The frame of `samples.parquet`; not needed for a table in the terminal.
    """
    cells = cells.reset_index(drop=True).sort_values("samples", kind="stable")
    cells = cells.drop_duplicates("cell", keep="last").sort_index()
    cells = cells.sort_values("policy", key=lambda policy: policy != "full", kind="stable")
    cells = cells.reset_index(drop=True)
    cells["answers"] = cells["versions"].map(answers)
    cells["model_id"] = cells["model"].astype(str)
    cells["model"] = cells["model_id"]
    _tell_apart(cells)
    if isinstance(samples, pd.DataFrame):
        samples = Samples(samples)
    overall = group_means(cells, samples)
    head_counts = _head_counts(cells, samples)
    for frame in (cells, overall) if len(overall) else (cells,):
        _add_costs(frame, head_counts)
    policies = [str(policy) for policy in dict.fromkeys(cells["policy"]) if policy != "full"]
    return Results(cells, samples, overall, policies)


def _add_costs(frame: pd.DataFrame, head_counts: Mapping[str, float]) -> None:
    """Add the columns of memory and reading costs relative to the full cache, and in tokens per KV head."""
    for share, column in (("share", "live"), ("read_share", "read"), ("allocated_share", "allocated")):
        frame[share] = frame[f"kv_bytes_{column}"] / frame["kv_bytes_full"]
    heads = frame["model"].map(head_counts).astype(np.float64)
    reads_few = frame["kv_bytes_read"] < frame["kv_bytes_live"]
    frame["held_tokens"] = frame["held_entries"] / heads
    frame["read_tokens"] = frame["held_entries"].where(~reads_few, frame["budget_entries"]) / heads


def _head_counts(cells: pd.DataFrame, samples: Samples | None) -> dict[str, float]:
    """Return how many KV heads hold entries, over all layers, by model, as measured with the full cache.

    A full cache has one entry per token in each of them; layers that share keys and values count once, and
    sliding-window and recurrent layers not at all. Models without a full cache are left out.
    """
    full_cells = cells[(cells["policy"] == "full") & (cells["status"] == "ok")].drop_duplicates("model")
    if samples is None or not len(full_cells):
        return {}
    sums = samples.of(full_cells["cell"]).groupby("cell", observed=True)[["held_entries", "context_tokens"]].sum()
    entries_per_token = full_cells["cell"].map(sums["held_entries"] / sums["context_tokens"])
    return dict(zip(full_cells["model"], entries_per_token, strict=True))


def informed_policies(cells: pd.DataFrame) -> set[str]:
    """Return the policies that see the answer: references that compete with no policy."""
    return {str(policy) for policy in cells.loc[cells["informed"], "policy"]}


def policy_title(policy: str, *, informed: bool, labels: Mapping[str, str] | None = None) -> Phrase:
    """Return the name or the label of a policy, marked if it sees the answer."""
    title = (labels or {}).get(policy) or Name(policy)
    return (title, INFORMED) if informed else title


def metric_title(metric: str) -> str:
    """Return name and unit of a metric of fidelity; "score" for any other metric."""
    return ", ".join(filter(None, FIDELITY_NAMES.get(metric, ("score",))))


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame as dictionaries."""
    return cast(list[dict[str, Any]], frame.to_dict("records"))


def unit_scale(frame: pd.DataFrame) -> bool:
    """Return whether all scores lie in [0, 1], so that they are shown in points, 0 to 100."""
    if frame["metric"].isin(UNBOUNDED).any():
        return False
    scores = pd.concat([frame["score"], frame["full_score"]]).dropna()
    return bool(scores.between(0.0, 1.0).all())


def extras(samples: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Parse every distinct text in the column `extra` once, and return the JSON objects by text."""
    return {extra_json: json.loads(extra_json or "{}") for extra_json in samples["extra"].unique()}


def budget_order(budget: str) -> tuple[int, float]:
    """Return a sort key: fractions of the context, then numbers of tokens, then visual budgets, each ascending."""
    budget_kind, _, amount = budget.rpartition(":")
    try:
        return (2 * bool(budget_kind) + amount.isdigit(), float(amount))
    except ValueError:
        return (4, math.inf)


def uncompared(cells: pd.DataFrame) -> list[str]:
    """Return tasks without a full-cache score at some length and seed."""
    task_names = []
    for question_key, question_cells in cells.groupby([*_QUESTIONS, _live(cells)], sort=False):
        if not ((question_cells["policy"] == "full") & (question_cells["status"] == "ok")).any():
            task_names.append(str(question_key[_QUESTIONS.index("task")]))
    return list(dict.fromkeys(task_names))


def tasks_at_chance(cells: pd.DataFrame) -> list[str]:
    """Return tasks on which full is not above chance, ignoring those without a full-cache score."""
    is_full = (cells["policy"] == "full") & (cells["status"] == "ok")
    return list(dict.fromkeys(cells.loc[is_full & ~cells["discriminative"].astype(bool), "task"].astype(str)))


def readers(cells: pd.DataFrame) -> list[str]:
    """Return policies that read less per decode step than they hold."""
    compressed_cells = cells[(cells["status"] == "ok") & (cells["policy"] != "full")]
    sparse_cells = compressed_cells[compressed_cells["kv_bytes_read"] < compressed_cells["kv_bytes_live"]]
    return list(dict.fromkeys(sparse_cells["policy"].astype(str)))


def holds_codes(cells: pd.DataFrame) -> bool:
    """Return whether any policy stores entries in another form: quantised, or with fewer channels."""
    return bool(cells["policy"].str.contains(":(?:bits|key_channels)=").any())


def lower_is_better_tasks(cells: pd.DataFrame) -> list[str]:
    """Return tasks for which a lower score is better."""
    lower_is_better = ~cells["higher_is_better"].astype(bool)
    return list(dict.fromkeys(cells.loc[lower_is_better, "task"].astype(str)))


def unaveraged_tasks(cells: pd.DataFrame) -> list[str]:
    """Return tasks whose score is not a mean over samples, such as a perplexity."""
    return list(dict.fromkeys(cells.loc[~cells["is_mean"].astype(bool), "task"].astype(str)))


def judged(cells: pd.DataFrame) -> dict[str, list[str]]:
    """Return judged tasks by judge, as recorded in `versions`."""
    judged_tasks: dict[str, list[str]] = {}
    for task_name, versions in dict.fromkeys(zip(cells["task"], cells["versions"], strict=True)):
        judge_name = recorded(versions).get("judge")
        if judge_name and str(task_name) not in judged_tasks.setdefault(str(judge_name), []):
            judged_tasks[str(judge_name)].append(str(task_name))
    return judged_tasks


def answers(versions: str) -> str:
    """Return the decoding of a cell's answers from its `versions`: "greedy", or "temperature 0.6"."""
    generation = recorded(versions).get("generation")
    generation = generation if isinstance(generation, dict) else {}  # published by anyone
    settings = [
        f"{setting_name} {setting_value}"
        for setting_name, setting_value in generation.items()
        if setting_name not in _COUNTS
    ]
    return ", ".join(settings if "temperature" in generation else ["greedy", *settings])


def recorded(versions: str) -> dict[str, Any]:
    """Parse a cell's `versions`; empty if it is not a JSON object."""
    try:
        version_record = json.loads(versions)
    except ValueError:
        return {}
    return version_record if isinstance(version_record, dict) else {}


def _live(cells: pd.DataFrame) -> pd.Series[bool]:
    """Return which cells are live dialogues, which have a separate full cache."""
    return (cells["moment"] == "turns").rename("_live")


def _tell_apart(cells: pd.DataFrame) -> None:
    """Give cells that share a place other names: of the model, or of a policy whose code differs.

    A name gets only what differs within a place. Data and version of a task are added for its own cells alone, so that
    the other tasks keep their mean.
    """
    places = cells[_PLACE].astype(str).agg("\0".join, axis=1)
    clashing = cells[places.duplicated(keep=False)]
    if not len(clashing):
        return
    differs = clashing[[*_OF_MODEL, *_OF_TASK]].astype(str).groupby(places).nunique() > 1
    parts: dict[Any, list[str]] = {row: [] for row in cells.index}
    for column in (*_OF_MODEL, *_OF_TASK):
        concerned = clashing[places[clashing.index].isin(differs.index[differs[column]])]
        scope = ["model_id", *(["task"] if column in _OF_TASK else [])]
        renamed = cells[pd.MultiIndex.from_frame(cells[scope]).isin(pd.MultiIndex.from_frame(concerned[scope]))]
        for row, value in zip(renamed.index, renamed[column].astype(str), strict=True):
            parts[row].append(value)
    alike = clashing[~places[clashing.index].map(differs.any(axis=1))]
    code = alike["versions"].map(lambda versions: str(recorded(versions).get("policy", "")))
    is_told = code.groupby(places).transform("nunique") == code.groupby(places).transform("size")
    told = code.where(is_told, alike["cell"].astype(str))
    for row, policy, mark in zip(alike.index, alike["policy"], told, strict=True):
        if policy == "full":
            parts[row].append(mark)
        else:
            cells.loc[row, "policy"] = f"{policy} ({mark})"
    named = zip(cells["model"], parts.values(), strict=True)
    cells["model"] = [f"{model} ({', '.join(marks)})" if marks else model for model, marks in named]


def with_depth(results: Results) -> pd.DataFrame:
    """Return the samples of tasks in which every sample has a depth, in percent of the context, in `extra`.

    Tasks whose score is not a mean over samples are left out.

    Returns:
        Columns `cell`, `sample_id`, `question_id`, `score`, `depth`, `model`, `task`, `metric`,
        `length`, `policy`, `budget` and `moment`.
    """
    assert results.samples is not None
    cell_columns = ["cell", "model", "task", "metric", "length", *CONFIG]
    is_averaged = ~results.cells["task"].isin(unaveraged_tasks(results.cells))
    ok_cells = results.cells.loc[is_averaged & (results.cells["status"] == "ok"), cell_columns]
    depth_frames = []
    for _, task_cells in ok_cells.groupby("task", sort=False):
        task_samples = results.samples.of(task_cells["cell"])[["cell", *SAMPLE_KEY, "extra", "score"]]
        depth_by_extra = {extra_json: _depth(extra_fields) for extra_json, extra_fields in extras(task_samples).items()}
        if depth_by_extra and not any(map(math.isnan, depth_by_extra.values())):
            sample_depth = task_samples["extra"].map(depth_by_extra).astype(float)
            depth_frames.append(task_samples.drop(columns="extra").assign(depth=sample_depth))
    if not depth_frames:
        return pd.DataFrame(columns=["cell", *SAMPLE_KEY, "score", "depth", *cell_columns[1:]])
    return pd.concat(depth_frames).sort_index().astype({"cell": str}).merge(ok_cells, on="cell")


def _depth(extra_fields: Mapping[str, Any]) -> float:
    depth_value = extra_fields.get("depth")
    if isinstance(depth_value, bool) or not isinstance(depth_value, (int, float)):
        return math.nan
    return float(depth_value)
