"""Fills a layout with the figures of runs: scores, ranks, and marks of significance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvbench.errors import UserError, nearest
from kvbench.layouts.measures import Config, Measures, Source, Tested, Weights
from kvbench.layouts.notes import Tests, notes
from kvbench.layouts.slots import Computed, Layout, Measured, Slot
from kvbench.layouts.value import Value
from kvbench.regression import significance
from kvbench.report.numbers import Kind, number, score_kind
from kvbench.report.table import Cell, Column, Graded, Row, Table, first_two

ALPHA = 0.05
_RESOLUTION = 10
"""Draws per 1 / level: enough that the smallest p that can be drawn is far below the level."""


@dataclass(frozen=True)
class Test:
    """A paired test of a slot against the reference.

    Attributes:
        better: +1 if it is significantly better, -1 if it is significantly worse, otherwise 0.
        p: The p-value, corrected for all tests of the table.
        contexts: How many contexts both have.
    """

    better: int = 0
    p: float = math.nan
    contexts: int = 0


def fill(layout: Layout, measures: Measures, against: str = "") -> Table:
    """Fill a layout.

    The best number of those that compete (the same thing at the same budget, by policy) has rank
    1, the second best rank 2; the full cache does not compete. A slot that the runs do not fill is
    a dash, and a note says what is missing.

    Args:
        layout: The layout.
        measures: The runs.
        against: The policy that every score is tested against at the same budget, `full` for the
            full cache, or an empty string for no tests.

    Raises:
        UserError: The runs do not have the policy to test against.
    """
    filler = _Filler(measures)
    tests = _tests(layout, filler, against) if against else {}
    ranks = _ranks(layout, filler)

    def cell(slot: Slot | None) -> Cell:
        if slot is None or math.isnan(value := filler.value(slot)):
            return None
        kind, signed = filler.format(slot)
        test = tests.get(slot, Test())
        return Graded(value, kind, signed, ranks.get(slot, 0), test.better, test.p)

    heads = tuple(Column(title, group=group, align="right") for title, group in layout.heads)
    rows = tuple(Row((*row.lead, *map(cell, row.slots)), row.group) for row in layout.rows)
    contexts = max((test.contexts for test in tests.values()), default=0)
    tested = Tests(against, len(tests), ALPHA, contexts)
    below = notes(layout, measures, ranked=bool(ranks), tested=tested)
    return Table(layout.title, (*layout.lead, *heads), rows, tuple(below))


class _Filler:
    """What slots hold."""

    def __init__(self, measures: Measures) -> None:
        self.measures = measures

    def fills(self, slot: Slot) -> bool:
        """Whether the runs have a figure for a slot."""
        return not math.isnan(self.value(slot))

    def value(self, slot: Slot) -> float:
        """The figure of a slot, scores and shares as the runs record them; NaN without one."""
        if isinstance(slot, Computed):
            numbers = [self._points(one) for one in slot.of]
            if any(map(math.isnan, numbers)):
                return math.nan
            try:
                return slot.compute(numbers) / 100
            except ZeroDivisionError:  # a loss against a full cache that scores 0
                return math.nan
        if slot.value is Value.KV:
            return self._mean(slot, self.measures.held)
        score = self._mean(slot, self.measures.score)
        if slot.value is Value.SCORE:
            return score
        full = self._mean(replace(slot, config=slot.config.full), self.measures.score)
        if slot.value is Value.DIFF:
            both = not math.isnan(score) and not math.isnan(full)
            pairs = self.measures.paired(slot.config, slot.config.full, slot.weights)
            return pairs.gap if both else math.nan
        change = score / full - 1 if full else math.nan
        return -change if slot.value is Value.LOSS else change

    def format(self, slot: Slot) -> tuple[Kind, bool]:
        """How the figure of a slot is written, and whether with a sign."""
        if isinstance(slot, Computed):
            return Kind.PERCENT, slot.signed
        if slot.value is Value.KV:
            return Kind.PERCENT, False
        if slot.value in (Value.RELATIVE, Value.LOSS):
            return Kind.PERCENT, slot.value is Value.RELATIVE
        unit = all(self.measures.unit(source) for source, _ in slot.weights)
        return score_kind(unit=unit), slot.value is Value.DIFF

    def sign(self, slot: Slot) -> int:
        """+1 if larger figures of a slot are better, -1 if smaller ones are, 0 if neither is."""
        if isinstance(slot, Computed):
            return {"higher": 1, "lower": -1}.get(slot.better, 0)
        if slot.value is Value.KV:
            return 0
        up = self.measures.higher_is_better(slot.config, slot.weights[0][0])
        return (1 if up else -1) * (-1 if slot.value is Value.LOSS else 1)

    def _points(self, slot: Slot) -> float:
        return 100 * self.value(slot)

    def _mean(self, slot: Measured, measure: Callable[[Config, Source], float]) -> float:
        """The slot's mean; NaN if a source lacks a figure, or if they differ in kind."""
        sources = [source for source, _ in slot.weights]
        directions = {self.measures.higher_is_better(slot.config, one) for one in sources}
        if len(directions) > 1 or len({self.measures.unit(one) for one in sources}) > 1:
            return math.nan
        return math.fsum(weight * measure(slot.config, one) for one, weight in slot.weights)


def _ranks(layout: Layout, filler: _Filler) -> dict[Slot, int]:
    contests: dict[tuple[object, ...], dict[Slot, tuple[float, str]]] = {}
    for slot in dict.fromkeys(layout.slots):
        sign, value = filler.sign(slot), filler.value(slot)
        if slot.config.policy == "full" or not sign or math.isnan(value):
            continue
        kind, signed = filler.format(slot)
        shown = number(value, kind, signed=signed)
        contests.setdefault(slot.rivals, {})[slot] = (-sign * value, shown)
    ranks: dict[Slot, int] = {}
    for values in contests.values():
        if len({slot.config.policy for slot in values}) > 1:
            ranks |= first_two(values)
    return ranks


def _tests(layout: Layout, filler: _Filler, against: str) -> dict[Slot, Test]:
    """The tests of all slots that differ from the reference in a score.

    Where nothing differs no false alarm can be raised, so the correction leaves these slots out.
    """
    measures = filler.measures
    policies = list(dict.fromkeys(map(str, measures.cells["policy"])))
    if against not in policies:
        hint = nearest(against, policies)
        raise UserError(f"--against {against}: not in the run{hint}; it has {', '.join(policies)}")
    asked = dict.fromkeys(layout.slots)
    slots = [
        slot
        for slot in asked
        if isinstance(slot, Measured)
        and slot.value is not Value.KV
        # A loss beside its own score would be the same test once more.
        and not (slot.value is Value.LOSS and replace(slot, value=Value.SCORE) in asked)
        and slot.config.policy not in ("full", against)
        and filler.fills(slot)
    ]
    draws = max(significance.DRAWS, math.ceil(_RESOLUTION * len(slots) / ALPHA))
    draws = min(draws, significance.MOST_DRAWS)
    p: dict[Measured, float] = {}
    signs: dict[Measured, float] = {}
    tests: dict[tuple[Config, Weights], Tested] = {}
    for slot in slots:
        other = slot.config.full if against == "full" else replace(slot.config, policy=against)
        key = (slot.config, slot.weights)
        if key not in tests:
            tests[key] = measures.paired(slot.config, other, slot.weights).tested(draws)
        if not math.isnan(tests[key].p):
            p[slot] = tests[key].p
            plain = replace(slot, value=Value.SCORE)
            signs[slot] = math.copysign(1.0, tests[key].gap) * filler.sign(plain)
    corrected = significance.holm(list(p.values()))
    return {
        slot: Test(
            int(signs[slot]) if one < ALPHA else 0, one, tests[slot.config, slot.weights].contexts
        )
        for slot, one in zip(p, corrected, strict=True)
    }
