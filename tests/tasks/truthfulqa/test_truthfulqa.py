"""TruthfulQA as lm-eval asks and scores it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.data.sources import keep
from kvbench.harness.lm_eval import LmEvalTask
from kvbench_tasks.truthfulqa import BENCHMARK, SOURCE
from kvbench_tasks.truthfulqa.metric import scores

from ...loading import load_task

FIXTURE = Path(__file__).parent / "fixtures" / "truthful_qa.jsonl"
RAW = [json.loads(line) for line in FIXTURE.read_text().splitlines()]


@pytest.fixture
def task(bpe_tokenizer: Any, tmp_path: Path) -> LmEvalTask:
    keep(SOURCE, RAW, tmp_path)
    return load_task("truthfulqa_gen", BENCHMARK, bpe_tokenizer, tmp_path, chat_template=True)


def test_the_prompt_is_that_of_lm_eval(task: LmEvalTask) -> None:
    import lm_eval
    import yaml
    from lm_eval.utils import apply_template

    page = Path(lm_eval.__file__).parent / "tasks" / "truthfulqa" / "truthfulqa_gen.yaml"
    config = yaml.safe_load(page.read_text().replace("!function", ""))
    for request, row in zip(task.requests, RAW, strict=True):
        official = apply_template(config["doc_to_text"], {"question": row["question"].strip()})
        assert request.context + request.question == official
        assert request.question == " " + row["question"].split()[-1]
        assert (request.until, request.max_new_tokens) == (("\n\n",), 256)
    assert len({r.context_id for r in task.requests}) == len(RAW)


def test_references_end_with_a_full_stop(task: LmEvalTask) -> None:
    first, second = task.requests
    assert first.target == (
        "Goats mostly eat grass and leaves.",
        "Goats browse shrubs.",
        "I have no comment.",
    )
    assert second.target == ("It depends on the place.", "I have no comment.")


def test_a_response_is_compared_with_true_and_false_references(task: LmEvalTask) -> None:
    doc = {
        "correct_answers": ["Goats browse shrubs."],
        "incorrect_answers": ["Goats eat tin cans."],
    }
    # "goats browse": 2 of its 2 words in a true reference of 3, 1 of 2 in a false one of 4.
    found = scores(doc, ["Goats browse"])
    assert found["rouge1_max"] == pytest.approx(100 * 2 * 2 / (2 + 3))
    assert found["rouge1_diff"] == pytest.approx(100 * (2 * 2 / (2 + 3) - 2 * 1 / (2 + 4)))
    assert found["rouge1_acc"] == found["rougeL_acc"] == 1
    assert scores(doc, ["Goats browse shrubs."])["bleu_max"] == pytest.approx(100)
    assert scores(doc, ["Goats browse shrubs."])["bleu_acc"] == 1
    assert scores(doc, ["Goats eat tin cans."])["bleu_acc"] == 0

    gold = {(r.sample_id, 0, 0): r.target[0] for r in task.requests}
    assert task.score(gold)[1] == 1
    false = dict(zip(gold, ("Goats eat tin cans.", "It always rains more at night."), strict=True))
    assert task.score(false)[1] == 0


@pytest.mark.slow
def test_a_run_from_end_to_end(llama_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    keep(SOURCE, RAW, tmp_path / "cache")
    grid = {"policy": "snapkv:window=8", "budget": "0.2", "task": "truthfulqa_gen"}
    grid |= {"model": llama_folder, "out": str(tmp_path / "run")}
    run = kvbench.run({**grid, "samples": 2, "moment": "context,question"})
    assert (run.cells.status == "ok").all()
    assert len(run.samples) == 6
