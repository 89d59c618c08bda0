"""Output folders of analyses."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.analysis.output import prepare_folder, removed_on_failure
from kvbench.errors import UserError


@pytest.mark.parametrize("names", [["responses.jsonl"], ["cells.parquet", "grid.yaml"]])
def test_a_folder_with_a_run_is_refused_unchanged(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="holds a run; choose another folder"):
        prepare_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_an_earlier_analysis_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "cells.parquet").touch()
    assert prepare_folder(tmp_path) == tmp_path


def test_a_failure_leaves_no_empty_folders(tmp_path: Path) -> None:
    folder = prepare_folder(tmp_path / "out")
    with pytest.raises(UserError), removed_on_failure(folder):
        raise UserError("it failed")
    assert not folder.exists()
    (folder := prepare_folder(folder)).joinpath("heads.parquet").touch()
    with pytest.raises(UserError), removed_on_failure(folder):
        raise UserError("it failed")
    assert [path.name for path in folder.iterdir()] == ["heads.parquet"]
