"""Progress counts every forward of the planned work, never stands still between two, and ends at the plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.engine import driver
from kvbench.errors import UserError
from kvbench.progress import Late, Silent
from kvbench.runs.meter import Meter
from kvbench.runs.planning import plan
from kvbench.runs.runner import execute
from kvbench.runs.work import Work, missing_of
from tests.kvbench.runs.small import small_grid

ONE = {"task": "niah_single_1", "samples": 2}
GRIDS: dict[str, dict[str, Any]] = {
    "before and after the question": {**ONE, "policy": "snapkv:window=8,kvzip", "moment": "context,question"},
    "in chunks": {**ONE, "policy": "snapkv:window=8", "moment": "chunked:64,chunked:100"},
    "during the answer": {**ONE, "policy": "keydiff", "moment": "decode,context"},
    "in turns": {**ONE, "policy": "snapkv:window=8", "moment": "turns,context", "task": "dialogue"},
    "compared with the full cache": {**ONE, "policy": "keydiff", "moment": "decode,context,question", "fidelity": True},
    "two jobs in small batches": {"policy": "random", "batch_size": 2, "samples": 3},
}


@dataclass
class Recorder(Silent):
    """Reporter that records what it is told."""

    totals: list[int] = field(default_factory=list)
    counted: int = 0
    left: list[float | None] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def start(self, total_units: int, description: str, unit: str = "") -> None:
        assert unit == "tokens"
        self.totals.append(total_units)
        self.counted = 0

    def advance(self, n: int = 1, seconds_left: float | None = None) -> None:
        assert n > 0
        self.counted += n
        self.left.append(seconds_left)

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def message(self, text: str) -> None:
        self.messages.append(text)


@dataclass
class Events:
    """What happened in a run: after each forward its phase, its tokens and the count."""

    forwards: int = 0
    fed: list[tuple[str, int, int]] = field(default_factory=list)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Events of the runs of a test; forwards are counted on their own, where the engine ends them."""
    recorded = Events()
    fed, after = Meter.fed, driver.Driver.after

    def recording_fed(meter: Meter, tokens: int) -> None:
        fed(meter, tokens)
        recorded.fed.append((meter._phase, tokens, meter.reporter.counted))  # type: ignore[attr-defined]

    def recording_after(self: driver.Driver, cache: Any, forward: Any) -> None:
        recorded.forwards += 1
        after(self, cache, forward)

    monkeypatch.setattr(Meter, "fed", recording_fed)
    monkeypatch.setattr(driver.Driver, "after", recording_after)
    return recorded


def planned(grid: Any) -> Work:
    (stage,) = plan(grid, lambda text: None).stages
    works = [missing.work for missing in missing_of(stage, set(), fidelity=grid.fidelity)]
    return Work(sum(work.read for work in works), sum(work.answered for work in works))


@pytest.mark.parametrize("name", GRIDS)
def test_the_count_rises_with_every_forward_and_ends_at_the_plan(tmp_path: Path, events: Events, name: str) -> None:
    grid = small_grid(tmp_path, **GRIDS[name])
    recorder = Recorder()
    execute(grid, recorder)
    assert len(events.fed) == events.forwards > 5
    counts = [0] + [counted for _, _, counted in events.fed]
    assert all(later > earlier for earlier, later in pairwise(counts))
    work = planned(replace(grid, out=str(tmp_path / "other")))
    assert recorder.totals == [work.tokens] and recorder.counted == work.tokens
    # The plan of what is read is exact: the tokens of these forwards, replays included.
    read = sum(tokens for phase, tokens, _ in events.fed if phase in ("prefill", "compress"))
    assert read == work.read
    answered = sum(tokens for phase, tokens, _ in events.fed if phase == "decode")
    assert 0 < answered <= work.answered
    assert {"prefill", "compress", "decode"} == set(recorder.phases)
    if name == "before and after the question":
        assert any(phase == "compress" for phase, _, _ in events.fed), "kvzip reads while it compresses"


def test_the_time_left_is_known_from_the_first_context_on(tmp_path: Path, events: Events) -> None:
    recorder = Recorder()
    execute(small_grid(tmp_path, samples=2), recorder)
    assert events.fed[0][0] == "prefill"
    assert all(left is not None and left >= 0 for left in recorder.left)
    assert recorder.left[-1] == pytest.approx(0.0)


def test_a_resumed_run_counts_what_is_left(tmp_path: Path) -> None:
    execute(small_grid(tmp_path / "run", samples=2))
    whole = planned(small_grid(tmp_path / "new", samples=5))
    first = planned(small_grid(tmp_path / "new", samples=2))
    recorder = Recorder()
    execute(small_grid(tmp_path / "run", samples=5), recorder)
    assert recorder.totals == [whole.tokens - first.tokens] and recorder.counted == recorder.totals[0]
    again = Recorder()
    execute(small_grid(tmp_path / "run", samples=5), again)
    assert not again.totals and not again.left


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = small_grid(tmp_path, samples=3)

    class Stopped(Recorder):
        def advance(self, n: int = 1, seconds_left: float | None = None) -> None:
            super().advance(n, seconds_left)
            if self.counted > self.totals[0] / 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(grid, stopped := Stopped())
    rest = Recorder()
    execute(grid, rest)
    assert 0 < rest.totals[0] < stopped.totals[0] and rest.counted == rest.totals[0]


def test_a_cell_that_fails_does_not_hold_the_count_up(tmp_path: Path) -> None:
    policy = tmp_path / "broken.py"
    policy.write_text("def broken(v):\n    raise ValueError('no')\n")
    recorder = Recorder()
    execute(small_grid(tmp_path / "run", policy=f"{policy}:broken,keydiff", samples=2), recorder)
    assert recorder.counted == recorder.totals[0]
    assert any("failed" in message for message in recorder.messages)


def test_work_that_is_repeated_because_memory_ran_out_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbench.engine.pool import Pool

    step, steps = Pool._step, [0]

    def failing_step(pool: Any) -> Any:
        steps[0] += 1
        if steps[0] == 4:
            raise torch.OutOfMemoryError("out of memory")
        return step(pool)

    monkeypatch.setattr(Pool, "_step", failing_step)
    recorder = Recorder()
    execute(small_grid(tmp_path, samples=2), recorder)
    assert any("now decoding" in message for message in recorder.messages)
    assert recorder.counted == recorder.totals[0]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_follows_the_speed_of_each_phase() -> None:
    clock, recorder = Clock(), Recorder()
    meter = Meter(recorder, clock)
    with meter.running(Work(1000, 500), "model"), meter.job(Work(1000, 500)):
        assert meter.seconds_left() is None
        for _ in range(2):
            with meter.contexts(100):
                with meter.phase("prefill"):
                    clock.now += 1.0
                    meter.fed(80)
                with meter.phase("compress"):
                    clock.now += 1.0
                    meter.fed(20)
        # 2 s for 100 tokens of contexts; answers are taken to cost as much
        assert recorder.left[-1] == pytest.approx(0.02 * (800 + 500))
        meter._begun_tokens = 100  # responses that were begun
        clock.now += 10.0
        meter.fed(50)
        assert recorder.left[-1] == pytest.approx(0.02 * 800 + 0.2 * 450)
        meter.fed(500)  # no more than was begun
        assert recorder.counted == 200 + 100
    assert recorder.counted == 1500


def test_an_error_in_a_job_is_not_counted_as_done() -> None:
    recorder = Recorder()
    meter = Meter(recorder)
    with pytest.raises(UserError), meter.running(Work(10, 10), "model"), meter.job(Work(10, 10)):
        raise UserError("too little memory")
    assert recorder.counted == 0


def test_scoring_counts_cells_once_it_takes_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int]] = []

    class Scoring(Silent):
        counted = 0

        def start(self, total_units: int, description: str, unit: str = "") -> None:
            started.append((description, total_units))
            self.counted = 0

        def advance(self, n: int = 1, seconds_left: float | None = None) -> None:
            self.counted += n

    execute(small_grid(tmp_path, samples=1))
    monkeypatch.setattr(Late, "AFTER", 0.0)
    recorder = Scoring()
    execute(small_grid(tmp_path, samples=1), recorder)
    assert started[-1] == ("scoring cells", 6) and recorder.counted == 6
