"""A run on disk: responses as they come, safe against any crash, and the two result tables.

`responses.jsonl` is append-only. Every line is `{"crc":"8 hex digits","r":{...}}`; the CRC-32 is
over the bytes of the object after `"r":`. A torn tail is cut and a damaged line is dropped when the
file is opened, so what is missing is generated again and nothing else is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvbench.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

Key = tuple[str, str, int, int]
"""A response's key: (cell, sample_id, question_id, repeat)."""

RESPONSES = "responses.jsonl"
GRID = "grid.yaml"
CELLS = "cells.parquet"
SAMPLES = "samples.parquet"

_HEAD = b'{"crc":"'
_MIDDLE = b'","r":'
_PAYLOAD = len(_HEAD) + 8 + len(_MIDDLE)


@dataclass(frozen=True)
class Response:
    """What a cell answered to one question, and what it cost.

    Attributes:
        cell: Hash of the cell.
        sample_id: Of the request.
        question_id: Of the request.
        repeat: Counts the answers to the same question, from 0.
        doc_id: Of the request.
        context_id: Of the request.
        response: The text.
        stop: Why it ended: "eos", "stop" (a stop string) or "length"; "given": a text of the task
            was measured.
        error: Empty, or why there is no response; such a request is tried again on resuming.
        context_tokens: Tokens of the context.
        question_tokens: Tokens of the question.
        generated_tokens: Tokens of the answer.
        budget_entries: Entries that the budget allows, over all layers and KV heads.
        held_entries: Entries held after compression.
        kv_bytes_live: Bytes of the held entries, per-entry extras included.
        kv_bytes_allocated: Bytes allocated for them.
        kv_bytes_full: Bytes that the full cache would hold.
        prefill_s: Seconds of the prefill.
        compress_s: Seconds of the compression.
        decode_s: Seconds of question and decode.
    """

    cell: str
    sample_id: str
    question_id: int
    repeat: int
    doc_id: int
    context_id: str
    response: str
    stop: str
    error: str
    context_tokens: int
    question_tokens: int
    generated_tokens: int
    budget_entries: int
    held_entries: int
    kv_bytes_live: int
    kv_bytes_allocated: int
    kv_bytes_full: int
    prefill_s: float
    compress_s: float
    decode_s: float

    @property
    def key(self) -> Key:
        """What makes it unique in a run."""
        return (self.cell, self.sample_id, self.question_id, self.repeat)


def _encode(response: Response) -> bytes:
    payload = json.dumps(asdict(response), separators=(",", ":")).encode()
    return _HEAD + b"%08x" % zlib.crc32(payload) + _MIDDLE + payload + b"}\n"


def _decode(line: bytes) -> Response | None:
    """The response in a line without its newline, or None where the line is damaged."""
    payload = line[_PAYLOAD:-1]
    if line != _HEAD + b"%08x" % zlib.crc32(payload) + _MIDDLE + payload + b"}":
        return None
    try:
        return Response(**json.loads(payload))
    except (TypeError, ValueError):
        raise UserError(
            "another version of kvbench wrote the responses there; another --out would be right"
        ) from None


def append_whole(file: int, block: bytes) -> None:
    """Append to an open file and wait until the disk has it; where that fails nothing is left.

    Args:
        file: Descriptor, opened with `O_APPEND`.
        block: What is appended.

    Raises:
        OSError: The disk is full or fails.
    """
    left = memoryview(block)
    start = os.fstat(file).st_size
    try:
        while left:
            left = left[os.write(file, left) :]
        os.fsync(file)
    except BaseException:
        with contextlib.suppress(OSError):  # a torn tail is cut on the next open, too
            os.ftruncate(file, start)
        raise


class RunStore:
    """The folder of a run, locked while it is open.

    Args:
        path: The folder; it is made where there is none.
        fresh: Whether to throw away what an earlier run left in it.

    Raises:
        UserError: Another process has the folder open, or it cannot be written.
    """

    def __init__(self, path: str | Path, fresh: bool = False) -> None:
        self.path = Path(path)
        self._lock = -1
        self._file = -1
        self._responses: dict[Key, Response] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            if fresh:
                self._own_folder()
                for name in (RESPONSES, GRID, CELLS, SAMPLES):
                    (self.path / name).unlink(missing_ok=True)
            self._recover()
            self._file = os.open(
                self.path / RESPONSES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
            )
        except OSError as error:
            self.close()
            raise _cannot("write", error.filename or self.path, error) from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the folder go. What was appended is on disk already."""
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1

    def keys(self) -> set[Key]:
        """The keys that need not be generated again: all but those that ended in an error."""
        return {key for key, response in self._responses.items() if not response.error}

    def responses(self) -> list[Response]:
        """All responses, the last one of each key, in the order of their first coming."""
        return list(self._responses.values())

    def append(self, responses: Sequence[Response]) -> None:
        """Write responses and wait until the disk has them.

        Raises:
            UserError: The disk is full or fails; nothing of these responses is left in the file.
        """
        if not responses:
            return
        try:
            append_whole(self._file, b"".join(_encode(response) for response in responses))
        except OSError as error:
            raise _cannot("write", self.path / RESPONSES, error) from None
        self._responses.update((response.key, response) for response in responses)

    def save_grid(self, grid: Mapping[str, Any]) -> None:
        """Write the grid as YAML: `kvbench run --config` reads it."""
        import yaml

        with _replacing(self.path / GRID) as part:
            part.write_text(yaml.safe_dump(dict(grid), sort_keys=False), encoding="utf-8")

    def write(self, cells: pd.DataFrame, samples: pd.DataFrame) -> list[Path]:
        """Write both result tables with the schemas of `kvbench.runs.schema`.

        Returns:
            The paths written.
        """
        import pyarrow.parquet as pq

        from kvbench.runs.schema import CELLS_SCHEMA, SAMPLES_SCHEMA, to_table

        written = []
        for name, frame, schema in (
            (SAMPLES, samples, SAMPLES_SCHEMA),
            (CELLS, cells, CELLS_SCHEMA),
        ):
            with _replacing(self.path / name) as part:
                pq.write_table(to_table(frame, schema), part)
            written.append(self.path / name)
        return written[::-1]

    def _own_folder(self) -> None:
        """Refuse to throw away results that no run of ours has left."""
        there = [name for name in (RESPONSES, CELLS, SAMPLES) if (self.path / name).exists()]
        if there and not (self.path / GRID).exists():
            raise UserError(
                f"{self.path} holds {there[0]} but no {GRID}: it is no run's folder, and --fresh "
                "throws nothing away there"
            )

    def _take_lock(self) -> None:
        path = self.path / ".lock"
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._lock, 20).decode(errors="replace").strip()
            raise UserError(
                f"{self.path} is in use by another run (process {owner or 'unknown'}); "
                "wait for it or give another --out"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _recover(self) -> None:
        """Read what there is; cut a torn tail, drop damaged lines."""
        path = self.path / RESPONSES
        if not path.exists():
            return
        *lines, tail = path.read_bytes().split(b"\n")
        good: list[bytes] = []
        for line in lines:
            response = _decode(line)
            if response is not None:
                self._responses[response.key] = response
                good.append(line)
        if damaged := len(lines) - len(good):
            warnings.warn(
                f"{path}: {damaged} damaged line(s) dropped; their responses are generated again",
                stacklevel=3,
            )
            with _replacing(path) as part:
                part.write_bytes(b"".join(line + b"\n" for line in good))
        elif tail:
            os.truncate(path, path.stat().st_size - len(tail))


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to; it takes the place of `path` when all is on disk."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _cannot("write", path, error) from None
    finally:
        part.unlink(missing_ok=True)


def _cannot(verb: str, path: str | Path, error: OSError) -> UserError:
    return UserError(f"cannot {verb} {path}: {error.strerror or error}")


def load_frames(paths: str | Path | Iterable[str | Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the result tables of one run or of several.

    A cell that several runs have is taken from the run that has most samples of it, and of those
    most responses.

    Args:
        paths: Folders of runs.

    Returns:
        The frames of `cells.parquet` and `samples.parquet`.

    Raises:
        UserError: There is no such folder, it holds no results, another version wrote them, or two
            of them score the same data by different metrics or judges.
    """
    import pandas as pd

    folders = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(p) for p in paths]
    if not folders:
        raise UserError("no run is named; give the folder of one, as results/...")
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
    """Refuse scores that are no scores of the same, mostly those of two judges."""
    for (task, _), part in cells.groupby(["task", "data_hash"], sort=False):
        found = part.drop_duplicates("metric")
        if len(found) > 1:
            (a, one), (b, two) = zip(found["metric"][:2], found["_run"][:2], strict=True)
            raise UserError(
                f"{task} is scored by {a} in {folders[one]} and by {b} in {folders[two]}, which "
                "cannot be compared; one at a time would be right, or the same judge for both"
            )


def _read(folder: Path, name: str, run: int) -> pd.DataFrame:
    import pandas as pd

    from kvbench.runs.schema import SCHEMA_VERSION

    path = folder / name
    if not path.is_file():
        raise UserError(f"{folder} holds no finished run: {name} is missing")
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
    if "schema" not in frame or (frame["schema"] != SCHEMA_VERSION).any():
        raise UserError(f"{path} was written with another schema than {SCHEMA_VERSION}")
    return frame.assign(_run=run)
