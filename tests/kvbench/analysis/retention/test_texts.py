"""Which tokens a text has and how they are spelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.analysis.common import make_grid
from kvbench.analysis.retention import texts
from kvbench.engine.decode import Stop, greedy
from kvbench.engine.driver import engine
from kvbench.engine.prefix import Prefix
from kvbench.errors import UserError
from kvbench.progress import Silent


def grid_of(folder: str, task: str = "text", **more: Any) -> Any:
    given = {"policies": "local", "models": folder, "tasks": task, "device": "cpu", "samples": 4}
    return make_grid({**given, **more})


@pytest.mark.parametrize("text", ["Two  words,\n\ttabs.", "a café — naïve 漢字 🙂", "<|eos|>x", "  y"])
def test_the_pieces_are_the_text(bpe_tokenizer: Any, text: str) -> None:
    ids = bpe_tokenizer(text)["input_ids"]
    pieces = texts.pieces(bpe_tokenizer, ids)
    assert len(pieces) == len(ids)
    assert pieces[0] == "<|bos|>"
    assert all(pieces)
    whole = bpe_tokenizer.decode(ids[1:])
    if whole.isascii():  # what is only a part of a character is spelled as the vocabulary does
        assert "".join(pieces[1:]) == whole
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_a_tokenizer_of_words_puts_its_spaces_between(word_tokenizer: Any) -> None:
    from kvbench.reference.grammar import VOCABULARY

    words = list(VOCABULARY[40:43])
    ids = word_tokenizer(" ".join(words))["input_ids"]
    assert texts.pieces(word_tokenizer, ids)[1:] == [" " + word for word in words]
    assert texts.token_label(word_tokenizer, ids[1]) == repr(words[0])


def test_a_file_is_a_text_as_it_stands(grouped: str, bpe_tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine, too.txt"
    file.write_text("The letter was read.\n", encoding="utf-8")
    (source,) = texts.sources(grid_of(grouped), str(file), 5, Silent())
    (text,) = source.texts
    assert list(text.context) == bpe_tokenizer("The letter was read.\n")["input_ids"]
    assert (text.question, text.limit, source.task) == ((), 5, "mine, too.txt")


def test_a_task_gives_its_prompts(grouped: str, questions: str) -> None:
    (source,) = texts.sources(grid_of(grouped, questions, chat_template=False), None, None, Silent())
    assert [t.sample_id for t in source.texts] == ["0", "0/1", "1", "2"]
    assert source.texts[0].context == source.texts[1].context
    assert source.texts[0].question != source.texts[1].question
    assert {t.limit for t in source.texts} == {2}
    (longer,) = texts.sources(grid_of(grouped, questions, chat_template=False), None, 7, Silent())
    assert {t.limit for t in longer.texts} == {7}


@pytest.mark.parametrize(
    ("content", "more", "says"),
    [
        (None, {}, "cannot read"),
        (b"\xff\xfe", {}, "it is not UTF-8"),
        (b" \n", {}, "contains no text"),
        (b"word " * 1200, {}, "exceed the window of 1024"),
        (b"words", {"chat_template": True}, "--chat-template needs --task"),
    ],
)
def test_a_file_that_will_not_do_is_refused(
    grouped: str, tmp_path: Path, content: bytes | None, more: dict[str, Any], says: str
) -> None:
    file = tmp_path / "mine.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=says) as error:
        texts.sources(grid_of(grouped, **more), str(file), 0, Silent())
    assert "\n" not in str(error.value)


def test_all_leaves_out_what_has_no_files_for_a_model(grouped: str) -> None:
    found = texts.runnable(grid_of(grouped, policies="all"), grouped)
    assert {"snapkv", "local"} <= set(found)
    assert not {"trimkv", "dbtrimkv", "locret", "lococo", "full"} & set(found)
    with pytest.raises(UserError, match="gates"):
        texts.runnable(grid_of(grouped, policies="all,trimkv"), grouped)


def test_what_is_written_is_the_models_own_greedy_answer(model: Any, bpe_tokenizer: Any, ids: list[int]) -> None:
    out = model.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False, eos_token_id=None)[
        0, len(ids) :
    ].tolist()

    def told(limit: int, until: tuple[str, ...], ends: list[int]) -> tuple[list[int], int]:
        stop = Stop(bpe_tokenizer, ends, until)
        with engine(model), torch.no_grad():
            prefix = Prefix(model, ())
            logits = prefix.extend(torch.tensor([ids]))
            said = list(greedy(prefix, logits, limit, stop, feed_last=True))
        return said, int(prefix.cache.lengths())

    assert told(9, (), []) == (out, len(ids) + 9)
    assert told(0, (), []) == ([], len(ids))
    stop = out.index(out[4]) + 1
    assert told(9, (), [out[4]]) == (out[:stop], len(ids) + stop)
    until = bpe_tokenizer.decode(out[:3])
    assert told(9, (until,), [])[0] == out[:3]
