"""Samples are repeatable, and every answer follows from what was drawn and said before."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from kvbench.reference_vl import dialogues
from kvbench.reference_vl.dialogues import DialogueSample, DialogueSettings
from kvbench.reference_vl.pictures import Picture
from kvbench.reference_vl.questions import KINDS
from kvbench.reference_vl.words import COLOURS, COUNTS, ORDINALS, SHAPES, VOCABULARY


def test_a_sample_depends_on_settings_seed_and_index() -> None:
    for make in (dialogues.vqa, dialogues.dialogue):
        settings = DialogueSettings(questions=3)
        assert make(settings, 1, 4) == make(settings, 1, 4)
        assert make(settings, 1, 4) != make(settings, 1, 5)
        assert make(settings, 1, 4) != make(settings, 2, 4)
    drawn = dialogues.pictures(dialogues.vqa(DialogueSettings(), 1, 4).exchanges())[0]
    other = dialogues.pictures(dialogues.vqa(DialogueSettings(), 2, 4).exchanges())[0]
    assert drawn.seed != other.seed


def _said_and_asked(sample: DialogueSample) -> list[tuple[list[Picture], str, dialogues.Question]]:
    """Return every question with the pictures and the text before it."""
    pictures: list[Picture] = []
    text = ""
    result = []
    for parts, question in sample.exchanges():
        for part in parts:
            if isinstance(part, Picture):
                pictures.append(part)
            else:
                text += f" {part}"
        result.append((list(pictures), text, question))
        text += f" {' '.join(question.words)} {question.answer}"
    return result


def _plain(text: str) -> str:
    """Write "second image" as "image 2"."""
    for number, word in enumerate(ORDINALS, 1):
        text = text.replace(f"{word} image", f"image {number}")
    return text


def _table(pictures: list[Picture]) -> dict[int, dict[str, tuple[str, str]]]:
    """Return colour and shape by picture and cell, read from the objects alone."""
    table: dict[int, dict[str, tuple[str, str]]] = {}
    for picture in pictures:
        cells = table.setdefault(picture.name, {})
        for place, thing in enumerate(picture.objects):
            if thing >= 0:
                word = "abcd"[place // picture.side] + str(place % picture.side + 1)
                cells[word] = (COLOURS[thing // 6], SHAPES[thing % 6])
    return table


def _answer(table: dict[int, dict[str, tuple[str, str]]], text: str, words: str) -> str:
    """Answer a question again, from its words."""
    if match := re.fullmatch(r"(colour|shape) image (.) (..)", words):
        return table[int(match[2])][match[3]][match[1] == "shape"]
    if match := re.fullmatch(r"colour image (.) (\w{3,})", words):
        (colour,) = [c for c, shape in table[int(match[1])].values() if shape == match[2]]
        return colour
    if match := re.fullmatch(r"which image (\w+) (\w+)", words):
        (name,) = [n for n, cells in table.items() if (match[1], match[2]) in cells.values()]
        return str(name)
    if match := re.fullmatch(r"count image (.) (\w+)", words):
        return COUNTS[sum(match[2] in pair for pair in table[int(match[1])].values())]
    if match := re.fullmatch(r"more image (.) image (.) (\w+)", words):
        first, second = (sum(match[3] in pair for pair in table[int(match[n])].values()) for n in (1, 2))
        assert first != second
        return match[1] if first > second else match[2]
    if match := re.fullmatch(r"same (colour|shape) image (.) image (.) (..)", words):
        first, second = (table[int(match[n])][match[4]][match[1] == "shape"] for n in (2, 3))
        return "yes" if first == second else "no"
    match = re.fullmatch(r"note image (.)", words)
    assert match, words
    (tag,) = re.findall(rf"note image {match[1]} (\w+) \.", text)
    return tag


def test_answers_follow_from_the_cells_and_the_text(samples: list[DialogueSample]) -> None:
    kinds: Counter[str] = Counter()
    for sample in samples:
        for pictures, text, question in _said_and_asked(sample):
            table = _table(pictures)
            words = _plain(" ".join(question.words))
            assert _answer(table, _plain(text), words) == question.answer, words
            kinds[question.kind] += 1
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) >= 5


def test_cells_of_a_question_hold_its_answer(samples: list[DialogueSample]) -> None:
    for sample in samples:
        for pictures, _, question in _said_and_asked(sample):
            shown = [pictures[n].objects[cell] for n, cell in question.cells]
            assert all(thing >= 0 for thing in shown)
            if question.kind in ("colour", "only"):
                assert [COLOURS[thing // 6] for thing in shown] == [question.answer]
            elif question.kind == "count":
                assert COUNTS[len(shown)] == question.answer
            elif question.kind == "same":
                assert len(shown) == 2


def test_words_are_in_the_vocabulary_and_names_are_in_order(samples: list[DialogueSample]) -> None:
    for sample in samples:
        for _, text, question in _said_and_asked(sample):
            assert {*text.split(), *question.words, question.answer} <= set(VOCABULARY)
    for index in range(20):
        exchanges = dialogues.dialogue(DialogueSettings(), 9, index).exchanges()
        names = [picture.name for picture in dialogues.pictures(exchanges)]
        assert names == list(range(1, len(names) + 1))


def test_hints_and_large_objects_are_asked_about_more_often() -> None:
    hinted = large = asked = 0
    for index in range(150):
        for pictures, text, question in _said_and_asked(dialogues.vqa(DialogueSettings(questions=2), 3, index)):
            if question.kind not in ("colour", "shape"):
                continue
            ((n, cell),) = question.cells
            hints = set(re.findall(r"look image (. ..)", _plain(text)))
            word = "abcd"[cell // pictures[n].side] + str(cell % pictures[n].side + 1)
            asked += 1
            hinted += f"{pictures[n].name} {word}" in hints
            large += pictures[n].large[cell]
    assert asked > 80
    assert hinted / asked > 0.4
    assert large / asked > 0.25


def test_dialogues_have_turns_that_go_back() -> None:
    back = 0
    for index in range(40):
        sample = dialogues.dialogue(DialogueSettings(), 4, index)
        counts = [sum(isinstance(p, Picture) for p in turn.parts) for turn in sample.turns]
        assert 4 <= len(counts) <= 8
        assert 2 <= counts[0] <= 4
        assert 2 <= sum(counts) <= 8
        shown = 0
        for turn, count in zip(sample.turns, counts, strict=True):
            (question,) = turn.questions
            back += any(n < shown for n, _ in question.cells)
            shown += count
    assert back >= 40


def test_no_question_is_asked_twice() -> None:
    for index in range(20):
        exchanges = dialogues.vqa(DialogueSettings(questions=8), 6, index).exchanges()
        assert len({question.words for _, question in exchanges}) == len(exchanges)


def test_questions_of_one_context_can_be_asked_apart() -> None:
    sample = dialogues.vqa(DialogueSettings(questions=3), 2, 0)
    (parts, question), *others = sample.asked(0, 2)
    assert not others
    assert parts == sample.turns[0].parts
    assert question == sample.turns[0].questions[2]
    messages = dialogues.messages(sample.asked(0, 2))
    assert [message["role"] for message in messages] == ["user"]
    assert messages[0]["content"][-1]["text"] == " ".join(question.words)


@pytest.mark.parametrize("field", ["images", "sides"])
def test_settings_set_the_number_and_the_sides_of_pictures(field: str) -> None:
    settings = DialogueSettings(images=(5, 5), sides=(4,))
    shown = dialogues.pictures(dialogues.vqa(settings, 1, 0).exchanges())
    values = {"images": [len(shown)], "sides": [picture.side for picture in shown]}
    assert set(values[field]) == {{"images": 5, "sides": 4}[field]}
