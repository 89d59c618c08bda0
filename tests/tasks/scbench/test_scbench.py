"""SCBench: official prompts in both modes, and a run from fixtures in the hub's schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.data.sources import keep
from kvbench.errors import UserError
from kvbench.harness.lm_eval import LmEvalTask
from kvbench.harness.protocol import Request
from kvbench_tasks.scbench import BENCHMARK, NAMES, REQUESTS, SOURCES

from ...loading import load_task

FIXTURES = Path(__file__).parent / "fixtures"


def raw(name: str) -> list[dict[str, Any]]:
    lines = (FIXTURES / f"scbench_{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    for name in NAMES:
        keep(SOURCES[name], raw(name), folder)
    return folder


def load(leaf: str, tokenizer: Any, cache: Path, chat: bool = False, **changes: Any) -> LmEvalTask:
    bench = BENCHMARK if leaf in BENCHMARK.leaves else REQUESTS
    settings = {"samples": 9, "chat_template": chat}
    return load_task(leaf, bench, tokenizer, cache, **settings | changes)


def whole(request: Request) -> str:
    return request.context + request.question


@pytest.mark.parametrize("name", NAMES)
def test_every_turn_is_a_question_about_one_context(name: str, bpe_tokenizer: Any, cache: Path) -> None:
    task = load(f"scbench_{name}", bpe_tokenizer, cache)
    rows = raw(name)
    assert len(task.requests) == sum(len(row["multi_turns"]) for row in rows)
    assert len({r.context_id for r in task.requests}) == len(rows)
    for request in task.requests:
        row = rows[int(request.sample_id)]
        turn = row["multi_turns"][request.question_id]
        told = row["context"] if "context" in row else row["input"]
        assert str(told) in request.context
        assert turn["input"] in request.question
        assert request.answer == str(turn["answer"]).strip()
        for earlier in row["multi_turns"][: request.question_id]:
            assert earlier["input"] in request.context
            assert str(earlier["answer"]) in request.context
    apart = load(f"scdq_{name}", bpe_tokenizer, cache)
    assert len(apart.requests) == len(task.requests)
    contexts = {str(row.get("context", row.get("input"))) for row in rows}
    assert len({r.context for r in apart.requests}) == len(contexts), "one prefill for all"
    assert {r.dialogue for r in apart.requests} == {""}


def test_the_prompts_are_the_official_ones(bpe_tokenizer: Any, cache: Path) -> None:
    kv = load("scbench_kv", bpe_tokenizer, cache).requests
    row = raw("kv")[0]
    one, two, _ = row["multi_turns"]
    head = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    first = f"{head}{row['context']}\n\n{one['input']}"
    assert whole(kv[0]) == first
    assert kv[0].context == f"{head}{row['context']}\n\n"
    assert whole(kv[1]) == f"{first}{one['answer']}\n\n{two['input']}"

    row = raw("choice_eng")[0]
    one, two = row["multi_turns"]
    asked = [
        f"Question: {t['input']}\n"
        + "".join(f"{a}. {o}\n" for a, o in zip("ABCD", t["options"], strict=True))
        + "\nThe the correct answer is"
        for t in (one, two)
    ]
    head = f"Read the book and answer the question.\n\n{row['context']}"
    choice = load("scbench_choice_eng", bpe_tokenizer, cache).requests
    assert whole(choice[1]) == f"{head}\n\n{asked[0]}{one['answer']}\n\n{asked[1]}"
    assert choice[0].target == ("At the north quay", "C")
    assert whole(load("scdq_choice_eng", bpe_tokenizer, cache).requests[1]) == head + asked[1]

    row = raw("qa_eng")[0]
    qa = load("scbench_qa_eng", bpe_tokenizer, cache).requests
    assert whole(qa[1]) == (
        "Read the book and answer the question. Be very concise in your answer.\n\n"
        f"{row['context']}\n\nQuestion: Who mended nets?\nAnswer:Oskar\n\n"
        "Question: What carried the letters after the flood?\nAnswer:"
    )
    chinese = load("scbench_qa_chn", bpe_tokenizer, cache).requests
    row = raw("qa_chn")[0]
    assert whole(chinese[0]) == (f"阅读以下书籍然后回答问题。\n\n{row['context']}\n\n问题：谁每天送信？\n答案：")


def test_math_find_names_the_number_to_find(bpe_tokenizer: Any, cache: Path) -> None:
    row = raw("mf")[0]
    inputs = [turn["input"] for turn in row["multi_turns"]]
    prefixes = [
        "What is the largest number of the list?",
        "What is the second smallest number of the list?",
    ]
    turns = load("scbench_mf", bpe_tokenizer, cache).requests
    first = f"{prefixes[0]}\n\n{row['context']}\n\n{inputs[0]}"
    assert whole(turns[0]) == first
    answer = row["multi_turns"][0]["answer"]
    assert whole(turns[1]) == f"{first}{answer}\n\n{prefixes[1]}\n\n{inputs[1]}"
    apart = load("scdq_mf", bpe_tokenizer, cache).requests
    assert apart[1].context == f"{inputs[0]}\n\n{row['context']}"
    assert apart[1].question == f"{prefixes[1]}\n\n{inputs[1]}"


def test_limits_and_mixed_tasks(bpe_tokenizer: Any, cache: Path) -> None:
    limits = {
        name: [r.max_new_tokens for r in load(f"scbench_{name}", bpe_tokenizer, cache).requests[:2]] for name in NAMES
    }
    assert limits == {
        "kv": [150, 150],
        "prefix_suffix": [150, 150],
        "vt": [30, 30],
        "repoqa": [1024, 1024],
        "qa_eng": [40, 40],
        "qa_chn": [40, 40],
        "choice_eng": [40, 40],
        "many_shot": [10, 10],
        "mf": [5, 5],
        "summary": [200, 200],
        "summary_with_needles": [800, 15],
        "repoqa_and_kv": [1024, 80],
    }
    mixed = load("scbench_repoqa_and_kv", bpe_tokenizer, cache)
    assert [r.extra["task"] for r in mixed.requests[:2]] == ["scbench_repoqa", "scbench_kv"]


@pytest.mark.parametrize("name", NAMES)
def test_reference_answers_score_one(name: str, bpe_tokenizer: Any, cache: Path) -> None:
    for mode in ("scbench", "scdq"):
        task = load(f"{mode}_{name}", bpe_tokenizer, cache)
        gold = {(r.sample_id, r.question_id, 0): " ".join(r.target[:3]) for r in task.requests}
        if "repoqa" in name:
            gold = {(r.sample_id, r.question_id, 0): f"Here:\n```python\n{r.target[0]}\n```" for r in task.requests}
        if name == "choice_eng":
            gold = {(r.sample_id, r.question_id, 0): f" {r.target[1]}." for r in task.requests}
        assert task.score(gold)[1] == pytest.approx(1)
        assert task.score(dict.fromkeys(gold, "I cannot say."))[1] < 0.2


def test_a_chat_template_gives_real_turns(bpe_tokenizer: Any, cache: Path) -> None:
    for request in load("scbench_qa_eng", bpe_tokenizer, cache, chat=True).requests:
        turns = raw("qa_eng")[int(request.sample_id)]["multi_turns"][: request.turn + 1]
        messages = []
        for number, turn in enumerate(turns):
            told = f"Question: {turn['input']}\nAnswer:"
            if number == 0:
                told = f"{request.context.split('user')[1].split('Question')[0].strip()}\n\n{told}"
            messages += [{"role": "user", "content": told}]
            if number < request.turn:
                messages += [{"role": "assistant", "content": turn["answer"]}]
        assert whole(request) == bpe_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_only_real_models_can_read_it(bpe_tokenizer: Any, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the reference model knows only its own 900 words"):
        load("scbench_kv", bpe_tokenizer, cache, lexicon="reference")
    with pytest.raises(UserError, match=r"microsoft/SCBench"):
        load("scbench_kv", bpe_tokenizer, tmp_path)


def test_a_run_from_end_to_end(llama_folder: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(cache))
    base = {"policy": "snapkv:window=8", "budget": "0.2", "model": llama_folder, "samples": 2}
    turns = {"task": "scbench_mf", "moment": "context,turns", "out": str(tmp_path / "turns")}
    cells = kvbench.run(base | turns).cells
    assert (cells.status == "ok").all()
    assert set(zip(cells.policy, cells.moment, strict=True)) >= {
        ("snapkv:window=8", "context"),
        ("snapkv:window=8", "turns"),
    }
    run = kvbench.run(base | {"task": "scdq_many_shot", "out": str(tmp_path / "apart")})
    assert (run.cells.status == "ok").all()
    kept = run.samples[run.samples.policy != "full"]
    assert (kept.held_entries == kept.budget_entries).all()
    assert len(kept) == 2 and kept.context_id.nunique() == 1
