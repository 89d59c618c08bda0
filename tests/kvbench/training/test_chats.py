"""Made-up conversations: what is learned, how long they are, and that they repeat."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kvbench.errors import UserError
from kvbench.training import chats
from kvbench.training.data import open_streams

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


def _draw(tokenizer: Any, seed: int, length: int = 448) -> dict[str, torch.Tensor]:
    return chats.sequence(tokenizer, length, random.Random(seed))


@pytest.mark.parametrize("seed", range(12))
def test_answers_and_what_ends_them_are_learned(bpe_tokenizer: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe_tokenizer, "chat_template", TEMPLATE, raising=False)
    item = _draw(bpe_tokenizer, seed)
    ids, learned = item["input_ids"], item["supervised"]
    assert ids.shape == learned.shape
    assert not bool(learned[-1])
    text = bpe_tokenizer.decode(ids)
    answers = [part.split("</s>")[0] for part in text.split("<assistant>")[1:]]
    got = bpe_tokenizer.decode(ids[1:][learned[:-1]])
    assert answers
    rest = got
    for answer in answers:  # nothing but answers, each followed by one token
        assert rest.startswith(answer)
        rest = rest[len(answer) :]
        rest = rest[rest.index(">") + 1 :] if rest.startswith("<") and ">" in rest else rest[1:]
    assert rest == ""


@pytest.mark.parametrize("length", [192, 448])
def test_conversations_fill_the_length_and_repeat(bpe_tokenizer: Any, length: int) -> None:
    for seed in range(20):
        item, again = _draw(bpe_tokenizer, seed, length), _draw(bpe_tokenizer, seed, length)
        assert len(item["input_ids"]) <= length
        assert torch.equal(item["input_ids"], again["input_ids"])
        assert 2 <= int(item["supervised"].sum()) < len(item["input_ids"]) / 2
    sizes = [len(_draw(bpe_tokenizer, seed, 448)["input_ids"]) for seed in range(20)]
    assert sum(sizes) / 20 > 0.6 * 448


@pytest.mark.parametrize("sort", sorted(chats._TEXT_KINDS))
@pytest.mark.parametrize("size", [0, 3])
def test_every_answer_is_in_the_text(sort: str, size: int) -> None:
    for seed in range(20):
        chat = chats._TEXT_KINDS[sort](seed)(size)
        for _, answer in chat.turns:
            last = answer.rstrip(".").rpartition(" ")[2].rpartition(", ")[2]
            assert last in chat.text


def test_chats_are_a_stream_of_data(bpe_tokenizer: Any) -> None:
    (stream,) = open_streams("chats", bpe_tokenizer, model="m", length=256, count=4, seed=0)
    assert stream.has_answers
    assert stream.facts["data"] == "chats"
    assert not torch.equal(stream.get(0)["input_ids"], stream.get(1)["input_ids"])
    with pytest.raises(UserError, match="use 192 or more"):
        open_streams("chats", bpe_tokenizer, model="m", length=64, count=4, seed=0)[0].get(0)
