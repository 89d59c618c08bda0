"""Patterns: the reference answer is what follows the beginning, by rules written here again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import UserError
from kvbench_tasks.longgen.metric import placed
from kvbench_tasks.patterns import BENCHMARK

from ...loading import load_task


def rows(leaf: str, samples: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    return BENCHMARK.docs(leaf, seed=seed)[:samples]


def test_counting_goes_on_from_the_beginning() -> None:
    for row in rows("pattern_count"):
        shown = [int(number) for number in row["gen_prefix"].strip(",").split(", ")]
        going_on = [int(number) for number in row["outputs"]]
        assert [*shown, *going_on] == list(range(shown[0], shown[0] + 112))
        assert row["context"] == f"Count from {shown[0]} to {going_on[-1]}.\n\n"
        answer = " " + ", ".join(row["outputs"])
        assert placed(row, [answer]) == {"placed": 1.0}
        half = answer.split(",")[:52]
        assert placed(row, [",".join(half)]) == {"placed": 0.5}


def test_a_list_is_repeated_in_its_order() -> None:
    for row in rows("pattern_cycle"):
        words = row["context"].split()
        assert len(set(words)) == 10
        shown = row["gen_prefix"].split("\n")
        assert shown == [f"{line + 1}. {words[line % 10]}" for line in range(30)]
        answer = "\n".join(f"{line + 1}. {words[line % 10]}" for line in range(30, 134))
        assert placed(row, ["\n" + answer]) == {"placed": 1.0}
        wrong = re.sub(words[0] + "$", "x", answer, flags=re.MULTILINE)
        assert placed(row, ["\n" + wrong])["placed"] == pytest.approx(1 - 11 / 104)


@pytest.mark.parametrize("leaf", BENCHMARK.leaves)
def test_more_samples_extend_fewer_and_a_seed_changes_all(leaf: str, tmp_path: Path, bpe_tokenizer: Any) -> None:
    few, many, other = (
        load_task(leaf, BENCHMARK, bpe_tokenizer, tmp_path, samples=samples, seed=seed)
        for samples, seed in ((2, 0), (3, 0), (2, 1))
    )
    assert few.requests == many.requests[:2] and len(many.requests) == 3
    assert few.data_hash == many.data_hash != other.data_hash
    assert all(a != b for a, b in zip(rows(leaf), rows(leaf, seed=1), strict=True))


@pytest.mark.parametrize("leaf", BENCHMARK.leaves)
def test_the_answer_begins_with_the_pattern(leaf: str, tmp_path: Path, bpe_tokenizer: Any) -> None:
    task = load_task(leaf, BENCHMARK, bpe_tokenizer, tmp_path, samples=2, chat_template=True)
    for request, row in zip(task.requests, rows(leaf, 2), strict=True):
        assert (request.context + request.question).endswith(f"<|im_start|>assistant\n{row['gen_prefix']}")
        assert request.max_new_tokens == 576


def test_the_reference_lexicon_is_refused(tmp_path: Path, word_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="use --model with a real model"):
        load_task("pattern_count", BENCHMARK, word_tokenizer, tmp_path, lexicon="reference")


def test_the_sample_row_of_the_page() -> None:
    page = (BENCHMARK.yaml / "README.md").read_text()
    (shown,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    row = rows("pattern_count", 1)[0]
    assert json.loads(shown) == {**row, "outputs": row["outputs"][:3]}
    assert f"Version: {BENCHMARK.version}" in page
