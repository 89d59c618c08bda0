"""Prompts that lmms-eval has for one model: those of lmms-eval's own loop, to the character."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import kvbench_tasks.mmmu_pro_vision
import kvbench_tasks.mmstar
import kvbench_tasks.textvqa
import kvbench_tasks.videomme
from kvbench import cli
from kvbench.benchmark import Benchmark
from kvbench.data.sources import Source, keep
from kvbench.errors import UserError
from kvbench.runs.grid import Grid
from kvbench.runs.planning import plan

from ... import lmms, vision
from ...tasks.mmmu_pro_vision import test_mmmu_pro_vision as mmmu_pro
from ...tasks.mmstar import test_mmstar as mmstar
from ...tasks.textvqa import test_textvqa as textvqa
from ...tasks.videomme import test_videomme as videomme

MODEL = "qwen3_vl"


def asked(
    task_name: str, bench: Benchmark, definition: str, rows: list[dict[str, Any]], folder: Path, **changes: Any
) -> list[str]:
    """Compare all prompts with those of lmms-eval's loop, and return the questions."""
    task = vision.load_task(task_name, bench, folder, lmms_model=MODEL)
    answers = ("A",) * len(rows)
    own = lmms.evaluated(definition, rows, answers, folder / "disk", lmms_model=MODEL, **changes)
    lmms.compare(task, bench, own, answers)
    assert task.recorded == {"lmms_model": MODEL}
    plain = vision.load_task(task_name, bench, folder)
    assert plain.recorded == {}
    assert [one.context for one in task.requests] == [one.context for one in plain.requests]
    return [one.question for one in task.requests]


SOURCED: dict[str, tuple[Benchmark, Source, str, Any]] = {
    "mmstar": (kvbench_tasks.mmstar.BENCHMARK, kvbench_tasks.mmstar.SOURCE, "mmstar/mmstar.yaml", mmstar.raw),
    "mmmu_pro_vision": (
        kvbench_tasks.mmmu_pro_vision.BENCHMARK,
        kvbench_tasks.mmmu_pro_vision.SOURCE,
        "mmmu_pro/mmmu_pro_vision.yaml",
        mmmu_pro.raw,
    ),
}


@lmms.needs_lmms_eval
@pytest.mark.parametrize("task_name", SOURCED)
def test_images_are_asked_about_as_lmms_eval_asks_the_model(task_name: str, tmp_path: Path) -> None:
    bench, source, definition, raw = SOURCED[task_name]
    keep(source, raw(), tmp_path)
    for question in asked(task_name, bench, definition, raw(), tmp_path):
        assert "Answer with the option letter only." in question


@lmms.needs_videos
def test_videos_are_asked_about_as_lmms_eval_asks_the_model(tmp_path: Path) -> None:
    for name, frames in (("vm1", 8), ("vm2", 40)):
        lmms.write_video(Path(os.environ["HF_HOME"], "videomme", "data", f"{name}.mp4"), frames)
    keep(kvbench_tasks.videomme.SOURCE, videomme.raw(), tmp_path)
    definition = "videomme/videomme.yaml"
    for question in asked("videomme", kvbench_tasks.videomme.BENCHMARK, definition, videomme.raw(), tmp_path):
        assert "Options:\nA. one." in question
    few = vision.load_task("videomme", kvbench_tasks.videomme.BENCHMARK, tmp_path, max_frames=4)
    assert [len(one.media[0].load()) for one in few.requests] == [4, 4, 4]
    assert len({one.media[0].digest for one in few.requests}) == 2


@lmms.needs_lmms_eval
def test_a_task_without_prompts_for_the_model_has_those_for_all_models(tmp_path: Path) -> None:
    keep(kvbench_tasks.textvqa.SOURCE, textvqa.raw(), tmp_path)
    bench = kvbench_tasks.textvqa.BENCHMARK
    # The definition's other metric writes a file.
    only = {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}
    questions = asked("textvqa_val", bench, "textvqa/textvqa_val.yaml", textvqa.raw(), tmp_path, **only)
    assert questions == [one.question for one in vision.load_task("textvqa_val", bench, tmp_path).requests]


@lmms.needs_lmms_eval
def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    keep(kvbench_tasks.mmstar.SOURCE, mmstar.raw(), tmp_path)
    with pytest.raises(UserError, match=r"no model 'qwen3vl' for --lmms-model; did you mean .*qwen3_vl"):
        vision.load_task("mmstar", kvbench_tasks.mmstar.BENCHMARK, tmp_path, lmms_model="qwen3vl")


@lmms.needs_lmms_eval
def test_an_unknown_model_is_one_line_in_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = ["--task", "docvqa_val", "--model", "reference-vl", "--policy", "snapkv", "--out", str(tmp_path / "run")]
    assert cli.call(["run", *named, "--lmms-model", "qwen3vl"]) == 2
    message = capsys.readouterr().err
    assert "lmms-eval has no model 'qwen3vl' for --lmms-model; did you mean qwen3_vl" in message
    assert message.count("\n") == 1 and not (tmp_path / "run").exists()


def test_it_is_refused_where_no_task_is_of_lmms_eval(tmp_path: Path) -> None:
    grid = Grid(policies=("snapkv",), tasks=("vt",), lmms_model=MODEL, out=str(tmp_path / "run"))
    with pytest.raises(UserError, match="--lmms-model is for tasks of lmms-eval"):
        plan(grid, print)
