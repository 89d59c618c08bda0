"""Benchmarks that declare what a judge is asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvbench.benchmark import Ask, Benchmark
from kvbench.errors import UserError
from kvbench.harness.lm_eval import LmEvalTask

from ...loading import load_task

YAML = """
task: style
output_type: generate_until
test_split: test
doc_to_text: "{{context}}<|kvb_split|>{{question}}"
doc_to_target: outputs
process_results: !function metric.style
metric_list:
  - {metric: style, aggregation: mean, higher_is_better: true}
generation_kwargs: {until: [], max_gen_toks: 4, do_sample: false}
"""
METRIC = """
def style(doc, results):
    response, marks = results
    return {"style": marks["score"] + marks["style"] * len(response)}
"""


def ask(doc: Mapping[str, Any], response: str) -> Ask:
    fields = {"question": doc["question"], "answer": doc["outputs"][0], "response": response}
    return Ask("correct", fields)


def load(folder: Path, tokenizer: Any, **changes: Any) -> LmEvalTask:
    (folder / "style.yaml").write_text(YAML)
    (folder / "metric.py").write_text(METRIC)
    rows = [{"context": f"c{i} ", "question": f"q{i}", "outputs": [f"a{i}"]} for i in range(3)]
    usual = {"metric": "style", "judge": "correct", "ask": ask, "sized": False}
    benchmark = Benchmark("style", ("style",), lambda leaf, **_: rows, folder, **usual | changes)
    return load_task("style", benchmark, tokenizer, folder)


RESPONSES = {("2", 0, 0): "xx", ("0", 0, 1): "y", ("0", 0, 0): "zzz"}


def test_a_metric_receives_the_response_and_all_its_marks(bpe_tokenizer: Any, tmp_path: Path) -> None:
    task = load(tmp_path, bpe_tokenizer)
    asks = task.asks(RESPONSES)
    assert [(a.fields["question"], a.fields["response"]) for a in asks] == [
        ("q2", "xx"),
        ("q0", "y"),
        ("q0", "zzz"),
    ]
    marks = [{"score": float(i), "style": 10.0} for i in range(3)]
    scores, mean = task.score(RESPONSES, marks)
    assert scores == {("2", 0, 0): 20, ("0", 0, 1): 11, ("0", 0, 0): 32}
    assert mean == 21
    assert task.asks({}) == []


def test_a_judged_task_needs_marks(bpe_tokenizer: Any, tmp_path: Path) -> None:
    task = load(tmp_path, bpe_tokenizer)
    with pytest.raises(UserError, match=r"style is scored by a judge; pass its marks to score"):
        task.score(RESPONSES)
    with pytest.raises(ValueError, match="shorter"):
        task.score(RESPONSES, [{"score": 1.0}])


def test_the_rubric_of_an_ask_must_be_the_declared_one(bpe_tokenizer: Any, tmp_path: Path) -> None:
    task = load(tmp_path, bpe_tokenizer, judge="longmemeval")
    with pytest.raises(UserError) as caught:
        task.asks(RESPONSES)
    assert str(caught.value) == (
        "benchmark style asks by rubric 'correct' but declares judge='longmemeval'; make them agree"
    )


@pytest.mark.parametrize(
    ("given", "missing", "fields"),
    [("judge", "ask", {"judge": "correct"}), ("ask", "judge", {"ask": ask})],
)
def test_judge_and_ask_need_each_other(given: str, missing: str, fields: dict[str, Any]) -> None:
    message = f"benchmark b sets {given} but not {missing}; set both"
    with pytest.raises(UserError, match=message):
        Benchmark("b", ("b",), lambda leaf, **_: [], Path(), **fields)
