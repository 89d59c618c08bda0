"""MATH-500: prompts, equivalence of answers and a run from a fixture in the hub's own schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.data.sources import keep
from kvbench.harness.lm_eval import LmEvalTask
from kvbench_tasks.math_500 import BENCHMARK

from ...loading import load_task

FIXTURE = Path(__file__).parent / "fixtures" / "test.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in FIXTURE.read_text().splitlines()]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    keep(BENCHMARK.sources["math_500"][0], ROWS, folder)
    return folder


@pytest.fixture(scope="module")
def task(bpe_tokenizer: Any, cache: Path) -> LmEvalTask:
    return load_task("math_500", BENCHMARK, bpe_tokenizer, cache, samples=500)


def test_prompts_and_the_fields_that_reports_group_by(task: LmEvalTask) -> None:
    for request, row in zip(task.requests, ROWS, strict=True):
        assert request.context + request.question == (
            row["problem"] + "\nPlease reason step by step, and put your final answer within \\boxed{}."
        )
        assert request.extra == {
            "id": row["unique_id"],
            "subject": row["subject"],
            "level": row["level"],
        }
        assert request.target == (row["answer"],)
        assert (request.repeats, request.max_new_tokens) == (8, 16384)


def test_equivalent_answers_are_right(task: LmEvalTask) -> None:
    given = [
        [r"\boxed{0.5}", r"\boxed{\dfrac{2}{4}}", r"\boxed{2}", "0.5"],
        [r"$\boxed{(0, 2]}$", r"\boxed{(0,2)}", r"\boxed{x \in (0,2]}", ""],
        [r"\boxed{Ann}", r"\boxed{\textbf{ann}}", r"\boxed{Bo}", r"\boxed{}"],
    ]
    responses = {
        (request.sample_id, 0, repeat): text
        for request, texts in zip(task.requests, given, strict=True)
        for repeat, text in enumerate(texts)
    }
    scores, total = task.score(responses)
    assert list(scores.values()) == [1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 0]
    assert total == pytest.approx(6 / 12)


def test_run(llama_folder: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(cache))
    run = kvbench.run(
        {
            "policy": "snapkv:window=8",
            "budget": "0.2",
            "task": "math_500",
            "model": llama_folder,
            "samples": 2,
            "repeats": 2,
            "max_new_tokens": 6,
            "out": str(tmp_path / "run"),
        }
    )
    assert (run.cells.status == "ok").all()
    assert run.cells.metric.unique().tolist() == ["accuracy"]
    assert len(run.samples) == 2 * 2 * 2
