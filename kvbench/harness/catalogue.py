"""Catalogue of tasks: the installed benchmarks and the user's own JSONL files."""

from __future__ import annotations

from kvbench import registry
from kvbench.benchmark import Benchmark
from kvbench.errors import UserError, quoted, unknown
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


def resolve_task(spec: str) -> list[tuple[str, Benchmark]]:
    """Return the tasks that a spelling stands for.

    Args:
        spec: A benchmark (`ruler`), a subset of one (`longbench_code`), a task (`vt`), or a file (`./mine.jsonl`).

    Returns:
        Pairs of task name and benchmark, in the benchmark's order.

    Raises:
        UserError: There is no such task, or its package does not import.
    """
    if spec.endswith(".jsonl"):
        file_benchmark = own_benchmark(spec)
        return [(task_name, file_benchmark) for task_name in file_benchmark.leaves]
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
    task_names = (known_name for group in loaded.values() for known_name in (*group.leaves, *group.subsets))
    error = unknown("task", spec, sorted({*loaded, *task_names}), "kvbench list tasks")
    raise UserError("; ".join([str(error), *failures]))


def task_sets() -> dict[str, tuple[str, ...]]:
    """Return the tasks of every installed benchmark and subset."""
    sets: dict[str, tuple[str, ...]] = {}
    for group_name, benchmark in benchmarks()[0].items():
        sets[group_name] = tuple(benchmark.leaves)
        sets |= {subset: tuple(task_names) for subset, task_names in benchmark.subsets.items()}
    return sets
