"""The locked journal survives crashes, and one process or thread uses it at a time.

A folder that is written aside appears whole or not at all, and only once.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvbench import files
from kvbench.errors import UserError
from kvbench.files import (
    Journal,
    cache_dir,
    file_digests,
    is_off,
    locked_journal,
    replacing,
    replacing_folder,
    unfinished,
    write_whole,
)


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
        other = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
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


def test_a_full_disk_leaves_the_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- digests --------------------------------------------------------------------------------------


def test_a_file_replaced_with_its_size_and_time_kept_has_a_new_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_SETTLED", 0)
    monkeypatch.setattr(files, "_LARGE", 0)
    weights, other = tmp_path / "weights", tmp_path / "other"
    weights.write_bytes(b"one")
    first = file_digests([weights])
    other.write_bytes(b"two")
    os.utime(other, ns=(weights.stat().st_atime_ns, weights.stat().st_mtime_ns))
    subprocess.run(["cp", "-p", str(other), str(weights)], check=True)
    assert file_digests([weights]) == file_digests([other]) != first
    other.replace(weights)
    os.utime(weights, ns=(1, 1))
    moved = file_digests([weights])
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("it is read again"))
    assert file_digests([weights]) == moved


def test_a_digest_of_a_file_that_has_just_changed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_LARGE", 0)
    monkeypatch.setattr(files, "state_of", lambda path: (3, 5, time.time_ns(), 7, 8))
    weights = tmp_path / "weights"
    weights.write_bytes(b"one")
    first = file_digests([weights])
    weights.write_bytes(b"two")  # within the resolution of the file system's clock
    assert file_digests([weights]) != first


def test_digests_are_kept_of_large_files_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("KVBENCH_CACHE", str(cache))
    monkeypatch.setattr(files, "_SETTLED", 0)
    monkeypatch.setattr(files, "_LARGE", 4)
    small, large, gone = (tmp_path / name for name in ("small", "large", "gone"))
    small.write_bytes(b"one")
    assert file_digests([small]) == [hashlib.sha256(b"one").hexdigest()]
    assert not cache.exists()
    gone.write_bytes(b"seven")
    file_digests([gone])
    assert list(json.loads((cache / "digests.json").read_text())) == [str(gone)]
    gone.unlink()
    large.write_bytes(b"eleven")
    digests = file_digests([large, small])
    assert digests == [hashlib.sha256(content).hexdigest() for content in (b"eleven", b"one")]
    assert list(json.loads((cache / "digests.json").read_text())) == [str(large)]


# --- what is not a file ---------------------------------------------------------------------------


def test_devices_pipes_and_links_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write /dev/full: No space left on device"):
        write_whole(Path("/dev/full"), b"text")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo()
    link, target = tmp_path / "link", tmp_path / "there" / "target"
    target.parent.mkdir()
    link.symlink_to(Path("there") / "target")
    for text in (b"first", b"second"):
        write_whole(link, text)
        assert link.is_symlink() and target.read_bytes() == text
    out = subprocess.run(
        [sys.executable, "-c", "from pathlib import Path; from kvbench.files import write_whole\n"
         "write_whole(Path('/dev/stdout'), b'text')"],
        capture_output=True,
        check=True,
    )  # fmt: skip
    assert out.stdout == b"text"


def test_a_read_only_file_system_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)  # even of a file that is not there
    with pytest.raises(UserError, match=r"^cannot write .*: Read-only file system$"):
        write_whole(tmp_path / "report.md", b"text")


@pytest.mark.parametrize("name", ["/", "/tmp", "x" * 300, "x" * 300 + "/y"])
def test_a_name_that_cannot_be_a_file_is_one_line(name: str) -> None:
    with pytest.raises(UserError, match=r"^cannot write [^\n]*$"):
        write_whole(Path(name), b"text")


def test_processes_of_the_same_number_write_to_different_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in two containers
    with replacing(tmp_path / "a") as first, replacing(tmp_path / "a") as second:
        first.write_text("1")
        second.write_text("2")
    assert (tmp_path / "a").read_text() == "1" and unfinished(tmp_path / "a") == []


def test_without_a_home_the_cache_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("KVBENCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(UserError, match="set KVBENCH_CACHE to a folder"):
        cache_dir()


@pytest.mark.parametrize(("value", "off"), [("0", True), ("No", True), ("false", True), ("1", False), ("", False)])
def test_what_turns_something_off(value: str, off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_NATIVE", value)
    assert is_off("KVBENCH_NATIVE") is off
