"""Which tasks exist: the installed benchmarks and the user's own JSONL files."""

from __future__ import annotations

from kvbench import registry
from kvbench.benchmark import Benchmark
from kvbench.errors import UserError, quoted, unknown
from kvbench.harness.own import own_benchmark


def benchmarks() -> tuple[dict[str, Benchmark], list[str]]:
    """All benchmarks that load, and one line for each that does not.

    Returns:
        Benchmarks by group name, and the messages of those that failed.
    """
    loaded: dict[str, Benchmark] = {}
    failed: list[str] = []
    for name in registry.names(registry.TASKS):
        try:
            loaded[name] = registry.get(registry.TASKS, name)
        except UserError as error:
            failed.append(str(error))
    return loaded, failed


def resolve_task(spec: str) -> list[tuple[str, Benchmark]]:
    """The leaf tasks that a spelling stands for.

    Args:
        spec: A group (`ruler`), a subset of one (`longbench_code`), a leaf (`vt`), or a file
            (`./mine.jsonl`).

    Returns:
        Pairs of leaf name and benchmark, in the benchmark's order.

    Raises:
        UserError: There is no such task, or its package does not import.
    """
    if spec.endswith(".jsonl"):
        mine = own_benchmark(spec)
        return [(leaf, mine) for leaf in mine.leaves]
    if spec in registry.names(registry.TASKS):
        group: Benchmark = registry.get(registry.TASKS, spec)
        return [(leaf, group) for leaf in group.leaves]
    loaded, failed = benchmarks()
    owners = [(name, group) for name, group in loaded.items() if spec in group.leaves]
    if len(owners) > 1:
        groups = ", ".join(name for name, _ in owners)
        raise UserError(f"task {quoted(spec)} is in more than one group: {groups}; name the group")
    if owners:
        return [(spec, owners[0][1])]
    for group in loaded.values():
        if spec in group.subsets:
            return [(leaf, group) for leaf in group.subsets[spec]]
    parts = (part for group in loaded.values() for part in (*group.leaves, *group.subsets))
    error = unknown("task", spec, sorted({*loaded, *parts}), "kvbench list tasks")
    raise UserError("; ".join([str(error), *failed]))


def task_sets() -> dict[str, tuple[str, ...]]:
    """Groups and subsets of the installed benchmarks with their tasks."""
    sets: dict[str, tuple[str, ...]] = {}
    for name, benchmark in benchmarks()[0].items():
        sets[name] = tuple(benchmark.leaves)
        sets |= {sub: tuple(leaves) for sub, leaves in benchmark.subsets.items()}
    return sets
