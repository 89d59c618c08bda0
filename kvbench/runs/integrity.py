"""Integrity of a run's tables: digests, and sums that must agree.

The metadata of `cells.parquet` holds a record: a digest of its cells, the SHA-256 of `samples.parquet` and
`metrics.parquet`, the samples and repeats of the grid, the hardware, and whether native code or torch computed on a
CPU. Tables of earlier versions have no record; their counts and means are compared instead. `metrics.parquet` can be
missing: earlier versions did not write it.
"""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvbench.errors import UserError, first_lines
from kvbench.files import State, digest_of, sha256_of, state_of
from kvbench.runs.file_names import CELLS, METRICS, SAMPLES
from kvbench.runs.schema import AVERAGED, CELL_COLUMNS, SAMPLES_SCHEMA

_RECORD = b"kvbench"
_DIGESTS = {SAMPLES: "samples_sha256", METRICS: "metrics_sha256"}
"""Field of the record for the SHA-256 of each file."""
_IN_BOTH = ("score", *(name for name in AVERAGED if name in SAMPLES_SCHEMA.names))
"""Columns of the cells that are means of a sample column; `score` only if `is_mean`."""
_NUMBERS = tuple(column.name for column in CELL_COLUMNS if column.always)
"""Columns that are numbers in every cell that has a score; one context has an infinite interval."""
_MACHINE_FACTS = ("hardware", "cpu_code", "gpu_code")
"""Fields of the record about what generated the responses: names of GPUs and CPUs, and what computed there."""
_MEND = "restore it, or run the same command again to rewrite it from the responses"


def with_record(cells: pa.Table, folder: Path, facts: Mapping[str, Any]) -> pa.Table:
    """Add the record to the metadata of a table of cells.

    Args:
        folder: The run's folder, with the final files of its other tables; earlier versions wrote no metrics.
        facts: Further JSON values to record.
    """
    file_digests = {field: sha256_of(folder / name) for name, field in _DIGESTS.items() if (folder / name).is_file()}
    digests = {"cells": _digest(cells), **file_digests}
    return cells.replace_schema_metadata({_RECORD: json.dumps({**facts, **digests})})


def rows_of_cells(folder: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """Count the samples per cell in a folder's tables, and read the record of their grid.

    Returns:
        Rows of the samples by cell, and `samples` and `repeats` if recorded; both are empty if a table is missing or
        damaged, because only the responses matter.
    """
    try:
        facts = _recorded(checked_cells(folder))
        with pq.ParquetFile(folder / SAMPLES, page_checksum_verification=True) as samples_file:
            counts = samples_file.read(["cell"])["cell"].value_counts().to_pylist()
    except Exception:  # pyarrow raises many error classes for damaged files
        return {}, {}
    row_counts = {str(entry["values"]): int(entry["counts"]) for entry in counts}
    return row_counts, {name: facts[name] for name in ("samples", "repeats") if name in facts}


def recorded_hardware(folder: Path) -> list[str]:
    """Return the hardware that generated a run's responses, as recorded; empty if unknown or if a table is damaged."""
    return recorded_names(folder, "hardware")


def recorded_names(folder: Path, fact: str) -> list[str]:
    """Return the names that a run records under a fact; empty if there are none or if a table is damaged."""
    try:
        return list(map(str, _recorded(checked_cells(folder)).get(fact, [])))
    except UserError:
        return []


def differing_machines(baseline: Path, run: Path) -> dict[str, tuple[str, str]]:
    """Return what two runs record differently about the machines that generated their responses.

    Returns:
        The values of both by fact, comma-separated if there are several; no fact that a run does not record.
    """
    values_by_fact = {
        fact: tuple(sorted(recorded_names(folder, fact)) for folder in (baseline, run)) for fact in _MACHINE_FACTS
    }
    return {
        fact: (", ".join(before), ", ".join(after))
        for fact, (before, after) in values_by_fact.items()
        if before and after and before != after
    }


def _recorded(cells: pa.Table) -> dict[str, Any]:
    """Return the record of a table of cells; empty if an earlier version wrote it."""
    record: dict[str, Any] = json.loads((cells.schema.metadata or {}).get(_RECORD, b"{}"))
    return record


def checked_cells(folder: Path) -> pa.Table:
    """Read the cells of a run, with the columns of their version, and check all tables.

    Raises:
        UserError: A table is missing or damaged, lacks a number, or does not belong to the other.
    """
    file_states = []
    for file_name in (CELLS, SAMPLES):
        path = folder / file_name
        try:
            file_states.append(state_of(path))
        except (FileNotFoundError, NotADirectoryError):
            raise _not_a_run(folder, file_name) from None
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from None
    metrics = folder / METRICS
    file_states += [state_of(metrics)] if metrics.is_file() else []
    return _checked(folder.absolute(), folder, *file_states)


def _not_a_run(folder: Path, missing_name: str) -> UserError:
    if not folder.is_dir():
        return UserError(f"{folder} is not a folder; name that of a run (kvbench list runs shows them)")
    if (folder / "settings.json").is_file():
        found = "a benchmark" if (folder / "bench.parquet").is_file() else "an analysis"
        return UserError(f"{folder} holds {found}, not a run; read its summary.md and its tables")
    return UserError(f"{folder} is not a finished run: {missing_name} is missing")


def checked_metrics(folder: Path) -> pa.Table:
    """Read the scores of a run by all metrics, after checking all tables.

    Raises:
        UserError: The run does not have them, or a table is missing or damaged.
    """
    record = _recorded(checked_cells(folder))
    if _DIGESTS[METRICS] not in record or not (folder / METRICS).is_file():
        raise UserError(
            f"{folder} has only the scores by the metric of each task; run the same command again, which rewrites the "
            "tables from the responses, with all metrics"
        )
    try:
        with pq.ParquetFile(folder / METRICS, page_checksum_verification=True) as metrics_file:
            return metrics_file.read()
    except Exception as error:  # pyarrow raises many error classes for damaged files
        raise unreadable(folder / METRICS, error) from None


@functools.lru_cache(maxsize=16)
def _checked(_: Path, folder: Path, *states: State) -> pa.Table:
    """Run `checked_cells`, cached by the state of the tables."""
    path = folder / CELLS
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as cells_file:
            cells = cells_file.read()
        record = _recorded(cells)
        cells_digest = _digest(cells) if record else ""
    except Exception as error:  # pyarrow and json raise many error classes for damaged files
        raise unreadable(path, error) from None
    if record and record.get("cells") != cells_digest:
        raise UserError(f"{path} is damaged: it was changed after it was written; {_MEND}")
    if record:
        _check_digest(folder / SAMPLES, record.get(_DIGESTS[SAMPLES]))
    if (folder / METRICS).is_file() and _DIGESTS[METRICS] in record:
        _check_digest(folder / METRICS, record[_DIGESTS[METRICS]])
    if not record:
        _compare(cells, folder)
    _check_numbers(cells, path)
    return cells


def _check_digest(path: Path, digest: object) -> None:
    """Refuse a table other than the recorded one."""
    try:
        is_same = digest == sha256_of(path)
    except OSError as error:
        raise unreadable(path, error) from None
    if not is_same:
        raise UserError(
            f"{path} is not the table that {CELLS} was written with: it is damaged, "
            f"or the run was stopped between the two; {_MEND}"
        )


def _compare(cells: pa.Table, folder: Path) -> None:
    """Compare the counts and means of cells with their samples.

    Raises:
        UserError: They do not agree; the message names a cell.
    """
    path = folder / SAMPLES
    try:
        column_means, sample_ids = _totals(path)
        cell_rows = cells.to_pylist()
        for cell_row in cell_rows:
            cell_means = column_means.get(cell_row["cell"], {})
            wrong_columns = [] if cell_row["samples"] == len(sample_ids[cell_row["cell"]]) else ["samples"]
            if cell_row["status"] == "ok":
                wrong_columns += [
                    column
                    for column in _IN_BOTH
                    if column in cell_row
                    and (column != "score" or cell_row.get("is_mean", True))
                    and not _agree(cell_row[column], cell_means.get(column))
                ]
            if wrong_columns:
                cell_label = f"{cell_row['task']}, {cell_row['policy']} at {cell_row['budget']}"
                raise UserError(
                    f"{folder}: {CELLS} and {SAMPLES} do not agree on {wrong_columns[0]} of {cell_label}; "
                    "one of them is damaged, so restore both"
                )
    except UserError:
        raise
    except Exception as error:  # damaged files, as above
        raise unreadable(path, error) from None


def _totals(path: Path) -> tuple[dict[str, dict[str, float]], dict[str, set[str]]]:
    """Return sample means by cell, and the names of the samples without an error."""
    column_sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    row_counts: dict[str, int] = defaultdict(int)
    sample_ids: dict[str, set[str]] = defaultdict(set)
    with pq.ParquetFile(path, page_checksum_verification=True) as samples_file:
        numeric_columns = [column for column in _IN_BOTH if column in samples_file.schema_arrow.names]
        for group_index in range(samples_file.num_row_groups):
            table = samples_file.read_row_group(group_index, ["cell", "sample_id", "error", *numeric_columns])
            # Turn a missing score into a NaN mean, which agrees with nothing.
            filled_columns = [pc.fill_null(table[column].cast(pa.float64()), math.nan) for column in numeric_columns]
            grouped_table = pa.table([table["cell"], *filled_columns], ["cell", *numeric_columns]).group_by("cell")
            aggregations = [("cell", "count"), *((column, "sum") for column in numeric_columns)]
            for aggregated in grouped_table.aggregate(aggregations).to_pylist():
                row_counts[aggregated["cell"]] += aggregated["cell_count"]
                for column in numeric_columns:
                    column_sums[aggregated["cell"]][column] += aggregated[f"{column}_sum"]
            answered_rows = table.filter(pc.equal(table["error"], "")).select(["cell", "sample_id"])
            for aggregated in answered_rows.group_by(["cell", "sample_id"]).aggregate([]).to_pylist():
                sample_ids[aggregated["cell"]].add(aggregated["sample_id"])
    return {
        cell: {column_name: column_sum / row_counts[cell] for column_name, column_sum in cell_sums.items()}
        for cell, cell_sums in column_sums.items()
    }, sample_ids


def _agree(mean: float | None, recorded: float | None) -> bool:
    """Return whether a mean matches the samples; a column that the samples lack always does."""
    if recorded is None:
        return True
    return mean is not None and math.isclose(mean, recorded, rel_tol=1e-6, abs_tol=1e-9)


def _check_numbers(cells: pa.Table, path: Path) -> None:
    """Refuse scored cells that lack a number."""
    numeric_columns = [column_name for column_name in _NUMBERS if column_name in cells.column_names]
    for cell_row in cells.to_pylist():
        bad_columns = [column for column in numeric_columns if cell_row[column] is None or math.isnan(cell_row[column])]
        if cell_row["status"] == "ok" and bad_columns:
            raise UserError(
                f"{path}: {cell_row['task']}, {cell_row['policy']} at {cell_row['budget']} has a score, "
                f"but its {bad_columns[0]} is not a number; {_MEND}"
            )


def _digest(cells: pa.Table) -> str:
    """Return the digest of all values of a table; NaN counts as missing."""
    columns = [[field.name, str(field.type), cells[field.name].to_pylist()] for field in cells.schema]
    return digest_of(columns)


def unreadable(path: Path, error: Exception) -> UserError:
    """Return a one-line error for a table that cannot be read."""
    reason = getattr(error, "strerror", None) or first_lines(error)
    return UserError(f"cannot read {path}: {reason}")
