"""Loading of result tables as data frames. Home of `kvbench.load`."""

from __future__ import annotations

import functools
import json
import math
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvbench.errors import UserError, nearest, quoted
from kvbench.runs.file_names import CELLS, METRICS, SAMPLES
from kvbench.runs.integrity import checked_cells, checked_metrics, unreadable
from kvbench.runs.schema import (
    CELLS_SCHEMA,
    FIDELITY,
    METRICS_SCHEMA,
    OLDEST_VERSION,
    SAMPLE_COLUMNS,
    SAMPLES_SCHEMA,
    SCHEMA_VERSION,
    SCORES,
    TEXTS,
    ResultColumn,
    missing_columns,
)

_SHARED = tuple(column.name for column in SAMPLE_COLUMNS if column.shared)

_METRIC_FACTS = ("metric", "higher_is_better", "is_mean")
"""Columns of cells that depend on the metric, besides its scores."""

_ROUNDING = 1e-9
"""Largest difference between two computations of the same score."""

_PART = 1 << 13
"""Number of rows decoded at a time when only some are kept."""


def load(
    paths: str | Path | Iterable[str | Path],
    columns: Sequence[str] | None = None,
    where: Mapping[str, Any] | None = None,
    metric: str | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the results of one run or several as data frames: cells and samples.

    The samples are held in memory; docs/performance.md says how much they take. For a large run, restrict `columns` or
    `where`.

    Args:
        paths: Folders of runs.
        columns: Columns of the samples; None for all.
        where: Restricts cells and samples: by column of the cells, one or several values, such as
            `{"task": "vt", "policy": ["full", "snapkv"]}`. Samples of other cells are not loaded.
        metric: Metric of the scores, such as `acc_norm`, or `exact_match,strict-match` with its filter. Tasks without
            it keep their own, with a warning. None: every task's own metric.

    Raises:
        UserError: A run cannot be read, a column does not exist, no task has the metric, or the runs are incompatible.
    """
    return load_frames(paths, columns, where=where, metric=metric)


def load_frames(
    paths: str | Path | Iterable[str | Path],
    columns: Sequence[str] | None = None,
    *,
    coded: bool = False,
    where: Mapping[str, Any] | None = None,
    sample_ids: Collection[str] | None = None,
    metric: str | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the result tables of one run or several.

    A cell in several runs is taken from the run with the most samples of it, then with the most responses; of runs with
    as many, from the first, with a warning if their scores differ.

    Args:
        paths: Folders of runs.
        columns: Columns of the samples, in this order; None for all.
        coded: Whether to load texts shared by samples as categories: 4 bytes per sample and column.
        where: Cells to read, as for `load`; None for all.
        sample_ids: Samples to read of each cell; None for all.
        metric: Metric of the scores, as for `load`.

    Returns:
        The frames of `cells.parquet` and `samples.parquet`.

    Raises:
        UserError: A folder does not exist, holds no results, damaged ones or those of another version, two runs score
            the same data by different metrics or judges, a column does not exist, or no task has the metric.
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
    labels: dict[str, str] = {}
    if metric is not None:
        cells, labels = _with_metric(cells, folders, metric)
    _one_metric(cells, folders)
    if cells["cell"].duplicated().any():
        cells = _fullest(cells, folders)
    tables = [
        _samples(folder, columns, coded, set(cells.loc[cells["_run"] == run_index, "cell"]), sample_ids, labels)
        for run_index, folder in enumerate(folders)
    ]
    sample_table = pa.concat_tables(tables).unify_dictionaries()
    del tables
    if coded:  # slicing a chunked text column copies it; combine the chunks once
        sample_table = sample_table.combine_chunks()
    samples = sample_table.to_pandas(split_blocks=True, self_destruct=True)
    return cells.drop(columns="_run").reset_index(drop=True), samples


def load_groups(paths: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """Read the scores of groups of tasks: the rows of `metrics.parquet` whose `task` is a group.

    Args:
        paths: Folders of runs, as for `load_frames`. Those of earlier versions have none.
    """
    folders = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    tables = [
        _upgraded(checked_metrics(folder), folder / METRICS, METRICS_SCHEMA, METRICS_SCHEMA.names).to_pandas()
        for folder in folders
        if (folder / METRICS).exists()
    ]
    rows = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=METRICS_SCHEMA.names)
    return rows[rows["cell"] == ""].reset_index(drop=True)


def responses_of(
    paths: str | Path | Iterable[str | Path], metric: str | None = None
) -> Callable[[Collection[str]], pd.DataFrame]:
    """Return a function that reads all columns of samples with given ids.

    Args:
        paths: Folders of runs, as for `load_frames`.
        metric: Metric of the scores, as for `load`.
    """
    return lambda sample_ids: load_frames(paths, sample_ids=sample_ids, metric=metric)[1]


def _check_columns(table_name: str, names: Iterable[str], schema: pa.Schema) -> None:
    """Refuse columns that a table does not have."""
    for name in names:
        if name not in schema.names:
            raise UserError(f"{table_name} have no column {quoted(name)}{nearest(name, schema.names)}")


def _fullest(cells: pd.DataFrame, folders: Sequence[Path]) -> pd.DataFrame:
    """Select each cell once, from the run that has the most of it, or else from the first."""
    row_counts: dict[tuple[str, int], int] = {}
    for run_index, folder in enumerate(folders):
        cell_counts = _sample_rows(folder, ["cell"])["cell"].value_counts()
        row_counts |= {(str(entry["values"]), run_index): entry["counts"].as_py() for entry in cell_counts}
    cell_rows = [row_counts.get(key, 0) for key in zip(cells["cell"], cells["_run"], strict=True)]
    ordered_cells = cells.assign(_said=cell_rows).sort_values(["samples", "_said"], ascending=False, kind="stable")
    alike = ordered_cells[ordered_cells["status"] == "ok"]
    as_many = ["cell", "samples", "_said"]
    first_scores = alike.groupby(as_many)["score"].transform("first")
    if len(others := alike[(alike["score"] - first_scores).abs() > _ROUNDING]):
        other = others.iloc[0]
        first = alike[(alike[as_many] == other[as_many]).all(axis=1)].iloc[0]
        what = f"{first['task']}, {first['policy']}" + f" at {first['budget']}" * (first["policy"] != "full")
        warnings.warn(
            f"the runs have different scores for the same cells ({others['cell'].nunique()}), such as {what}: "
            f"{first['score']:.4g} in {folders[first['_run']]} and {other['score']:.4g} in {folders[other['_run']]}; "
            "the run that is named first counts, and kvbench compare shows all",
            stacklevel=1,
        )
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


def _with_metric(cells: pd.DataFrame, folders: Sequence[Path], metric: str) -> tuple[pd.DataFrame, dict[str, str]]:
    """Replace the scores of cells by those of another metric.

    Returns:
        The cells, and the metric's key in the column `metrics` of the samples, by cell; without the cells of tasks that
        lack the metric.

    Raises:
        UserError: No task has the metric, or a run has no scores by all metrics.
    """
    tables = [
        _upgraded(checked_metrics(folder), folder / METRICS, METRICS_SCHEMA, METRICS_SCHEMA.names)
        .to_pandas()
        .assign(_run=run_index)
        for run_index, folder in enumerate(folders)
    ]
    rows = pd.concat(tables, ignore_index=True).merge(cells[["cell", "_run"]], on=["cell", "_run"])
    suffixes = rows["filter"].map(lambda filter_name: f",{filter_name}" if filter_name else "")
    # A judged metric is stored with its judge, which users need not write.
    names = rows["metric"].str.partition(" (")[0]
    rows = rows.assign(_label=names + suffixes, metric=rows["metric"] + suffixes)
    is_named = (names == metric) | (rows["_label"] == metric) | (rows["metric"] == metric)
    named = rows[is_named].drop_duplicates(["cell", "_run"])  # without a filter, the first one counts
    if not len(named):
        raise UserError(
            f"no task has the metric {quoted(metric)}; there are {', '.join(dict.fromkeys(rows['_label']))}"
        )
    found = named.set_index(["cell", "_run"]).reindex(pd.MultiIndex.from_frame(cells[["cell", "_run"]]))
    found.index = cells.index
    # A failed cell has no row, but its task has the metric.
    cells = cells.copy()
    facts = found[list(_METRIC_FACTS)].groupby([cells["task"], cells["_run"]]).transform("first")
    has_metric = facts["metric"].notna()
    if others := list(dict.fromkeys(cells.loc[~has_metric, "task"])):
        warnings.warn(f"shown by their own metric, because they lack {metric}: {', '.join(others)}", stacklevel=1)
    # Fidelity is to the full cache, so that the chance level of the task does not matter.
    cells["discriminative"] |= found["metric"].isin(FIDELITY) & found["full_score"].notna()
    lacks_score = has_metric & (cells["status"] == "ok") & found["score"].isna()
    for column in (*SCORES, *_METRIC_FACTS):
        values = found[column] if column in SCORES else facts[column]
        cells[column] = values.where(has_metric, cells[column]).astype(cells[column].dtype)
    cells["status"] = cells["status"].mask(lacks_score, "error")
    cells["error"] = cells["error"].mask(lacks_score, f"no score by {metric}")
    return cells, dict(zip(named["cell"], named["_label"], strict=True))


def _samples(
    folder: Path,
    columns: Sequence[str] | None,
    coded: bool,
    cells: Collection[str],
    sample_ids: Collection[str] | None,
    labels: Mapping[str, str],
) -> pa.Table:
    """Read the samples of some cells of a run, with the score by another metric for the cells in `labels`."""
    requested = SAMPLES_SCHEMA.names if columns is None else list(columns)
    stored_cells = set(_cells(folder, ["cell"])["cell"].to_pylist())
    row_filters = [] if stored_cells <= set(cells) else [_any_of("cell", cells)]
    row_filters += [] if sample_ids is None else [_any_of("sample_id", sample_ids)]
    is_replaced = bool(labels) and "score" in requested
    read_columns = list(dict.fromkeys([*requested, "cell", *(["metrics"] if is_replaced else [])]))
    table = _sample_rows(folder, read_columns, _SHARED if coded else (), row_filters)
    # A run that ended between writing its tables has samples of cells missing from the other.
    if not set(cells).issuperset(table["cell"].unique().to_pylist()):
        table = table.filter(_any_of("cell", cells))
    if is_replaced:
        table = _with_scores(table, labels)
    return table.select(requested)


def _with_scores(table: pa.Table, labels: Mapping[str, str]) -> pa.Table:
    """Replace the scores of samples by the values in their column `metrics`; each text in it is parsed once."""
    cells, texts = (
        column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        for column in (table[name].combine_chunks() for name in ("cell", "metrics"))
    )
    label_of_cell = np.array([labels.get(cell, "") for cell in cells.dictionary.to_pylist()], dtype=object)
    sample_labels = label_of_cell[cells.indices.to_numpy()]
    parsed = [json.loads(text) if text else {} for text in texts.dictionary.to_pylist()]
    is_single = np.array([not text for text in texts.dictionary.to_pylist()], dtype=bool)[texts.indices.to_numpy()]
    scores = table["score"].to_numpy(zero_copy_only=False).copy()
    for label in set(labels.values()):
        values = np.array([numbers.get(label, math.nan) for numbers in parsed], dtype=np.float64)
        replaced = (sample_labels == label) & ~is_single
        scores[replaced] = values[texts.indices.to_numpy()[replaced]]
    score_field = table.schema.field("score")
    return table.set_column(
        table.schema.get_field_index("score"), score_field, pa.array(scores, score_field.type, from_pandas=True)
    )


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
    if not any(column.name in stored_columns for column in TEXTS):  # a published run
        for column in TEXTS:
            if column.name in columns:
                table = _with_substitute(table, SAMPLES_SCHEMA.field(column.name), column, coded)
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
