"""Workers die at every moment, and no response is lost or generated twice.

Ray is a fake here: its deaths come exactly when a test wants them. `test_ray.py` has the real one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import UserError
from kvbench.files import Journal
from kvbench.progress import Silent
from kvbench.runs.executors import ray as on_ray
from kvbench.runs.runner import execute
from tests.kvbench.runs.executors.fake_ray import FakeRay
from tests.kvbench.runs.small import small_grid, stored
from tests.sweeps import slow_but


class Counter(Silent):
    def __init__(self) -> None:
        self.total, self.done = 0, 0
        self.unit = ""
        self.said: list[str] = []

    def start(self, total_units: int, description: str, unit: str = "") -> None:
        self.unit = unit
        if unit == "responses":  # not scoring, which is counted once it takes seconds
            self.total = total_units

    def advance(self, n: int = 1, seconds_left: float | None = None) -> None:
        self.done += n if self.unit == "responses" else 0

    def message(self, text: str) -> None:
        self.said.append(text)


def use(monkeypatch: pytest.MonkeyPatch, fake: FakeRay) -> FakeRay:
    monkeypatch.setattr(on_ray, "_imported", lambda: fake)
    return fake


def written(out: Path) -> list[Any]:
    """The keys of all lines of the journal, in order."""
    with Journal(out / "responses.jsonl") as journal:
        return [(e["cell"], e["sample_id"], e["question_id"], e["repeat"]) for e in journal.entries()]


@pytest.mark.parametrize("seed", slow_but(range(3), 0))
def test_workers_that_die_cost_no_response(
    tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    lives = [draw.randrange(9) for _ in range(6)]
    fake = use(monkeypatch, FakeRay(lives, seed))
    told = Counter()
    done = execute(small_grid(tmp_path, executor="ray"), told)
    keys = written(tmp_path)
    assert len(keys) == len(set(keys)), "nothing is generated twice"
    assert stored(tmp_path) == stored(undisturbed.path)
    assert told.done == told.total == len(keys)
    assert set(done.cells.status) == {"ok"}
    assert len(fake.started) > 2 and any("lost" in text for text in told.said)
    assert {id(actor) for actor in fake.killed} <= {id(actor) for actor in fake.started}


@pytest.mark.slow
def test_workers_that_all_die_end_the_run_and_the_same_command_goes_on(
    tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = small_grid(tmp_path, executor="ray")
    use(monkeypatch, FakeRay([3, 5, *[0] * 30]))
    with pytest.raises(
        UserError, match=r"5 Ray workers in a row.*response: killed at the start; .*--workers"
    ) as raised:
        execute(grid)
    assert "\n" not in str(raised.value)
    before = written(tmp_path)
    assert 0 < len(before) < len(stored(undisturbed.path))
    fake = use(monkeypatch, FakeRay())
    execute(grid)
    assert written(tmp_path)[: len(before)] == before
    assert stored(tmp_path) == stored(undisturbed.path)
    use(monkeypatch, fake := FakeRay())
    execute(grid)
    assert not fake.started, "nothing is left to do"


def test_machines_that_die_before_their_workers_begin_do_not_end_the_run(
    tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = use(monkeypatch, FakeRay([0, *[-1] * 9], cpus=1))
    told = Counter()
    execute(small_grid(tmp_path, executor="ray"), told)
    assert len(fake.started) == 11
    assert stored(tmp_path) == stored(undisturbed.path)
    assert told.said.count("a Ray worker was lost, and another continues its work: its node has died") == 9


def test_what_a_worker_cannot_do_is_the_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, FakeRay())

    def refuse(*_: Any) -> None:
        raise UserError("this machine cannot")

    monkeypatch.setattr(on_ray.RemoteWorker, "_plan", refuse)
    with pytest.raises(UserError, match="this machine cannot"):
        execute(small_grid(tmp_path, executor="ray"))
    assert len(fake.killed) == len(fake.started), "no worker is left behind"


def test_a_failing_cell_is_not_tried_by_every_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def broken(v):\n    raise RuntimeError('no luck')\n")
    use(monkeypatch, FakeRay(cpus=1))
    told = Counter()
    grid = small_grid(tmp_path / "run", policy=f"{bad}:broken,random", executor="ray", workers=2)
    done = execute(grid, told)
    status = done.cells.groupby("policy").status.unique().apply(list).to_dict()
    assert status == {"full": ["ok"], "random": ["ok"], f"{bad}:broken": ["error"]}
    assert sum("no luck" in text for text in told.said) == len(done.failed) == 2


def test_workers_fill_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(cpus=7)
    assert on_ray._room(fake, on_ray._Needs(2, 0)) == 3
    cards = [{"Alive": True, "Resources": {"CPU": 16.0, "GPU": 3.0}}] * 2
    monkeypatch.setattr(fake, "nodes", lambda: cards)
    rooms = {g: on_ray._room(fake, on_ray._Needs(1, g)) for g in (0.5, 0.3, 1, 2, 4)}
    assert rooms == {0.5: 12, 0.3: 18, 1: 6, 2: 2, 4: 0}


def test_machines_without_the_gpus_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeRay())
    with pytest.raises(UserError, match=r"no machine of Ray has 1 CPU and 2 GPUs"):
        execute(small_grid(tmp_path, executor="ray", gpus_per_cell=2))
