"""The index of lm-eval's names equals lm-eval's own, and is kept on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager

from kvbench.errors import UserError
from kvbench.harness.named_tasks import index


@pytest.fixture(autouse=True)
def forget() -> None:
    index._installed_names.cache_clear()
    index._own_names.cache_clear()


@pytest.mark.slow
def test_the_index_has_every_name_of_lm_eval() -> None:
    manager = TaskManager()
    known = index.names()
    assert set(known) == set(manager.all_tasks)
    for name, entry in manager.task_index.items():
        assert known[name] == (entry.kind.name, str(entry.yaml_path or ""), sorted(entry.tags))


def test_a_stored_index_is_read_without_scanning(monkeypatch: pytest.MonkeyPatch) -> None:
    known = index.names()
    index._installed_names.cache_clear()
    monkeypatch.setattr(index, "_scanned", lambda folder: pytest.fail("scanned again"))
    assert index.names() == known


def test_the_index_is_scanned_again_if_a_file_of_lm_eval_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(index, "_tasks_folder", lambda: tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/one.yaml").write_text("task: one\n")
    assert set(index.names()) == {"one"}
    (tmp_path / "sub/two.yaml").write_text("task: two\ntag: both\n")
    assert set(index.names()) == {"one"}
    assert set(index.rebuilt_names()) == {"one", "two", "both"}


def test_a_damaged_index_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(index, "_tasks_folder", lambda: tmp_path)
    (tmp_path / "one.yaml").write_text("task: one\n")
    index.names()
    for damage in ("", "{", json.dumps({"files": "x"})):
        index._index_file().write_text(damage)
        index._installed_names.cache_clear()
        assert set(index.names()) == {"one"}


def test_own_folders_come_first_and_hidden_ones_are_skipped(own_tasks: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: arc_easy\n")
    (tmp_path / "other.yaml").write_text("version: 3\nservices: {}\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/hidden.yaml").write_text("task: hidden\n")
    known = index.names([str(own_tasks), str(tmp_path)])
    assert known["arc_easy"].yaml == str(tmp_path / "mine.yaml")
    assert known["own_group"].kind == "GROUP"
    assert "hidden" not in known
    assert index.broken_files([str(tmp_path)]) == []


def test_files_that_cannot_be_read_are_told_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("task: x\nmetric_list: [\n")
    (message,) = index.broken_files([str(tmp_path)])
    assert message.startswith(f"{tmp_path / 'bad.yaml'}: line ")


def test_a_folder_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="--include-path nowhere is not a folder"):
        index.names(["nowhere"])


def test_entries_are_those_that_lm_eval_builds_from() -> None:
    registry = index.entries(index.names())
    assert registry["arc_easy"] is registry["arc_easy"]
    assert "no_such" not in registry
    with pytest.raises(KeyError):
        registry["no_such"]
    registry["new"] = registry["arc_easy"]
    assert registry["new"].name == "arc_easy" and len(registry) == len(index.names()) + 1
    del registry["new"]
    assert "new" not in [*registry]
