"""The schemas of the two result tables. Users rely on their names and types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 4

Columns: TypeAlias = dict[str, Sequence[Any]]
"""Rows of a table, column by column."""

ADDED: dict[int, dict[str, int | str]] = {
    2: {"visual_tokens": 0, "held_visual": 0, "prompt_end": ""},
    3: {},
}
"""By older version, the columns that its tables lack, with what stands in their place."""

COPIED: dict[int, dict[str, str]] = {3: {"kv_bytes_read": "kv_bytes_live"}}
"""By older version, the columns that its tables lack and that equal another column."""


def _schema(columns: dict[Any, str]) -> Any:
    return pa.schema(
        [
            (column, column_type)
            for column_type, column_names in columns.items()
            for column in column_names.split()
        ]
    )


CELLS_SCHEMA = _schema(
    {
        pa.string(): "cell match model model_revision task group policy budget moment metric "
        "status error task_version data_hash dtype device attention versions",
        pa.int32(): "schema length samples",
        pa.int64(): "seed",
        pa.float64(): "score score_se score_lo score_hi full_score diff diff_lo diff_hi "
        "budget_entries held_entries kv_bytes_live kv_bytes_read kv_bytes_allocated kv_bytes_full "
        "visual_tokens held_visual prefill_s compress_s decode_s",
        pa.bool_(): "higher_is_better discriminative",
    }
)
"""`cells.parquet`: a row per model, leaf task, length, policy, budget, moment and seed."""

SAMPLES_SCHEMA = _schema(
    {
        pa.string(): "cell task policy budget moment sample_id context_id response stop error "
        "extra prompt_end",
        pa.list_(pa.string()): "target",
        pa.int32(): "schema length doc_id question_id repeat "
        "context_tokens question_tokens generated_tokens",
        pa.float64(): "score",
        pa.int64(): "budget_entries held_entries kv_bytes_live kv_bytes_read visual_tokens "
        "held_visual",
    }
)
"""`samples.parquet`: a row per cell, sample, question and repeat."""


def to_table(frame: pd.DataFrame, schema: Any) -> Any:
    """Turn a frame into a table with exactly the columns and types of a schema.

    Args:
        frame: It must have every column of the schema and no other; `schema` is filled in.
        schema: `CELLS_SCHEMA` or `SAMPLES_SCHEMA`.

    Raises:
        ValueError: A column is missing or unknown, or does not fit its type.
    """
    frame = frame.assign(schema=SCHEMA_VERSION)
    _check(frame.columns, schema)
    table = pa.Table.from_pandas(frame[schema.names], schema=schema, preserve_index=False)
    return table.replace_schema_metadata()


def from_columns(columns: Columns, schema: Any) -> Any:
    """Turn columns into a table of a schema; a score that is not a number is missing.

    Args:
        columns: By name; each column of the schema and no other.
        schema: `CELLS_SCHEMA` or `SAMPLES_SCHEMA`.

    Raises:
        ValueError: A column is missing or unknown, or does not fit its type.
    """
    _check(columns, schema)
    arrays = [pa.array(columns[field.name], field.type, from_pandas=True) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _check(columns: Iterable[str], schema: Any) -> None:
    """Refuse columns that are not those of a schema."""
    mismatched = set(columns) ^ set(schema.names)
    if mismatched:
        raise ValueError(f"columns missing or unknown: {', '.join(sorted(mismatched))}")
