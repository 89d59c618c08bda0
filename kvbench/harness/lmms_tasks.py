"""Tasks of lmms-eval by their names: an index of names, and benchmarks for them.

The index is read from lmms-eval's YAML without importing lmms-eval, which takes seconds, and is kept on disk.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kvbench.benchmark import Benchmark, Doc
from kvbench.errors import UserError
from kvbench.files import cache_dir, digest_of, stored_json
from kvbench.harness.protocol import GroupMetric, TaskGroup

PREFIX = "lmms_eval:"
"""Prefix of a task's name that means lmms-eval's task, where kvbench or lm-eval has one of that name too."""

TASK, CLASS, GROUP, TAG = "task", "class", "group", "tag"
"""Kinds of names: a task, a task that a Python class defines, and two that stand for several tasks."""


class LmmsEntry(NamedTuple):
    """What a name of lmms-eval stands for.

    Attributes:
        kind: `task`, `class`, `group` or `tag`.
        yaml: Path of its YAML inside lmms-eval's folder of tasks; "" for a tag.
        members: Names of the tasks, groups and tags that a group or a tag stands for.
        aggregates: Metrics that a group aggregates, each with whether tasks are weighted by their size.
    """

    kind: str
    yaml: str
    members: list[str]
    aggregates: Sequence[tuple[str, bool]] = ()


@dataclass(frozen=True)
class LmmsBenchmark(Benchmark):
    """Tasks of lmms-eval, by a name of lmms-eval, on the data that lmms-eval loads.

    Attributes:
        definitions: YAML of each task.
        groups: The groups with a score of their own: the named one and those inside it.
    """

    definitions: Mapping[str, Path] = field(default_factory=dict)
    groups: tuple[TaskGroup, ...] = ()

    def identity(self, leaf: str) -> tuple[str, str]:
        """Return what two tasks of one name share only if they are the same."""
        return (self.harness, str(self.definitions[leaf]))


def resolve(name: str) -> list[tuple[str, Benchmark]] | None:
    """Return the tasks that a name of lmms-eval stands for; None if lmms-eval does not know it or is not installed.

    Args:
        name: Name of a task, a group or a tag; `PREFIX` may precede it.

    Raises:
        UserError: A group has no tasks, or one that does not exist.
    """
    known_names, name = names(), name.removeprefix(PREFIX)
    folder = tasks_folder()
    if name not in known_names or folder is None:
        return None
    task_names = dict.fromkeys(_tasks_of(name, known_names, ()))
    if not task_names:
        raise UserError(f"{name} is a {known_names[name].kind} of lmms-eval without tasks; choose another task")
    benchmark = LmmsBenchmark(
        name=name,
        leaves=tuple(task_names),
        docs=_no_rows,
        yaml=folder,
        summary=f"{known_names[name].kind} of lmms-eval",
        source=str(folder / known_names[name].yaml),
        harness="lmms_eval",
        metric="",
        sized=False,
        media=("image",),
        definitions={task_name: folder / known_names[task_name].yaml for task_name in task_names},
        groups=tuple(_groups(name, known_names)),
    )
    return [(task_name, benchmark) for task_name in benchmark.leaves]


def _no_rows(*_: Any, **__: Any) -> list[Doc]:
    raise AssertionError("lmms-eval reads the data of its own tasks")


def _tasks_of(name: str, known_names: Mapping[str, LmmsEntry], inside: tuple[str, ...]) -> Iterator[str]:
    """Yield the tasks that a name stands for.

    Args:
        known_names: The index.
        inside: The groups that the name is in.

    Raises:
        UserError: A group names a task that does not exist, or contains itself.
    """
    if name not in known_names or name in inside:
        reason = "itself" if name in inside else f"{name!r}, which lmms-eval does not have"
        raise UserError(f"group {inside[-1]} of lmms-eval names {reason}; choose its tasks one by one")
    entry = known_names[name]
    if entry.kind in (TASK, CLASS):
        yield name
    for member in entry.members:
        yield from _tasks_of(member, known_names, (*inside, name))


def _groups(name: str, known_names: Mapping[str, LmmsEntry]) -> Iterator[TaskGroup]:
    """Yield the groups with a score of their own that a name stands for."""
    entry = known_names[name]
    if entry.aggregates:
        metrics = tuple(GroupMetric(metric, None, bool(by_size)) for metric, by_size in entry.aggregates)
        yield TaskGroup(name, tuple(dict.fromkeys(_tasks_of(name, known_names, ()))), metrics)
    for member in entry.members:
        yield from _groups(member, known_names)


# --- the index ------------------------------------------------------------------------------------


def names() -> Mapping[str, LmmsEntry]:
    """Return every name that lmms-eval knows; none if it is not installed."""
    folder = tasks_folder()
    return {} if folder is None else _names(folder, _fingerprint(folder))


def tasks_folder() -> Path | None:
    """Return the folder with the tasks of the installed lmms-eval; None if it is not installed."""
    package = importlib.util.find_spec("lmms_eval")
    if package is None or not package.submodule_search_locations:
        return None
    return Path(package.submodule_search_locations[0], "tasks")


def _fingerprint(folder: Path) -> str:
    """Return a digest of the version of lmms-eval, and of the names, sizes and times of all its YAML files."""
    states = []
    for path in _yaml_files(folder):
        state = os.stat(path)
        states.append([path, state.st_size, state.st_mtime_ns])
    return digest_of([version("lmms_eval"), LmmsEntry._fields, sorted(states)])


def _yaml_files(folder: Path) -> Iterator[str]:
    """Yield the YAML files of tasks in the order in which lmms-eval reads them: of equal names the last one counts."""
    for parent, folder_names, file_names in os.walk(folder):
        folder_names[:] = [name for name in folder_names if name not in ("__pycache__", ".ipynb_checkpoints")]
        yield from (os.path.join(parent, name) for name in file_names if name.endswith(".yaml"))


@functools.lru_cache(maxsize=1)
def _names(folder: Path, fingerprint: str) -> dict[str, LmmsEntry]:
    """Return the index of a folder of tasks, from the file if it has it."""
    index_file = cache_dir() / "lmms_eval" / f"index-{fingerprint}.json"
    return stored_json(
        index_file,
        lambda: _scanned(folder),
        lambda stored: {name: LmmsEntry(*entry) for name, entry in stored.items()},
    )


def _scanned(folder: Path) -> dict[str, LmmsEntry]:
    """Return the names that YAML files define, by the rules of lmms-eval's `TaskManager`."""
    found: dict[str, LmmsEntry] = {}
    included: dict[str, dict[str, Any]] = {}
    for path in _yaml_files(folder):
        config = read_config(path, included)
        task, yaml_path = config.get("task"), os.path.relpath(path, folder)
        if "class" in config:
            found[config["task"]] = LmmsEntry(CLASS, yaml_path, [])
        elif isinstance(task, list):
            aggregates = config.get("aggregate_metric_list") or []
            aggregates = [aggregates] if isinstance(aggregates, dict) else aggregates
            weights = [(metric["metric"], bool(metric.get("weight_by_size"))) for metric in aggregates]
            found[config["group"]] = LmmsEntry(GROUP, yaml_path, [*_members(task)], weights)
        elif isinstance(task, str):
            found[task] = LmmsEntry(TASK, yaml_path, [])
            for key in ("tag", "group"):
                tags = config.get(key) or []
                for tag in [tags] if isinstance(tags, str) else tags:
                    tag_entry = found.setdefault(tag, LmmsEntry(TAG, "", []))
                    if tag_entry.kind != TAG:
                        break
                    tag_entry.members.append(task)
    return found


def _members(entries: list[Any]) -> Iterator[str]:
    """Yield the names in a group, also those of groups that it defines itself."""
    for entry in entries:
        member = entry["task"] if isinstance(entry, dict) else entry
        if isinstance(member, list):
            yield from _members(member)
        else:
            yield member


class _Loader(yaml.CSafeLoader):
    """Loader that leaves functions unresolved."""


_Loader.add_constructor("!function", lambda loader, node: node.value)


def read_config(path: str | Path, included: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a YAML with the files that it includes, and with functions as their names.

    Args:
        path: The file.
        included: What was read before, by path.
    """
    path = os.path.normpath(path)
    if path not in included:
        with open(path, "rb") as file:
            config = yaml.load(file, _Loader) or {}
        merged: dict[str, Any] = {}
        includes = config.pop("include", None) or []
        for include in reversed([includes] if isinstance(includes, str) else includes):
            beside = os.path.join(os.path.dirname(path), include)
            merged |= read_config(include if os.path.isfile(include) else beside, included)
        included[path] = {**merged, **config}
    return included[path]
