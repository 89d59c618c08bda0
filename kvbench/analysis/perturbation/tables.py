"""Tables of a perturbation analysis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from kvbench.analysis.scopes import Row, rows_by_budget, rows_in_scope, scope_heading, scopes
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.table import Column, Interval, Name, Table, TableCell, beside

READING = (
    "l1: L1 distance, for the same query, between a query head's output with the full cache and "
    "with what the policy keeps, after the head's slice of the output projection; mean over heads, "
    "layers and questions. Brackets: 95% intervals, bootstrapped over contexts; omitted below 5 "
    "contexts.",
    "Assumption 3.4 (A3.4): stage 1 collects more than half of the query's attention. Best "
    "possible: the same if stage 1 held the entries with the most attention. Mean bound, and its "
    "ratio to the mean l1: where the assumption holds. 2 of 3: bound 2 in percent of bound 3, "
    "the paper's ratio. Violations: rows with l1 above the bound, of all "
    "rows for bound 1 and of those where the assumption holds for bounds 2 and 3.",
    "Heads won: share of heads with the smaller mean l1. Queries won: share of (question, head) "
    "pairs. Ties count half. Change of l1: relative change of the mean.",
)
_BOUNDS = (1, 2, 3)


def perturbation_tables(
    cells: pd.DataFrame, pairs: pd.DataFrame, shown_pairs: Sequence[tuple[str, str]]
) -> Iterator[Table]:
    """Yield three tables per model, task, length and moment.

    Args:
        cells, pairs: Output of `comparison.cells` and `comparison.pairs`.
        shown_pairs: The pairs to show.
    """
    for scope, scope_rows in scopes(cells):
        title, records = scope_heading(scope), rows_by_budget(scope_rows)
        yield beside(
            (*title, ": output perturbation"),
            [
                *_names(records, "policy", "budget"),
                (Column("mean l1", NumberFormat.NUMBER), _intervals(records, "l1")),
                (
                    Column("of output", NumberFormat.PERCENT),
                    [record["relative"] for record in records],
                ),
                (Column("mass kept", NumberFormat.PERCENT), [record["mass"] for record in records]),
            ],
        )
        yield beside(
            (*title, ": Assumption 3.4 and bounds"),
            [
                *_names(records, "policy", "budget"),
                (Column("A3.4 holds", NumberFormat.PERCENT), _intervals(records, "assumption")),
                (
                    Column("best possible", NumberFormat.PERCENT),
                    [record["assumption_top"] for record in records],
                ),
                *_of_bounds(records, "bound", "mean bound", NumberFormat.NUMBER),
                (
                    Column("2 of 3", NumberFormat.PERCENT, "mean bound"),
                    [record["bound_ratio"] for record in records],
                ),
                *_of_bounds(records, "tightness", "ratio to l1", NumberFormat.TIMES),
                *_of_bounds(records, "violations", "violations", NumberFormat.COUNT),
            ],
        )
        records = rows_by_budget(rows_in_scope(pairs, scope))
        records = [record for record in records if (record["policy"], record["against"]) in shown_pairs]
        if records:
            change = Column("change of l1", NumberFormat.PERCENT, better="lower", signed=True)
            yield beside(
                (*title, ": who perturbs less"),
                [
                    *_names(records, "budget", "policy", "against"),
                    *(
                        (
                            Column(measure.replace("_", " "), NumberFormat.PERCENT),
                            _intervals(records, measure),
                        )
                        for measure in ("heads_won", "queries_won")
                    ),
                    (change, _intervals(records, "change")),
                ],
            )


def _names(records: Sequence[Row], *columns: str) -> list[tuple[Column, list[TableCell]]]:
    return [(Column(column), [Name(record[column]) for record in records]) for column in columns]


def _of_bounds(
    records: Sequence[Row], measure: str, group: str, column_format: NumberFormat
) -> list[tuple[Column, list[TableCell]]]:
    """Return one column per bound."""
    return [
        (
            Column(f"bound {bound_index}", column_format, group),
            [record[f"{measure}{bound_index}"] for record in records],
        )
        for bound_index in _BOUNDS
    ]


def _intervals(records: Sequence[Row], measure: str) -> list[TableCell]:
    """Return means with their intervals, if informative."""
    return [
        Interval(record[measure], *(record[f"{measure}{suffix}"] for suffix in ("_lo", "_hi")))
        if math.isfinite(record[f"{measure}_lo"])
        else record[measure]
        for record in records
    ]
