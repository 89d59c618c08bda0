"""Training data: its sequences and their supervised positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.errors import UserError
from kvbench.training.data import Sequences, collate, open_streams


def _open(spec: str, tokenizer: Any, **kwargs: Any) -> Any:
    settings = {"model": "m", "length": 128, "count": 4, "seed": 0, **kwargs}
    return open_streams(spec, tokenizer, **settings)


def test_answers_of_reference_samples_are_supervised(word_tokenizer: Any) -> None:
    (stream,) = _open("reference", word_tokenizer)
    assert stream.has_answers
    for i in range(4):
        item = stream.get(i)
        assert item["input_ids"].shape == item["supervised"].shape
        assert 2 <= len(item["input_ids"]) <= 128
        assert bool(item["supervised"].any())
        assert not bool(item["supervised"][-1])
        again = stream.get(i)
        assert torch.equal(item["input_ids"], again["input_ids"])
    other = _open("reference", word_tokenizer, seed=1)[0].get(0)["input_ids"]
    assert not torch.equal(stream.get(0)["input_ids"], other)


def test_reference_samples_are_in_the_words_of_its_model(bpe_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="needs the reference model's vocabulary"):
        _open("reference", bpe_tokenizer)


def test_only_the_answer_of_a_row_is_supervised(tmp_path: Path, bpe_tokenizer: Any) -> None:
    path = tmp_path / "mine.jsonl"
    row = {"context": "The code is 4711.\n", "question": "Code:", "answers": ["4711"]}
    path.write_text(json.dumps(row) + "\n")
    (stream,) = _open(str(path), bpe_tokenizer)
    item = stream.get(3)
    learned = item["input_ids"][1:][item["supervised"][:-1]]
    assert bpe_tokenizer.decode(learned) == " 4711"
    text = bpe_tokenizer.decode(item["input_ids"], skip_special_tokens=True)
    assert text == "The code is 4711.\nCode: 4711"


def test_text_is_supervised_everywhere_and_cut_to_length(tmp_path: Path, bpe_tokenizer: Any) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} " * 300}) + "\n" for n in range(3)))
    (stream,) = _open(str(path), bpe_tokenizer)
    assert not stream.has_answers
    items = [stream.get(i) for i in range(6)]
    assert all(len(item["input_ids"]) == 128 for item in items)
    assert all(int(item["supervised"].sum()) == 127 for item in items)
    assert len({tuple(item["input_ids"].tolist()) for item in items}) == 3


def test_a_row_that_does_not_fit_is_left_out(tmp_path: Path, bpe_tokenizer: Any) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [{"context": "x " * n, "question": "?", "answers": "y"} for n in (2, 900)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (stream,) = _open(str(path), bpe_tokenizer)
    assert all(len(stream.get(i)["input_ids"]) < 20 for i in range(4))
    path.write_text(json.dumps(rows[1]) + "\n")
    (stream,) = _open(str(path), bpe_tokenizer)
    with pytest.raises(UserError, match="no row fits"):
        stream.get(0)


@pytest.mark.parametrize(
    ("row", "message"),
    [({"words": "a"}, "has the columns words; use rows"), ([1], "must be an object")],
)
def test_other_rows_are_refused(tmp_path: Path, bpe_tokenizer: Any, row: Any, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=message):
        _open(str(path), bpe_tokenizer)


def test_a_column_can_be_named_and_conversations_are_templated(tmp_path: Path, bpe_tokenizer: Any) -> None:
    path = tmp_path / "mine.jsonl"
    talk = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "there"}]
    path.write_text(json.dumps({"words": "abc", "talk": talk}) + "\n")
    (stream,) = _open(str(path), bpe_tokenizer, column="talk")
    text = bpe_tokenizer.decode(stream.get(0)["input_ids"])
    assert text.startswith("<|bos|><|im_start|>user\nhello<|im_end|>")


def test_data_of_several_names_takes_turns(tmp_path: Path, bpe_tokenizer: Any) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name * 20}) + "\n")
    streams = _open(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", bpe_tokenizer)
    texts = [bpe_tokenizer.decode(Sequences(streams, 4)[i]["input_ids"], skip_special_tokens=True) for i in range(4)]
    assert texts == ["a" * 20, "b" * 20, "a" * 20, "b" * 20]


def test_prompts_of_tasks_are_of_other_seeds(llama_folder: str, bpe_tokenizer: Any) -> None:
    (stream,) = _open("niah_single_1", bpe_tokenizer, model=llama_folder, length=512, count=2)
    assert stream.facts["seed"] >= 1_000_000
    item = stream.get(0)
    assert 1 <= int(item["supervised"].sum()) < 40
    assert len(item["input_ids"]) <= 512


def test_padding_is_on_the_left() -> None:
    items = [{"input_ids": torch.arange(n) + 1, "supervised": torch.ones(n, dtype=torch.bool)} for n in (3, 5)]
    batch = collate(items, pad_token=9)
    assert batch["input_ids"].tolist() == [[9, 9, 1, 2, 3], [1, 2, 3, 4, 5]]
    assert batch["supervised"].sum(-1).tolist() == [3, 5]
    assert batch["valid"].sum(-1).tolist() == [3, 5]
    assert "valid" not in collate(items[:1])
