"""Runs on a Ray cluster of several nodes, which are processes of this machine with made-up GPUs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import problems, workers_of
from kvbench.errors import UserError
from kvbench.runs.runner import execute
from tests.kvbench.runs.children import Child, lines
from tests.kvbench.runs.small import small_grid

pytestmark = pytest.mark.faults

SAMPLES = 12


class Nodes:
    """A cluster whose head has the driver only, and this process as an observer."""

    def __init__(self) -> None:
        cluster_utils = pytest.importorskip("ray.cluster_utils")
        import ray

        self.ray: Any = ray
        self.cluster = cluster_utils.Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self.address = str(self.cluster.address)
        ray.init(address=self.address, log_to_driver=False)

    def add(self, cpus: int, gpus: int = 0) -> Any:
        """Start a node."""
        return self.cluster.add_node(num_cpus=cpus, num_gpus=gpus)

    def kill(self, *nodes: Any) -> None:
        """End nodes with all their workers, as if the machines had lost their power."""
        for node in nodes:
            self.cluster.remove_node(node, allow_graceful=False)

    def free(self, resource: str) -> float:
        """What nobody uses."""
        return float(self.ray.available_resources().get(resource, 0))

    def close(self) -> None:
        self.ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return execute(small_grid(tmp_path_factory.mktemp("undisturbed") / "run", samples=SAMPLES))


def hired(node: Any) -> int:
    """How many workers of kvbench a node has."""
    return len(workers_of(node.all_processes["raylet"][0].process.pid))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it has not come so far"
        time.sleep(0.1)


def killed(child: Child) -> None:
    """End a run that is only looked at."""
    os.kill(child.process.pid, signal.SIGKILL)
    child.end()


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_a_grid_runs_over_two_nodes(
    tmp_path: Path, nodes: Nodes, undisturbed: Any, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [nodes.add(cpus=1), nodes.add(cpus=1)]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    where = {"ray_address": nodes.address} if by == "flag" else {}
    if by == "environment":
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    grid = small_grid(tmp_path / "run", samples=SAMPLES, executor="ray", **where)
    child = Child(grid)
    until(lambda: [hired(node) for node in both] == [1, 1])
    assert child.end() == (0, "")
    assert problems(grid.path, undisturbed.path) == []
    nodes.kill(*both)


def test_a_node_that_dies_loses_and_repeats_nothing(tmp_path: Path, nodes: Nodes, undisturbed: Any) -> None:
    kept, lost = nodes.add(cpus=1), nodes.add(cpus=1)
    grid = small_grid(tmp_path / "run", samples=SAMPLES, executor="ray", ray_address=nodes.address)
    child = Child(grid)
    until(lambda: [hired(node) for node in (kept, lost)] == [1, 1])
    until(lambda: (grid.path / "responses.jsonl").exists() and len(lines(grid.path)) > 3)
    nodes.kill(lost)
    before = lines(grid.path)
    assert len(before) < len(lines(undisturbed.path)), "the run is not over"
    assert child.end() == (0, "")
    assert lines(grid.path)[: len(before)] == before
    assert problems(grid.path, undisturbed.path) == []
    nodes.kill(kept)


def test_a_run_waits_for_a_node_that_takes_the_place_of_the_last_one(
    tmp_path: Path, nodes: Nodes, undisturbed: Any
) -> None:
    first = nodes.add(cpus=1)
    grid = small_grid(tmp_path / "run", samples=SAMPLES, executor="ray", ray_address=nodes.address)
    child = Child(grid)
    until(lambda: (grid.path / "responses.jsonl").exists() and len(lines(grid.path)) > 3)
    nodes.kill(first)
    before = lines(grid.path)
    second = nodes.add(cpus=1)
    assert child.end() == (0, "")
    assert lines(grid.path)[: len(before)] == before
    assert problems(grid.path, undisturbed.path) == []
    nodes.kill(second)


def test_workers_take_the_gpus_that_they_are_given(tmp_path: Path, nodes: Nodes) -> None:
    small, large = nodes.add(cpus=2, gpus=1), nodes.add(cpus=2, gpus=2)
    for gpus, workers, left in ((1, [1, 2], 0), (2, [0, 1], 1), (0.5, [2, 2], 1)):
        until(lambda: nodes.free("GPU") == 3)
        grid = small_grid(tmp_path / f"{gpus}", executor="ray", ray_address=nodes.address, gpus_per_cell=gpus)
        child = Child(grid, pause=1)
        child.wait_until_it_pauses()
        until(lambda workers=workers: [hired(small), hired(large)] == workers)  # type: ignore[misc]
        until(lambda left=left: nodes.free("GPU") == left)  # type: ignore[misc]
        killed(child)
    grid = small_grid(tmp_path / "3", executor="ray", ray_address=nodes.address, gpus_per_cell=3)
    with pytest.raises(UserError, match=r"no machine of .* has 1 CPU and 3 GPUs; use a smaller"):
        execute(grid)
    nodes.kill(small, large)
