"""One offline command runs tasks with images on a model folder, from data that was fetched."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvbench
from kvbench import cli
from kvbench.data.sources import keep
from kvbench_tasks.gqa import IMAGES, QUESTIONS
from kvbench_tasks.mathvision import SOURCES

from .. import vision
from ..lmms import needs_lmms_eval
from .gqa.test_gqa import images, questions
from .mathvision.test_mathvision import raw
from .mmdu.test_mmdu import fetched


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return vision.save("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"))


def run(flags: str, out: Path) -> str:
    flags = f"--samples 2 --max-new-tokens 4 --judge local {flags} --out {out}"
    done = CliRunner().invoke(cli.app.app, ["run", *flags.split()])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@needs_lmms_eval
def test_mmdu_and_the_tasks_of_lmms_eval(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    fetched(tmp_path / "cache", tmp_path)
    keep(SOURCES["mathvision_testmini"], raw(), tmp_path / "cache")
    keep(QUESTIONS, questions(), tmp_path / "cache")
    keep(IMAGES, images(), tmp_path / "cache")
    told = run(
        f"--model {folder} --policy snapkv --budget 0.2 --task mmdu,mathvision,gqa",
        tmp_path / "run",
    )
    assert "mathvision_test is left out" in told  # only testmini has been fetched
    cells, samples = kvbench.load(tmp_path / "run")
    assert set(cells.status) == {"ok"}
    assert set(cells.task) == {"mmdu", "mathvision_testmini", "gqa"}
    assert set(cells.metric) == {
        "overall (local judge)",
        "mathvision_standard_eval",
        "exact_match",
    }
    snapkv = cells[cells.policy == "snapkv"]
    assert (snapkv.held_entries == snapkv.budget_entries).all()
    mmdu = samples[(samples.task == "mmdu") & (samples.policy == "snapkv")]
    assert [json.loads(extra)["turn"] for extra in mmdu.extra] == [0, 1, 2, 0]
    assert mmdu.score.between(0.1, 1).all()
    with pytest.warns(UserWarning, match="because they lack creativity: "):
        cells, samples = kvbench.load(tmp_path / "run", metric="creativity")
    assert "creativity (local judge)" in set(cells.metric)
    creative = samples[(samples.task == "mmdu") & (samples.policy == "snapkv")].score
    assert creative.mean() == pytest.approx(cells[(cells.task == "mmdu") & (cells.policy == "snapkv")].score.item())


def test_a_live_dialogue_keeps_its_images(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    fetched(tmp_path / "cache", tmp_path)
    run(
        f"--model {folder} --policy snapkv --budget 0.5 --moment turns --task mmdu",
        tmp_path / "run",
    )
    cells, _ = kvbench.load(tmp_path / "run")
    assert set(cells.status) == {"ok"}
    use = ["--use", "512=0.5", "--reduced", "--format", "csv"]
    done = CliRunner().invoke(cli.app.app, ["table", str(tmp_path / "run"), "--layout", "dbtrimkv-6", *use])
    assert done.exit_code == 0, done.output
    (shown,) = (row for row in csv.DictReader(done.output.splitlines()) if "SnapKV" in row.values())
    by_column = {"Creativity": "creativity", "Image Relative": "image_relationships", "Overall": "overall"}
    for column, metric in by_column.items():
        cells, _ = kvbench.load(tmp_path / "run", metric=metric)
        assert float(shown[column]) == cells.loc[cells.policy == "snapkv", "score"].item(), column


def test_a_text_model_leaves_them_out_with_one_line(
    llama_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    flags = f"--model {llama_folder} --policy snapkv --budget 0.2 --task mmdu,vt --length 512"
    told = run(flags, tmp_path / "run")
    assert f"mmdu is left out: model {llama_folder} takes no images; use --model with a" in told
    cells, _ = kvbench.load(tmp_path / "run")
    assert set(cells.task) == {"vt"}
