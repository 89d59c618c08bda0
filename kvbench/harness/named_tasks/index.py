"""Index of the tasks, groups and tags of lm-eval, kept on disk because lm-eval takes seconds to build it.

Reading the index imports nothing of lm-eval, so that names complete and errors appear at once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvbench.errors import UserError
from kvbench.files import cache_dir, digest_of, stored_json

if TYPE_CHECKING:
    from lm_eval.tasks._index import Entry

PREFIX = "lm_eval:"
"""Prefix of a task's name that means lm-eval's task, where kvbench has one of that name too."""

TASKS = ("TASK", "PY_TASK")
"""Kinds of names that stand for one task; others are `GROUP` and `TAG`."""


class IndexEntry(NamedTuple):
    """What a name of lm-eval stands for.

    Attributes:
        kind: `TASK`, `PY_TASK` (defined by a Python class), `GROUP` or `TAG`.
        yaml: Path of its YAML; "" for a tag.
        tags: Tags of a task; tasks of a tag.
    """

    kind: str
    yaml: str
    tags: list[str]


Names = Mapping[str, IndexEntry]
"""Index entries by name."""


def names(include_path: Sequence[str] = ()) -> Names:
    """Return every name that lm-eval knows, and those of the user's own folders, which come first.

    Args:
        include_path: Folders with YAML of tasks.

    Raises:
        UserError: A folder does not exist.
    """
    own_names: dict[str, IndexEntry] = {}
    for folder in include_path:
        own_names |= _own_names(Path(folder))[0]
    return _installed_names() | own_names if own_names else _installed_names()


def broken_files(include_path: Sequence[str]) -> list[str]:
    """Return one message for each YAML file in the user's own folders that cannot be read."""
    return [problem for folder in include_path for problem in _own_names(Path(folder))[1]]


def rebuilt_names(include_path: Sequence[str] = ()) -> Names:
    """Return `names` after checking every file of lm-eval, in case a task was added to the installed package."""
    _installed_names.cache_clear()
    index_file = _index_file()
    with contextlib.suppress(OSError, ValueError):
        if json.loads(index_file.read_text(encoding="utf-8"))["files"] != _fingerprint(_tasks_folder()):
            index_file.unlink()
    return names(include_path)


def entries(known_names: Names) -> MutableMapping[str, Entry]:
    """Return the index in the form that lm-eval builds tasks from; each entry is created when it is read."""
    return _Registry(known_names)


class _Registry(MutableMapping[str, "Entry"]):
    """lm-eval's mapping of names to entries, created on demand: creating all of them takes a third of a second."""

    def __init__(self, known_names: Names) -> None:
        self._names = known_names
        self._entries: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        from lm_eval.tasks._index import Entry, Kind

        if name not in self._entries:
            kind, yaml, tags = self._names[name]
            # Without `cfg`, lm-eval reads the YAML again.
            self._entries[name] = Entry(name, Kind[kind], Path(yaml) if yaml else None, None, set(tags))
        return self._entries[name]

    def __setitem__(self, name: str, entry: Entry) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter({**self._names, **self._entries})

    def __len__(self) -> int:
        return len({**self._names, **self._entries})


def _tasks_folder() -> Path:
    """Return the folder with the tasks of the installed lm-eval."""
    package = importlib.util.find_spec("lm_eval")
    assert package is not None  # kvbench requires it
    return Path((package.submodule_search_locations or [""])[0], "tasks")


def _index_file() -> Path:
    folder = _tasks_folder()
    identity = digest_of([version("lm-eval"), str(folder), folder.stat().st_mtime_ns])
    return cache_dir() / "lm_eval" / f"index-{identity}.json"


@functools.cache
def _installed_names() -> dict[str, IndexEntry]:
    """Return the names of the installed lm-eval, from the file if it has them."""
    folder = _tasks_folder()
    return stored_json(
        _index_file(),
        lambda: {"files": _fingerprint(folder), "names": _scanned(folder)},
        lambda index: {name: IndexEntry(*entry) for name, entry in index["names"].items()},
    )


def _fingerprint(folder: Path) -> str:
    """Return a digest of the names, sizes and times of all YAML files in a folder."""
    states = []
    for parent, _, file_names in os.walk(folder):
        for file_name in file_names:
            if file_name.endswith(".yaml"):
                state = os.stat(os.path.join(parent, file_name))
                states.append([parent, file_name, state.st_size, state.st_mtime_ns])
    return digest_of(sorted(states))


def _scanned(folder: Path) -> dict[str, list[Any]]:
    """Return the names that the YAML files of lm-eval define."""
    from lm_eval.tasks._index import TaskIndex

    return _plain(TaskIndex.build([folder]))


def _plain(found: Mapping[str, Entry]) -> dict[str, list[Any]]:
    """Return entries of lm-eval as JSON values."""
    return {
        name: [entry.kind.name, str(entry.yaml_path or ""), sorted(entry.tags)] for name, entry in sorted(found.items())
    }


@functools.lru_cache(maxsize=16)
def _own_names(folder: Path) -> tuple[dict[str, IndexEntry], list[str]]:
    """Return the names in a folder of the user's own tasks, and what is wrong with files that cannot be read.

    Hidden folders are skipped: a virtual environment may hold all of lm-eval.

    Raises:
        UserError: There is no such folder.
    """
    from lm_eval.tasks._index import TaskIndex
    from lm_eval.tasks._yaml_loader import load_yaml

    if not folder.is_dir():
        raise UserError(f"--include-path {folder} is not a folder; name the folder with the YAML of your tasks")
    found: dict[str, Entry] = {}
    problems = []
    for parent, folder_names, file_names in os.walk(folder.absolute()):
        folder_names[:] = sorted(name for name in folder_names if not name.startswith((".", "__")))
        for file_name in sorted(file_names):
            yaml_file = Path(parent, file_name)
            if yaml_file.suffix != ".yaml":
                continue
            try:
                config = load_yaml(yaml_file, resolve_func=False)
            except Exception as error:
                problems.append(f"{yaml_file}: {_first_line(error)}")
                continue
            with contextlib.suppress(ValueError):  # YAML of something else
                TaskIndex.process_cfg(config, yaml_file, found)
    return {name: IndexEntry(*entry) for name, entry in _plain(found).items()}, problems


def _first_line(error: Exception) -> str:
    """Return what is wrong with a YAML file, with the line if the parser knows it."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is not None and problem:
        return f"line {mark.line + 1}: {problem}"
    return next(iter(str(error).splitlines()), "") or type(error).__name__
