"""Rows of a report that are not separate results: equal to another row, or with a fully reserved budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from kvbench.budget import Budget
from kvbench.errors import UserError
from kvbench.plugin_facts import PluginFacts
from kvbench.report.frames import Results
from kvbench.report.sorted_samples import Samples
from kvbench.tables.text import tokens

_LEAST = 5
"""Minimum number of responses that differ from the full cache's in text and score as evidence that two policies are
equal: policies that lose nothing agree, but for punctuation after a right answer."""


class Place(NamedTuple):
    """A setting in which policies are compared."""

    model: str
    length: int
    seed: int
    moment: str
    budget: str


_SETTING = list(Place._fields)

Places = dict[tuple[str, ...], list[Place]]
"""Settings by policies, for a property of the policies."""


def equal_rows(results: Results) -> Places:
    """Return policies with the same responses and numbers of entries on all tasks of a setting.

    Kept sets are not recorded. Equal responses imply equal sets if enough of them are worse or better than the full
    cache's; without a full cache there is no such evidence.
    """
    ok_cells, samples = results.cells[results.cells["status"] == "ok"], results.samples
    places_by_policies: Places = {}
    if samples is None:
        return places_by_policies
    is_full = ok_cells["policy"] == "full"
    full_cells = ok_cells[is_full].set_index(["model", "task", "length", "seed"])["cell"].to_dict()
    for setting, setting_cells in ok_cells[~is_full].groupby(_SETTING, sort=False):
        policies_by_answers: dict[tuple[tuple[str, bytes], ...], list[str]] = {}
        for policy_name, policy_cells in setting_cells.sort_values("task").groupby("policy", sort=False):
            answer_arrays = (samples.answer_table(cell_id) for cell_id in policy_cells["cell"])
            answer_key = tuple(
                (task_name, answers.tobytes())
                for task_name, answers in zip(policy_cells["task"], answer_arrays, strict=True)
            )
            policies_by_answers.setdefault(answer_key, []).append(str(policy_name))
        for policy_names in (policy_names for policy_names in policies_by_answers.values() if len(policy_names) > 1):
            place, policy_rows = (
                _place(setting),
                setting_cells[setting_cells["policy"] == policy_names[0]],
            )
            changed_count = sum(
                _count_changed(
                    samples,
                    cell_id,
                    full_cells.get((place.model, task_id, place.length, place.seed)),
                )
                for task_id, cell_id in zip(policy_rows["task"], policy_rows["cell"], strict=True)
            )
            if changed_count >= _LEAST:
                places_by_policies.setdefault(tuple(sorted(policy_names)), []).append(place)
    return places_by_policies


def _count_changed(samples: Samples, cell_id: str, full_id: str | None) -> int:
    """Return how many responses of a cell differ from the full cache's in text and score; 0 without a full cache."""
    cell_answers, full_answers = samples.answer_table(cell_id), samples.answer_table(full_id or "")
    is_same = len(cell_answers) == len(full_answers) and np.array_equal(cell_answers[:, 0], full_answers[:, 0])
    if not is_same:
        return 0
    has_other_score = samples.scores_by_question(cell_id) != samples.scores_by_question(full_id or "")
    return int(((cell_answers[:, 1] != full_answers[:, 1]) & has_other_score).sum())


def without_room(results: Results) -> Places:
    """Return policies whose fixed-size sinks and windows fill the budget of most contexts."""
    compressed_cells, places_by_policies = results.cells[results.cells["status"] == "ok"], Places()
    compressed_cells = compressed_cells[
        compressed_cells["moment"].isin(["context", "question"]) & (compressed_cells["policy"] != "full")
    ]
    if results.samples is None:
        return places_by_policies
    with PluginFacts() as facts:
        for (policy_name, *setting), setting_cells in compressed_cells.groupby(["policy", *_SETTING], sort=False):
            setting_samples = results.samples.of(setting_cells["cell"])
            context_lengths = setting_samples["context_tokens"].to_numpy(np.int64)
            place = _place(setting)
            if place.moment == "question":
                context_lengths = context_lengths + setting_samples["question_tokens"].to_numpy(np.int64)
            lengths, budget = context_lengths.tolist(), Budget.parse(place.budget)
            reserved_counts = _reserved(facts, str(policy_name), lengths)
            if any(budget.is_filled(counts.__getitem__, lengths) for counts in reserved_counts):
                places_by_policies.setdefault((str(policy_name),), []).append(place)
    return places_by_policies


def _place(setting: Iterable[Any]) -> Place:
    """Return the setting of a group of rows."""
    return Place(*setting)


def _reserved(facts: PluginFacts, policy_name: str, lengths: Iterable[int]) -> list[dict[int, int]]:
    """Return the entries that each part of a policy reserves, by length; none if the policy is not installed."""
    distinct_lengths = sorted(set(lengths))

    def reserved_counts() -> list[list[int]]:
        from kvbench.spelling import policy

        try:
            parts = policy(policy_name).parts
        except UserError:
            return []
        return [[component.reserved(length) for length in distinct_lengths] for component in parts]

    counts_by_part = facts.get_of_policy(policy_name, f"reserved of {distinct_lengths} by", reserved_counts)
    return [dict(zip(distinct_lengths, counts, strict=True)) for counts in counts_by_part]


def labels(results: Results, places: Iterable[Place]) -> list[str]:
    """Return labels of settings: the budget, and the fields that vary within the report."""
    compressed = results.cells[results.cells["policy"] != "full"]
    varied_fields = [field_name for field_name in _SETTING[:-1] if compressed[field_name].nunique() > 1]
    budget_labels = []
    for place in places:
        field_texts = place._asdict() | {
            "length": tokens(place.length),
            "seed": f"seed {place.seed}",
        }
        setting_text = ", ".join(field_texts[field_name] for field_name in varied_fields)
        budget_labels.append(f"{place.budget} ({setting_text})" if setting_text else place.budget)
    return budget_labels
