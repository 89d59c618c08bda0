"""The tables of a perturbation analysis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from kvbench.analysis.scopes import Row, by_budget, scopes, title_of, within
from kvbench.report.numbers import Kind
from kvbench.report.table import Cell, Column, Interval, Name, Table, beside

READING = (
    "l1: L1 distance, for the same query, between a query head's output with the full cache and "
    "with what the policy keeps, after the head's slice of the output projection; mean over heads, "
    "layers and questions. Brackets: 95% intervals, bootstrapped over contexts; omitted below 5 "
    "contexts.",
    "Assumption 3.4 (A3.4): stage 1 collects more than half of the query's attention. Best "
    "possible: the same if stage 1 held the entries with the most attention. Ratio: mean bound "
    "over mean l1 where the assumption holds. Violations: rows with l1 above the bound, of all "
    "rows for bound 1 and of those where the assumption holds for bounds 2 and 3.",
    "Heads won: share of heads with the smaller mean l1. Queries won: share of (question, head) "
    "pairs. Ties count half. Change of l1: relative change of the mean.",
)
_BOUNDS = (1, 2, 3)


def perturbation_tables(
    cells: pd.DataFrame, pairs: pd.DataFrame, shown: Sequence[tuple[str, str]]
) -> Iterator[Table]:
    """The tables of a perturbation analysis, three for each model, task, length and moment.

    Args:
        cells, pairs: What `compare` makes.
        shown: The pairs to show.
    """
    for scope, part in scopes(cells):
        title, rows = title_of(scope), by_budget(part)
        yield beside(
            (*title, ": output perturbation"),
            [
                *_names(rows, "policy", "budget"),
                (Column("mean l1", Kind.NUMBER), _intervals(rows, "l1")),
                (Column("of output", Kind.PERCENT), [row["relative"] for row in rows]),
                (Column("mass kept", Kind.PERCENT), [row["mass"] for row in rows]),
            ],
        )
        yield beside(
            (*title, ": Assumption 3.4 and bounds"),
            [
                *_names(rows, "policy", "budget"),
                (Column("A3.4 holds", Kind.PERCENT), _intervals(rows, "assumption")),
                (Column("best possible", Kind.PERCENT), [row["assumption_top"] for row in rows]),
                *_of_bounds(rows, "tightness", "ratio", Kind.TIMES),
                *_of_bounds(rows, "violations", "violations", Kind.COUNT),
            ],
        )
        rows = by_budget(within(pairs, scope))
        rows = [row for row in rows if (row["policy"], row["against"]) in shown]
        if rows:
            change = Column("change of l1", Kind.PERCENT, better="lower", signed=True)
            yield beside(
                (*title, ": who perturbs less"),
                [
                    *_names(rows, "budget", "policy", "against"),
                    *(
                        (Column(name.replace("_", " "), Kind.PERCENT), _intervals(rows, name))
                        for name in ("heads_won", "queries_won")
                    ),
                    (change, _intervals(rows, "change")),
                ],
            )


def _names(rows: Sequence[Row], *columns: str) -> list[tuple[Column, list[Cell]]]:
    return [(Column(name), [Name(row[name]) for row in rows]) for name in columns]


def _of_bounds(
    rows: Sequence[Row], name: str, group: str, kind: Kind
) -> list[tuple[Column, list[Cell]]]:
    """A column for each bound."""
    return [
        (Column(f"bound {i}", kind, group), [row[f"{name}{i}"] for row in rows]) for i in _BOUNDS
    ]


def _intervals(rows: Sequence[Row], name: str) -> list[Cell]:
    """Means with their intervals, where those say anything."""
    return [
        Interval(row[name], *(row[f"{name}{end}"] for end in ("_lo", "_hi")))
        if math.isfinite(row[f"{name}_lo"])
        else row[name]
        for row in rows
    ]
