"""Dialogues: every fact is told before it is asked for, and the turns join to the character."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import UserError
from kvbench.harness.encode import split_encode
from kvbench.harness.lm_eval import LmEvalTask
from kvbench.harness.protocol import Request
from kvbench.reference import grammar
from kvbench_tasks.dialogue import BENCHMARK, FACTS, TURNS

from ...loading import load_task

WAYS = (("reference", "word", False), ("natural", "bpe", True), ("natural", "bpe", False))


def load(lexicon: str, tokenizer: Any, cache: Path, chat: bool = False, **changes: Any) -> LmEvalTask:
    settings = {"length": 700, "samples": 3, "lexicon": lexicon, "chat_template": chat}
    return load_task("dialogue", BENCHMARK, tokenizer, cache, **settings | changes)


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]}-{'chat' if way[2] else 'plain'}")
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any, LmEvalTask]:
    lexicon, name, chat = request.param
    tokenizer = request.getfixturevalue(f"{name}_tokenizer")
    return lexicon, tokenizer, load(lexicon, tokenizer, tmp_path, chat)


def dialogues(task: LmEvalTask) -> list[list[Request]]:
    """The requests of each dialogue; they must be adjacent and in order."""
    found: list[list[Request]] = []
    for request in task.requests:
        if request.turn == 0:
            found.append([])
        found[-1].append(request)
    for number, turns in enumerate(found):
        assert [(r.turn, r.question_id) for r in turns] == [(i, i) for i in range(len(turns))]
        assert {(r.dialogue, r.sample_id) for r in turns} == {(str(number), str(number))}
        assert len({r.context_id for r in turns}) == 1
    assert len({turns[0].context_id for turns in found}) == len(found)
    return found


def facts(lexicon: str, text: str) -> dict[str, str]:
    """What is told, in order, read out of a text."""
    pattern = r"\bnote (\w+) (\w+ \w+) \."
    if lexicon == "natural":
        pattern = r"The code of the (\w+ \w+) is (\d{7})\."
    found = re.findall(pattern, text)
    assert len(dict(found)) == len(found)
    return dict(found)


def asked(lexicon: str, text: str) -> str:
    pattern = r"<q> (\w+)" if lexicon == "reference" else r"What is the code of the (\w+ \w+)\?"
    (key,) = re.findall(pattern, text)
    return str(key)


def test_the_turns_join_to_the_prompts(loaded: tuple[str, Any, LmEvalTask]) -> None:
    for turns in dialogues(loaded[2]):
        history = ""
        for request in turns:
            assert history + request.delta == request.context
            history += request.delta + request.question
            assert history == request.context + request.question
            assert request.answer_begin == ""
            assert request.answer == request.answer.strip()
            history += request.answer + request.answer_end
            assert request.answer_end


def test_every_turn_asks_for_a_fact_that_was_told(loaded: tuple[str, Any, LmEvalTask]) -> None:
    lexicon, _, task = loaded
    ages = set()
    for turns in dialogues(task):
        told: dict[str, str] = {}
        when: dict[str, int] = {}
        seen = set()
        for request in turns:
            new = facts(lexicon, request.delta)
            assert len(new) == FACTS
            assert not new.keys() & told.keys()
            told |= new
            when |= dict.fromkeys(new, request.turn)
            assert facts(lexicon, request.context) == told
            key = asked(lexicon, request.question)
            assert request.target == (told[key],) == (request.answer,)
            assert key not in seen
            assert request.extra == {"age": request.turn - when[key]}
            assert request.question.count(told[key]) == 0
            seen.add(key)
            ages.add(request.turn - when[key])
        assert len(set(told.values())) == len(told) or lexicon == "reference"
    assert len(ages) > 2
    gold = {(r.sample_id, r.question_id, 0): f"It is {r.answer}." for r in task.requests}
    scores, total = task.score(gold)
    assert len(scores) == len(task.requests)
    assert total == 1.0
    wrong = {(r.sample_id, r.question_id, 0): "0000000" for r in task.requests}
    assert task.score({**gold, **dict(list(wrong.items())[:2])})[1] < 1
    assert task.score(wrong)[1] == 0.0


def test_a_live_dialogue_stays_within_its_length(loaded: tuple[str, Any, LmEvalTask]) -> None:
    _, tokenizer, task = loaded
    for turns in dialogues(task):
        last = turns[-1]
        prompt = sum(map(len, split_encode(tokenizer, last.context, last.question)))
        total = prompt + sum(r.max_new_tokens for r in turns)
        assert 700 - 4 <= total <= 700
        for request in turns:
            answer = tokenizer(request.answer, add_special_tokens=False)["input_ids"]
            assert len(answer) < request.max_new_tokens


def test_a_chat_template_gives_real_turns(bpe_tokenizer: Any, tmp_path: Path) -> None:
    chat = load("natural", bpe_tokenizer, tmp_path, True)
    for turns in dialogues(chat):
        for request in turns:
            messages = []
            for done in turns[: request.turn]:
                told = done.delta.split("<|im_start|>user\n")[1] + done.question.split("<|")[0]
                messages += [
                    {"role": "user", "content": told},
                    {"role": "assistant", "content": done.answer},
                ]
            told = request.delta.split("<|im_start|>user\n")[1] + request.question.split("<|")[0]
            messages.append({"role": "user", "content": told})
            assert request.context + request.question == bpe_tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            assert request.answer_end == "<|im_end|>\n"
            assert request.question.endswith("<|im_start|>assistant\n")
            assert "User:" not in request.context


def test_the_reference_model_is_asked_as_in_training(word_tokenizer: Any, tmp_path: Path) -> None:
    for turns in dialogues(load("reference", word_tokenizer, tmp_path)):
        assert len(turns) == TURNS
        words = (turns[-1].context + turns[-1].question).split()
        assert set(words) <= set(grammar.VOCABULARY)
        assert words.count("user") == TURNS == words.count("<q>")
        for request in turns:
            text = request.delta + request.question + request.answer + request.answer_end
            said = text.split()
            assert said[0] == grammar.turn([])[0]
            key = asked("reference", request.question)
            closing = [*grammar.ask([key]), *grammar.answer([request.answer.split()])]
            assert said[-len(closing) :] == closing
            assert request.until == (grammar.STOP,)
            assert request.max_new_tokens == 3


def test_samples_are_dialogues_and_extend(bpe_tokenizer: Any, tmp_path: Path) -> None:
    few = load("natural", bpe_tokenizer, tmp_path / "a", True, samples=1)
    grown = load("natural", bpe_tokenizer, tmp_path / "a", True, samples=2)
    many = load("natural", bpe_tokenizer, tmp_path / "b", True, samples=2)
    assert grown.requests == many.requests
    assert many.requests[: len(few.requests)] == few.requests
    assert few.data_hash == many.data_hash
    assert [r.doc_id for r in many.requests] == list(range(len(many.requests)))
    plain = load("natural", bpe_tokenizer, tmp_path / "b", False, samples=2)
    assert plain.data_hash != many.data_hash


def test_short_lengths_have_fewer_turns_and_then_none(word_tokenizer: Any, tmp_path: Path) -> None:
    for length, turns in ((200, TURNS), (100, 4), (60, 2)):
        task = load("reference", word_tokenizer, tmp_path, length=length, samples=1)
        assert len(task.requests) == turns
    with pytest.raises(UserError, match=r"^dialogue does not fit into --length 30 .*least \d+$"):
        load("reference", word_tokenizer, tmp_path, length=30)
