"""Output folders of analyses."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.analysis.output import Findings, prepare_folder, write_files
from kvbench.errors import UserError


@pytest.mark.parametrize("names", [["responses.jsonl"], ["cells.parquet"], ["cells.parquet", "grid.yaml"]])
def test_a_folder_with_a_run_is_refused_unchanged(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="holds a run; choose another folder"):
        prepare_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_an_earlier_analysis_is_no_run(tmp_path: Path) -> None:
    for name in ("heads.parquet", "policies.parquet", "settings.json"):
        (tmp_path / name).touch()
    assert prepare_folder(tmp_path) == tmp_path


def test_nothing_is_created_before_there_is_something_to_write(tmp_path: Path) -> None:
    folder = prepare_folder(tmp_path / "deep" / "out")
    assert not list(tmp_path.iterdir())
    output = write_files(folder, "kvbench x", {}, Findings({}, [], [], [], {}), "kvbench x")
    assert {path.name for path in folder.iterdir()} == {"settings.json", "summary.md"}
    assert output.files == [folder / "summary.md", folder / "settings.json"]


def test_a_place_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="is a file, not a folder"):
            prepare_folder(place)
