"""Comparison of two runs as tables, sentences, Markdown and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal
from xml.etree import ElementTree

from kvbench.regression.compare import POINT, Comparison, Outcome, Regression
from kvbench.regression.pairs import CellLabel
from kvbench.report.frames import FIDELITY_NAMES, metric_title
from kvbench.tables.numbers import NumberFormat, number, score_kind
from kvbench.tables.outputs import markdown, markdown_text, plain_text
from kvbench.tables.table import Column, Interval, Name, Phrase, Table, TableCell, beside
from kvbench.tables.text import counted, plain, tokens

_MOST = 6
"""Maximum number of cells named in a sentence."""
_CHANGED = (
    Outcome.FAILED,
    Outcome.UNPROVEN,
    Outcome.ALLOWED,
    Outcome.IMPROVED,
    Outcome.HIGHER,
)
_SAID = {
    Outcome.FAILED: "dropped significantly and by more than allowed",
    Outcome.UNPROVEN: "dropped by more than allowed, but not significantly",
    Outcome.ALLOWED: "dropped within the allowance",
    Outcome.IMPROVED: "improved significantly",
    Outcome.HIGHER: "not worse",
    Outcome.SAME: "unchanged",
}


def verdict(result: Regression) -> str:
    """Return the overall result in a few words."""
    if result.failed:
        return f"regression in {counted(len(result.of(Outcome.FAILED)), 'cell')}"
    if not result.complete:
        return "not everything could be compared"
    return "no regression shown"


def complaint(result: Regression) -> str:
    """Return the overall result in one line, with the first affected cell."""
    worst_cells = result.of(Outcome.FAILED) or result.of(Outcome.NOT_COMPARED)
    if not worst_cells:
        return f"{verdict(result)}: the runs have no common cells"
    place = worst_cells[0].pair.place
    reason = worst_cells[0].reason or change_text(worst_cells[0])
    return f"{verdict(result)}, first {place.task}, {plain_text(place.policy_title)} at {place.budget}: {reason}"


def tables(result: Regression, outcomes: Sequence[Outcome] = _CHANGED) -> list[Table]:
    """Return the compared cells as tables, one per model, scale, direction and metric of fidelity.

    Args:
        result: The comparison.
        outcomes: Outcomes of the cells to include, in this order; by default those with changed responses.
    """
    selected_cells = [comparison for outcome in outcomes for comparison in result.of(outcome)]
    cells_by_table: dict[tuple[str, bool, bool, str], list[Comparison]] = {}
    for comparison in selected_cells:
        metric = comparison.pair.metric if comparison.pair.metric in FIDELITY_NAMES else ""
        table_key = (comparison.pair.place.model, comparison.unit, comparison.pair.higher_is_better, metric)
        cells_by_table.setdefault(table_key, []).append(comparison)
    return [_table(result, *table_key, table_cells) for table_key, table_cells in cells_by_table.items()]


def sentences(result: Regression) -> Iterator[Phrase]:
    """Yield explanations of the tables, the most important first."""
    drop, dropped = _drop_words(result)
    compared = result.compared
    outcome_counts = {outcome: len(result.of(outcome)) for outcome in _SAID}
    outcome_text = "; ".join(
        f"{cell_count} {_SAID[outcome].replace('dropped', dropped)}"
        for outcome, cell_count in outcome_counts.items()
        if cell_count
    )
    shared_count = sum(comparison.pair.responses for comparison in compared)
    baseline_count = sum(comparison.pair.shared.known for comparison in compared)
    responses_text = counted(shared_count, "response") + f" of the baseline's {baseline_count}" * (
        shared_count < baseline_count
    )
    yield (
        f"Compared {len(compared)} of {counted(len(result.cells), 'cell')} "
        f"on {responses_text}{': ' + outcome_text if outcome_text else ''}."
    )
    yield from _unpaired(result)
    if compared:
        yield from _visible(result, drop)
    if result.made:
        setting_phrases = [
            (
                Name(setting_name),
                " ",
                Name(baseline_value or "none"),
                " → ",
                Name(run_value or "none"),
            )
            for setting_name, (baseline_value, run_value) in result.made.items()
        ]
        yield ("Settings that differ: ", *_with_commas(setting_phrases), ".")
    if result.extra:
        yield f"The baseline lacks {counted(result.extra, 'cell')} of the run."
    if any(comparison.outcome in _CHANGED for comparison in compared):
        units = {comparison.unit for comparison in compared}
        limit = points(result.max_drop) if True in units else f"{result.max_drop:g} percent of the baseline's"
        yield (
            f"A cell fails if its score {drop}s by more than {limit} and the corrected p is below "
            f"{result.alpha:g}. Changes are paired by response, brackets are 95% intervals, and p is corrected for the "
            f"{counted(result.tested, 'cell')} whose scores differ (Holm)."
            + " For scores outside [0, 1], the limit is in percent of the baseline's score."
            * (len(units) > 1)
        )


def points(count: float) -> str:
    """Return a number of points, such as `1 point` or `0.5 points`."""
    return f"{count:g} point{'s' * (count != 1)}"


def markdown_page(result: Regression, baseline_name: str, run_name: str) -> str:
    """Return the comparison as Markdown, for the summary of a CI job."""
    blocks = [
        f"## kvbench: {verdict(result)}",
        markdown_text((Name(run_name), " vs ", Name(baseline_name), ".")),
        *map(markdown, tables(result)),
        *map(markdown_text, sentences(result)),
    ]
    if result.of(Outcome.SAME):
        same_tables = "\n\n".join(map(markdown, tables(result, (Outcome.SAME,))))
        blocks += ["<details><summary>Unchanged cells</summary>", same_tables, "</details>"]
    return "\n\n".join(blocks) + "\n"


def as_json(result: Regression, exit_code: int) -> dict[str, Any]:
    """Return the comparison as JSON-serialisable data; numbers that are not finite become null."""
    return {
        "exit_code": exit_code,
        "verdict": verdict(result),
        "max_drop": result.max_drop,
        "alpha": result.alpha,
        "cells": [_record(comparison) for comparison in result.cells],
        "not_in_baseline": result.extra,
        "made_differently": {
            setting_name: {"baseline": baseline_value, "run": run_value}
            for setting_name, (baseline_value, run_value) in result.made.items()
        },
    }


def place_text(place: CellLabel) -> str:
    """Return policy, budget, moment, length and seed of a cell in one line."""
    moment_text = f", {place.moment}" if place.moment else ""
    return f"{plain_text(place.policy_title)} at {place.budget}{moment_text}, {tokens(place.length)}, seed {place.seed}"


def change_text(cell: Comparison) -> str:
    """Return the change of a cell's score in one line."""
    kind = score_kind(unit_scaled=cell.unit)
    baseline, run_score = (number(score, kind) for score in (cell.before, cell.after))
    return (
        f"{baseline} -> {run_score} ({number(cell.change.mean, kind, signed=True)}, corrected p "
        f"{number(cell.p_corrected, NumberFormat.P_VALUE)}) on {counted(cell.contexts, 'context')}"
    )


def _table(
    result: Regression,
    model_name: str,
    unit_scaled: bool,
    higher_is_better: bool,
    metric: str,
    comparisons: list[Comparison],
) -> Table:
    number_kind = score_kind(unit_scaled=unit_scaled)
    better_direction: Literal["higher", "lower"] = "higher" if higher_is_better else "lower"
    places = [comparison.pair.place for comparison in comparisons]
    table_columns: list[tuple[Column, list[TableCell]]] = [
        (Column("result"), [comparison.outcome.value for comparison in comparisons]),
        *place_columns(places, [comparison.pair.place for comparison in result.cells]),
    ]
    change_cells: list[TableCell] = [_interval(comparison) for comparison in comparisons]
    visible_cells: list[TableCell] = [
        comparison.visible if math.isfinite(comparison.visible) else _NO_DROP * math.isinf(comparison.visible) or None
        for comparison in comparisons
    ]
    table_columns += [
        (Column("baseline", number_kind), [comparison.before for comparison in comparisons]),
        (Column("run", number_kind), [comparison.after for comparison in comparisons]),
        (Column("change", number_kind, better=better_direction, signed=True), change_cells),
        (
            Column("corrected p", NumberFormat.P_VALUE),
            [comparison.p_corrected for comparison in comparisons],
        ),
        (
            Column("contexts", NumberFormat.COUNT),
            [comparison.contexts for comparison in comparisons],
        ),
        (Column(f"minimum detectable {'drop' if higher_is_better else 'rise'}", number_kind), visible_cells),
    ]
    metric_text = f", {metric_title(metric)}" * bool(metric)
    table_title = (Name(model_name), metric_text, "" if higher_is_better else ", lower is better")
    return beside(table_title, table_columns, groups=[comparison.outcome.value for comparison in comparisons])


_NO_DROP = "none"


def place_columns(
    table_places: Sequence[CellLabel], all_places: Sequence[CellLabel]
) -> list[tuple[Column, list[TableCell]]]:
    """Return the columns that identify cells.

    Args:
        table_places: The cells of the table.
        all_places: All cells; moment, length and seed get a column only if they vary.
    """
    table_columns: list[tuple[Column, list[TableCell]]] = []
    for field_name in ("task", "policy", "budget", "moment", "length", "seed"):
        field_values = {getattr(place, field_name) for place in all_places} - {""}
        if field_name in ("task", "policy", "budget") or len(field_values) > 1:
            head_column = Column(field_name, align="left" if field_name in ("task", "policy") else "right")
            column_cells: list[TableCell] = [Name(str(getattr(place, field_name))) for place in table_places]
            if field_name == "policy":
                column_cells = [place.policy_title for place in table_places]
            table_columns.append((head_column, column_cells))
    return table_columns


def _interval(comparison: Comparison) -> Interval:
    if comparison.outcome is Outcome.SAME:
        return Interval(0.0)
    return Interval(comparison.change.mean, comparison.change.lo, comparison.change.hi)


def _unpaired(result: Regression) -> Iterator[Phrase]:
    """Yield a sentence per reason why cells were not compared."""
    for outcome, label in (
        (Outcome.NOT_COMPARED, "Not compared"),
        (Outcome.NO_BASELINE, "Nothing to compare with"),
    ):
        cells_by_reason: dict[str, list[Comparison]] = {}
        for comparison in result.of(outcome):
            cells_by_reason.setdefault(comparison.reason, []).append(comparison)
        for reason, cells in cells_by_reason.items():
            phrases: list[Phrase] = [
                (entry.pair.place.policy_title, " at ", Name(entry.pair.place.budget), " on ",
                 Name(entry.pair.place.task))
                for entry in cells[:_MOST]
            ]  # fmt: skip
            rest = f" and {len(cells) - _MOST} more" if len(cells) > _MOST else ""
            yield (f"{label} ({counted(len(cells), 'cell')}): ", *_with_commas(phrases), rest, ": ",
                   reason, ".")  # fmt: skip


def _drop_words(result: Regression) -> tuple[str, str]:
    """Return what a change for the worse is called: a drop, or a rise if lower is better in all cells."""
    is_lower_better = not any(comparison.pair.higher_is_better for comparison in result.compared)
    return ("rise", "rose") if is_lower_better else ("drop", "dropped")


def _visible(result: Regression, drop: str) -> Iterator[Phrase]:
    """Yield the minimum detectable drops; a pass is no evidence against smaller ones."""
    # `kvbench power` plans for scores only.
    has_scores = any(comparison.pair.metric not in FIDELITY_NAMES for comparison in result.compared)
    blind = [comparison for comparison in result.compared if math.isinf(comparison.visible)]
    if blind:
        yield (
            f"For {counted(len(blind), 'cell')}, a pass is uninformative: too few contexts can get worse for any "
            f"{drop} to be significant. Use more samples",
            (" (", Name("kvbench power"), " estimates how many), or a budget at which more answers are correct.")
            if has_scores
            else ".",
        )  # fmt: skip
    for unit in (True, False):
        coarse_drops = [
            comparison.visible
            for comparison in result.compared
            if comparison.unit is unit and comparison.allowed < comparison.visible < math.inf
        ]
        if coarse_drops:
            number_kind = score_kind(unit_scaled=unit)
            ends = list(dict.fromkeys(number(drop, number_kind) for drop in (min(coarse_drops), max(coarse_drops))))
            by_cell = ", depending on the cell," * (len(ends) > 1)
            yield (
                f"A {drop} of less than {' to '.join(ends)}{' points' * unit}{by_cell} can remain undetected with so "
                "few samples", (" (", Name("kvbench power"), " estimates how many are needed).") if has_scores else ".",
            )  # fmt: skip


def _with_commas(phrases: Iterable[Phrase]) -> list[Phrase]:
    return [piece for phrase in phrases for piece in (", ", phrase)][1:]


def _record(comparison: Comparison) -> dict[str, Any]:
    numbers = {
        "baseline": comparison.before,
        "run": comparison.after,
        "change": comparison.change.mean,
        "change_lo": comparison.change.lo,
        "change_hi": comparison.change.hi,
        "p": comparison.p,
        "p_corrected": comparison.p_corrected,
        "allowed_drop": comparison.allowed,
        "visible_drop": comparison.visible,
    }
    return {
        **asdict(comparison.pair.place),
        "metric": comparison.pair.metric,
        "higher_is_better": comparison.pair.higher_is_better,
        "outcome": comparison.outcome.value,
        "reason": comparison.reason,
        "contexts": comparison.contexts,
        "responses": comparison.pair.responses,
        **{field_name: value if math.isfinite(value) else None for field_name, value in numbers.items()},
    }


def allowance(comparison: Comparison) -> str:
    """Return the allowed drop of a cell as text."""
    if comparison.unit:
        return points(comparison.allowed / POINT)
    return number(comparison.allowed, NumberFormat.NUMBER)


_CHILD = {
    Outcome.FAILED: "failure",
    Outcome.NOT_COMPARED: "error",
    Outcome.NO_BASELINE: "skipped",
}


def junit(result: Regression, suite_name: str) -> bytes:
    """Return a comparison as JUnit XML, a test case per cell of the baseline.

    A significant drop that is larger than allowed is a failure. A cell that cannot be compared is an error, or skipped
    if the baseline has no score.
    """
    root_element = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root_element, "testsuite", name=plain(suite_name))
    suite.set("tests", str(len(result.cells)))
    for attribute, outcome in (
        ("failures", Outcome.FAILED),
        ("errors", Outcome.NOT_COMPARED),
        ("skipped", Outcome.NO_BASELINE),
    ):
        suite.set(attribute, str(len(result.of(outcome))))
    for comparison in result.cells:
        _add_case(suite, comparison)
    ElementTree.indent(root_element)
    xml_text = ElementTree.tostring(root_element, encoding="utf-8", xml_declaration=True)
    return bytes(xml_text) + b"\n"


def _add_case(suite: ElementTree.Element, comparison: Comparison) -> None:
    place = comparison.pair.place
    # XML forbids control characters, even escaped; `plain` spells them out.
    case_element = ElementTree.SubElement(
        suite,
        "testcase",
        classname=plain(f"{place.model}.{place.task}"),
        name=plain(place_text(place)),
    )
    message = plain(comparison.reason or f"{comparison.outcome}: {change_text(comparison)}")
    child_tag = _CHILD.get(comparison.outcome)
    if child_tag is None:
        ElementTree.SubElement(case_element, "system-out").text = message
        return
    element = ElementTree.SubElement(case_element, child_tag, message=message)
    if comparison.outcome is Outcome.FAILED:
        drop = "drop" if comparison.pair.higher_is_better else "rise"
        element.text = f"allowed: a {drop} of {allowance(comparison)}"
