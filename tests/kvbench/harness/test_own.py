"""The user's own data: every line is checked, scored as it says, and shares its context."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvbench.errors import UserError
from kvbench.harness.lm_eval import LmEvalTask
from kvbench.harness.own import METRICS, own_benchmark

from ...loading import load_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GOOD = {"context": "The key is 7.", "question": "What is the key?", "answers": "7"}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def load(path: Path, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> LmEvalTask:
    settings = {"samples": 50, "chat_template": True}
    cache = path.parent / "cache"
    return load_task(path.stem, own_benchmark(str(path)), tokenizer, cache, **settings | changes)


def test_rows_with_one_context_are_questions_of_one_sample(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    other = {"context": "Nothing here.", "question": "Why?", "answers": ["a", "b"], "until": "\n"}
    path = write(tmp_path / "mine.jsonl", GOOD, other, "", {**GOOD, "question": "Which key?"})
    task = load(path, bpe_tokenizer)
    assert (task.name, task.group, task.length, task.metric) == ("mine", "own", 0, "contains_all")
    asked = [(r.sample_id, r.question_id, r.doc_id) for r in task.requests]
    assert asked == [("0", 0, 0), ("0", 1, 2), ("1", 0, 1)]
    first, second, third = task.requests
    assert first.context == second.context
    assert first.context_id == second.context_id != third.context_id
    assert first.context.endswith("The key is 7.\n")
    assert second.question.startswith("Which key?")
    assert third.until == ("\n",)
    assert third.target == ("a", "b")
    scores, total = task.score({("0", 0, 0): "it is 7", ("0", 1, 0): "no", ("1", 0, 0): "B!"})
    assert scores == {("0", 0, 0): 1.0, ("0", 1, 0): 0.0, ("1", 0, 0): 0.5}
    assert total == pytest.approx(0.5)


def test_fewer_samples_are_the_first_rows_and_the_hash_is_the_content(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write(tmp_path / "mine.jsonl", *[{**GOOD, "context": f"Key {i}"} for i in range(5)])
    some, all_ = load(path, bpe_tokenizer, samples=2), load(path, bpe_tokenizer, seed=3)
    assert some.requests == all_.requests[:2]
    assert some.data_hash == all_.data_hash
    write(path, *[{**GOOD, "context": f"Key {i}"} for i in range(6)])
    assert load(path, bpe_tokenizer, samples=2).data_hash != some.data_hash


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "2: not JSON"),
        ([1], "2: must be an object"),
        (
            {"context": "x", "question": "y", "anwser": "z"},
            "'answers' is missing; rename 'anwser' to 'answers'",
        ),
        (
            {"context": "x", "question": "y", "outputs": ["z"]},
            "'answers' is missing; rename 'outputs' to 'answers'",
        ),
        ({**GOOD, "context": 3}, "'context' must be a text"),
        ({**GOOD, "question": " "}, "'question' must be a text that is not empty"),
        ({**GOOD, "answers": []}, "'answers' must be"),
        ({**GOOD, "answers": [1]}, "'answers' must be"),
        ({**GOOD, "metric": "F1"}, "unknown metric 'F1'; did you mean f1?"),
        ({**GOOD, "max_new_tokens": 0}, "'max_new_tokens' must be"),
        ({**GOOD, "max_new_tokens": True}, "'max_new_tokens' must be"),
        ({**GOOD, "until": [""]}, "'until' must be"),
        ({**GOOD, "context": "a <|kvb_split|> b"}, "must not contain <|kvb_split|>"),
        ({**GOOD, "metrc": "f1"}, "unknown key 'metrc'; did you mean metric?"),
        ({**GOOD, "zzz": 1}, "unknown key 'zzz'; there are context, question, answers, metric"),
        ({**GOOD, "context": "a \ud800 b"}, r"\ud800 is a lone surrogate"),
        ({**GOOD, "answers": ["\udc00"]}, r"\udc00 is a lone surrogate"),
        ({**GOOD, "met\udfffic": 1}, r"\udfff is a lone surrogate"),
        ("[" * 100_000, "the JSON is nested too deeply"),
        ("9" * 5000, "a number has more digits than kvbench reads"),
        ({**GOOD, "metric": ["f1"]}, "unknown metric ['f1']; choose from"),
        ({**GOOD, "metric": {"f1": 1}}, "unknown metric {'f1': 1}"),
        ({**GOOD, "metric": 10**400}, "unknown metric 1000"),
        ({**GOOD, "max_new_tokens": 10**400}, "'max_new_tokens' must be a whole number from 1 to"),
        ({**GOOD, "max_new_tokens": 1e300}, "'max_new_tokens' must be"),
        ({**GOOD, "k" * 5000: 1}, "unknown key 'kkk"),
        ("\0", "not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, says: str) -> None:
    path = write(tmp_path / "mine.jsonl", GOOD, row)
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        own_benchmark(str(path))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 300


def test_text_of_every_script_and_a_byte_order_mark_are_read(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    odd = {**GOOD, "context": "\U0001f600 one\u2028two\x85three"}
    path = tmp_path / "mine.jsonl"
    text = json.dumps(odd) + "\r\n" + json.dumps(odd, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8-sig", newline="")
    escaped, plain = load(path, bpe_tokenizer).requests
    assert escaped.context == plain.context
    assert escaped.context.endswith(odd["context"] + "\n")


def test_a_file_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        own_benchmark(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="no rows"):
        own_benchmark(str(write(tmp_path / "empty.jsonl", "")))
    with pytest.raises(UserError, match=r"cannot read .*null byte"):
        own_benchmark("a\0b.jsonl")


@pytest.mark.parametrize(
    ("metric", "response", "answers", "value"),
    [
        ("contains_all", "Red and BLUE", ["red", "blue", "green"], 2 / 3),
        ("exact", " The red, house! ", ["red house", "x"], 1.0),
        ("exact", "red houses", ["red house"], 0.0),
        # Shared: red, house; 3 words in the response, 2 in the answer: p = 2/3, r = 1.
        ("f1", "a red old house", ["red house", "tree"], 0.8),
        ("f1", "red red", ["red house"], 0.5),
        ("f1", "", ["red"], 0.0),
        # Longest common subsequence: "cat on mat" = 3 of 4 and 5 words.
        ("rougeL", "cat sat on mat", ["the cat on the mat"], 2 * 3 / 9),
        ("rougeL", "b a", ["a b"], 0.5),
        ("rougeL", "x", ["a b"], 0.0),
    ],
)
def test_metrics_have_their_known_values(metric: str, response: str, answers: list[str], value: float) -> None:
    assert METRICS[metric](response, answers) == pytest.approx(value)


def test_metrics_of_rows_may_differ(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{**GOOD, "context": m, "metric": m, "answers": ["red house"]} for m in METRICS]
    task = load(write(tmp_path / "mine.jsonl", *rows), bpe_tokenizer)
    assert task.metric == "score"
    scores, _ = task.score({(r.sample_id, 0, 0): "the red house there" for r in task.requests})
    assert list(scores.values()) == pytest.approx([1.0, 0.0, 0.8, 2 * 2 / 6])


def test_every_metric_that_rows_name_has_the_scores_of_its_rows(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{**GOOD, "answers": "7", "metric": metric} for metric in ("f1", "contains_all", "f1")]
    task = load(write(tmp_path / "mine.jsonl", *rows), bpe_tokenizer)
    responses = {(r.sample_id, r.question_id, 0): "it is 7" for r in task.requests}
    metrics = {metric.name: metric for metric in task.score_metrics(responses)}
    assert list(metrics) == ["score", "f1", "contains_all"]
    assert [len(metric.values) for metric in metrics.values()] == [3, 2, 1]
    assert metrics["f1"].score == pytest.approx(0.5) and metrics["contains_all"].score == 1
    assert metrics["score"].score == pytest.approx(2 / 3)


TEXT = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen."


def test_without_answers_fidelity_is_the_metric(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
    asked = {"context": TEXT, "question": "Why?", "max_new_tokens": 9}
    task = load(write(tmp_path / "open.jsonl", asked, asked), bpe_tokenizer)
    (first, _) = task.requests
    assert (task.metric, task.higher_is_better, first.target, first.max_new_tokens) == ("kl", False, (), 9)
    assert "<|im_start|>" in first.context


def test_without_a_question_the_text_is_continued_without_a_template(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase
) -> None:
    task = load(write(tmp_path / "texts.jsonl", {"context": TEXT}), bpe_tokenizer)
    (only,) = task.requests
    assert only.context.endswith("One two")
    assert only.question == TEXT.removeprefix("One two")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([GOOD, {"context": TEXT, "question": "Why?"}], r":2: 'answers' must be in all rows or in none; row 1 differs"),
        ([{"context": TEXT, "question": "?"}, {"context": TEXT}], r":2: 'question' must be in all rows or in none"),
        ([{"context": "Too short."}], r":1: a context without a question needs more than 12 words"),
        ([{"context": TEXT, "answers": "x"}], r":1: 'question' is missing"),
        ([{"context": TEXT, "metric": "f1"}], r":1: 'metric' needs 'answers'; without them, fidelity is the metric"),
    ],
)
def test_rows_that_do_not_agree_are_refused(tmp_path: Path, rows: list[Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        own_benchmark(write(tmp_path / "mine.jsonl", *rows))
