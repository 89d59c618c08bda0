"""LongBench v2: the official prompt from rows in their true schema, its accuracy, and a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvbench
from kvbench.data.sources import keep
from kvbench.errors import NeedsHub
from kvbench.harness.lm_eval import LmEvalTask
from kvbench_tasks.longbench_v2 import BENCHMARK, SOURCE
from kvbench_tasks.longbench_v2.metric import accuracy, letter

from ...loading import load_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "fixtures" / "train.jsonl").read_text().splitlines()
]

# prompts/0shot.txt of the repository.
OFFICIAL = """\
Please read the following text and answer the question below.

<text>
$DOC$
</text>

What is the correct answer to this question: $Q$
Choices:
(A) $C_A$
(B) $C_B$
(C) $C_C$
(D) $C_D$

Format your response as follows: "The correct answer is (insert answer here)"."""


def load(tokenizer: Any, cache: Path) -> LmEvalTask:
    return load_task("longbench_v2", BENCHMARK, tokenizer, cache, length=512)


def test_prompts_are_the_official_ones(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    keep(SOURCE, ROWS, tmp_path)
    task = load(bpe_tokenizer, tmp_path)
    assert (task.metric, task.chance, task.length) == ("accuracy", 0.25, 0)
    assert len(task.requests) == 2
    for request, row in zip(task.requests, ROWS, strict=True):
        prompt = OFFICIAL
        for mark in "ABCD":
            prompt = prompt.replace(f"$C_{mark}$", row[f"choice_{mark}"].strip())
        prompt = prompt.replace("$Q$", row["question"].strip())
        prompt = prompt.replace("$DOC$", row["context"].strip())
        assert request.context + request.question == prompt
        assert request.context.endswith(row["context"].strip() + "\n</text>\n\n")
        assert request.target == (row["answer"],)
        assert (request.max_new_tokens, request.until) == (128, ())
        about = {name: row[name] for name in ("domain", "sub_domain", "difficulty", "length")}
        assert request.extra == {**about, "id": row["_id"]}
    said = {(r.sample_id, 0, 0): "The correct answer is (B)." for r in task.requests}
    assert list(task.score(said)[0].values()) == [1.0, 0.0]
    assert task.score(said)[1] == 0.5


def test_the_readme_shows_a_raw_row() -> None:
    page = (BENCHMARK.yaml / "README.md").read_text()
    (shown,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert json.loads(shown) == ROWS[0]


def test_without_the_hub_it_is_left_out(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(NeedsHub, match=r"needs the dataset zai-org/LongBench-v2 "):
        load(bpe_tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("The correct answer is (C)", "C"),
        ("The correct answer is D, because", "D"),
        ("**The correct answer is (*A*)**", "A"),
        ("The correct answer is B. No: The correct answer is (A)", "A"),  # parentheses go first
        ("The correct answer is (A) or The correct answer is (B)", "A"),
        ("The correct answer is: (A)", None),
        ("the correct answer is (A)", None),
        ("The correct answer is (E)", None),
        ("The correct answer is Day 3", "D"),  # as the official expression reads it
        ("A", None),
        ("", None),
    ],
)
def test_letter(response: str, expected: str | None) -> None:
    assert letter(response) == expected
    assert accuracy({"outputs": ["A"]}, [response]) == {"accuracy": float(expected == "A")}


def test_a_run_gives_a_score(llama_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    keep(SOURCE, ROWS, tmp_path / "cache")
    kvbench.run(
        {
            "policy": "snapkv:window=8",
            "budget": "0.2",
            "task": "longbench_v2",
            "model": llama_folder,
            "samples": 2,
            "out": str(tmp_path / "run"),
        }
    )
    cells, samples = kvbench.load(tmp_path / "run")
    assert list(cells["policy"]) == ["full", "snapkv:window=8"]
    assert (cells["status"] == "ok").all()
    assert list(cells["score"]) == [0.0, 0.0]  # a random model writes no sentence
    assert len(samples) == 4
