"""The task that heads and queries are profiled on is unlike the tasks that policies meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.data import manual
from kvbench.harness.catalogue import resolve_task
from kvbench_tasks.facts import BENCHMARK

from ...loading import load_task


@pytest.mark.parametrize("lexicon", BENCHMARK.lexicons)
def test_a_row_tells_its_fact_once_and_asks_for_a_value_that_the_question_lacks(
    lexicon: str, bpe_tokenizer: Any, word_tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer = bpe_tokenizer if lexicon == "natural" else word_tokenizer
    task = load_task("facts", BENCHMARK, tokenizer, tmp_path, lexicon=lexicon, samples=30, length=512)
    needles, depths = set(), []
    for request in task.requests:
        needle, (value,) = request.extra["needle"], request.target
        assert request.context.count(needle) == 1
        assert value in needle
        assert value not in request.question
        needles.add(needle)
        depths.append(request.context.index(needle) / len(request.context))
    assert len(needles) >= 29
    assert min(depths) < 0.2 < 0.8 < max(depths)


def test_natural_rows_are_the_manual_and_a_fact(bpe_tokenizer: Any, tmp_path: Path) -> None:
    task = load_task("facts", BENCHMARK, bpe_tokenizer, tmp_path, samples=5, length=1024)
    assert task.version == f"1+manual-{manual.digest()}"
    whole = " ".join(manual.sentences()) + " " + manual.sentences()[0]
    for request in task.requests:
        before, after = request.context.split("\n\n")[1].split(request.extra["needle"])
        assert len(before) + len(after) > 1000
        assert before.strip() in whole
        assert after.strip() in whole


def test_no_other_generated_task_tells_or_asks_as_this_one_does(bpe_tokenizer: Any, tmp_path: Path) -> None:
    (one,) = load_task("facts", BENCHMARK, bpe_tokenizer, tmp_path, samples=1, length=512).requests
    sentences = set(manual.sentences())
    assert any(sentence in one.context for sentence in sentences)
    for spec in ("niah_single_2", "niah_multikey_1", "niah_depth", "niah_hard", "dialogue"):
        [(leaf, bench)] = resolve_task(spec)
        length = 2048 if spec == "niah_hard" else 512
        task = load_task(leaf, bench, bpe_tokenizer, tmp_path, samples=2, length=length)
        for request in task.requests:
            assert not any(sentence in request.context for sentence in sentences)
            assert "magic" in request.context or "code" in request.context or spec == "niah_hard"
    assert "magic" not in one.context + one.question
