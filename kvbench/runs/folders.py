"""Run folders: their names, the search for earlier ones, and summaries of their contents."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from kvbench.errors import UserError
from kvbench.runs.command import command_line
from kvbench.runs.file_names import CELLS, GRID, LOCK, RESPONSES
from kvbench.runs.yaml_loader import Loader, read_text

RESULTS = "results"
"""Parent folder of runs without `--out`."""

_HASH = 8
"""Number of hex digits of a grid's digest in its folder's name."""
_SHOWN = 2
_WIDTH = 20
_DEPTH = 4
_RUN_FILES = {GRID, RESPONSES, CELLS}
"""Files of which a run has at least one."""


# --- names ----------------------------------------------------------------------------------------


def default_folder(digest: str, models: Sequence[str], tasks: Sequence[str], policies: Sequence[str]) -> Path:
    """Return the folder of a run without `--out`, from the grid's digest, models, tasks and policies.

    An earlier run of the same grid keeps its folder: the oldest versions used the digest alone as a name, later ones
    end it in the digest's first digits. Otherwise it is `results/MODEL-TASK-POLICY-HASH`.
    """
    results_folder = Path(RESULTS)
    if (results_folder / digest).is_dir():
        return results_folder / digest
    short_digest = digest[:_HASH]
    folder_name = "-".join([*(short_names(grid_values) for grid_values in (models, tasks, policies)), short_digest])
    if not (results_folder / folder_name).is_dir():
        earlier_folders = sorted(path for path in results_folder.glob(f"*-{short_digest}") if (path / GRID).is_file())
        if earlier_folders:
            return earlier_folders[0]
    return results_folder / folder_name


def short_names(spellings: Iterable[str]) -> str:
    """Return a few names, short enough for a folder: `snapkv+h2o+3`."""
    short_names = list(dict.fromkeys(map(_name, spellings)))
    extra_count = [str(len(short_names) - _SHOWN)] if len(short_names) > _SHOWN else []
    return "+".join([*short_names[:_SHOWN], *extra_count])


def _name(spelling: str) -> str:
    """Return the name in a spelling: `snapkv` in `snapkv:window=64`, `Mine` in `./a.py:Mine`."""
    file_part, separator, attribute = spelling.partition(".py:")
    short_name = (attribute if separator else file_part).partition(":")[0].rstrip("/")
    short_name = short_name.rpartition("/")[2].removesuffix(".jsonl").removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", short_name).strip("._-")[:_WIDTH] or "run"


# --- contents -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run for `kvbench list runs`.

    Attributes:
        path: Its folder.
        date: Time of the last change, as ISO 8601 without a time zone.
        ok: Number of cells with a score.
        failed: Number of cells without one.
        state: "finished", "running", "stopped" (the same command continues it) or "broken".
        problem: Why it is broken, or "".
    """

    path: str
    date: str
    models: list[str]
    policies: list[str]
    tasks: list[str]
    ok: int
    failed: int
    state: str
    problem: str = ""


def find_runs(root: Path) -> list[RunSummary]:
    """Find the runs in a folder and its subfolders, newest first.

    Args:
        root: Folder to search.

    Raises:
        UserError: There is no such folder.
    """
    if not os.path.isdir(root):  # Path.is_dir raises if the name is too long
        raise UserError(f"{root} is not a folder; name one that holds runs")
    summaries = [summarise(folder) for folder in _folders(root)]
    return sorted(summaries, key=lambda run: (run.date, run.path), reverse=True)


def _folders(root: Path) -> Iterator[Path]:
    for path, subfolders, file_names in os.walk(root):
        if _RUN_FILES & set(file_names):
            subfolders.clear()
            yield Path(path)
        elif len(Path(path).relative_to(root).parts) >= _DEPTH:
            subfolders.clear()


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run, finished or not."""
    return any(os.path.lexists(folder / file_name) for file_name in _RUN_FILES)


def summarise(folder: Path) -> RunSummary:
    """Summarise a run's folder, even if it is damaged."""
    grid, problem = _grid(folder / GRID)
    cells: list[str] = []
    if (folder / CELLS).exists():
        try:
            with pq.ParquetFile(folder / CELLS, page_checksum_verification=True) as cells_file:
                cells = cells_file.read(["status"]).column("status").to_pylist()
        except Exception as error:  # pyarrow raises many error classes for damaged files
            problem = problem or f"{CELLS}: {_line(error)}"
    state = "finished" if _tables_are_newest(folder) else "stopped"
    if _locked(folder):
        state = "running"
    ok_count = cells.count("ok")
    return RunSummary(
        path=str(folder),
        date=_date(folder),
        models=_strings(grid.get("models")),
        policies=_strings(grid.get("policies")),
        tasks=_strings(grid.get("tasks")),
        ok=ok_count,
        failed=len(cells) - ok_count,
        state="broken" if problem else state,
        problem=problem,
    )


def stored_command(folder: Path) -> str:
    """Return the command that repeats a run; "" if its grid cannot be read."""
    grid, problem = _grid(folder / GRID)
    return "" if problem else command_line(grid)


def _grid(path: Path) -> tuple[dict[str, Any], str]:
    """Return the stored grid, and an error message or ""."""
    try:
        grid = yaml.load(read_text(path), Loader)
    except FileNotFoundError:
        return {}, f"{GRID} is missing"
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        return {}, f"{GRID}: {_line(error)}"
    if not isinstance(grid, dict):
        return {}, f"{GRID} is not a grid"
    return grid, ""


def _tables_are_newest(folder: Path) -> bool:
    """Return whether the tables are newer than the responses: a run writes them when it ends.

    Without responses, as in a copy that is published, nothing can follow the tables.
    """
    try:
        written_time = (folder / CELLS).stat().st_mtime_ns
        if not (folder / RESPONSES).exists():
            return True
        return all(
            written_time >= path.stat().st_mtime_ns for path in (folder / GRID, folder / RESPONSES) if path.exists()
        )
    except OSError:
        return False


def _locked(folder: Path) -> bool:
    """Return whether a run has the folder open."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _date(folder: Path) -> str:
    modified_times = []
    for file_name in (GRID, RESPONSES, CELLS):
        try:
            modified_times.append((folder / file_name).stat().st_mtime)
        except OSError:
            continue
    return datetime.fromtimestamp(max(modified_times, default=0)).isoformat(" ", "minutes")


def _strings(value: object) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    return [] if value is None else [str(value)]


def _line(error: BaseException) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())[:120] or type(error).__name__
