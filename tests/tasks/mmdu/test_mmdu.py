"""MMDU: dialogues about several images, judged answer by answer."""

from __future__ import annotations

import base64
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvbench.data.formats import file_rows
from kvbench.data.media import medium
from kvbench.data.sources import keep
from kvbench.errors import LeftOut, UserError
from kvbench.harness.encode import split_encode
from kvbench.judge.base import LocalJudge
from kvbench.judge.rubrics import rubric
from kvbench_tasks.mmdu import BENCHMARK, DIALOGUES, IMAGES

from ...vision import KINDS, encoded, load_task, picture, processor

SAID = (
    ("<ImageHere><ImageHere>Describe both images.", "The first is red, the second is blue. "),
    ("Which one is warmer?", "Red is warmer."),
    ("Here is another: <ImageHere>\nCompare it with the first.", "Green is colder than red."),
)
NAMES = ("a1.jpg", "b2.jpg", "c3.jpg")
COLORS = ("red", "blue", "green")


def raw() -> list[dict[str, Any]]:
    said = [part for question, answer in SAID for part in (("user", question), ("assistant", answer))]
    first = {
        "id": "wit_1",
        "image": [f"/mmdu_pics/{name}" for name in NAMES],
        "conversations": [{"from": who, "value": text} for who, text in said],
    }
    second = {
        "id": "wit_2",
        "image": ["/mmdu_pics/b2.jpg"],
        "conversations": [
            {"from": "user", "value": "What is <ImageHere>"},
            {"from": "assistant", "value": "It is blue."},
        ],
    }
    return [first, second]


def fetched(cache: Path, tmp_path: Path) -> None:
    """What `kvbench data fetch mmdu` leaves behind; the archive is read as the hub's would be."""
    path = tmp_path / "mmdu_pics.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, color in zip(NAMES, COLORS, strict=True):
            content = base64.b64decode(encoded(picture(color), "JPEG")["bytes"])
            archive.writestr(f"mmdu_pics/{name}", content)
        archive.writestr("__MACOSX/note.txt", "")
    assert IMAGES.file is not None
    keep(IMAGES, file_rows(path, IMAGES.file.partition(":")[2]), cache)
    keep(DIALOGUES, raw(), cache)


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_adds_its_images_and_its_question(kind: str, tmp_path: Path) -> None:
    fetched(tmp_path, tmp_path)
    task = load_task("mmdu", BENCHMARK, tmp_path, kind)
    turns = task.requests[:3]
    assert [(r.dialogue, r.turn, r.sample_id) for r in turns] == [("0", t, "0") for t in range(3)]
    colors = [medium(encoded(picture(color), "JPEG")).digest for color in COLORS]
    assert [[m.digest for m in r.media] for r in turns] == [colors[:2], colors[:2], colors]
    assert [[m.digest for m in r.delta_media] for r in turns] == [colors[:2], [], colors[2:]]
    placeholder = processor(kind).image_token
    for request in task.requests:
        assert request.context.count(placeholder) == len(request.media)
        assert request.delta.count(placeholder) == len(request.delta_media)
        assert placeholder not in request.question
    history = ""
    for turn in turns:
        assert history + turn.delta == turn.context
        history += turn.delta + turn.question + turn.answer_begin + turn.answer + turn.answer_end
    asked = [turn.question.partition("<|im_end|>")[0].partition(" ASSISTANT")[0] for turn in turns]
    assert asked == [
        "Describe both images.",
        "Which one is warmer?",
        "\nCompare it with the first.",
    ]
    assert turns[1].context.endswith("user\n" if kind != "llava" else "USER: ")
    last = task.requests[3]
    assert (last.dialogue, last.target) == ("1", ("It is blue.",))
    assert last.question.strip()  # an image at the end: the question is what the template adds
    for request in task.requests:
        assert all(split_encode(processor(kind).tokenizer, request.context, request.question))
    assert turns[2].extra == {"turn": 2, "images": 3}
    assert turns[0].max_new_tokens == 1024


def test_every_answer_gets_seven_ratings(tmp_path: Path) -> None:
    fetched(tmp_path, tmp_path)
    task = load_task("mmdu", BENCHMARK, tmp_path)
    answers = ("Red and blue.", "Red is warmer.", "", "It is blue.")
    given = {(r.sample_id, r.question_id, 0): answers[i] for i, r in enumerate(task.requests)}
    asks = task.asks(given)
    assert asks[2].fields["question"] == "Here is another: [image]\nCompare it with the first."
    assert asks[0].fields["answer"] == "The first is red, the second is blue."
    for ask in asks:
        prompt = rubric(ask.rubric).render(ask.fields)
        assert all(text in prompt for text in ask.fields.values())
    scores, mean = task.score(given, LocalJudge().judge(asks))
    assert list(scores.values()) == [0.4, 1.0, 0.1, 1.0]
    assert mean == pytest.approx(2.5 / 4)
    assert (task.metric, task.rubric) == ("overall", "dialogue_answer")
    respects = [metric.name for metric in task.score_metrics(given, LocalJudge().judge(asks))]
    assert respects[0] == "overall" and set(respects[1:]) == set(rubric("dialogue_answer").ratings[:-1])
    marks = [{"score": 0.5, **{respect: rank / 10 for rank, respect in enumerate(respects[1:], 1)}} for _ in asks]
    scores = {metric.name: metric.score for metric in task.score_metrics(given, marks)}
    assert scores == {"overall": 0.5, **{respect: pytest.approx(r / 10) for r, respect in enumerate(respects[1:], 1)}}


def test_a_dialogue_with_a_wrong_number_of_images_is_left_out_with_a_note(tmp_path: Path) -> None:
    fetched(tmp_path, tmp_path)
    one, two = raw()
    keep(DIALOGUES, [{**one, "image": one["image"][:2]}, two], tmp_path)
    note = "MMDU, dialogue wit_1: 3 places for 2 images; it is left out"
    with pytest.warns(UserWarning, match=note):
        task = load_task("mmdu", BENCHMARK, tmp_path)
    assert [request.target for request in task.requests] == [("It is blue.",)]
    keep(DIALOGUES, [{**one, "image": one["image"][:2]}], tmp_path)
    with pytest.warns(UserWarning, match=note), pytest.raises(UserError, match="no dialogue fits"):
        load_task("mmdu", BENCHMARK, tmp_path)


def test_the_order_of_messages_and_the_presence_of_images_are_checked(tmp_path: Path) -> None:
    fetched(tmp_path, tmp_path)
    one, _ = raw()
    cases = {
        "user and assistant do not take turns": {"conversations": one["conversations"][1:]},
        "there is no image x.jpg": {"image": [*one["image"][:2], "/mmdu_pics/x.jpg"]},
    }
    for message, changes in cases.items():
        keep(DIALOGUES, [{**one, **changes}], tmp_path)
        with pytest.raises(UserError, match=f"MMDU, dialogue wit_1: {message}"):
            load_task("mmdu", BENCHMARK, tmp_path)


def test_it_needs_a_vision_language_model_and_its_chat_template(tmp_path: Path) -> None:
    fetched(tmp_path, tmp_path)
    with pytest.raises(LeftOut, match="model tiny takes no images; use --model"):
        load_task("mmdu", BENCHMARK, tmp_path, processor=None)
    with pytest.raises(UserError, match="leave out --no-chat-template"):
        load_task("mmdu", BENCHMARK, tmp_path, chat_template=False)
