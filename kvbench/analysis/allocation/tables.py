"""The tables of an allocation analysis."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from kvbench.analysis.scopes import budgets, names, scopes, title_of
from kvbench.report.numbers import Kind
from kvbench.report.table import Cell, Column, Name, Row, Table

_MOST_LAYERS = 12
"""A model with more layers is shown by those that get least and most."""


def allocation_tables(table: pd.DataFrame) -> Iterator[Table]:
    """The table of an allocation analysis for each model, task, length and moment."""
    for scope, part in scopes(table):
        layers = list(dict.fromkeys(part["layer"]))
        each = len(layers) <= _MOST_LAYERS
        titles = [f"layer {i}" for i in layers] if each else ["least layer", "most layer"]
        columns = [Column("policy"), Column("budget")]
        counts = ("mean", "least KV head", "most KV head", *titles)
        columns += [Column(title, Kind.COUNT) for title in counts]
        rows = []
        for policy in names(part, "policy"):
            for budget in budgets(part):
                here = part[(part["policy"] == policy) & (part["budget"] == budget)]
                if not len(here):
                    continue
                entries = here["entries"]
                means = here.groupby("layer", observed=True)["entries"].mean()
                shown: list[Cell] = [*means[layers]] if each else [means.min(), means.max()]
                numbers = (entries.mean(), entries.min(), entries.max())
                rows.append(Row((Name(policy), Name(budget), *numbers, *shown)))
        title = (*title_of(scope), ": entries per layer and KV head, mean over contexts")
        yield Table(title, tuple(columns), tuple(rows))
