"""The locked journal survives crashes, and one process or thread uses it at a time.

A folder that is written aside appears whole or not at all, and only once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvbench.errors import UserError
from kvbench.files import Journal, locked_journal, replacing_folder


def add(journal: Journal, *texts: str) -> None:
    journal.append([{"text": text} for text in texts])


def texts(journal: Journal) -> list[str]:
    return [entry["text"] for entry in journal.entries()]


def entries(path: Path) -> list[str]:
    with locked_journal(path) as journal:
        return texts(journal)


def test_entries_are_kept_for_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "judge" / "a.jsonl"
    with locked_journal(path) as journal:
        add(journal, "k1", "nö \ud83d\n")
        add(journal, "k2")
    assert entries(path) == ["k1", "nö \ud83d\n", "k2"]
    assert path.stat().st_mode & 0o077 == 0


def test_damage_costs_only_the_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with locked_journal(path) as journal:
        add(journal, "yes 0", "yes 1", "yes 2")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"yes", b"no!") + lines[2] + lines[0][:20])
    with locked_journal(path) as journal:
        assert texts(journal) == ["yes 0", "yes 2"]
        add(journal, "no")
    assert entries(path) == ["yes 0", "yes 2", "no"]


def test_processes_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    script = (
        "import sys; from pathlib import Path; from kvbench.files import locked_journal\n"
        "with locked_journal(Path(sys.argv[1]), lambda: print('waiting', flush=True)) as journal:\n"
        "    print(len(journal.entries())); journal.append([{'text': 'theirs'}])\n"
    )
    with locked_journal(path) as journal:
        other = subprocess.Popen(
            [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        assert other.stdout.readline() == "waiting\n"
        add(journal, "ours")
    assert other.communicate(timeout=30)[0] == "1\n"
    assert entries(path) == ["ours", "theirs"]


def test_threads_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def count() -> None:
        with locked_journal(path) as journal:
            add(journal, str(len(journal.entries())))

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entries(path) == [str(i) for i in range(8)]


def test_a_full_disk_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    with locked_journal(path) as journal:
        add(journal, "k")
    before = path.read_bytes()
    write = os.write

    def full(file: int, data: bytes) -> int:
        write(file, data[:7])
        raise OSError(28, "No space left on device")

    def fill() -> None:
        with locked_journal(path) as journal:
            monkeypatch.setattr(os, "write", full)
            add(journal, "other")

    with pytest.raises(UserError, match=r"cannot write .*a\.jsonl: No space left"):
        fill()
    assert path.read_bytes() == before


def test_a_folder_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "judge").write_text("")
    with (
        pytest.raises(UserError, match=r"cannot write .*judge"),
        locked_journal(tmp_path / "judge" / "a.jsonl"),
    ):
        pass


# --- whole folders --------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_once_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "folder"
    with replacing_folder(target) as part:
        (part / "inner").mkdir()
        (part / "inner" / "file").write_text("text")
        assert not target.exists()
    assert (target / "inner" / "file").read_text() == "text"
    assert names(target.parent) == ["folder"]


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    def fail() -> None:
        with replacing_folder(tmp_path / "folder") as part:
            (part / "file").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert names(tmp_path) == []


def test_the_faster_of_two_processes_wins(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with replacing_folder(target) as part:
        (part / "file").write_text("slower")
        target.mkdir()
        (target / "file").write_text("faster")
    assert (target / "file").read_text() == "faster"
    assert names(tmp_path) == ["folder"]


def test_what_an_ended_process_left_is_not_published(tmp_path: Path) -> None:
    with replacing_folder(tmp_path / "folder") as part:
        leftover = part
    leftover.mkdir()
    (leftover / "stale").write_text("stale")
    with replacing_folder(tmp_path / "folder") as part:
        assert names(part) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot write"),
        replacing_folder(tmp_path / "file" / "folder"),
    ):
        pytest.fail("there is no folder to write to")
