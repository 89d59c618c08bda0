"""A run on disk: responses as they come, safe against any crash, and the two result tables."""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import pandas as pd
import pyarrow.parquet as pq
import yaml

from kvbench.errors import UserError
from kvbench.files import Journal, cannot, replacing
from kvbench.runs.schema import (
    ADDED,
    CELLS_SCHEMA,
    SAMPLES_SCHEMA,
    SCHEMA_VERSION,
    to_table,
)

Key = tuple[str, str, int, int]
"""A response's key: (cell, sample_id, question_id, repeat)."""

RESPONSES = "responses.jsonl"
GRID = "grid.yaml"
CELLS = "cells.parquet"
SAMPLES = "samples.parquet"
LOCK = ".lock"


@dataclass(frozen=True)
class Response:
    """What a cell answered to one question, and what it cost.

    Attributes:
        cell: Hash of the cell.
        sample_id: Sample of the request.
        question_id: Question of the request.
        repeat: Index of the answer among the answers to the same question, from 0.
        doc_id: Row of the request.
        context_id: Context of the request.
        response: The text of the answer.
        stop: Why it ended: "eos", "stop" (a stop string) or "length"; "given" if a text of the task
            was measured.
        error: Why there is no response, or an empty string; resuming tries such a request again.
        context_tokens: Tokens of the context.
        question_tokens: Tokens of the question.
        generated_tokens: Tokens of the answer.
        budget_entries: Entries that the budget allows, over all layers and KV heads.
        held_entries: Entries held after compression.
        kv_bytes_live: Bytes of the held entries, including per-entry extras.
        kv_bytes_allocated: Bytes allocated for them.
        kv_bytes_full: Bytes that the full cache would hold.
        visual_tokens: Tokens of images and videos in the context.
        held_visual: How many of the held entries are theirs; at moment `decode`, when the answer
            ends.
        prefill_s: Seconds of the prefill.
        compress_s: Seconds of the compression.
        decode_s: Seconds of question and decoding.
    """

    cell: str
    sample_id: str
    question_id: int
    repeat: int
    doc_id: int
    context_id: str
    response: str = ""
    stop: str = ""
    error: str = ""
    context_tokens: int = 0
    question_tokens: int = 0
    generated_tokens: int = 0
    budget_entries: int = 0
    held_entries: int = 0
    kv_bytes_live: int = 0
    kv_bytes_allocated: int = 0
    kv_bytes_full: int = 0
    visual_tokens: int = 0
    held_visual: int = 0
    prefill_s: float = 0.0
    compress_s: float = 0.0
    decode_s: float = 0.0

    @property
    def key(self) -> Key:
        """What makes it unique in a run."""
        return (self.cell, self.sample_id, self.question_id, self.repeat)


class RunStore:
    """The folder of a run, locked while it is open.

    `responses.jsonl` is a `kvbench.files.Journal` of responses: whatever is missing after a crash
    is generated again, and nothing else.

    Args:
        path: The folder; it is created if it does not exist.
        fresh: Whether to discard what an earlier run left in it.

    Raises:
        UserError: Another process has the folder open, it cannot be written, or it holds files that
            no run of kvbench has written.
    """

    def __init__(self, path: str | Path, fresh: bool = False) -> None:
        self.path = Path(path)
        self._lock = -1
        self._journal: Journal | None = None
        self._responses: dict[Key, Response] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._check_owner()
            if fresh:
                for name in (RESPONSES, GRID, CELLS, SAMPLES):
                    (self.path / name).unlink(missing_ok=True)
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
        """Release the folder. Everything that was appended is already on disk."""
        if self._journal is not None:
            self._journal.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def keys(self) -> set[Key]:
        """The keys of the responses that did not end in an error: they are not generated again."""
        return {key for key, response in self._responses.items() if not response.error}

    def responses(self) -> list[Response]:
        """The last response of each key, in the order in which the keys first came."""
        return list(self._responses.values())

    def append(self, responses: Sequence[Response]) -> None:
        """Write responses and wait until the disk has them.

        Raises:
            UserError: The disk is full or fails; none of these responses remains in the file.
        """
        if not responses:
            return
        assert self._journal is not None
        try:
            self._journal.append(map(asdict, responses))
        except OSError as error:
            raise cannot("write", self.path / RESPONSES, error) from None
        self._responses.update((response.key, response) for response in responses)

    def save_grid(self, grid: Mapping[str, Any]) -> None:
        """Write the grid as YAML, which `kvbench run --config` can read."""
        with replacing(self.path / GRID) as part:
            part.write_text(yaml.safe_dump(dict(grid), sort_keys=False), encoding="utf-8")

    def write(self, cells: pd.DataFrame, samples: pd.DataFrame) -> None:
        """Write both result tables with the schemas of `kvbench.runs.schema`."""
        tables = ((SAMPLES, samples, SAMPLES_SCHEMA), (CELLS, cells, CELLS_SCHEMA))
        for name, frame, schema in tables:
            with replacing(self.path / name) as part:
                pq.write_table(to_table(frame, schema), part)

    def _check_owner(self) -> None:
        """Refuse a folder with results that kvbench did not write: they would be lost."""
        if (self.path / GRID).exists():
            return
        for name in (RESPONSES, CELLS, SAMPLES):
            file = self.path / name
            # A run that was killed at its very start leaves an empty journal and no grid.
            if file.exists() and (name != RESPONSES or file.stat().st_size > 0):
                raise UserError(
                    f"{self.path} holds {name} but no {GRID}, so it was not written by kvbench; "
                    "choose another --out"
                )

    def _take_lock(self) -> None:
        path = self.path / LOCK
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._lock, 20).decode(errors="replace").strip()
            raise UserError(
                f"{self.path} is in use by another run (process {owner or 'unknown'}); "
                "wait for it or choose another --out"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _open_journal(self) -> None:
        self._journal = Journal(self.path / RESPONSES)
        try:
            responses = [Response(**entry) for entry in self._journal.entries()]
        except TypeError:
            raise UserError(
                f"another version of kvbench wrote the responses in {self.path}; choose another "
                "--out"
            ) from None
        self._responses = {response.key: response for response in responses}
        if self._journal.damaged:
            warnings.warn(
                f"{self._journal.path}: {self._journal.damaged} damaged line(s) were moved to "
                f"{RESPONSES}.damaged; their responses are generated again",
                stacklevel=4,
            )


def load_frames(paths: str | Path | Iterable[str | Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the result tables of one run or of several.

    If several runs have a cell, it is taken from the run with the most samples of it, and among
    these from the run with the most responses.

    Args:
        paths: Folders of runs.

    Returns:
        The frames of `cells.parquet` and `samples.parquet`.

    Raises:
        UserError: A folder does not exist, holds no results or those of another version, or two
            runs score the same data by different metrics or judges.
    """
    folders = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(p) for p in paths]
    if not folders:
        raise UserError("name at least one run, such as results/my_run")
    cells = pd.concat([_read(f, CELLS, run) for run, f in enumerate(folders)], ignore_index=True)
    samples = pd.concat(
        [_read(f, SAMPLES, run) for run, f in enumerate(folders)], ignore_index=True
    )
    _one_metric(cells, folders)
    said = samples.value_counts(["cell", "_run"])
    rows = [said.get(key, 0) for key in zip(cells["cell"], cells["_run"], strict=True)]
    order = cells.assign(_said=rows).sort_values(["samples", "_said"], ascending=False)
    best = order.drop_duplicates("cell")
    cells = cells.loc[sorted(best.index)]
    samples = samples.merge(cells[["cell", "_run"]], on=["cell", "_run"])
    return (
        cells.drop(columns="_run").reset_index(drop=True),
        samples.drop(columns="_run").reset_index(drop=True),
    )


def _one_metric(cells: pd.DataFrame, folders: Sequence[Path]) -> None:
    """Refuse to mix scores of different metrics, usually those of two judges."""
    for (task, _), part in cells.groupby(["task", "data_hash"], sort=False):
        found = part.drop_duplicates("metric")
        if len(found) > 1:
            (a, one), (b, two) = zip(found["metric"][:2], found["_run"][:2], strict=True)
            raise UserError(
                f"{task} is scored by {a} in {folders[one]} and by {b} in {folders[two]}, which "
                "cannot be compared; give one run at a time, or use the same judge for both"
            )


def _read(folder: Path, name: str, run: int) -> pd.DataFrame:
    path = folder / name
    if not path.is_file():
        raise UserError(f"{folder} is not a finished run: {name} is missing")
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
    for older, columns in ADDED.items():
        if "schema" in frame and (frame["schema"] == older).all():
            names = (CELLS_SCHEMA if name == CELLS else SAMPLES_SCHEMA).names
            frame = frame.assign(**columns, schema=frame["schema"] + 1)
            frame = frame[[column for column in names if column in frame]]
    if "schema" not in frame or (frame["schema"] != SCHEMA_VERSION).any():
        raise UserError(f"{path} was not written with schema {SCHEMA_VERSION}; run it again")
    return frame.assign(_run=run)
