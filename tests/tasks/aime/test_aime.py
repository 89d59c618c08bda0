"""AIME: prompts, answers and a run from fixtures in the hub's own schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.data.sources import keep
from kvbench.errors import NeedsHub
from kvbench.harness.lm_eval import LmEvalTask
from kvbench_tasks.aime import BENCHMARK

from ...loading import load_task

FIXTURES = Path(__file__).parent / "fixtures"


def raw(leaf: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FIXTURES / f"{leaf}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    for leaf in BENCHMARK.leaves:
        keep(BENCHMARK.sources[leaf][0], raw(leaf), folder)
    return folder


def load(leaf: str, tokenizer: Any, cache: Path, chat: bool = False) -> LmEvalTask:
    return load_task(leaf, BENCHMARK, tokenizer, cache, samples=30, chat_template=chat)


def test_prompt_is_the_problem_and_the_instruction(bpe_tokenizer: Any, cache: Path) -> None:
    for leaf, field in (("aime24", "Problem"), ("aime25", "problem")):
        task = load(leaf, bpe_tokenizer, cache)
        assert len(task.requests) == len(raw(leaf))
        for request, row in zip(task.requests, raw(leaf), strict=True):
            assert request.context + request.question == (
                row[field].strip() + "\nPlease reason step by step, and put your final answer within \\boxed{}."
            )
            assert request.context == row[field].strip() + "\n"
            assert request.max_new_tokens == 32768
            assert request.until == ()


def test_answers_are_drawn_64_times_as_in_the_papers(bpe_tokenizer: Any, cache: Path) -> None:
    for request in load("aime25", bpe_tokenizer, cache, chat=True).requests:
        assert request.repeats == 64
        assert request.sampling is not None
        assert (request.sampling.temperature, request.sampling.top_p) == (0.6, 0.95)
        assert request.question.endswith("\\boxed{}.<|im_end|>\n<|im_start|>assistant\n")


def test_leading_zeros_of_integers_do_not_count(bpe_tokenizer: Any, cache: Path) -> None:
    task = load("aime24", bpe_tokenizer, cache)
    ids = [request.sample_id for request in task.requests]
    responses = {
        (ids[0], 0, 0): r"<think>\boxed{12}? No.</think> So \boxed{011}.",
        (ids[0], 0, 1): r"It is \boxed{11 \text{ pairs}}.",
        (ids[0], 0, 2): "It is 11.",
        (ids[0], 0, 3): r"\boxed{12}",
        (ids[1], 0, 0): r"\boxed{\frac{20 \cdot 21}{2}}",
        (ids[2], 0, 0): r"\boxed{24.}",
        (ids[2], 0, 1): r"\boxed{24}, or else \boxed{1024}",
    }
    scores, total = task.score(responses)
    assert [scores[key] for key in responses] == [1, 1, 0, 0, 1, 1, 0]
    assert total == pytest.approx(4 / 7)


def test_without_data_and_hub_it_is_left_out(bpe_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(NeedsHub, match=r"math-ai/aime25.*kvbench data fetch aime25"):
        load("aime25", bpe_tokenizer, tmp_path)


def test_run(llama_folder: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(cache))
    run = kvbench.run(
        {
            "policy": "snapkv:window=8",
            "budget": "0.2",
            "task": "aime",
            "model": llama_folder,
            "samples": 2,
            "repeats": 2,
            "max_new_tokens": 6,
            "out": str(tmp_path / "run"),
        }
    )
    cells = run.cells
    assert (cells.status == "ok").all()
    assert set(cells.task) == {"aime24", "aime25"}
    assert (cells.score == 0).all()  # random weights put nothing into a box
    assert len(run.samples) == 2 * 2 * 2 * 2
    assert sorted(run.samples.repeat.unique()) == [0, 1]
    first = run.samples[(run.samples.sample_id == "0") & (run.samples.policy == "snapkv:window=8")]
    assert first.groupby("task").response.nunique().max() == 2  # drawn, not greedy
