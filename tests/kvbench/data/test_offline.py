"""Without the hub: what other tools have downloaded into the hub's caches is found and read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvbench.benchmark import Source
from kvbench.data.fetching import fetch, verify
from kvbench.data.records import Damaged, NotFetched, head
from kvbench.data.sources import rows
from tests.sweeps import slow

from .test_fetching import SHA, lines, parquet, squad

if TYPE_CHECKING:
    from .conftest import Hub

NEW = "f" * 40
RAW = [{"a": 1}, {"a": 2}]

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub that this process does not contact, but whose clients' caches it reads."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.home / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", hub.home / "datasets")
    return hub


def other_tool(hub: Hub, code: str) -> None:
    """Run code that uses the hub's clients, but not kvbench."""
    done = hub.python(f"from huggingface_hub import hf_hub_download, snapshot_download\n{code}", hub.home / "no")
    assert done.returncode == 0, done.stderr


def test_tables_that_other_tools_have_loaded_are_read(offline: Hub, tmp_path: Path) -> None:
    offline.add("org/Tables", "data/test-00000-of-00001.parquet", parquet(squad(3)))
    offline.add("org/Tables", "data/train-00000-of-00001.parquet", parquet(squad(2)))
    other_tool(offline, "import datasets; datasets.load_dataset('org/Tables')")
    table = Source("org/Tables", columns=("question",))
    want = [{"question": row["question"]} for row in squad(3)]
    warning = rf"^org/Tables test is read from the Hugging Face cache at commit {SHA}, because "
    with pytest.warns(UserWarning, match=warning):
        assert rows(table, tmp_path) == want
    assert rows(table, tmp_path) == want  # it is recorded now, and no longer worth a warning
    record = head(table, tmp_path)
    assert record is not None
    assert (record.rows, record.revision) == (3, SHA)
    parts = Source("org/Tables", split="train[1:]+test[:1]")
    assert fetch(parts, tmp_path).rows == 2
    # The converted files are enough, and so are the raw ones.
    shutil.rmtree(offline.home / "hub")
    assert fetch(table, tmp_path / "new") == record
    shutil.rmtree(offline.home / "datasets")
    with pytest.raises(FileNotFoundError):
        verify(table, tmp_path)
    other_tool(offline, "snapshot_download('org/Tables', repo_type='dataset')")
    assert verify(table, tmp_path) == record
    assert (offline.home / "datasets").exists()


def test_files_that_other_tools_have_downloaded_are_read(offline: Hub, tmp_path: Path) -> None:
    offline.add("org/raw", "a.jsonl", lines(RAW))
    offline.add("org/raw", "b/0-0.jsonl", lines(RAW[:1]))
    offline.add("org/raw", "b/0-1.jsonl", lines(RAW[1:]))
    offline.add("org/raw", "c-00000-of-00002.jsonl", lines(RAW))
    fetches = ["a.jsonl", "b/0-0.jsonl", "b/0-1.jsonl", "c-00000-of-00002.jsonl"]
    code = "hf_hub_download('org/raw', {!r}, repo_type='dataset')"
    other_tool(offline, "\n".join(code.format(name) for name in fetches))
    assert fetch(Source("org/raw", file="a.jsonl"), tmp_path).revision == SHA
    several = Source("org/raw", file="b/*.jsonl")
    fetch(several, tmp_path)
    assert rows(several, tmp_path) == RAW
    why = "the hub is not contacted because HF_HUB_OFFLINE is set"
    for file, reason in [
        ("c-*.jsonl", "FileNotFoundError: the cache holds 1 of 2 files"),
        ("d.jsonl", "FileNotFoundError: the cache does not hold all of its files"),
        ("d*.jsonl", "FileNotFoundError: the cache does not hold all of its files"),
    ]:
        with pytest.raises(NotFetched) as error:
            rows(Source("org/raw", file=file), tmp_path)
        assert str(error.value) == (
            f"needs org/raw {file} from the Hugging Face hub: {reason} (commit {SHA[:12]} in its cache; {why})"
        )
    with pytest.raises(NotFetched) as error:
        rows(Source("org/other", file="a.jsonl"), tmp_path)
    assert str(error.value) == (
        "needs the dataset org/other from the Hugging Face hub, which is not contacted because HF_HUB_OFFLINE is set"
    )


@pytest.mark.slow
def test_a_pinned_commit_is_read_and_otherwise_the_newest(offline: Hub, tmp_path: Path) -> None:
    get = "hf_hub_download('org/raw', 'a.jsonl', repo_type='dataset'"
    offline.add("org/raw", "a.jsonl", lines(RAW[:1]))
    other_tool(offline, f"{get}, revision={SHA!r})")
    offline.add("org/raw", "a.jsonl", lines(RAW))
    other_tool(offline, f"{get}, revision={NEW!r})")
    offline.commit = "a" * 40
    other_tool(offline, f"{get}, revision='v2')")
    found = {
        revision: fetch(Source("org/raw", file="a.jsonl", revision=revision), tmp_path).revision
        for revision in (None, SHA, NEW, "v2")
    }
    assert found == {None: NEW, SHA: SHA, NEW: NEW, "v2": "a" * 40}
    assert rows(Source("org/raw", file="a.jsonl", revision=SHA), tmp_path) == RAW[:1]
    for revision in ("v3", "b" * 40):
        with pytest.raises(NotFetched, match=r"^needs the dataset org/raw .*OFFLINE is set$"):
            fetch(Source("org/raw", file="a.jsonl", revision=revision), tmp_path)
    # The commit of `main` comes first; if it lacks the file, another one does.
    offline.commit = "e" * 40
    other_tool(offline, f"{get})")
    assert fetch(Source("org/raw", file="a.jsonl"), tmp_path / "new").revision == "e" * 40
    shutil.rmtree(offline.home / "hub/datasets--org--raw/snapshots" / offline.commit)
    assert fetch(Source("org/raw", file="a.jsonl"), tmp_path / "newer").revision == NEW


@pytest.mark.slow
def test_parts_of_a_table_are_not_taken_for_it(offline: Hub, tmp_path: Path) -> None:
    for shard in range(2):
        offline.add("org/tables", f"data/test-{shard:05}-of-00002.parquet", parquet(squad(2)))
    other_tool(
        offline,
        "hf_hub_download('org/tables', 'data/test-00000-of-00002.parquet', repo_type='dataset')",
    )
    with pytest.raises(NotFetched, match="the cache holds 1 of 2 files"):
        rows(Source("org/tables"), tmp_path)
    offline.add("org/script", "script.py", b"open('ran', 'w')")
    offline.add("org/script", "test.jsonl", lines(RAW))
    other_tool(offline, "snapshot_download('org/script', repo_type='dataset')")
    with pytest.raises(NotFetched, match=r"needs a loading script, and kvbench never runs one"):
        rows(Source("org/script"), tmp_path)
    assert not Path("ran").exists()


@pytest.mark.slow
def test_the_default_configuration_is_read_where_several_are_cached(offline: Hub, tmp_path: Path) -> None:
    card = (
        "---\nconfigs:\n- config_name: a\n  data_files: a.jsonl\n"
        "- config_name: b\n  data_files: b.jsonl\n  default: true\n---\n"
    )
    offline.add("org/two", "README.md", card.encode())
    offline.add("org/two", "a.jsonl", lines(RAW[:1]))
    offline.add("org/two", "b.jsonl", lines(RAW))
    other_tool(offline, "import datasets\nfor name in 'ab':\n datasets.load_dataset('org/two', name)")
    with pytest.warns(UserWarning, match="is read from the Hugging Face cache"):
        assert rows(Source("org/two", split="train"), tmp_path) == RAW
    assert not list((offline.home / "datasets").glob(f"{SHA}/*"))  # nothing is converted again
    fetch(Source("org/two", "a", "train"), tmp_path)
    assert rows(Source("org/two", "a", "train"), tmp_path) == RAW[:1]


def test_reading_writes_nothing_into_the_caches(offline: Hub, tmp_path: Path) -> None:
    """A cache that several users share may be read-only."""
    offline.add("org/tables", "data/test.parquet", parquet(squad(3)))
    other_tool(offline, "import datasets; datasets.load_dataset('org/tables')")
    before = {path: path.stat().st_mtime_ns for path in offline.home.rglob("*")}
    for source in (Source("org/tables"), Source("org/tables", file="data/*.parquet")):
        fetch(source, tmp_path)
        assert rows(source, tmp_path) == squad(3)
    assert {path: path.stat().st_mtime_ns for path in offline.home.rglob("*")} == before


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"House 1")] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        slow(Source("org/tables"), "datasets/**/*-test.arrow"),
        (Source("org/tables", file="*.jsonl"), "hub/**/test.jsonl"),
    ],
)
def test_damage_is_found_and_repaired(offline: Hub, tmp_path: Path, source: Source, pattern: str) -> None:
    offline.add("org/tables", "test.jsonl", lines(squad(3)))
    get = f"from kvbench.data.fetching import *\nfetch({source!r}, Path({str(tmp_path)!r}))"
    get = f"from kvbench.data.sources import Source\n{get}"
    assert offline.python(get, tmp_path).returncode == 0
    (file,) = offline.home.glob(pattern)
    flip(file)
    place = r"^org/tables \S+ in the Hugging Face cache is damaged: its content does not match"
    with pytest.raises(Damaged, match=place):
        verify(source, tmp_path)
    for read in (rows, fetch):
        with pytest.raises(NotFetched, match=r" is damaged: .*; it needs the dataset org/tables"):
            read(source, tmp_path)
    done = offline.python(get, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert rows(source, tmp_path) == squad(3)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        verify(source, tmp_path)
