"""A comparison of two runs for readers: tables, sentences, Markdown and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal

from kvbench.regression.compare import POINT, Comparison, Outcome, Regression
from kvbench.regression.pairs import Place
from kvbench.report.numbers import Kind, number, score_kind
from kvbench.report.outputs import markdown, markdown_text
from kvbench.report.table import Cell, Column, Interval, Name, Phrase, Table, beside
from kvbench.report.text import counted, tokens

_MOST = 6
"""Cells that a sentence names."""
_CHANGED = (
    Outcome.FAILED,
    Outcome.UNPROVEN,
    Outcome.ALLOWED,
    Outcome.IMPROVED,
    Outcome.HIGHER,
)
_SAID = {
    Outcome.FAILED: "dropped by more than is allowed, significantly",
    Outcome.UNPROVEN: "dropped by more than is allowed, which may be chance",
    Outcome.ALLOWED: "dropped within the allowance",
    Outcome.IMPROVED: "improved significantly",
    Outcome.HIGHER: "not worse",
    Outcome.SAME: "unchanged",
}


def verdict(found: Regression) -> str:
    """The whole comparison in a few words."""
    if found.failed:
        return f"regression in {counted(len(found.of(Outcome.FAILED)), 'cell')}"
    if not found.complete:
        return "not everything could be compared"
    return "no regression shown"


def complaint(found: Regression) -> str:
    """What is wrong, in one line that names the first cell."""
    worst = found.of(Outcome.FAILED) or found.of(Outcome.NOT_COMPARED)
    if not worst:
        return f"{verdict(found)}: the runs have no cell in common"
    place = worst[0].pair.place
    what = worst[0].reason or change_text(worst[0])
    return f"{verdict(found)}, first {place.task}, {place.policy} at {place.budget}: {what}"


def tables(found: Regression, outcomes: Sequence[Outcome] = _CHANGED) -> list[Table]:
    """The compared cells as tables, one per model, scale and direction of scores.

    Args:
        found: The comparison.
        outcomes: The cells to show, in this order; by default those with a response that changed.
    """
    cells = [cell for outcome in outcomes for cell in found.of(outcome)]
    parts: dict[tuple[str, bool, bool], list[Comparison]] = {}
    for cell in cells:
        key = (cell.pair.place.model, cell.unit, cell.pair.higher_is_better)
        parts.setdefault(key, []).append(cell)
    return [_table(found, *key, part) for key, part in parts.items()]


def sentences(found: Regression) -> Iterator[Phrase]:
    """What a reader must know besides the tables, the most important first."""
    compared = found.compared
    counts = {outcome: len(found.of(outcome)) for outcome in _SAID}
    said = "; ".join(f"{n} {_SAID[outcome]}" for outcome, n in counts.items() if n)
    shared = sum(cell.pair.responses for cell in compared)
    known = sum(cell.pair.shared.known for cell in compared)
    responses = counted(shared, "response") + f" of the baseline's {known}" * (shared < known)
    yield (
        f"Compared {len(compared)} of {counted(len(found.cells), 'cell')} "
        f"on {responses}{': ' + said if said else ''}."
    )
    yield from _unpaired(found)
    if compared:
        yield from _visible(found)
    if found.made:
        parts = [
            (Name(name), " ", Name(one or "none"), " → ", Name(two or "none"))
            for name, (one, two) in found.made.items()
        ]
        yield ("Made differently: ", *_with_commas(parts), ".")
    if found.extra:
        yield f"The baseline lacks {counted(found.extra, 'cell')} of the run."
    if any(cell.outcome in _CHANGED for cell in compared):
        yield (
            f"A cell fails if its score drops by more than {points(found.max_drop)} and the "
            f"corrected p is below {found.alpha:g}. Changes are paired by response, brackets are "
            "95% intervals, and p is corrected for the "
            f"{counted(found.tested, 'cell')} whose scores differ (Holm)."
            + " Where scores are not in [0, 1], percent of the baseline's score replace points."
            * (not all(cell.unit for cell in compared))
        )


def points(count: float) -> str:
    """A number of points, such as `1 point` or `0.5 points`."""
    return f"{count:g} point{'s' * (count != 1)}"


def markdown_page(found: Regression, baseline: str, run: str) -> str:
    """The comparison as Markdown, for the summary of a CI job.

    Args:
        found: The comparison.
        baseline: What the baseline is called.
        run: What the run is called.
    """
    blocks = [
        f"## kvbench: {verdict(found)}",
        markdown_text((Name(run), " against ", Name(baseline), ".")),
        *map(markdown, tables(found)),
        *map(markdown_text, sentences(found)),
    ]
    if found.of(Outcome.SAME):
        same = "\n\n".join(map(markdown, tables(found, (Outcome.SAME,))))
        blocks += ["<details><summary>Unchanged cells</summary>", same, "</details>"]
    return "\n\n".join(blocks) + "\n"


def as_json(found: Regression, code: int) -> dict[str, Any]:
    """The comparison as JSON can hold it: what is not a finite number is null.

    Args:
        found: The comparison.
        code: The exit code.
    """
    return {
        "exit_code": code,
        "verdict": verdict(found),
        "max_drop": found.max_drop,
        "alpha": found.alpha,
        "cells": [_record(cell) for cell in found.cells],
        "not_in_baseline": found.extra,
        "made_differently": {
            name: {"baseline": one, "run": two} for name, (one, two) in found.made.items()
        },
    }


def place_text(place: Place) -> str:
    """A cell's policy, budget, moment, length and seed in one line."""
    moment = f", {place.moment}" if place.moment else ""
    return f"{place.policy} at {place.budget}{moment}, {tokens(place.length)}, seed {place.seed}"


def change_text(cell: Comparison) -> str:
    """What became of a cell's score, in one line."""
    kind = score_kind(unit=cell.unit)
    before, after = (number(x, kind) for x in (cell.before, cell.after))
    return (
        f"{before} -> {after} ({number(cell.change.mean, kind, signed=True)}, corrected p "
        f"{number(cell.p_corrected, Kind.NUMBER)}) on {counted(cell.contexts, 'context')}"
    )


def _table(
    found: Regression, model: str, unit: bool, higher: bool, cells: list[Comparison]
) -> Table:
    kind = score_kind(unit=unit)
    better: Literal["higher", "lower"] = "higher" if higher else "lower"
    places = [cell.pair.place for cell in cells]
    columns: list[tuple[Column, list[Cell]]] = [
        (Column("result"), [cell.outcome.value for cell in cells]),
        *place_columns(places, [cell.pair.place for cell in found.cells]),
    ]
    changes: list[Cell] = [_interval(cell) for cell in cells]
    visible: list[Cell] = [
        cell.visible if math.isfinite(cell.visible) else _NONE * math.isinf(cell.visible) or None
        for cell in cells
    ]
    columns += [
        (Column("baseline", kind), [cell.before for cell in cells]),
        (Column("run", kind), [cell.after for cell in cells]),
        (Column("change", kind, better=better, signed=True), changes),
        (Column("corrected p", Kind.NUMBER), [cell.p_corrected for cell in cells]),
        (Column("contexts", Kind.COUNT), [cell.contexts for cell in cells]),
        (Column("sees drops from", kind), visible),
    ]
    title = (Name(model), "" if higher else ", lower is better")
    return beside(title, columns, groups=[cell.outcome.value for cell in cells])


_NONE = "none"


def place_columns(
    places: Sequence[Place], everywhere: Sequence[Place]
) -> list[tuple[Column, list[Cell]]]:
    """Columns that say what cells measure.

    Args:
        places: The cells of a table.
        everywhere: All cells; moment, length and seed have a column only if these differ in them.
    """
    columns: list[tuple[Column, list[Cell]]] = []
    for name in ("task", "policy", "budget", "moment", "length", "seed"):
        values = {getattr(place, name) for place in everywhere} - {""}
        if name in ("task", "policy", "budget") or len(values) > 1:
            head = Column(name, align="left" if name in ("task", "policy") else "right")
            columns.append((head, [Name(str(getattr(place, name))) for place in places]))
    return columns


def _interval(cell: Comparison) -> Interval:
    if cell.outcome is Outcome.SAME:
        return Interval(0.0)
    return Interval(cell.change.mean, cell.change.lo, cell.change.hi)


def _unpaired(found: Regression) -> Iterator[Phrase]:
    """Why cells were not compared: a sentence per reason."""
    for outcome, said in (
        (Outcome.NOT_COMPARED, "Not compared"),
        (Outcome.NO_BASELINE, "Nothing to compare with"),
    ):
        reasons: dict[str, list[Comparison]] = {}
        for cell in found.of(outcome):
            reasons.setdefault(cell.reason, []).append(cell)
        for reason, cells in reasons.items():
            names: list[Phrase] = [
                (Name(c.pair.place.policy), " at ", Name(c.pair.place.budget), " on ",
                 Name(c.pair.place.task))
                for c in cells[:_MOST]
            ]  # fmt: skip
            more = f" and {len(cells) - _MOST} more" if len(cells) > _MOST else ""
            yield (f"{said} ({counted(len(cells), 'cell')}): ", *_with_commas(names), more, ": ",
                   reason, ".")  # fmt: skip


def _visible(found: Regression) -> Iterator[Phrase]:
    """Which drops the samples could have shown at all: a pass is no evidence against others."""
    blind = [cell for cell in found.compared if math.isinf(cell.visible)]
    if blind:
        yield (
            f"Of {counted(len(blind), 'cell')} a pass says nothing: too few contexts can get worse "
            "for any drop to be significant. Use more samples (", Name("kvbench power"),
            " says how many), or a budget at which more answers are right.",
        )  # fmt: skip
    for unit in (True, False):
        coarse = [
            cell.visible
            for cell in found.compared
            if cell.unit is unit and cell.allowed < cell.visible < math.inf
        ]
        if coarse:
            kind = score_kind(unit=unit)
            ends = list(dict.fromkeys(number(x, kind) for x in (min(coarse), max(coarse))))
            by_cell = ", depending on the cell," * (len(ends) > 1)
            yield (
                f"A drop of less than {' to '.join(ends)}{' points' * unit}{by_cell} can go unseen "
                "with so few samples (", Name("kvbench power"), " says how many see it).",
            )  # fmt: skip


def _with_commas(parts: Iterable[Phrase]) -> list[Phrase]:
    return [piece for part in parts for piece in (", ", part)][1:]


def _record(cell: Comparison) -> dict[str, Any]:
    numbers = {
        "baseline": cell.before,
        "run": cell.after,
        "change": cell.change.mean,
        "change_lo": cell.change.lo,
        "change_hi": cell.change.hi,
        "p": cell.p,
        "p_corrected": cell.p_corrected,
        "allowed_drop": cell.allowed,
        "visible_drop": cell.visible,
    }
    return {
        **asdict(cell.pair.place),
        "metric": cell.pair.metric,
        "higher_is_better": cell.pair.higher_is_better,
        "outcome": cell.outcome.value,
        "reason": cell.reason,
        "contexts": cell.contexts,
        "responses": cell.pair.responses,
        **{name: x if math.isfinite(x) else None for name, x in numbers.items()},
    }


def allowance(cell: Comparison) -> str:
    """The drop that a cell is allowed, in one word."""
    if cell.unit:
        return points(cell.allowed / POINT)
    return number(cell.allowed, Kind.NUMBER)
