"""Scopes of an analysis, which have separate tables and figures, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import pandas as pd

from kvbench.report.frames import budget_order, records
from kvbench.tables.table import Name, Phrase
from kvbench.tables.text import tokens

SCOPE = ["model", "task", "length", "moment"]

Row: TypeAlias = dict[str, Any]


def scopes(frame: pd.DataFrame) -> Iterator[tuple[Row, pd.DataFrame]]:
    """Yield the rows per model, task, length and moment, in the order of the run."""
    for scope_values, scope_rows in frame.groupby(SCOPE, sort=False, observed=True):
        yield dict(zip(SCOPE, scope_values, strict=True)), scope_rows


def rows_in_scope(frame: pd.DataFrame, scope: Row) -> pd.DataFrame:
    """Return the rows of a frame in one scope."""
    for column in SCOPE:
        if len(frame):
            frame = frame[frame[column] == scope[column]]
    return frame


def scope_heading(scope: Row) -> tuple[Phrase, ...]:
    """Format model, task, length and moment, if there is one, as one line."""
    conditions = f" · {tokens(scope['length'])}" + (f" · moment {scope['moment']}" if "moment" in scope else "")
    return (Name(scope["model"]), " · ", Name(scope["task"]), conditions)


def distinct_values(frame: pd.DataFrame, column: str) -> list[str]:
    """Return the values of a text column in order of first appearance."""
    return [str(value) for value in frame[column].drop_duplicates()]


def ordered_budgets(frame: pd.DataFrame) -> list[str]:
    """Return a frame's budgets in the order of `budget_order`."""
    return sorted(distinct_values(frame, "budget"), key=budget_order)


def rows_by_budget(frame: pd.DataFrame) -> list[Row]:
    """Return a frame's rows sorted by budget, stably."""
    return sorted(records(frame), key=lambda record: budget_order(record["budget"]))
