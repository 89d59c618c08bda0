"""Resolution of a name of lm-eval to its tasks, without reading any data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc
from kvbench.errors import UserError, first_lines
from kvbench.files import digest_of
from kvbench.harness.named_tasks import index
from kvbench.harness.protocol import GroupMetric, TaskGroup

HARNESS = "lm_eval_named"
"""Name of the harness that runs these tasks."""


@dataclass(frozen=True)
class TaskSpec:
    """What lm-eval needs to build a task.

    Attributes:
        name: Name of the task.
        known_as: Its name in the index; "" for a task that a group defines itself.
        overrides: What the group changes in its YAML, or the whole configuration of a task that a group defines.
    """

    name: str
    known_as: str
    overrides: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Return a digest that two tasks share only if they are the same."""
        return digest_of([self.known_as, {key: repr(value) for key, value in self.overrides.items()}])


@dataclass(frozen=True)
class NamedBenchmark(Benchmark):
    """Tasks of lm-eval, by a name of lm-eval.

    Attributes:
        specs: What each task is built from.
        groups: The groups with a score of their own: the named one and those inside it.
        include_path: Folders of the user's own tasks.
    """

    specs: Mapping[str, TaskSpec] = field(default_factory=dict)
    groups: tuple[TaskGroup, ...] = ()
    include_path: tuple[str, ...] = ()

    def identity(self, leaf: str) -> tuple[str, str]:
        """Return what two tasks of one name share only if they are the same."""
        return (HARNESS, self.specs[leaf].digest)


def resolve(name: str, include_path: Sequence[str] = ()) -> NamedBenchmark | None:
    """Return the tasks that a name of lm-eval stands for; None if lm-eval does not know it.

    Args:
        name: Name of a task, a group or a tag; `PREFIX` may precede it.
        include_path: Folders of the user's own tasks.

    Raises:
        UserError: A group has no tasks or several of one name, or its YAML is wrong.
    """
    task_name = name.removeprefix(index.PREFIX)
    known_names = index.names(include_path)
    if task_name not in known_names:
        known_names = index.rebuilt_names(include_path)
        if task_name not in known_names:
            return None
    entry = known_names[task_name]
    with _sketching(task_name) as factory:
        registry = index.entries(known_names)
        built = factory.build(registry[task_name], registry=registry)
    specs, groups = _collected(built, task_name)
    if not specs:
        raise UserError(f"{task_name} is a {entry.kind.lower()} without tasks; choose another task")
    return NamedBenchmark(
        name=task_name,
        leaves=tuple(specs),
        docs=_no_rows,
        yaml=Path(entry.yaml),
        summary=f"{entry.kind.lower()} of lm-eval",
        source=entry.yaml,
        harness=HARNESS,
        metric="",
        sized=False,
        specs=specs,
        groups=tuple(groups),
        include_path=tuple(include_path),
    )


def _no_rows(*_: Any, **__: Any) -> list[Doc]:
    raise AssertionError("lm-eval reads the data of its own tasks")


@dataclass(frozen=True)
class _Sketch:
    """A task of a group, in the place of lm-eval's object, which would load its data."""

    spec: TaskSpec

    @property
    def task_name(self) -> str:
        return self.spec.name


@contextlib.contextmanager
def _sketching(task_name: str) -> Iterator[Any]:
    """Lend a factory of lm-eval that builds groups, with sketches of their tasks.

    Raises:
        UserError: The YAML of a group is wrong.
    """
    from lm_eval.tasks import _factory

    class SketchFactory(_factory.TaskFactory):  # type: ignore[misc]
        def _build_task(self, entry: Any, overrides: dict[str, Any] | None) -> _Sketch:
            changes = {key: value for key, value in (overrides or {}).items() if (key, value) != ("task", entry.name)}
            return _Sketch(TaskSpec(changes.get("task", entry.name), entry.name, changes))

    def sketch(config: dict[str, Any]) -> _Sketch:
        return _Sketch(TaskSpec(config["task"], "", config))

    task_class = _factory.ConfigurableTask
    _factory.ConfigurableTask = sketch  # for tasks that a group defines itself
    try:
        yield SketchFactory()
    except Exception as error:
        raise UserError(f"{task_name}: lm-eval cannot read this group ({first_lines(error)}); mend its YAML") from error
    finally:
        _factory.ConfigurableTask = task_class


def _collected(built: Any, group_name: str) -> tuple[dict[str, TaskSpec], list[TaskGroup]]:
    """Return the tasks and groups of what lm-eval has built.

    Raises:
        UserError: Different tasks have the same name.
    """
    if isinstance(built, _Sketch):
        return {built.task_name: built.spec}, []
    specs: dict[str, TaskSpec] = {}
    groups: list[TaskGroup] = []
    for child in built:
        child_specs, child_groups = _collected(child, group_name)
        for name, spec in child_specs.items():
            if specs.setdefault(name, spec).digest != spec.digest:
                # lm-eval does this to a group inside a group that changes its settings, and then recurs without end.
                raise UserError(
                    f"{group_name} gives several tasks the name {name}; use the names of its members instead"
                )
        groups += child_groups
    metrics = getattr(built, "aggregate_metric_list", None)
    if metrics:
        group_metrics = tuple(
            GroupMetric(
                config.metric,
                None if config.filter_list is None else tuple(config.filter_list),
                bool(config.weight_by_size),
            )
            for config in metrics
        )
        groups.insert(0, TaskGroup(built.name, tuple(specs), group_metrics))
    return specs, groups


def configured(spec: TaskSpec, include_path: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a task, without importing its functions."""
    from lm_eval.tasks._yaml_loader import load_yaml

    if not spec.known_as:
        return dict(spec.overrides)
    yaml = index.names(include_path)[spec.known_as].yaml
    return {**load_yaml(yaml, resolve_func=False), **spec.overrides}


def build(spec: TaskSpec, include_path: Sequence[str], metadata: Mapping[str, Any]) -> Any:
    """Build lm-eval's object of a task, which loads its data.

    Args:
        spec: The task.
        include_path: Folders of the user's own tasks.
        metadata: What functions of a task that make its data are given.
    """
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._factory import TaskFactory

    if not spec.known_as:
        return ConfigurableTask(config=dict(spec.overrides))
    registry = index.entries(index.names(include_path))
    factory = TaskFactory(meta=dict(metadata))
    return factory.build(registry[spec.known_as], overrides=dict(spec.overrides) or None, registry=registry)
