"""What a publication holds, what its digest covers, and what cannot be published."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml

import kvbench
from kvbench.errors import UserError
from kvbench.leaderboard import publication
from kvbench.leaderboard.publication import MANIFEST, find_publications, load_publication, publish
from kvbench.runs.file_names import CELLS, GRID, METRICS, RESPONSES, SAMPLES
from kvbench.runs.folders import summarise
from kvbench.runs.schema import SAMPLES_SCHEMA
from kvbench.runs.store import RunStore

from ..report.conftest import make_run
from .conftest import Publish, save_run

SECRET = "the secret sentence"


def secret_frames() -> tuple[pd.DataFrame, pd.DataFrame]:
    """A run whose every text quotes its data."""
    cells, samples = make_run(samples=12)
    texts = {
        "response": SECRET,
        "prompt_end": SECRET,
        "extra": json.dumps({"needle": SECRET, "depth": 50, "kind": "x"}),
    }
    return cells, samples.assign(**texts, target=[[SECRET]] * len(samples))


def test_a_publication_has_every_score_and_no_text(published: Publish) -> None:
    publication = published(frames=secret_frames())
    run_cells, run_samples = kvbench.load(publication.folder.parents[1] / "run")
    cells, samples = kvbench.load(publication.folder)
    pd.testing.assert_frame_equal(cells, run_cells)
    left_out = ["response", "prompt_end", "target", "extra"]
    pd.testing.assert_frame_equal(samples.drop(columns=left_out), run_samples.drop(columns=left_out))
    assert set(samples["response"]) == set(samples["prompt_end"]) == {""}
    assert {len(targets) for targets in samples["target"]} == {0}
    assert json.loads(samples["extra"][0]) == {"depth": 50, "kind": "x"}
    for path in publication.folder.iterdir():
        assert SECRET.encode() not in path.read_bytes()
        if path.suffix == ".parquet":
            assert SECRET not in str(pq.read_table(path).to_pydict())


def test_every_text_column_of_the_samples_is_known_to_quote_nothing() -> None:
    """A new text column must be left out, or be added here because it quotes neither data nor model."""
    quotes_nothing = {
        "cell",
        "task",
        "policy",
        "budget",
        "moment",
        "sample_id",
        "context_id",
        "stop",
        "error",
        "metrics",
    }
    reduced = {"extra"}
    texts = {entry.name for entry in SAMPLES_SCHEMA if "string" in str(entry.type)}
    assert texts - quotes_nothing - reduced == {"response", "prompt_end", "target"}


def test_the_same_run_has_the_same_digest_and_another_run_another(tmp_path: Path, published: Publish) -> None:
    publication = published()
    assert re.fullmatch(rf"reference-vt\+cwe-{publication.digest[:8]}", publication.folder.name)
    assert publish(tmp_path / "run", tmp_path / "elsewhere").digest == publication.digest
    assert publish(tmp_path / "run", tmp_path / "elsewhere", "NVIDIA H200").digest != publication.digest
    assert published("other", make_run(samples=11)).digest != publication.digest
    assert len(find_publications([tmp_path])) == 3
    shutil.rmtree(tmp_path / "elsewhere")
    assert len(find_publications([tmp_path / "board", publication.folder])) == 2  # each counts once


def test_the_hardware_is_the_recorded_one_unless_described(
    tmp_path: Path, published: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert published().hardware == ""  # made-up tables record none
    monkeypatch.setattr(publication, "recorded_hardware", lambda folder: ["CPU A", "CPU B"])
    assert publish(tmp_path / "run", tmp_path / "board").hardware == "CPU A, CPU B"
    assert publish(tmp_path / "run", tmp_path / "board", "GPU").hardware == "GPU"


def test_a_publication_can_be_moved(tmp_path: Path, published: Publish) -> None:
    publication = published()
    moved = tmp_path / "renamed"
    publication.folder.rename(moved)
    assert load_publication(moved).digest == publication.digest


@pytest.mark.parametrize("name", [CELLS, SAMPLES, METRICS, GRID, MANIFEST])
def test_a_file_that_differs_is_named_in_one_line(published: Publish, name: str) -> None:
    publication = published()
    path = publication.folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(str(path))) as failure:
        load_publication(publication.folder)
    assert "\n" not in str(failure.value)
    path.unlink()
    with pytest.raises(UserError, match=f"{name}.* is missing"):
        load_publication(publication.folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"digest": 1, "files": 3}', "[" * 100_000, '{"files": "x"}'])
def test_a_manifest_that_is_none_is_one_line(published: Publish, text: str) -> None:
    publication = published()
    (publication.folder / MANIFEST).write_text(text)
    with pytest.raises(UserError, match="damaged"):
        load_publication(publication.folder)


def test_the_grid_repeats_the_run_and_says_nothing_of_the_machine(published: Publish) -> None:
    publication = published(moments=["context"], ray_address="10.0.0.1:6379", dtype="bfloat16")
    stored = yaml.safe_load((publication.folder / GRID).read_text())
    lists = {"policies": ["full", "snapkv", "criticalkv"], "tasks": ["vt", "cwe"], "moments": ["context"]}
    assert stored == {**lists, "dtype": "bfloat16", "samples": 12}
    flags = "--policy full,snapkv,criticalkv --task vt,cwe --dtype bfloat16 --samples 12"
    assert publication.command == f"kvbench run {flags}"
    assert summarise(publication.folder).state == "finished"


def test_remarks_need_the_responses_and_travel_with_the_publication(published: Publish) -> None:
    failed = published(frames=make_run(samples=12, failed=[("snapkv", "0.1", "vt")]))
    assert failed.remarks[0] == "1 of 14 cells failed."
    assert any("reference is kvbench's own tiny model" in remark for remark in failed.remarks)


def test_a_run_without_any_full_cache_is_refused(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", make_run(samples=12, with_full=False))
    with pytest.raises(UserError, match=r"no score of the full cache.*--no-full"):
        publish(run, tmp_path / "board")
    assert not (tmp_path / "board").exists()


def test_a_run_without_any_score_is_refused(tmp_path: Path) -> None:
    failed = [("full", "full", "vt"), ("snapkv", "0.2", "vt")]
    run = save_run(tmp_path / "run", make_run(["snapkv"], ["0.2"], ["vt"], samples=4, failed=failed))
    with pytest.raises(UserError, match="every cell failed"):
        publish(run, tmp_path / "board")


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", make_run(samples=4))
    with RunStore(run), pytest.raises(UserError, match="still running"):
        publish(run, tmp_path / "board")
    later = (run / CELLS).stat().st_mtime_ns + 1  # files written in one tick of the kernel's clock have the same time
    os.utime(run / RESPONSES, ns=(later, later))
    with pytest.raises(UserError, match="run the same command again"):
        publish(run, tmp_path / "board")
    (run / CELLS).unlink()
    with pytest.raises(UserError, match=r"is not a finished run: cells\.parquet is missing"):
        publish(run, tmp_path / "board")


def test_a_damaged_run_is_refused(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", make_run(samples=4))
    (run / SAMPLES).write_bytes((run / SAMPLES).read_bytes()[:-9])
    with pytest.raises(UserError, match=re.escape(str(run / SAMPLES))):
        publish(run, tmp_path / "board")


def test_a_run_without_its_grid_is_refused(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", make_run(samples=4))
    (run / GRID).unlink()
    with pytest.raises(UserError, match="says how to repeat the run"):
        publish(run, tmp_path / "board")
    (run / GRID).write_text("- 1")
    with pytest.raises(UserError, match="is not a grid"):
        publish(run, tmp_path / "board")


def test_folders_without_a_publication_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no published run"):
        find_publications([tmp_path])
    with pytest.raises(UserError, match="is not a folder"):
        find_publications([tmp_path / "none"])
    with pytest.raises(UserError, match=f"{MANIFEST} is missing"):
        load_publication(tmp_path)
