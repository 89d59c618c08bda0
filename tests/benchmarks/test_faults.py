"""The comparison with an undisturbed run sees every kind of harm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from benchmarks.faults import journal, problems, workers_of
from kvbench.runs.load import load_frames
from kvbench.runs.runner import execute
from kvbench.runs.store import RunStore
from tests.kvbench.runs.small import small_grid


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "run"
    execute(small_grid(path, task="niah_single_1", policy="random", samples=2))
    return path


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run"))


def rewrite(run: Path, lines: list[bytes]) -> None:
    (run / "responses.jsonl").write_bytes(b"".join(lines))


def lines(run: Path) -> list[bytes]:
    return journal(run).splitlines(keepends=True)


def test_a_copy_in_another_order_has_no_problem(run: Path, good: Path) -> None:
    rewrite(run, lines(run)[::-1])
    cells, samples = load_frames(run)
    with RunStore(run) as store:
        store.write(cells, samples[::-1])
    assert problems(run, good) == []


def test_a_lost_and_a_repeated_response_are_seen(run: Path, good: Path) -> None:
    _, second, *rest = lines(run)
    rewrite(run, [second, second, *rest])
    lost, repeated = problems(run, good)
    assert lost.startswith("lost: ") and repeated.startswith("written 2 times: ")


def test_another_response_is_seen_but_not_another_time(run: Path, good: Path) -> None:
    def changed(line: bytes, **changes: object) -> bytes:
        entry = json.dumps(json.loads(line)["r"] | changes, separators=(",", ":")).encode()
        return b'{"crc":"%08x","r":%s}\n' % (zlib.crc32(entry), entry)

    first, second, *rest = lines(run)
    rewrite(run, [changed(first, decode_s=99.0), changed(second, response="other"), *rest])
    (found,) = problems(run, good)
    assert found.startswith("different: ")


@pytest.mark.parametrize("name", ["cells", "samples"])
def test_another_table_is_seen(run: Path, good: Path, name: str) -> None:
    tables = dict(zip(("cells", "samples"), load_frames(run), strict=True))
    tables[name] = tables[name].assign(score=tables[name]["score"] + 0.5)
    with RunStore(run) as store:
        store.write(**tables)
    assert problems(run, good) == [f"{name}.parquet differs"]


def test_a_torn_line_is_not_in_the_journal_yet(run: Path) -> None:
    whole = journal(run)
    with (run / "responses.jsonl").open("ab") as file:
        file.write(whole[:50])
    assert journal(run) == whole


def test_only_workers_below_a_process_are_found() -> None:
    name = "import time; print(flush=True); time.sleep(60)"
    child = subprocess.Popen(
        ["ray::RemoteWorker.answer", "-c", name], executable=sys.executable, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline()
        assert workers_of(os.getpid()) == [child.pid]
        assert workers_of(child.pid) == [child.pid] and workers_of(10**9) == []
    finally:
        child.kill()
        child.communicate()
