"""Loading of result tables as data frames. Home of `kvbench.load`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvbench.errors import UserError, nearest, quoted
from kvbench.runs.integrity import CELLS, SAMPLES, checked_cells, unreadable
from kvbench.runs.schema import (
    CELLS_SCHEMA,
    OLDEST_VERSION,
    SAMPLE_COLUMNS,
    SAMPLES_SCHEMA,
    SCHEMA_VERSION,
    ResultColumn,
    missing_columns,
)

_SHARED = tuple(column.name for column in SAMPLE_COLUMNS if column.shared)

_PART = 1 << 13
"""Number of rows decoded at a time when only some are kept."""


def load(
    paths: str | Path | Iterable[str | Path],
    columns: Sequence[str] | None = None,
    where: Mapping[str, Any] | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the results of one run or several as data frames: cells and samples.

    The samples are held in memory; docs/performance.md says how much they take. For a large run, restrict `columns` or
    `where`.

    Args:
        paths: Folders of runs.
        columns: Columns of the samples; None for all.
        where: Restricts cells and samples: by column of the cells, one or several values, such as
            `{"task": "vt", "policy": ["full", "snapkv"]}`. Samples of other cells are not loaded.

    Raises:
        UserError: A run cannot be read, a column does not exist, or the runs are incompatible.
    """
    return load_frames(paths, columns, where=where)


def load_frames(
    paths: str | Path | Iterable[str | Path],
    columns: Sequence[str] | None = None,
    *,
    coded: bool = False,
    where: Mapping[str, Any] | None = None,
    sample_ids: Collection[str] | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the result tables of one run or several.

    A cell in several runs is taken from the run with the most samples of it, then with the most responses.

    Args:
        paths: Folders of runs.
        columns: Columns of the samples, in this order; None for all.
        coded: Whether to load texts shared by samples as categories: 4 bytes per sample and column.
        where: Cells to read, as for `load`; None for all.
        sample_ids: Samples to read of each cell; None for all.

    Returns:
        The frames of `cells.parquet` and `samples.parquet`.

    Raises:
        UserError: A folder does not exist, holds no results, damaged ones or those of another version, two runs score
            the same data by different metrics or judges, or a column does not exist.
    """
    folders = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    if not folders:
        raise UserError("name at least one run, such as results/my_run")
    _check_columns("samples", columns or (), SAMPLES_SCHEMA)
    _check_columns("cells", where or (), CELLS_SCHEMA)
    cells = pd.concat(
        [
            _cells(folder, CELLS_SCHEMA.names).to_pandas().assign(_run=run_index)
            for run_index, folder in enumerate(folders)
        ],
        ignore_index=True,
    )
    for column, values in (where or {}).items():
        is_collection = isinstance(values, Collection) and not isinstance(values, str)
        cells = cells[cells[column].isin(list(values) if is_collection else [values])]
    _one_metric(cells, folders)
    if cells["cell"].duplicated().any():
        cells = _fullest(cells, folders)
    tables = [
        _samples(folder, columns, coded, set(cells.loc[cells["_run"] == run_index, "cell"]), sample_ids)
        for run_index, folder in enumerate(folders)
    ]
    sample_table = pa.concat_tables(tables).unify_dictionaries()
    del tables
    if coded:  # slicing a chunked text column copies it; combine the chunks once
        sample_table = sample_table.combine_chunks()
    samples = sample_table.to_pandas(split_blocks=True, self_destruct=True)
    return cells.drop(columns="_run").reset_index(drop=True), samples


def responses_of(
    paths: str | Path | Iterable[str | Path],
) -> Callable[[Collection[str]], pd.DataFrame]:
    """Return a function that reads all columns of samples with given ids.

    Args:
        paths: Folders of runs, as for `load_frames`.
    """
    return lambda sample_ids: load_frames(paths, sample_ids=sample_ids)[1]


def _check_columns(table_name: str, names: Iterable[str], schema: pa.Schema) -> None:
    """Refuse columns that a table does not have."""
    for name in names:
        if name not in schema.names:
            raise UserError(f"{table_name} have no column {quoted(name)}{nearest(name, schema.names)}")


def _fullest(cells: pd.DataFrame, folders: Sequence[Path]) -> pd.DataFrame:
    """Select each cell once, from the run that has the most of it."""
    row_counts: dict[tuple[str, int], int] = {}
    for run_index, folder in enumerate(folders):
        cell_counts = _sample_rows(folder, ["cell"])["cell"].value_counts()
        row_counts |= {(str(entry["values"]), run_index): entry["counts"].as_py() for entry in cell_counts}
    cell_rows = [row_counts.get(key, 0) for key in zip(cells["cell"], cells["_run"], strict=True)]
    ordered_cells = cells.assign(_said=cell_rows).sort_values(["samples", "_said"], ascending=False)
    return cells.loc[sorted(ordered_cells.drop_duplicates("cell").index)]


def _one_metric(cells: pd.DataFrame, folders: Sequence[Path]) -> None:
    """Refuse to mix scores of different metrics, usually from two judges."""
    for (task, _), task_cells in cells.groupby(["task", "data_hash"], sort=False):
        metric_rows = task_cells.drop_duplicates("metric")
        if len(metric_rows) > 1:
            (metric, run_index), (other_metric, other_run) = zip(
                metric_rows["metric"][:2], metric_rows["_run"][:2], strict=True
            )
            raise UserError(
                f"{task} is scored by {metric} in {folders[run_index]} and by {other_metric} in {folders[other_run]}, "
                "which cannot be compared; give one run at a time, or use the same judge for both"
            )


def _samples(
    folder: Path,
    columns: Sequence[str] | None,
    coded: bool,
    cells: Collection[str],
    sample_ids: Collection[str] | None,
) -> pa.Table:
    """Read the samples of some cells of a run."""
    requested = SAMPLES_SCHEMA.names if columns is None else list(columns)
    stored_cells = set(_cells(folder, ["cell"])["cell"].to_pylist())
    row_filters = [] if stored_cells <= set(cells) else [_any_of("cell", cells)]
    row_filters += [] if sample_ids is None else [_any_of("sample_id", sample_ids)]
    read_columns = list(dict.fromkeys([*requested, "cell"]))
    table = _sample_rows(folder, read_columns, _SHARED if coded else (), row_filters)
    # A run that ended between writing its two tables has samples of cells missing from the other.
    if not set(cells).issuperset(table["cell"].unique().to_pylist()):
        table = table.filter(_any_of("cell", cells))
    return table.select(requested)


def _any_of(column: str, values: Collection[str]) -> pc.Expression:
    """Return the filter for rows whose text in a column is one of these."""
    return pc.field(column).isin(pa.array(sorted(values), pa.string()))


def _chosen(file: pq.ParquetFile, columns: Sequence[str], row_filters: Sequence[pc.Expression]) -> pa.Table:
    """Read the rows that satisfy all conditions in parts, because all texts can take gigabytes."""
    condition = functools.reduce(operator.and_, row_filters)
    batches = file.iter_batches(_PART, columns=columns)
    filtered = [pa.Table.from_batches([batch]).filter(condition) for batch in batches]
    return pa.concat_tables([table for table in filtered if len(table)] or filtered[:1] or [file.read(columns)])


def _cells(folder: Path, columns: Sequence[str]) -> pa.Table:
    """Read columns of the cells of a run whose tables agree."""
    return _upgraded(checked_cells(folder), folder / CELLS, CELLS_SCHEMA, columns)


def _sample_rows(
    folder: Path,
    columns: Sequence[str],
    coded: Sequence[str] = (),
    row_filters: Sequence[pc.Expression] = (),
) -> pa.Table:
    """Read columns of the samples of a run.

    Args:
        columns: The columns, in this order.
        coded: Columns whose texts become categories.
        row_filters: Conditions that all rows must satisfy.
    """
    path = folder / SAMPLES
    try:
        stored_columns = pq.read_schema(path).names
        source_columns = [column.copy_of for column in SAMPLE_COLUMNS if column.copy_of]
        read_columns = [
            column for column in dict.fromkeys([*columns, *source_columns, "schema"]) if column in stored_columns
        ]
        coded_columns = [column for column in coded if column in stored_columns]
        with pq.ParquetFile(path, read_dictionary=coded_columns, page_checksum_verification=True) as file:
            table = _chosen(file, read_columns, row_filters) if row_filters else file.read(read_columns)
        table.validate(full=True)
    except Exception as error:  # pyarrow raises many error classes for damaged files
        raise unreadable(path, error) from None
    return _upgraded(table, path, SAMPLES_SCHEMA, columns, coded)


def _upgraded(
    table: pa.Table,
    path: Path,
    schema: pa.Schema,
    columns: Sequence[str],
    coded: Sequence[str] = (),
) -> pa.Table:
    """Convert columns of a table to the types of a schema, filling in those that older schemas lack.

    Args:
        table: The table, with the column `schema` and the source columns of missing ones.
        schema: The current schema.
        columns: The columns, in this order.
        coded: Columns whose texts are categories.
    """
    stored_columns = table.column_names
    versions = set(table["schema"].unique().to_pylist()) if "schema" in stored_columns else {None}
    if len(versions) == 1 and (version := versions.pop()) is not None:
        if OLDEST_VERSION <= version < SCHEMA_VERSION:
            for missing in missing_columns(version):
                if missing.name in columns and missing.name not in stored_columns:
                    table = _with_substitute(table, schema.field(missing.name), missing, coded)
            version = SCHEMA_VERSION
        versions = {version}
    if not versions <= {SCHEMA_VERSION}:
        raise UserError(f"{path} was not written with schema {SCHEMA_VERSION}; run it again")
    if "schema" in columns:
        column_index = table.schema.get_field_index("schema")
        column_values = pa.array([SCHEMA_VERSION] * len(table), schema.field("schema").type)
        table = table.set_column(column_index, "schema", column_values)
    for column in columns:
        if column not in table.column_names:
            raise UserError(f"{path} has no column {column}; run it again")
        schema_field = schema.field(column)
        if schema_field.type in (pa.string(), table[column].type):
            continue
        try:
            typed_column = table[column].cast(schema_field.type)
        except pa.ArrowException as error:
            raise unreadable(path, error) from None
        table = table.set_column(table.schema.get_field_index(column), schema_field, typed_column)
    return table.select(list(columns)).replace_schema_metadata()


def _with_substitute(table: pa.Table, schema_field: pa.Field, column: ResultColumn, coded: Sequence[str]) -> pa.Table:
    """Add a column that an older table lacks: a copy of another one, or a constant."""
    if column.copy_of:
        return table.append_column(schema_field, table[column.copy_of])
    values = pa.array([column.substitute] * len(table), schema_field.type)
    if column.name in coded:
        values = values.dictionary_encode()
    return table.append_column(schema_field.with_type(values.type), values)
