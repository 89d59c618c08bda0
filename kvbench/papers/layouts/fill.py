"""Filling of layouts with the results of runs: scores, ranks and significance marks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.errors import UserError, nearest
from kvbench.papers.layouts.from_papers import published_layout
from kvbench.papers.layouts.lay_out import lay_out
from kvbench.papers.layouts.measures import Config, Measures, ScoreSource, Tested, Weights, load
from kvbench.papers.layouts.notes import Tests, notes
from kvbench.papers.layouts.slots import PUBLISHED_ROW, ComputedSlot, Layout, MeasuredSlot, Slot
from kvbench.papers.layouts.substitutes import Substitutes
from kvbench.papers.layouts.value import Value
from kvbench.regression import significance
from kvbench.tables.numbers import NumberFormat, number, score_kind
from kvbench.tables.table import Column, Graded, Table, TableCell, TableRow, first_two

ALPHA = 0.05
_RESOLUTION = 10
"""Draws per 1 / level, so that the smallest possible p-value is far below the level."""


@dataclass(frozen=True)
class Test:
    """A paired test of a slot against the reference.

    Attributes:
        better: +1 or -1 if significantly better or worse, otherwise 0.
        p: The p-value, corrected for all tests of the table.
        contexts: Number of common contexts.
    """

    better: int = 0
    p: float = math.nan
    contexts: int = 0


def fill(layout: Layout, measures: Measures, against: str = "", digits: int | None = None) -> Table:
    """Fill a layout.

    Policies compete for the best number in the same place at the same budget: the best has rank 1, the second best
    rank 2; the full cache and policies that see the answer do not compete. A slot without a result is a dash, and a
    note lists what is missing.

    Args:
        layout: The layout.
        measures: The runs.
        against: Reference policy of the significance tests at the same budget, `full` for the full cache, or "" for no
            tests.
        digits: Number of decimals; by default the layout's.

    Raises:
        UserError: The runs lack the reference policy.
    """
    filler = _Filler(measures, layout.digits if digits is None else dict.fromkeys(layout.slots, digits))
    slot_tests = _tests(layout, filler, against) if against else {}
    slot_ranks = _ranks(layout, filler)

    def cell(slot: Slot | None) -> TableCell:
        if slot is None or math.isnan(slot_value := filler.value(slot)):
            return None
        number_kind, signed = filler.format(slot)
        slot_test = slot_tests.get(slot, Test())
        slot_rank, slot_digits = slot_ranks.get(slot, 0), filler.digits.get(slot)
        return Graded(slot_value, number_kind, signed, slot_rank, slot_test.better, slot_test.p, slot_digits)

    head_columns = tuple(
        Column(column_title, group=group_title, align="right") for column_title, group_title in layout.heads
    )
    table_rows = []
    for layout_row in layout.rows:
        table_rows.append(TableRow((*layout_row.lead, *map(cell, layout_row.slots)), layout_row.group))
        if layout_row.published:
            lead_cells = (*layout_row.lead[:-1], PUBLISHED_ROW)
            table_rows.append(TableRow((*lead_cells, *layout_row.published), layout_row.group))
    context_count = max((slot_test.contexts for slot_test in slot_tests.values()), default=0)
    test_summary = Tests(against, len(slot_tests), ALPHA, context_count)
    note_phrases = notes(layout, measures, ranked=bool(slot_ranks), tested=test_summary)
    return Table(layout.title, (*layout.lead, *head_columns), tuple(table_rows), tuple(note_phrases))


def published_tables(folders: Sequence[Path], layout_names: Sequence[str]) -> dict[str, Table]:
    """Return the tables of papers with the results of runs and the paper's below them, by layout.

    A table that needs a choice, such as one of several lengths, is left out: `kvbench table` asks for it. Runs with
    different scores for the same cell give none.
    """
    tables: dict[str, Table] = {}
    if not layout_names:
        return tables
    try:
        measures = load(folders, {})
    except UserError:
        return tables
    for layout_name in layout_names:
        paper_layout = published_layout(layout_name)
        with contextlib.suppress(UserError):
            layout = lay_out(paper_layout, measures, Substitutes(), reduced=True, with_published=True)
            tables[layout_name] = fill(layout, measures, "full" if "full" in set(measures.cells["policy"]) else "")
    return tables


class _Filler:
    """Computes the values of slots."""

    def __init__(self, measures: Measures, digits: Mapping[Slot, int]) -> None:
        self.measures, self.digits = measures, digits

    def fills(self, slot: Slot) -> bool:
        """Return whether the runs have a result for a slot."""
        return not math.isnan(self.value(slot))

    def value(self, slot: Slot) -> float:
        """Return the value of a slot, with scores and shares on the scale of the run; NaN if there is none."""
        if isinstance(slot, ComputedSlot):
            numbers = [self._points(operand) for operand in slot.of]
            if any(map(math.isnan, numbers)) or self.is_fidelity(slot):
                return math.nan
            try:
                return slot.compute(numbers) / 100
            except ZeroDivisionError:  # the full cache scores 0
                return math.nan
        if slot.value is Value.KV:
            # As in a report: the bytes of all tasks together, so that long prompts count for more.
            full_bytes = self._mean(slot, self.measures.full_bytes)
            return self._mean(slot, self.measures.live_bytes) / full_bytes if full_bytes else math.nan
        mean_score = self._mean(slot, self.measures.score)
        if slot.value is Value.SCORE:
            return mean_score
        full_score = self._mean(replace(slot, config=slot.config.full), self.measures.score)
        if math.isnan(mean_score) or math.isnan(full_score):
            return math.nan
        if all(self.measures.is_mean(source) for source, _ in slot.weights):  # then both on their common samples
            paired_scores = self.measures.paired(slot.config, slot.config.full, slot.weights)
            mean_score, full_score = paired_scores.means
        if slot.value is Value.DIFF:
            return mean_score - full_score
        relative_change = mean_score / full_score - 1 if full_score else math.nan
        return -relative_change if slot.value is Value.LOSS else relative_change

    def format(self, slot: Slot) -> tuple[NumberFormat, bool]:
        """Return the number format of a slot, and whether it is signed."""
        if isinstance(slot, ComputedSlot):
            return NumberFormat.PERCENT, slot.signed
        if slot.value is Value.KV:
            return NumberFormat.PERCENT, False
        if slot.value in (Value.RELATIVE, Value.LOSS):
            return NumberFormat.PERCENT, slot.value is Value.RELATIVE
        if all(source.is_rating for source, _ in slot.weights):
            return NumberFormat.RATING, slot.value is Value.DIFF
        unit_scaled = all(self.measures.unit(source) for source, _ in slot.weights)
        return score_kind(unit_scaled=unit_scaled), slot.value is Value.DIFF

    def is_fidelity(self, slot: Slot) -> bool:
        """Return whether a slot compares with the full cache already, so that no loss or test against it applies."""
        if isinstance(slot, ComputedSlot):
            return any(map(self.is_fidelity, slot.of))
        return any(self.measures.is_fidelity(source) for source, _ in slot.weights)

    def sign(self, slot: Slot) -> int:
        """Return +1 if higher values of a slot are better, -1 if lower ones are, 0 if neither."""
        if isinstance(slot, ComputedSlot):
            return {"higher": 1, "lower": -1}.get(slot.better, 0)
        if slot.value is Value.KV:
            return 0
        higher_is_better = self.measures.higher_is_better(slot.config, slot.weights[0][0])
        return (1 if higher_is_better else -1) * (-1 if slot.value is Value.LOSS else 1)

    def _points(self, slot: Slot) -> float:
        return 100 * self.value(slot)

    def _mean(self, slot: MeasuredSlot, measure: Callable[[Config, ScoreSource], float]) -> float:
        """Return the mean of a slot; NaN if a source lacks a score, or if they differ in direction or scale.

        The mean of a single source is its score, whatever that is.
        """
        sources = [source for source, _ in slot.weights]
        directions = {self.measures.higher_is_better(slot.config, mean_source) for mean_source in sources}
        if len(sources) > 1 and measure == self.measures.score and not all(map(self.measures.is_mean, sources)):
            return math.nan
        if len(directions) > 1 or len({self.measures.unit(mean_source) for mean_source in sources}) > 1:
            return math.nan
        return math.fsum(weight * measure(slot.config, mean_source) for mean_source, weight in slot.weights)


def _ranks(layout: Layout, filler: _Filler) -> dict[Slot, int]:
    contests: dict[tuple[object, ...], dict[Slot, tuple[float, str]]] = {}
    for slot in dict.fromkeys(layout.slots):
        direction, slot_value = filler.sign(slot), filler.value(slot)
        is_reference = slot.config.policy in ("full", *filler.measures.informed)
        if is_reference or not direction or math.isnan(slot_value):
            continue
        number_kind, signed = filler.format(slot)
        shown_text = number(slot_value, number_kind, signed=signed, digits=filler.digits.get(slot))
        contests.setdefault(slot.rivals, {})[slot] = (-direction * slot_value, shown_text)
    slot_ranks: dict[Slot, int] = {}
    for contest_values in contests.values():
        if len({slot.config.policy for slot in contest_values}) > 1:
            slot_ranks |= first_two(contest_values)
    return slot_ranks


def _tests(layout: Layout, filler: _Filler, against: str) -> dict[Slot, Test]:
    """Return the tests of all slots that differ from the reference in a score.

    Slots without differences cannot raise a false alarm, so the correction ignores them.
    """
    measures = filler.measures
    policy_names = list(dict.fromkeys(map(str, measures.cells["policy"])))
    if against not in policy_names:
        hint = nearest(against, policy_names)
        raise UserError(f"--against {against}: not in the run{hint}; it has {', '.join(policy_names)}")
    layout_slots = dict.fromkeys(layout.slots)
    tested_slots = [
        slot
        for slot in layout_slots
        if isinstance(slot, MeasuredSlot)
        and slot.value is not Value.KV
        # A loss next to the same score would be a duplicate test.
        and not (slot.value is Value.LOSS and replace(slot, value=Value.SCORE) in layout_slots)
        and slot.config.policy not in ("full", against)
        and not (against == "full" and filler.is_fidelity(slot))
        and filler.fills(slot)
    ]
    draw_count = max(significance.DRAWS, math.ceil(_RESOLUTION * len(tested_slots) / ALPHA))
    draw_count = min(draw_count, significance.MOST_DRAWS)
    p_values: dict[MeasuredSlot, float] = {}
    gap_signs: dict[MeasuredSlot, float] = {}
    test_results: dict[tuple[Config, Weights], Tested] = {}
    for slot in tested_slots:
        reference_config = slot.config.full if against == "full" else replace(slot.config, policy=against)
        test_key = (slot.config, slot.weights)
        if test_key not in test_results:
            test_results[test_key] = measures.paired(slot.config, reference_config, slot.weights).tested(draw_count)
        if not math.isnan(test_results[test_key].p):
            p_values[slot] = test_results[test_key].p
            score_slot = replace(slot, value=Value.SCORE)
            gap_signs[slot] = math.copysign(1.0, test_results[test_key].gap) * filler.sign(score_slot)
    corrected_p = significance.holm(list(p_values.values()))
    return {
        slot: Test(
            int(gap_signs[slot]) if p_value < ALPHA else 0,
            p_value,
            test_results[slot.config, slot.weights].contexts,
        )
        for slot, p_value in zip(p_values, corrected_p, strict=True)
    }
