"""PG-19: passages of the right size, and the likelihood that the engine measures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.data.sources import keep
from kvbench.errors import UserError
from kvbench.harness.encode import count_tokens
from kvbench.harness.lm_eval import LmEvalTask
from kvbench_tasks.pg19 import BENCHMARK, SOURCE, STREAM
from kvbench_tasks.pg19.metric import nll

from ...loading import load_task

FIXTURE = Path(__file__).parent / "fixtures" / "pg19.jsonl"
RAW = [json.loads(line) for line in FIXTURE.read_text().splitlines()]


def load(leaf: str, tokenizer: Any, cache: Path, **changes: Any) -> LmEvalTask:
    keep(SOURCE, RAW, cache)
    bench = STREAM if leaf == "pg19_stream" else BENCHMARK
    settings = {"length": 200, "samples": 4, "chat_template": True}
    return load_task(leaf, bench, tokenizer, cache, **settings | changes)


@pytest.mark.parametrize(("leaf", "prompt"), [("pg19", 150), ("pg19_stream", 25)])
def test_a_passage_is_split_into_context_and_scored_text(
    leaf: str, prompt: int, bpe_tokenizer: Any, tmp_path: Path
) -> None:
    task = load(leaf, bpe_tokenizer, tmp_path)
    assert (task.metric, task.higher_is_better) == ("nll_per_token", False)
    assert len(task.requests) == 4
    books = {row["short_book_title"]: row["text"] for row in RAW}
    for request in task.requests:
        text = request.context + request.question + request.given
        assert text in books[str(request.extra["book"])]
        told = count_tokens(bpe_tokenizer, request.context + request.question)
        assert prompt - 12 < told <= prompt, "a word more would not fit"
        total = count_tokens(bpe_tokenizer, text)
        assert 200 - 12 < total <= 200
        assert request.max_new_tokens == total - told
        assert request.given[0].isspace()
        assert not request.question[-1].isspace()
    # The third book is too short.
    assert {str(r.extra["book"]) for r in task.requests} == {r["short_book_title"] for r in RAW[:2]}


def test_more_samples_extend_fewer(bpe_tokenizer: Any, tmp_path: Path) -> None:
    few = load("pg19", bpe_tokenizer, tmp_path / "a", samples=2).requests
    many = load("pg19", bpe_tokenizer, tmp_path / "b").requests
    assert many[:2] == few
    assert len({r.context for r in many}) == 4
    other = load("pg19", bpe_tokenizer, tmp_path / "a", samples=2, seed=1).requests
    assert {r.context for r in other}.isdisjoint(r.context for r in few)


def test_a_length_that_no_book_has(bpe_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^pg19: --length 9000 does not fit; use 8 to \d+$"):
        load("pg19", bpe_tokenizer, tmp_path, length=9000)


def test_the_metric_is_nats_per_token() -> None:
    assert nll({}, ['{"nll": 12.0, "tokens": 8}']) == {"nll_per_token": 1.5}


@pytest.mark.parametrize(("leaf", "moment", "budget"), [("pg19", "context", "0.2"), ("pg19_stream", "decode", "24")])
def test_a_run_from_end_to_end(
    leaf: str,
    moment: str,
    budget: str,
    llama_folder: str,
    tiny_llama: Any,
    bpe_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    keep(SOURCE, RAW, tmp_path / "cache")
    policy = "streaming_llm:buffer=4" if moment == "decode" else "snapkv:window=8"
    grid = {"policy": policy, "budget": budget, "task": leaf, "model": llama_folder, "length": 96}
    run = kvbench.run({**grid, "samples": 2, "moment": moment, "out": str(tmp_path / "run")})
    assert (run.cells.status == "ok").all()
    evicted = run.cells[run.cells.policy != "full"]
    assert (evicted["diff"].abs() > 1e-6).all(), "eviction changes the likelihood"
    # The full cache gives what the model gives in one forward.
    request = load(leaf, bpe_tokenizer, tmp_path / "cache", length=96, samples=1).requests[0]
    told = request.context + request.question
    ids = bpe_tokenizer(told + request.given, return_tensors="pt")["input_ids"]
    start = count_tokens(bpe_tokenizer, told)
    with torch.inference_mode():
        logits = tiny_llama(ids).logits[0].float()
    losses = torch.nn.functional.cross_entropy(logits[start - 1 : -1], ids[0, start:])
    sample = run.samples[(run.samples.policy == "full") & (run.samples.sample_id == "0")]
    assert math.isclose(float(sample.score.iloc[0]), float(losses), rel_tol=1e-4)
    assert (run.cells.score < BENCHMARK.chance).all()
