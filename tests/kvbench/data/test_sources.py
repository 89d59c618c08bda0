"""Our copies: hashed, whole or not there, verified; and the commands that say so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from kvbench import cli
from kvbench.benchmark import Source
from kvbench.data import fetching, sources
from kvbench.data.sources import Damaged, NotFetched, head, keep, load, rows, verify
from kvbench.errors import UserError
from kvbench_tasks.tables import SQUAD

TABLE = Source("org/table", "config", "test", columns=("text", "n"))
ROWS = [{"text": "ä\u2028\n", "n": 1}, {"text": "", "n": None}]


@pytest.fixture(autouse=True)
def away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetching, "unreachable", lambda: "cannot be reached (test)")
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))


def test_a_copy_gives_the_kept_columns_and_says_what_it_is(tmp_path: Path) -> None:
    path = keep(TABLE, iter([{**row, "more": 1} for row in ROWS]), tmp_path, revision="c0ffee")
    assert rows(TABLE, tmp_path) == load(TABLE, tmp_path) == ROWS
    found = verify(TABLE, tmp_path)
    assert found == head(TABLE, tmp_path)
    assert (found.path, found.rows, found.revision) == (path, 2, "c0ffee")
    assert found.bytes == path.stat().st_size
    assert path.name.startswith("org--table-config-test-")
    # Another column, revision or file is another copy.
    others = [
        Source("org/table", "config", "test", columns=("text",)),
        Source("org/table", "config", "test", columns=("text", "n"), revision="v2"),
        Source("org/table", "config", "train", columns=("text", "n")),
        Source("org/table", "config", "test", "../x:y.jsonl", columns=("text", "n")),
    ]
    paths = {sources.path(source, tmp_path) for source in [TABLE, *others]}
    assert len(paths) == 5
    assert {p.parent for p in paths} == {tmp_path / "hub"}
    with pytest.raises(NotFetched, match=r"^needs the dataset org/table from the"):
        rows(others[0], tmp_path)


@pytest.mark.parametrize(
    "harm",
    [
        lambda b: b[:-1],
        lambda b: b.replace(b'"n": 1', b'"n": 2'),
        lambda b: b + b"{}\n",
        lambda b: b[10:],
        lambda b: b"",
        lambda b: b.splitlines(keepends=True)[0],
    ],
)
def test_a_damaged_copy_is_never_read(tmp_path: Path, harm: object) -> None:
    path = keep(TABLE, ROWS, tmp_path)
    path.write_bytes(harm(path.read_bytes()))  # type: ignore[operator]
    for read in (load, verify):
        with pytest.raises(Damaged, match=r"is damaged: its content does not agree with its hash$"):
            read(TABLE, tmp_path)
    with pytest.raises(NotFetched):  # it is fetched again, were there a hub
        rows(TABLE, tmp_path)


def test_what_cannot_be_kept_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    bad = [
        ([], "org/table config test has no rows"),
        ([{"text": ""}], "org/table config test has no field n; it has text"),
        ([{"text": b"x", "n": 1}], "a field holds a bytes"),
        ([["text"]], "a row is a list, not an object"),
    ]
    for content, message in bad:
        with pytest.raises(UserError, match=message):
            keep(TABLE, content, tmp_path)  # type: ignore[arg-type]
    assert list((tmp_path / "hub").iterdir()) == []
    keep(TABLE, [{"text": date(2024, 5, 1), "n": 1}], tmp_path)
    assert load(TABLE, tmp_path) == [{"text": "2024-05-01", "n": 1}]
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(UserError, match=r"^cannot write into .*file/hub: .*KVBENCH_CACHE"):
        keep(TABLE, ROWS, blocked)


CHILD = """
import resource, sys, time
from pathlib import Path
from kvbench.data.sources import Source, keep
from kvbench.errors import UserError
table = Source("org/table", "config", "test", columns=("text", "n"))
def content():
    for i in range(10000):
        yield {{"text": "x" * 100, "n": i}}
        if {stall} and i == 5000:
            print("half", flush=True)
            time.sleep(60)
if not {stall}:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    keep(table, content(), Path({folder!r}))
except UserError as error:
    print(error)
"""


def test_a_full_disk_is_one_line_and_the_old_copy_stays(tmp_path: Path) -> None:
    keep(TABLE, ROWS, tmp_path)
    code = CHILD.format(stall=False, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == (
        f"cannot write into {tmp_path / 'hub'}: File too large; make room, or set KVBENCH_CACHE "
        "to another folder\n"
    )
    assert load(TABLE, tmp_path) == ROWS
    assert len(list((tmp_path / "hub").iterdir())) == 1


def test_what_is_killed_leaves_no_half_copy_and_is_cleared_away(tmp_path: Path) -> None:
    code = CHILD.format(stall=True, folder=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert head(TABLE, tmp_path) is None
    assert [p.suffix for p in (tmp_path / "hub").iterdir()] == [".part"]
    sources.scratch(TABLE, tmp_path).mkdir()
    with sources.locked(TABLE, tmp_path):
        keep(TABLE, ROWS, tmp_path)
    assert sorted(p.suffix for p in (tmp_path / "hub").iterdir()) == [".jsonl", ".lock"]


def test_verify_and_list_name_what_is_damaged_or_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call(["data", "verify"]) == 0
    assert capsys.readouterr().out == f"there are no copies in {tmp_path / 'hub'}\n"
    row = {"title": "t", "context": "c", "question": "q", "answers": {"text": ["c"]}}
    path = keep(SQUAD, [row], tmp_path, revision="c0ffee" * 6)
    assert cli.call(["data", "verify", "qa_1"]) == 0
    name = "rajpurkar/squad_v2 validation (qa_1)"
    size = path.stat().st_size
    well = f"{name}: well, 1 rows, {size / 1000:.1f} kB, commit c0ffeec0ffee\n"
    assert capsys.readouterr().out == well
    assert cli.call(["data", "verify", "qa_1", "qa_2"]) == 1
    said = capsys.readouterr()
    assert said.out == well
    assert said.err == (
        "kvbench: hotpotqa/hotpot_qa distractor validation (qa_2): missing; "
        "kvbench data fetch qa_2\n"
    )
    assert cli.call(["data", "list", "qa_1,qa_2"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[1].split() == (
        f"qa_1 rajpurkar/squad_v2 validation c0ffeec0ffee 1 {size / 1000:.1f} kB".split()
    )
    assert table[2].split() == "qa_2 hotpotqa/hotpot_qa distractor validation not there".split()
    path.write_bytes(path.read_bytes()[:-3])
    assert cli.call(["data", "verify"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"kvbench: {name}: {path} is damaged: its content does not agree with its hash; "
        "kvbench data fetch qa_1 gets it again\n"
    )


def test_commands_without_anything_to_do_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["data", "fetch", "vt"]) == 0
    assert capsys.readouterr().out == "vt: no data of the hub, nothing to fetch\n"
    assert cli.call(["data", "fetch", "ruller"]) == 2
    assert "did you mean ruler?" in capsys.readouterr().err
