"""The shipped folder loads with the Auto classes and answers questions about fresh pictures."""

from __future__ import annotations

import csv

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from kvbench import reference_vl
from kvbench.reference_vl.questions import KINDS
from kvbench.reference_vl.words import VOCABULARY
from scripts.reference_vl.evaluate import TASKS, Reader, cases, generated


def test_all_weights_match_and_the_folder_is_small() -> None:
    model, report = AutoModelForImageTextToText.from_pretrained(
        reference_vl.path(), dtype=torch.float32, output_loading_info=True
    )
    assert type(model).__name__ == "Qwen2VLForConditionalGeneration"
    assert not any(report.values())
    size = sum(file.stat().st_size for file in reference_vl.path().iterdir())
    assert size < 8e6


def test_the_tokenizer_is_that_of_the_vocabulary() -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference_vl.path())
    assert tokenizer.convert_ids_to_tokens(list(range(len(VOCABULARY)))) == list(VOCABULARY)


def test_the_log_has_the_accuracy_of_every_kind() -> None:
    with (reference_vl.path() / "train_log.csv").open(encoding="utf-8") as log:
        last = list(csv.DictReader(log))[-1]
    assert {kind for kind in KINDS if last[kind]} == set(KINDS)


@pytest.mark.parametrize("task", list(TASKS))
@pytest.mark.slow
def test_it_answers_most_questions_about_fresh_pictures(task: str) -> None:
    reader = Reader(reference_vl.path())
    model = AutoModelForImageTextToText.from_pretrained(reference_vl.path(), dtype=torch.float32).eval()
    asked = cases(reader, task, 40, seed=12345)
    right = [generated(model, reader, case) == case.answer for case in asked]
    # Chance is about 0.3; the card has the accuracy.
    assert sum(right) >= 30
