"""Catalogue of tasks: the installed benchmarks and the user's own JSONL files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from kvbench import registry
from kvbench.benchmark import Benchmark
from kvbench.errors import UserError, quoted, unknown
from kvbench.harness import lmms_tasks
from kvbench.harness.named_tasks import benchmarks as named
from kvbench.harness.named_tasks import index
from kvbench.harness.own import own_benchmark


def benchmarks() -> tuple[dict[str, Benchmark], list[str]]:
    """Return all benchmarks that load, and one message for each that does not.

    Returns:
        Benchmarks by name, and the messages of those that failed.
    """
    loaded: dict[str, Benchmark] = {}
    failures: list[str] = []
    for benchmark_name in registry.names(registry.TASKS):
        try:
            loaded[benchmark_name] = registry.get(registry.TASKS, benchmark_name)
        except UserError as error:
            failures.append(str(error))
    return loaded, failures


def benchmark(name: str) -> Benchmark | None:
    """Return an installed benchmark; None if there is none of this name, or it does not load."""
    with suppress(UserError):
        found: Benchmark = registry.get(registry.TASKS, name)
        return found
    return None


def resolve_task(spec: str, include_path: Sequence[str] = ()) -> list[tuple[str, Benchmark]]:
    """Return the tasks that a spelling stands for.

    Args:
        spec: A benchmark (`ruler`), a subset of one (`longbench_code`), a task (`vt`), a file (`./mine.jsonl`), or a
            task, group or tag of lm-eval (`arc_easy`) or lmms-eval (`mmmu_val`). kvbench's own come first, then those
            of lm-eval; `lm_eval:gsm8k` means lm-eval's.
        include_path: Folders with lm-eval's YAML of the user's own tasks.

    Returns:
        Pairs of task name and benchmark, in the benchmark's order.

    Raises:
        UserError: There is no such task, or its package does not import.
    """
    if spec.endswith(".jsonl"):
        file_benchmark = own_benchmark(spec)
        return [(task_name, file_benchmark) for task_name in file_benchmark.leaves]
    if spec.startswith((index.PREFIX, lmms_tasks.PREFIX)):
        return _of_a_harness(spec, include_path)
    if spec in registry.names(registry.TASKS):
        group: Benchmark = registry.get(registry.TASKS, spec)
        return [(task_name, group) for task_name in group.leaves]
    loaded, failures = benchmarks()
    matches = [(group_name, group) for group_name, group in loaded.items() if spec in group.leaves]
    if len(matches) > 1:
        group_names = ", ".join(group_name for group_name, _ in matches)
        raise UserError(f"task {quoted(spec)} is in more than one group: {group_names}; name the group")
    if matches:
        return [(spec, matches[0][1])]
    for group in loaded.values():
        if spec in group.subsets:
            return [(task_name, group) for task_name in group.subsets[spec]]
    try:
        return _of_a_harness(spec, include_path)
    except UserError as error:
        raise UserError("; ".join([str(error), *failures])) from None


def _of_a_harness(spec: str, include_path: Sequence[str]) -> list[tuple[str, Benchmark]]:
    """Return the tasks of lm-eval, or else of lmms-eval, that a name stands for.

    Raises:
        UserError: No harness knows the name.
    """
    if not spec.startswith(lmms_tasks.PREFIX):
        benchmark = named.resolve(spec, include_path)
        if benchmark is not None:
            return [(task_name, benchmark) for task_name in benchmark.leaves]
    if not spec.startswith(index.PREFIX):
        resolved = lmms_tasks.resolve(spec)
        if resolved is not None:
            return resolved
    task_name = spec.removeprefix(index.PREFIX).removeprefix(lmms_tasks.PREFIX)
    error = unknown("task", task_name, all_names(include_path), "kvbench list tasks --search WORD")
    raise UserError("; ".join([str(error), *index.broken_files(include_path)]))


def all_names(include_path: Sequence[str] = ()) -> list[str]:
    """Return every name that `resolve_task` knows."""
    own = (name for group in benchmarks()[0].values() for name in (group.name, *group.leaves, *group.subsets))
    return sorted({*own, *index.names(include_path), *lmms_tasks.names()})


def task_sets() -> dict[str, tuple[str, ...]]:
    """Return the tasks of every installed benchmark and subset."""
    sets: dict[str, tuple[str, ...]] = {}
    for group_name, benchmark in benchmarks()[0].items():
        sets[group_name] = tuple(benchmark.leaves)
        sets |= {subset: tuple(task_names) for subset, task_names in benchmark.subsets.items()}
    return sets
