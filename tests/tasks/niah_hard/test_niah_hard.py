"""Many needles at once: eight keys with four values each; four of the keys are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.harness.encode import split_encode
from kvbench.harness.lm_eval import LmEvalTask
from kvbench.reference import grammar
from kvbench_tasks.niah_hard import ANSWER, BENCHMARK

from ...loading import load_task
from ..synthetic.oracles import facts, keys_asked


def load(lexicon: str, tokenizer: Any, cache: Path, **changes: Any) -> LmEvalTask:
    settings = {"length": 2048, "samples": 8, "lexicon": lexicon}
    return load_task("niah_hard", BENCHMARK, tokenizer, cache, **settings | changes)


def test_real_models_are_asked_for_all_keys_at_once(bpe_tokenizer: Any, tmp_path: Path) -> None:
    task = load("natural", bpe_tokenizer, tmp_path, samples=3)
    assert len({r.context_id for r in task.requests}) == len(task.requests) == 3
    for request in task.requests:
        known = facts("natural", request.context)
        assert [len(set(values)) for values in known.values()] == [4] * 8
        asked = keys_asked("natural", request.question)
        assert len(set(asked)) == 4
        wanted = [value for key in asked for value in known[key]]
        assert sorted(request.target) == sorted(wanted)
        assert request.max_new_tokens == ANSWER
        used = sum(map(len, split_encode(bpe_tokenizer, request.context, request.question)))
        assert 2048 - 60 <= used + ANSWER <= 2048
    gold = {(r.sample_id, 0, 0): ", ".join(r.target) for r in task.requests}
    assert task.score(gold)[1] == 1
    half = {(r.sample_id, 0, 0): ", ".join(r.target[:4]) for r in task.requests}
    assert task.score(half)[1] == pytest.approx(4 / 16)


def test_the_reference_model_is_asked_key_by_key(word_tokenizer: Any, tmp_path: Path) -> None:
    requests = load("reference", word_tokenizer, tmp_path).requests
    assert [(r.sample_id, r.question_id) for r in requests] == [
        (sample, question) for sample in "01" for question in range(4)
    ]
    for request in requests:
        known = facts("reference", request.context)
        assert [len(values) for values in known.values()] == [4] * 8
        (key,) = keys_asked("reference", request.question)
        assert list(request.target) == known[key], "in order of appearance"
        assert (request.max_new_tokens, request.until) == (12, (grammar.STOP,))
        words = (request.context + request.question).split()
        assert set(words) <= set(grammar.VOCABULARY)
    for sample in "01":
        asked = [r.question for r in requests if r.sample_id == sample]
        assert len(set(asked)) == 4


def test_more_samples_extend_fewer(word_tokenizer: Any, tmp_path: Path) -> None:
    few = load("reference", word_tokenizer, tmp_path / "a", samples=3)
    many = load("reference", word_tokenizer, tmp_path / "b", samples=8)
    grown = load("reference", word_tokenizer, tmp_path / "a", samples=8)
    assert few.requests == many.requests[:3]
    assert grown.requests == many.requests
    assert few.data_hash == many.data_hash


def test_the_reference_model_answers_most_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    grid = {"policy": "snapkv", "budget": "0.2", "task": "niah_hard", "length": 512}
    run = kvbench.run({**grid, "samples": 8, "out": str(tmp_path / "run")})
    cells = run.cells.set_index("policy").score
    assert cells["full"] > 0.6, "it has 85 of 100 at this length"
    assert cells["snapkv"] < cells["full"] - 0.2
