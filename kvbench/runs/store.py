"""A run on disk: a crash-safe journal of responses and the result tables."""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Self

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from kvbench.errors import UserError
from kvbench.files import Journal, Place, cannot, replacing, unfinished, write_whole
from kvbench.runs.file_names import CELLS, GRID, LOCK, MACHINES, METRICS, RESPONSES, SAMPLES
from kvbench.runs.index import Key, ResponseIndex
from kvbench.runs.integrity import recorded_names, with_record
from kvbench.runs.schema import (
    CELLS_SCHEMA,
    METRICS_SCHEMA,
    SAMPLES_SCHEMA,
    Response,
    Row,
    ScoredCell,
    from_columns,
    to_table,
)

_TABLES = (CELLS, SAMPLES, METRICS)
_ROW_GROUP = 1 << 18
"""Rows of `samples.parquet` held in memory: some 200 MB if prompts are long."""


class RunStore:
    """The folder of a run, locked while it is open.

    `responses.jsonl` is a `kvbench.files.Journal` of responses: after a crash only missing responses are generated
    again. Responses stay on disk; memory holds their locations.

    Args:
        path: The folder; it is created if it does not exist.
        fresh: Whether to discard earlier results in it.
        fidelity: Whether answers need the columns of fidelity; those without them are generated again.

    Raises:
        UserError: Another process has the folder open, it cannot be written, or it holds files that were not written by
            a kvbench run.
    """

    def __init__(self, path: str | Path, fresh: bool = False, fidelity: bool = False) -> None:
        self.path = Path(path)
        self._fidelity = fidelity
        self._lock = -1
        self._journal: Journal | None = None
        self._index = ResponseIndex()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._clear_parts()
            self._check_owner()
            if fresh:
                for file_name in (RESPONSES, GRID, MACHINES, *_TABLES):
                    (self.path / file_name).unlink(missing_ok=True)
            self._open_journal()
        except OSError as error:
            self.close()
            raise cannot("write", error.filename or self.path, error) from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder. Appended responses are already on disk."""
        if self._journal is not None:
            self._journal.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def keys(self) -> Set[Key]:
        """Return a live set of the keys of complete responses without an error, which are not generated again."""
        return self._index.done()

    def responses(self) -> list[Response]:
        """Return the last response of each key, in the order of first responses.

        Raises:
            UserError: The file cannot be read any more.
        """
        return self._read(self._index.all_places())

    def responses_of(self, cell: str) -> list[Response]:
        """Return `responses` of one cell, because those of a large run do not fit into memory.

        Args:
            cell: Hash of the cell.

        Raises:
            UserError: The file cannot be read any more.
        """
        return self._read(self._index.places(cell))

    def append(self, responses: Sequence[Response]) -> None:
        """Write responses and wait until they are on disk.

        Raises:
            UserError: The disk is full or fails; none of these responses remains in the file.
        """
        if not responses:
            return
        assert self._journal is not None
        try:
            entries = [_entry(response) for response in responses]
            locations = self._journal.append(entries)
        except OSError as error:
            raise cannot("write", self.path / RESPONSES, error) from None
        for response, entry, location in zip(responses, entries, locations, strict=True):
            self._index.add(response.key, location, done=self._is_complete(entry))

    def save_grid(self, grid: Mapping[str, Any]) -> None:
        """Write the grid as YAML for `kvbench run --config`."""
        with replacing(self.path / GRID) as partial_file:
            partial_file.write_text(yaml.safe_dump(dict(grid), sort_keys=False), encoding="utf-8")

    def add_machine(self, names: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
        """Record what is about to generate responses; return this for all responses of the run.

        The record of the tables takes it over once they are written: until then a file of its own keeps it.

        Args:
            names: Names by fact, such as `hardware`.
        """
        machines_path = self.path / MACHINES
        try:
            noted = {fact: list(map(str, known)) for fact, known in json.loads(machines_path.read_text()).items()}
        except (OSError, ValueError, AttributeError, TypeError):
            noted = {}
        every = {
            fact: list(dict.fromkeys([*recorded_names(self.path, fact), *noted.get(fact, []), *new]))
            for fact, new in names.items()
        }
        if any(names.values()):
            write_whole(machines_path, json.dumps(every).encode())
        return every

    def write(self, cells: pd.DataFrame, samples: pd.DataFrame) -> None:
        """Write the result tables with the schemas of `kvbench.runs.schema`, for tasks with a single metric."""
        metrics = cells.assign(filter="").reindex(columns=METRICS_SCHEMA.names)
        self._write([to_table(samples, SAMPLES_SCHEMA)], lambda: (cells, metrics), {})

    def write_scored(
        self,
        scored: Iterable[ScoredCell],
        facts: Mapping[str, Any],
        group_rows: Callable[[list[Row], list[Row]], Iterable[Row]] = lambda cell_rows, metric_rows: (),
    ) -> pd.DataFrame:
        """Write the result tables cell by cell, without holding all samples in memory.

        Args:
            scored: The scored cells.
            facts: Further facts for the record of `kvbench.runs.integrity`.
            group_rows: Returns the rows of groups of tasks, given all rows of cells and of metrics.

        Returns:
            The frame of the cells.
        """
        cell_rows: list[Row] = []
        metric_rows: list[Row] = []

        def samples() -> Iterator[pa.Table]:
            for cell in scored:
                cell_rows.append(cell.row)
                metric_rows.extend(cell.metric_rows)
                yield from_columns(cell.samples, SAMPLES_SCHEMA)

        def frames() -> tuple[pd.DataFrame, pd.DataFrame]:
            metric_rows.extend([*group_rows(cell_rows, metric_rows)])
            rows_and_schemas = ((cell_rows, CELLS_SCHEMA), (metric_rows, METRICS_SCHEMA))
            cells, metrics = (pd.DataFrame(rows, columns=schema.names) for rows, schema in rows_and_schemas)
            return cells, metrics

        return self._write(samples(), frames, facts)

    def samples(self) -> pq.ParquetFile:
        """Open the table of samples, unaffected if another run replaces the file."""
        samples_file = pa.OSFile(str(self.path / SAMPLES))
        return pq.ParquetFile(samples_file, page_checksum_verification=True)

    def _write(
        self,
        samples: Iterable[pa.Table],
        frames: Callable[[], tuple[pd.DataFrame, pd.DataFrame]],
        facts: Mapping[str, Any],
    ) -> pd.DataFrame:
        """Write the samples, then metrics and cells, which are complete only after all samples."""
        with (
            replacing(self.path / SAMPLES) as partial_file,
            pq.ParquetWriter(partial_file, SAMPLES_SCHEMA, write_page_checksum=True) as writer,
        ):
            for row_group in _row_groups(samples):
                writer.write_table(row_group)
        cells, metrics = frames()
        cells_table, metrics_table = to_table(cells, CELLS_SCHEMA), to_table(metrics, METRICS_SCHEMA)
        with replacing(self.path / METRICS) as partial_file:
            pq.write_table(metrics_table, partial_file, write_page_checksum=True)
        cells_table = with_record(cells_table, self.path, facts)
        with replacing(self.path / CELLS) as partial_file:
            pq.write_table(cells_table, partial_file, write_page_checksum=True)
        (self.path / MACHINES).unlink(missing_ok=True)
        return cells

    def _check_owner(self) -> None:
        """Refuse a folder with results that kvbench did not write, because they would be lost."""
        if (self.path / GRID).exists():
            return
        for file_name in (RESPONSES, *_TABLES):
            file_path = self.path / file_name
            # A run killed at its very start leaves an empty journal and no grid.
            if file_path.exists() and (file_name != RESPONSES or file_path.stat().st_size > 0):
                raise UserError(
                    f"{self.path} holds {file_name} but no {GRID}, so it was not written by kvbench; "
                    "choose another --out"
                )

    def _take_lock(self) -> None:
        lock_path = self.path / LOCK
        self._lock = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner_id = os.read(self._lock, 20).decode(errors="replace").strip()
            raise UserError(
                f"{self.path} is in use by another run (process {owner_id or 'unknown'}); "
                "wait for it or choose another --out"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _clear_parts(self) -> None:
        """Remove half-written files of killed runs; the lock excludes other writers."""
        for file_name in (RESPONSES, GRID, MACHINES, *_TABLES):
            for partial_file in unfinished(self.path / file_name):
                partial_file.unlink()

    def _open_journal(self) -> None:
        self._journal = Journal(self.path / RESPONSES)
        for location, entry in self._journal.placed():
            if not _NEEDED <= entry.keys() <= _FIELDS:
                raise UserError(f"another version of kvbench wrote the responses in {self.path}; choose another --out")
            key = (entry["cell"], entry["sample_id"], entry["question_id"], entry["repeat"])
            self._index.add(key, location, done=self._is_complete(entry))
        if self._journal.damaged:
            warnings.warn(
                f"{self._journal.path}: {self._journal.damaged} damaged line(s) were moved to "
                f"{RESPONSES}.damaged; their responses are generated again",
                stacklevel=4,
            )

    def _is_complete(self, entry: Mapping[str, Any]) -> bool:
        """Return whether a response need not be generated again."""
        lacks_fidelity = self._fidelity and "kl" not in entry and entry.get("stop") != "given" and not entry["repeat"]
        return not entry.get("error") and not lacks_fidelity

    def _read(self, locations: Sequence[Place]) -> list[Response]:
        assert self._journal is not None
        try:
            return [_response(self._journal.at(location)) for location in locations]
        except OSError as error:
            raise cannot("read", self.path / RESPONSES, error) from None


def _entry(response: Response) -> dict[str, Any]:
    """Return the record of a response, without what was not measured."""
    return {name: value for name, value in vars(response).items() if value is not None}


def _response(entry: Mapping[str, Any]) -> Response:
    """Return a response from its record; records older than readers lack the read entries."""
    return Response(**{"kv_bytes_read": entry.get("kv_bytes_live", 0), **entry})


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Regroup many small tables into tables of about `_ROW_GROUP` rows."""
    pending_tables: list[pa.Table] = []
    row_count = 0
    for table in tables:
        pending_tables.append(table)
        row_count += len(table)
        if row_count >= _ROW_GROUP:
            yield pa.concat_tables(pending_tables)
            pending_tables, row_count = [], 0
    if pending_tables:
        yield pa.concat_tables(pending_tables)


_FIELDS = {field.name for field in fields(Response)}
_NEEDED = {field.name for field in fields(Response) if field.default is MISSING}
