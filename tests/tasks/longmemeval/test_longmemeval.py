"""LongMemEval_S: the official prompt, the rubric of each type, and a run with the local judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.data.sources import keep
from kvbench.harness.lm_eval import LmEvalTask
from kvbench.judge.base import LocalJudge
from kvbench.judge.rubrics import rubric
from kvbench_tasks.longmemeval import BENCHMARK, NOTES, SOURCE
from kvbench_tasks.longmemeval.chats import alternating

from ...loading import load_task

FIXTURE = Path(__file__).parent / "fixtures" / "longmemeval.jsonl"
RAW = [json.loads(line) for line in FIXTURE.read_text().splitlines()]


def load(leaf: str, tokenizer: Any, cache: Path) -> LmEvalTask:
    keep(SOURCE, RAW, cache)
    found = next(b for b in (BENCHMARK, NOTES) if leaf in b.leaves)
    return load_task(leaf, found, tokenizer, cache, samples=99)


def test_the_prompt_is_the_official_one(bpe_tokenizer: Any, tmp_path: Path) -> None:
    first = load("longmemeval_s", bpe_tokenizer, tmp_path).requests[0]
    history = (
        "\n### Session 1:\nSession Date: 2023/04/11 (Tue) 08:03\nSession Content:\n\n"
        '[{"role": "user", "content": "How do I mend a net?"}, '
        '{"role": "assistant", "content": "Use a netting needle \\u2013 and patience."}]\n'
        "\n### Session 2:\nSession Date: 2023/05/02 (Tue) 10:15\nSession Content:\n\n"
        '[{"role": "user", "content": "I adopted a grey mule called Pim today."}, '
        '{"role": "assistant", "content": "Congratulations! What does Pim eat?"}]\n'
    )
    assert first.context == (
        "I will give you several history chats between you and a user. Please answer the question "
        f"based on the relevant chat history.\n\n\nHistory Chats:\n\n{history}\n\n"
    )
    assert first.question == ("Current Date: 2023/07/01 (Sat) 12:00\nQuestion: What is my mule called?\nAnswer:")
    assert (first.max_new_tokens, first.until) == (500, ())
    notes = load("longmemeval_s_con", bpe_tokenizer, tmp_path).requests[0]
    assert notes.context.startswith(
        "I will give you several history chats between you and a user. Please answer the question "
        "based on the relevant chat history. Answer the question step by step: first extract all "
        "the relevant information, and then reason over the information to get the answer.\n\n\n"
        "History Chats:\n\n\n### Session 1:"
    )
    assert notes.question.endswith("Question: What is my mule called?\nAnswer (step by step):")
    assert notes.max_new_tokens == 800


def test_types_take_turns(bpe_tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"question_type": kind, "question_id": i} for i, kind in enumerate("aabbbc")]
    assert [row["question_id"] for row in alternating(rows)] == [0, 2, 5, 1, 3, 4]
    requests = load("longmemeval_s", bpe_tokenizer, tmp_path).requests
    assert sorted(r.extra["question_type"] for r in requests) == sorted(row["question_type"] for row in RAW)


def test_every_question_is_judged_by_the_rubric_of_its_type(bpe_tokenizer: Any, tmp_path: Path) -> None:
    task = load("longmemeval_s", bpe_tokenizer, tmp_path)
    asks = task.asks({(r.sample_id, r.question_id, 0): " R \n" for r in task.requests})
    rows = alternating(RAW)
    for ask, request in zip(asks, task.requests, strict=True):
        row = rows[request.doc_id]
        kind = "abstention" if row["question_id"].endswith("_abs") else row["question_type"]
        assert ask.rubric == f"longmemeval:{kind}"
        assert ask.fields == {
            "question": row["question"],
            "answer": str(row["answer"]),
            "response": "R",
        }
        assert row["question"] in rubric(ask.rubric).render(ask.fields)
    assert [ask.rubric for ask in asks].count("longmemeval:abstention") == 1


def test_accuracy_is_the_share_of_yes(bpe_tokenizer: Any, tmp_path: Path) -> None:
    task = load("longmemeval_s", bpe_tokenizer, tmp_path)

    def judged(responses: dict[Any, str]) -> Any:
        return task.score(responses, LocalJudge().judge(task.asks(responses)))  # type: ignore[arg-type]

    gold = {(r.sample_id, r.question_id, 0): f" It is {r.target[0]}." for r in task.requests}
    scores, total = judged(gold)
    assert set(scores.values()) == {1.0} and total == 1
    keys = list(gold)
    assert judged({**gold, keys[0]: "Who knows", keys[3]: ""})[1] == pytest.approx(5 / 7)


def test_a_run_from_end_to_end(llama_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    keep(SOURCE, RAW, tmp_path / "cache")
    grid = {"policy": "snapkv:window=8", "budget": "0.2", "model": llama_folder, "judge": "local"}
    grid |= {"task": "longmemeval_s", "samples": 2, "out": str(tmp_path / "run")}
    run = kvbench.run({**grid, "max_new_tokens": 8})
    assert (run.cells.status == "ok").all()
    assert set(run.cells.metric) == {"accuracy (local judge)"}
    assert len(run.samples) == 4
