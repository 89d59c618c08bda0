"""CoQA as lm-eval asks it, scored over several annotators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.data.sources import keep
from kvbench.harness.lm_eval import LmEvalTask
from kvbench_tasks.coqa import BENCHMARK, SOURCE
from kvbench_tasks.coqa.metric import scores

from ...loading import load_task

RAW = [json.loads(line) for line in (Path(__file__).parent / "fixtures" / "coqa.jsonl").read_text().splitlines()]


@pytest.fixture
def task(bpe_tokenizer: Any, tmp_path: Path) -> LmEvalTask:
    return load(bpe_tokenizer, tmp_path, RAW)


def load(tokenizer: Any, cache: Path, raw: list[dict[str, Any]]) -> LmEvalTask:
    keep(SOURCE, raw, cache)
    return load_task("coqa", BENCHMARK, tokenizer, cache, chat_template=True)


def test_the_last_question_follows_the_conversation(task: LmEvalTask) -> None:
    first, second = task.requests
    assert first.context + first.question == (
        "Nell had a goat. The goat was called Pim, and it ate the blue hat of the mayor.\n\n"
        "Q: Who had a goat?\n\nA: Nell\n\nQ: What was it called?\n\nA: Pim\n\n"
        "Q: What did it eat?\n\nA:"
    )
    assert first.question == "Q: What did it eat?\n\nA:"
    assert first.target == ("the blue hat", "the mayor's hat", "a hat")
    assert first.until == ("\nQ:",)
    assert second.target == ("nine days",)
    assert task.metric == "em"


def test_a_table_of_rows_reads_as_one_of_columns(task: LmEvalTask, bpe_tokenizer: Any, tmp_path: Path) -> None:
    def turned(table: dict[str, list[Any]]) -> list[dict[str, Any]]:
        return [dict(zip(table, one, strict=True)) for one in zip(*table.values(), strict=True)]

    rows = [
        {
            **row,
            "questions": turned(row["questions"]),
            "answers": turned(row["answers"]),
            "additional_answers": {k: turned(v) for k, v in row["additional_answers"].items()},
        }
        for row in RAW
    ]
    assert load(bpe_tokenizer, tmp_path / "rows", rows).requests == task.requests


def test_each_annotator_is_left_out_in_turn() -> None:
    doc = {"outputs": ["the blue hat", "the mayor's hat", "a hat"]}
    # "hat" matches the third alone: 1 where another is left out, else 0.
    # F1: 2/3 ("blue hat"), 2/3 ("mayors hat"), 1 ("hat").
    found = scores(doc, ["The hat.\nQ: more"])
    assert found["em"] == pytest.approx((1 + 1 + 0) / 3)
    assert found["f1"] == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert scores({"outputs": ["nine days"]}, ["Nine days!"]) == {"em": 1, "f1": 1}
    # 1 of the 4 words of the response is 1 of the 2 of the answer: P = 1/4, R = 1/2.
    assert scores({"outputs": ["nine days"]}, ["for about nine weeks"])["f1"] == pytest.approx(1 / 3)
    assert scores({"outputs": ["the"]}, ["a"]) == {"em": 1, "f1": 1}
    assert scores({"outputs": ["nine"]}, [""]) == {"em": 0, "f1": 0}


@pytest.mark.slow
def test_a_run_from_end_to_end(llama_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    keep(SOURCE, RAW, tmp_path / "cache")
    grid = {"policy": "snapkv:window=8", "budget": "0.2", "task": "coqa", "model": llama_folder}
    run = kvbench.run({**grid, "samples": 2, "out": str(tmp_path / "run")})
    assert (run.cells.status == "ok").all()
    assert len(run.samples) == 4
