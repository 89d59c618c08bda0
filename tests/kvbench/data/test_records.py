"""Records of tables, and the rows that `keep` puts in place: hashed, and whole or not there."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from kvbench.benchmark import Source
from kvbench.data import hub, records
from kvbench.data.fetching import load, verify
from kvbench.data.records import Damaged, NotFetched, head
from kvbench.data.sources import keep, rows
from kvbench.errors import UserError

TABLE = Source("org/table", "config", "test", columns=("text", "n"))
ROWS = [{"text": "ä\u2028\n", "n": 1}, {"text": "", "n": None}]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "unreachable", lambda: "cannot be reached (test)")


def test_kept_rows_have_the_columns_of_the_source_and_a_record(tmp_path: Path) -> None:
    path = keep(TABLE, iter([{**row, "more": 1} for row in ROWS]), tmp_path, revision="c0ffee")
    assert rows(TABLE, tmp_path) == load(TABLE, tmp_path) == ROWS
    record = verify(TABLE, tmp_path)
    assert record == head(TABLE, tmp_path)
    assert (record.rows, record.revision, record.cached) == (2, "c0ffee", False)
    content = path.read_bytes().partition(b"\n")[2]
    assert record.bytes == len(content)
    assert record.sha256 == hashlib.sha256(content).hexdigest()
    assert path.name.startswith("org--table-config-test-")
    # Other columns, another revision or another file make another table.
    others = [
        Source("org/table", "config", "test", columns=("text",)),
        Source("org/table", "config", "test", columns=("text", "n"), revision="v2"),
        Source("org/table", "config", "train", columns=("text", "n")),
        Source("org/table", "config", "test", "../x:y.jsonl", columns=("text", "n")),
    ]
    paths = {records.path(source, tmp_path) for source in [TABLE, *others]}
    assert len(paths) == 5
    assert {p.parent for p in paths} == {tmp_path / "hub"}
    with pytest.raises(NotFetched, match=r"^needs the dataset org/table from the"):
        rows(others[0], tmp_path)


def test_a_copy_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Its first line had 1024 bytes, and neither `bytes` nor `cached`."""
    content = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    first = {"sha256": hashlib.sha256(content).hexdigest(), "rows": 2, "revision": "c0ffee"}
    path = records.path(TABLE, tmp_path)
    path.parent.mkdir()
    line = json.dumps({**first, "of": TABLE.label}).ljust(1023) + "\n"
    path.write_bytes(line.encode() + content)
    assert rows(TABLE, tmp_path) == ROWS
    record = verify(TABLE, tmp_path)
    assert (record.rows, record.bytes, record.revision) == (2, len(content), "c0ffee")


@pytest.mark.parametrize(
    "harm",
    [
        lambda b: b[:-1],
        lambda b: b.replace(b'"n": 1', b'"n": 2'),
        lambda b: b + b"{}\n",
        lambda b: b.splitlines(keepends=True)[0],
        lambda b: b[:-20] + b"\xff" * 20,
    ],
)
def test_damaged_rows_are_never_read(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    path = keep(TABLE, ROWS, tmp_path)
    path.write_bytes(harm(path.read_bytes()))
    for read in (load, verify):
        with pytest.raises(Damaged, match=r"\.jsonl is damaged: "):
            read(TABLE, tmp_path)
    with pytest.raises(NotFetched, match=r"\.jsonl is damaged: .*; it needs the dataset org/table"):
        rows(TABLE, tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}\n", b"[1]\n", b'"sha256": "", "rows": 2}\n'])
def test_what_is_not_a_record_does_not_count(tmp_path: Path, content: bytes) -> None:
    keep(TABLE, ROWS, tmp_path).write_bytes(content)
    assert head(TABLE, tmp_path) is None
    for read in (load, verify):
        with pytest.raises(FileNotFoundError):
            read(TABLE, tmp_path)


def test_what_cannot_be_kept_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    bad = [
        ([], "org/table config test has no rows"),
        ([{"text": ""}], "org/table config test has no column n; it has text"),
        ([{"text": 3j, "n": 1}], "a column contains complex, which is not a JSON value"),
        ([ROWS[0], ["text"]], "row 2 is a list, not an object"),
    ]
    for content, message in bad:
        with pytest.raises(UserError, match=message):
            keep(TABLE, content, tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    keep(TABLE, [{"text": date(2024, 5, 1), "n": 1}], tmp_path)
    assert load(TABLE, tmp_path) == [{"text": "2024-05-01", "n": 1}]
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(UserError, match=r"file/hub'; free some space, or set KVBENCH_CACHE"):
        keep(TABLE, ROWS, blocked)


FULL = """
import resource
from pathlib import Path
from kvbench.data.sources import Source, keep
from kvbench.errors import UserError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
table = Source("org/table", "config", "test", columns=("text", "n"))
try:
    keep(table, [{{"text": "x" * 100, "n": i}} for i in range(10000)], Path({folder!r}))
except UserError as error:
    print(error)
"""


def test_a_full_disk_is_one_line_and_the_old_rows_stay(tmp_path: Path) -> None:
    path = keep(TABLE, ROWS, tmp_path)
    code = FULL.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == (
        f"cannot write {path}: File too large; free some space, or set KVBENCH_CACHE to another folder\n"
    )
    assert load(TABLE, tmp_path) == ROWS
    assert list(path.parent.iterdir()) == [path]
