"""Filters of a run's cells, such as `--task vt --budget 0.2`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from kvbench.errors import UserError
from kvbench.harness import catalogue
from kvbench.tables.text import listed


def filter_cells(cells: pd.DataFrame, filters: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """Return the cells with the selected values.

    Args:
        cells: The frame of `cells.parquet`.
        filters: Values to keep, as text, by column. Filters of policy, budget and moment do not apply to the full
            cache, and length filters do not apply to tasks of natural length. A task can be a group or a subset.

    Raises:
        UserError: No cell has a value.
    """
    for column_name, selected_names in filters.items():
        column_values = cells[column_name].astype(str)
        task_sets = catalogue.task_sets() if column_name == "task" and selected_names else {}
        selected_values: set[str] = set()
        for selected_name in selected_names:
            matching_values = {selected_name, *task_sets.get(selected_name, ())} & {*column_values}
            selected_values |= matching_values
            if not matching_values:
                value_list = listed(list(dict.fromkeys(filter(None, column_values))))
                raise UserError(f"--{column_name} {selected_name}: not in the run; it has {value_list}")
        is_exempt = (cells["policy"] == "full") & (column_name in ("policy", "budget", "moment"))
        is_exempt |= (cells["length"] == 0) & (column_name == "length")
        if selected_values:
            cells = cells[column_values.isin(selected_values) | is_exempt]
    return cells
