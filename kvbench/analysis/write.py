"""Writes the files of an analysis: tables, settings, figures and a summary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvbench.analysis.summary import summary_text
from kvbench.errors import UserError
from kvbench.files import cannot, replacing
from kvbench.report.table import Table
from kvbench.runs.grid import Grid

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Done:
    """What an analysis has made.

    Attributes:
        path: The folder.
        files: All files written, the summary first.
        tables: What to show in a terminal.
        notes: Lines to show below them.
        failed: Why cells failed, by cell id.
    """

    path: Path
    files: list[Path]
    tables: list[Table]
    notes: list[str]
    failed: Mapping[str, str]


def folder_of(grid: Grid, name: str, *settings: object) -> Path:
    """The folder to write to, created if needed, before any work is done.

    By default everything that changes a number, except `--samples`, has a folder of its own.

    Args:
        grid: Says where to write; None there stands for the default.
        name: Of the analysis.
        settings: Whatever else changes a number.

    Raises:
        UserError: It cannot be written to.
    """
    digest = hashlib.sha256(json.dumps([grid.digest, *settings]).encode()).hexdigest()[:16]
    return prepared(Path(grid.out) if grid.out else Path("results") / f"{name}-{digest}")


def prepared(path: Path) -> Path:
    """Create a folder and that of its figures, before any work is done.

    Raises:
        UserError: It cannot be written to.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"cannot write {path}: it is a file, not a folder")
    try:
        (path / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("write", path, error) from None
    return path


def write_all(
    path: Path,
    grid: Grid,
    settings: Mapping[str, Any],
    frames: Mapping[str, pd.DataFrame],
    tables: Sequence[Table],
    notes: Sequence[str],
    figures: Sequence[Path],
    command: str,
    failed: Mapping[str, str],
    as_csv: Collection[str] = (),
) -> Done:
    """Write tables, settings and summary of an analysis; its figures are already there.

    Args:
        path: The folder.
        grid: What was analysed.
        settings: What else it was made with; `analysis` is its name.
        frames: By the name of the file.
        tables: Shown in the summary.
        notes: Lines below them.
        figures: Files that the summary shows.
        command: What the summary says that made it.
        failed: Why cells failed, by cell id.
        as_csv: Frames to write as CSV too, where there are any.

    Raises:
        UserError: A file cannot be written.
    """
    own = {k: v for k, v in grid.to_dict().items() if k not in ("full", "out", "attn")}
    title = f"kvbench {settings['analysis']}"
    return write_files(
        path, title, {**own, **settings}, frames, tables, notes, figures, command, failed, as_csv
    )


def write_files(
    path: Path,
    title: str,
    record: Mapping[str, Any],
    frames: Mapping[str, pd.DataFrame],
    tables: Sequence[Table],
    notes: Sequence[str],
    figures: Sequence[Path],
    command: str,
    failed: Mapping[str, str],
    as_csv: Collection[str] = (),
) -> Done:
    """Write tables, settings and summary; `title` is the summary's.

    Args:
        path, frames, tables, notes, figures, command, failed, as_csv: As for `write_all`.
        title: Heading of the summary.
        record: How all this was made; versions are added.

    Raises:
        UserError: A file cannot be written.
    """
    files = [_write_csv(frames[n], path / f"{n}.csv") for n in frames if n in as_csv]
    files += [write_table(frame, path / f"{name}.parquet") for name, frame in frames.items()]
    files.append(path / "settings.json")
    packages = {name: version(name) for name in ("kvbench", "torch", "transformers")}
    with replacing(files[-1]) as part:
        part.write_text(json.dumps({**record, "versions": packages}, indent=2) + "\n")
    summary = path / "summary.md"
    page = summary_text(title, command, tables, notes, figures, path)
    with replacing(summary) as part:
        part.write_text(page, encoding="utf-8")
    return Done(path, [summary, *files, *figures], list(tables), list(notes), failed)


def write_table(frame: pd.DataFrame, path: Path) -> Path:
    """Write a frame as parquet; text columns are dictionaries."""
    table = pa.Table.from_pandas(frame.assign(schema=SCHEMA_VERSION), preserve_index=False)
    with replacing(path) as part:
        pq.write_table(table, part, compression="zstd")
    return path


def _write_csv(frame: pd.DataFrame, path: Path) -> Path:
    """Write a frame as CSV."""
    with replacing(path) as part:
        frame.to_csv(part, index=False)
    return path


def check_any(frame: Sized, failed: Mapping[str, str]) -> None:
    """Refuse to go on if every cell failed.

    Raises:
        UserError: The frame is empty; the first reason is given.
    """
    if not len(frame):
        reason = " ".join(next(iter(failed.values()), "no cell was run").split())
        raise UserError(f"nothing to show: all {len(failed)} cells failed: {reason}")
