"""Tables of an allocation analysis."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from kvbench.analysis.scopes import distinct_values, ordered_budgets, scope_heading, scopes
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.table import Cell, Column, Name, Table, TableRow

_MOST_LAYERS = 12
"""For models with more layers, only those with the fewest and most entries are shown."""


def allocation_tables(allocation_frame: pd.DataFrame) -> Iterator[Table]:
    """Yield one table per model, task, length and moment."""
    for scope, scope_rows in scopes(allocation_frame):
        layers = list(dict.fromkeys(scope_rows["layer"]))
        shows_all = len(layers) <= _MOST_LAYERS
        titles = [f"layer {layer}" for layer in layers] if shows_all else ["least layer", "most layer"]
        columns = [Column("policy"), Column("budget")]
        count_titles = ("mean", "least KV head", "most KV head", *titles)
        columns += [Column(heading, NumberFormat.COUNT) for heading in count_titles]
        table_rows = []
        for policy in distinct_values(scope_rows, "policy"):
            for budget in ordered_budgets(scope_rows):
                cell_rows = scope_rows[(scope_rows["policy"] == policy) & (scope_rows["budget"] == budget)]
                if not len(cell_rows):
                    continue
                entries = cell_rows["entries"]
                layer_means = cell_rows.groupby("layer", observed=True)["entries"].mean()
                layer_cells: list[Cell] = (
                    [*layer_means[layers]] if shows_all else [layer_means.min(), layer_means.max()]
                )
                numbers = (entries.mean(), entries.min(), entries.max())
                table_rows.append(TableRow((Name(policy), Name(budget), *numbers, *layer_cells)))
        heading = (*scope_heading(scope), ": entries per layer and KV head, mean over contexts")
        yield Table(heading, tuple(columns), tuple(table_rows))
