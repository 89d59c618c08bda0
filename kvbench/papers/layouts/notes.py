"""Notes below a table: how to read it, the underlying runs, and missing results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.papers.layouts.measures import Config, Measures, ScoreSource
from kvbench.papers.layouts.slots import ComputedSlot, Layout, MeasuredSlot, Slot
from kvbench.papers.layouts.value import Value
from kvbench.regression import significance
from kvbench.report.frames import judged, tasks_at_chance
from kvbench.tables.numbers import BETTER, DASH, WORSE
from kvbench.tables.table import Name, Phrase
from kvbench.tables.text import REFERENCE_MODEL, REFERENCE_NOTE, counted, listed, tokens

_MOST = 12
"""Maximum number of items per list in a note."""

SlotRequest = tuple[Config, ScoreSource]


@dataclass(frozen=True)
class Tests:
    """The significance tests of a table.

    Attributes:
        against: Reference policy of the significance tests, or "".
        count: Number of tests.
        alpha: Level of the tests.
        contexts: Largest number of contexts in a test.
    """

    against: str
    count: int
    alpha: float
    contexts: int


def notes(layout: Layout, measures: Measures, *, ranked: bool, tested: Tests) -> Iterator[Phrase]:
    """Yield the notes of a table.

    Args:
        layout: The layout.
        measures: The runs.
        ranked: Whether numbers are bold or underlined.
        tested: The significance tests.
    """
    if ranked:
        yield ("Bold: best; underlined: second best of the policies at one budget, without the full cache.")
    if measures.informed & {slot.config.policy for slot in layout.slots}:
        yield "(informed): the policy sees question and answer. It is a reference and is not ranked."
    if tested.count:
        yield from _marks(tested, layout.labels)
    requests = list(dict.fromkeys(request for slot in layout.slots for request in _slot_requests(slot)))
    row_by_request = {request: measures.row(*request) for request in requests}
    ok_rows = {
        request: cell_row
        for request, cell_row in row_by_request.items()
        if cell_row is not None and cell_row["status"] == "ok"
    }
    yield from _basis(ok_rows, measures)
    yield from layout.notes
    yield from _missing(
        [request for request, cell_row in row_by_request.items() if cell_row is None],
        requests,
        "not in the run",
    )
    failed_requests = [
        request for request, cell_row in row_by_request.items() if cell_row is not None and cell_row["status"] != "ok"
    ]
    yield from _missing(failed_requests, requests, "failed")
    used_cells = measures.cells[measures.cells["cell"].isin([cell_row["cell"] for cell_row in ok_rows.values()])]
    if at_chance := tasks_at_chance(used_cells):
        yield (f"The full cache is not above chance on {listed(at_chance, _MOST)}: differences there are meaningless.")
    for judge_name, judged_tasks in judged(used_cells).items():
        yield (f"{listed(judged_tasks, _MOST)}: scored by the judge ", Name(judge_name), ".")
    if REFERENCE_MODEL in {config.model for config, _ in ok_rows}:
        yield REFERENCE_NOTE


def _marks(tested: Tests, labels: Mapping[str, Phrase]) -> Iterator[Phrase]:
    is_full = tested.against == "full"
    reference: Phrase = labels.get(tested.against) or Name(tested.against)
    reference_phrase: Phrase = "the full cache" if is_full else (reference, " at the same budget")
    yield (
        f"{BETTER} or {WORSE}: significantly better or worse than ", reference_phrase,
        f" (paired permutation test over contexts, p < {tested.alpha:g} after Holm's correction "
        f"for the {counted(tested.count, 'test')} of this table).",
    )  # fmt: skip
    minimum = significance.least_contexts(tested.alpha / tested.count)
    if tested.contexts < minimum:
        yield (
            f"No mark is possible with {counted(tested.contexts, 'context')}: at least {minimum} would have to differ."
        )


def _slot_requests(slot: Slot) -> Iterator[SlotRequest]:
    """Yield the scores that a slot requires."""
    if isinstance(slot, ComputedSlot):
        for operand in slot.of:
            yield from _slot_requests(operand)
        return
    assert isinstance(slot, MeasuredSlot)
    for source, _ in slot.weights:
        yield slot.config, source
        if slot.value not in (Value.SCORE, Value.KV):
            yield slot.config.full, source


def _basis(ok_rows: dict[SlotRequest, dict[str, Any]], measures: Measures) -> Iterator[Phrase]:
    """Yield number of samples, length, moment and seed of the results in a table."""
    if not ok_rows:
        return
    sample_counts = [
        len(measures.responses(*request).scores) if request[1].field else int(cell_row["samples"])
        for request, cell_row in ok_rows.items()
    ]
    count_text = (
        f"{min(sample_counts)}"
        if min(sample_counts) == max(sample_counts)
        else f"{min(sample_counts)} to {max(sample_counts)}"
    )
    cell_rows = ok_rows.values()
    basis_parts = [f"{count_text} sample{'s' * (max(sample_counts) != 1)} per task"]
    if min(sample_counts) < max(sample_counts):
        basis_parts[0] += " (differences and losses are over common ones)"
    basis_parts.append(_or(tokens(length) for length in sorted({int(cell_row["length"]) for cell_row in cell_rows})))
    moments = [str(cell_row["moment"]) for cell_row in cell_rows if cell_row["policy"] != "full"]
    if any(moments):
        basis_parts.append(f"compressed at the moment {_or(dict.fromkeys(moments))}")
    seeds = sorted({int(cell_row["seed"]) for cell_row in cell_rows})
    basis_parts.append("seed " + _or(map(str, seeds)))
    yield ", ".join(basis_parts) + "."


def _missing(
    missing_requests: Sequence[SlotRequest], all_requests: Sequence[SlotRequest], reason_text: str
) -> Iterator[Phrase]:
    """Yield notes on missing results: whole tasks, whole configurations, then single cells."""
    if not missing_requests:
        return
    model_names = list(dict.fromkeys(config.model for config, _ in all_requests))
    for model_name in model_names:
        model_requests = {request for request in all_requests if request[0].model == model_name}
        missing_here = [request for request in missing_requests if request[0].model == model_name]
        if not missing_here:
            continue
        missing_set = set(missing_here)
        missing_sources = dict.fromkeys(source for _, source in missing_here)
        absent_sources = [
            task_source
            for task_source in missing_sources
            if {request for request in model_requests if request[1] == task_source} <= missing_set
        ]
        other_requests = [request for request in missing_here if request[1] not in absent_sources]
        other_configs = dict.fromkeys(config for config, _ in other_requests)
        absent_configs = [
            task_config
            for task_config in other_configs
            if {request for request in model_requests if request[0] == task_config and request[1] not in absent_sources}
            <= missing_set
        ]
        lengths = {config.length for config in other_configs}
        single_texts = [
            f"{task_config.label} on {task_source.label}"
            for task_config, task_source in other_requests
            if task_config not in absent_configs
        ]
        missing_texts = [
            listed([task_source.label for task_source in absent_sources], _MOST),
            *_by_policy(absent_configs, with_lengths=len(lengths) > 1),
            listed(list(dict.fromkeys(single_texts)), _MOST),
        ]
        model_phrase: Phrase = (" of ", Name(model_name)) if len(model_names) > 1 else ""
        yield (
            f"{DASH}: {reason_text}",
            model_phrase,
            f": {'; '.join(filter(None, missing_texts))}.",
        )


def _by_policy(configs: Iterable[Config], *, with_lengths: bool) -> list[str]:
    """Return configurations as text, grouped by budgets, with lengths if they vary."""
    budgets_by_policy: dict[tuple[str, str], list[str]] = {}
    for config in configs:
        length_text = f" ({tokens(config.length)})" * with_lengths
        budgets_by_policy.setdefault((config.policy, length_text), []).append(config.budget)
    policies_by_text: dict[tuple[str, ...], list[str]] = {}
    for (policy, length_text), budget_names in budgets_by_policy.items():
        budget_text = "" if policy == "full" else f" at {' and '.join(budget_names)}"
        policies_by_text.setdefault((budget_text, length_text), []).append(policy)
    return [
        f"{', '.join(policy_names)}{budget_text}{length_text}"
        for (budget_text, length_text), policy_names in policies_by_text.items()
    ]


def _or(alternatives: Iterable[str]) -> str:
    return " or ".join(alternatives)
