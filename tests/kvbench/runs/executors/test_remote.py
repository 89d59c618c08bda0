"""A remote worker, here in this process, answers exactly its shard, as one process would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import UserError
from kvbench.runs.executors.remote import RemoteWorker, Sent
from kvbench.runs.executors.shards import shards_of
from kvbench.runs.grid import Grid
from kvbench.runs.index import Key
from kvbench.runs.planning import JobName, plan
from kvbench.runs.runner import execute
from kvbench.runs.schema import Response
from tests.kvbench.runs.small import answers, small_grid, stored

GRID = small_grid(Path("unused"))


Work = tuple[JobName, frozenset[Key]]


def work(grid: Grid, count: int = 4) -> list[Work]:
    """What a driver sends for each shard."""
    stages = plan(grid, lambda text: None).stages
    jobs = {JobName.of(stage, job): job for stage in stages for job in stage.jobs}
    return [(s.job, s.missing(jobs[s.job], set())) for s in shards_of(stages, set(), count)]


def worker(grid: Grid) -> RemoteWorker:
    made = RemoteWorker(grid.to_dict(), str(Path.cwd()))
    made.start()
    return made


def sent(batches: Any) -> list[Sent]:
    return [one for batch in batches for one in batch]


def responses(batches: Any) -> list[Response]:
    return [one for one in sent(batches) if isinstance(one, Response)]


@pytest.mark.parametrize("count", [3, 100])
def test_shards_have_the_bytes_of_a_run_in_one_process(undisturbed: Any, count: int) -> None:
    one = worker(GRID)
    made = []
    for name, keys in reversed(work(GRID, count)):
        part = responses(one.answer(name, keys, {}))
        assert {r.key for r in part} == keys and len(part) == len(keys)
        made += part
    assert answers(made) == stored(undisturbed.path)


def test_shards_of_live_dialogues_too(tmp_path: Path) -> None:
    grid = small_grid(tmp_path / "run", task="dialogue", moment="turns", samples=2, policy="random")
    execute(grid)
    one = worker(grid)
    made = [r for each in work(grid, 2) for r in responses(one.answer(*each, {}))]
    assert answers(made) == stored(tmp_path / "run")


def test_a_cell_that_raises_is_sent_and_not_tried_again(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def broken(v):\n    raise RuntimeError('no luck')\n")
    grid = small_grid(tmp_path, policy=f"{bad}:broken", task="niah_single_1")
    one = worker(grid)
    first, second, *_ = work(grid, 100)
    news = sent(one.answer(*first, {}))
    (failed,) = [r for r in news if isinstance(r, Response) and r.error]
    assert "no luck" in failed.error
    assert any(isinstance(text, str) and "no luck" in text for text in news)
    later = responses(one.answer(*second, {failed.cell: failed.error}))
    assert {r.cell for r in later} == {key[0] for key in second[1]} - {failed.cell}


def test_a_machine_that_plans_other_cells_is_refused() -> None:
    ((name, _), *_) = work(GRID)
    other = frozenset({("0" * 16, "s", 0, 0)})
    with pytest.raises(UserError, match=r"plans other cells of niah_single_.*same packages"):
        sent(worker(GRID).answer(name, other, {}))


def test_data_that_the_machine_lacks_is_one_line() -> None:
    ((name, keys), *_) = work(GRID)
    other = name._replace(task="niah_single_3")
    with pytest.raises(UserError, match="cannot plan niah_single_3: nothing to run"):
        sent(worker(GRID).answer(other, keys, {}))


def test_a_folder_that_the_machine_lacks_is_one_line(tmp_path: Path) -> None:
    made = RemoteWorker(GRID.to_dict(), str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"cannot use .*nowhere.*all machines share"):
        made.start()
