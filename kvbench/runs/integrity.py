"""Whether the two tables of a run are what was written: digests, and sums that must agree.

The metadata of `cells.parquet` holds a record: a digest of its cells, the SHA-256 of
`samples.parquet`, and the samples and repeats of the grid. Tables of earlier versions have no
record; their counts and means are compared instead.
"""

from __future__ import annotations

import functools
import hashlib
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
from kvbench.files import State, digest_of, state_of

CELLS = "cells.parquet"
SAMPLES = "samples.parquet"
_RECORD = b"kvbench"
_IN_BOTH = (
    "score budget_entries held_entries kv_bytes_live kv_bytes_read visual_tokens held_visual"
).split()
"""Columns of the cells that are means of a column of the samples."""
_NUMBERS = (
    *("score", "score_lo", "score_hi"),
    *("budget_entries", "held_entries", "kv_bytes_live", "kv_bytes_allocated", "kv_bytes_full"),
)
"""Columns that are finite in every cell that has a score."""
_MEND = "restore it, or run the same command again, which writes it anew from the responses"


def with_record(cells: pa.Table, samples: Path, facts: Mapping[str, Any]) -> pa.Table:
    """Add the record to the metadata of a table of cells.

    Args:
        cells: The table.
        samples: The file of the samples, as it will stay.
        facts: More facts to record; JSON values.
    """
    digests = {"cells": _digest(cells), "samples_sha256": _sha256(samples)}
    return cells.replace_schema_metadata({_RECORD: json.dumps({**facts, **digests})})


def rows_of_cells(folder: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """How many samples a folder's tables have of each cell, and what is recorded of their grid.

    Returns:
        Rows of the samples by cell, and `samples` and `repeats` if they are recorded; both are
        empty if a table is missing or damaged: the responses are what counts.
    """
    try:
        facts = _recorded(checked_cells(folder))
        with pq.ParquetFile(folder / SAMPLES, page_checksum_verification=True) as file:
            counts = file.read(["cell"])["cell"].value_counts().to_pylist()
    except Exception:  # damage makes pyarrow raise errors of many classes
        return {}, {}
    rows = {str(one["values"]): int(one["counts"]) for one in counts}
    return rows, {name: facts[name] for name in ("samples", "repeats") if name in facts}


def _recorded(cells: pa.Table) -> dict[str, Any]:
    """The record of a table of cells; empty if an earlier version wrote it."""
    record: dict[str, Any] = json.loads((cells.schema.metadata or {}).get(_RECORD, b"{}"))
    return record


def checked_cells(folder: Path) -> pa.Table:
    """Read the cells of a run, with the columns of their version, and check both tables.

    Raises:
        UserError: A table is missing or damaged, lacks a number, or is not the other's.
    """
    states = []
    for name in (CELLS, SAMPLES):
        path = folder / name
        try:
            states.append(state_of(path))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{folder} is not a finished run: {name} is missing") from None
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from None
    return _checked(folder.absolute(), folder, *states)


@functools.lru_cache(maxsize=16)
def _checked(_: Path, folder: Path, *states: State) -> pa.Table:
    """`checked_cells`, once for each state of the tables."""
    path = folder / CELLS
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            cells = file.read()
        record = _recorded(cells)
        digest = _digest(cells) if record else ""
    except Exception as error:  # damage makes pyarrow and json raise errors of many classes
        raise unreadable(path, error) from None
    if record and record.get("cells") != digest:
        raise UserError(f"{path} is damaged: it is not what was written; {_MEND}")
    samples = folder / SAMPLES
    if record:
        try:
            same = record.get("samples_sha256") == _sha256(samples)
        except OSError as error:
            raise unreadable(samples, error) from None
        if not same:
            raise UserError(
                f"{samples} is not the table that {CELLS} was written with: it is damaged, or the "
                f"run was stopped between the two; {_MEND}"
            )
    else:
        _compare(cells, folder)
    _check_numbers(cells, path)
    return cells


def _compare(cells: pa.Table, folder: Path) -> None:
    """Compare the counts and means of cells with their samples.

    Raises:
        UserError: They do not agree; the message names a cell.
    """
    path = folder / SAMPLES
    try:
        totals, known = _totals(path)
        rows = cells.to_pylist()
        for row in rows:
            total = totals.get(row["cell"], {})
            wrong = [] if row["samples"] == len(known[row["cell"]]) else ["samples"]
            if row["status"] == "ok":
                wrong += [n for n in _IN_BOTH if n in row and not _agree(row[n], total.get(n))]
            if wrong:
                what = f"{row['task']}, {row['policy']} at {row['budget']}"
                raise UserError(
                    f"{folder}: {CELLS} and {SAMPLES} do not agree on {wrong[0]} of {what}; one "
                    "of them is damaged, so restore both"
                )
    except UserError:
        raise
    except Exception as error:  # as above
        raise unreadable(path, error) from None


def _totals(path: Path) -> tuple[dict[str, dict[str, float]], dict[str, set[str]]]:
    """By cell, the means of its samples' numbers, and the names of the samples without an error."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    rows: dict[str, int] = defaultdict(int)
    known: dict[str, set[str]] = defaultdict(set)
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        numbers = [name for name in _IN_BOTH if name in file.schema_arrow.names]
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, ["cell", "sample_id", "error", *numbers])
            # A missing score makes a mean that agrees with nothing.
            filled = [pc.fill_null(table[name].cast(pa.float64()), math.nan) for name in numbers]
            named = pa.table([table["cell"], *filled], ["cell", *numbers]).group_by("cell")
            wanted = [("cell", "count"), *((name, "sum") for name in numbers)]
            for row in named.aggregate(wanted).to_pylist():
                rows[row["cell"]] += row["cell_count"]
                for name in numbers:
                    sums[row["cell"]][name] += row[f"{name}_sum"]
            answered = table.filter(pc.equal(table["error"], "")).select(["cell", "sample_id"])
            for row in answered.group_by(["cell", "sample_id"]).aggregate([]).to_pylist():
                known[row["cell"]].add(row["sample_id"])
    return {c: {n: s / rows[c] for n, s in part.items()} for c, part in sums.items()}, known


def _agree(mean: float | None, other: float | None) -> bool:
    """Whether a mean is that of the samples; a column that the samples lack agrees."""
    if other is None:
        return True
    return mean is not None and math.isclose(mean, other, rel_tol=1e-6, abs_tol=1e-9)


def _check_numbers(cells: pa.Table, path: Path) -> None:
    """Refuse cells that have a score and lack a number."""
    numbers = [name for name in _NUMBERS if name in cells.column_names]
    for row in cells.to_pylist():
        bad = [n for n in numbers if row[n] is None or not math.isfinite(row[n])]
        if row["status"] == "ok" and bad:
            raise UserError(
                f"{path}: {row['task']}, {row['policy']} at {row['budget']} has a score, but its "
                f"{bad[0]} is not a number; {_MEND}"
            )


def _digest(cells: pa.Table) -> str:
    """Digest of all values of a table; a number that is not one is missing."""
    columns = [[f.name, str(f.type), cells[f.name].to_pylist()] for f in cells.schema]
    return digest_of(columns)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unreadable(path: Path, error: Exception) -> UserError:
    """Say in one line why a table cannot be read."""
    reason = getattr(error, "strerror", None) or first_lines(error)
    return UserError(f"cannot read {path}: {reason}")
