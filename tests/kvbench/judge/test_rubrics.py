from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from kvbench.errors import UserError
from kvbench.judge import rubrics
from kvbench.judge.rubrics import contains_yes, rubric, yes_no

ITEM = {"question": "Where?", "answer": "In Rome.", "response": "Rome, I think."}
TYPES = (
    "single-session-user",
    "single-session-assistant",
    "multi-session",
    "temporal-reasoning",
    "knowledge-update",
    "single-session-preference",
    "abstention",
)


def test_the_prompts_of_longmemeval_are_the_official_ones() -> None:
    assert rubric("longmemeval:knowledge-update").render(ITEM) == (
        "I will give you a question, a correct answer, and a response from a model. Please answer "
        "yes if the response contains the correct answer. Otherwise, answer no. If the response "
        "contains some previous information along with an updated answer, the response should be "
        "considered as correct as long as the updated answer is the required answer.\n\n"
        "Question: Where?\n\nCorrect Answer: In Rome.\n\nModel Response: Rome, I think.\n\n"
        "Is the model response correct? Answer yes or no only."
    )
    prompts = {kind: rubric(f"longmemeval:{kind}") for kind in TYPES}
    assert len({p.template for p in prompts.values()}) == 5, "three types share one prompt"
    for found in prompts.values():
        assert found.fields == ("question", "answer", "response")
        assert (found.max_tokens, found.parse) == (10, "contains_yes")
    assert "off-by-one errors" in prompts["temporal-reasoning"].template
    assert "\n\nRubric: {answer}\n\n" in prompts["single-session-preference"].template
    assert "\n\nExplanation: {answer}\n\n" in prompts["abstention"].template


@pytest.mark.parametrize(
    ("name", "version", "digest"),
    [("longmemeval", "1", "dba6d59dd2f635a2"), ("correct", "1", "6cf0a7cd33cf5307")],
)
def test_a_changed_prompt_needs_a_new_version(name: str, version: str, digest: str) -> None:
    data = json.loads((Path(rubrics.__file__).parent / f"shipped/{name}.json").read_text())
    asked = json.dumps([data.get("template"), data.get("templates")], sort_keys=True)
    assert (data["version"], hashlib.sha256(asked.encode()).hexdigest()[:16]) == (version, digest)


@pytest.mark.parametrize("response", ["{answer}", "{response} {question}", "\\g<0> \\1 %s {0} {}", "{{answer}}"])
def test_fields_in_a_response_are_not_filled_in(response: str) -> None:
    found = rubric("correct")
    prompt = found.render({**ITEM, "question": response, "response": response})
    assert prompt.count("In Rome.") == 1
    assert f"[Question]\n{response}\n\n" in prompt
    assert f"[Response]\n{response}\n\n[End of the response]" in prompt


def test_every_field_is_required() -> None:
    with pytest.raises(UserError, match=r"rubric correct: the field 'answer' must be a text"):
        rubric("correct").render({"question": "q", "response": "r"})


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("yes", 1.0),
        ("No", 0.0),
        (" **Yes.**\n", 1.0),
        ("No, the response says yes to another question.", 0.0),
        ("Yes. There is no error.", 1.0),
        ("The answer is: no", 0.0),
        ("Answer: YES", 1.0),
    ],
)
def test_yes_or_no(answer: str, score: float) -> None:
    assert yes_no(answer) == {"score": score}
    assert rubric("correct").read(answer) == {"score": score}


@pytest.mark.parametrize(
    "answer",
    ["", "maybe", "yes or no", "Yes/No", "Is it yes? No.", "yesterday", "nothing", "oui", "1"],
)
def test_answers_without_verdict(answer: str) -> None:
    assert yes_no(answer) is None


@pytest.mark.parametrize(
    "answer",
    [
        "yes",
        "No",
        "Yes/No",
        "Is it yes? No.",
        "no, not yes",
        "yesterday",
        "maybe",
        "The response is correct.",
        " YES.\n",
    ],
)
def test_longmemeval_uses_the_rule_of_its_script(answer: str) -> None:
    # evaluate_qa.py: eval_response = completion....content.strip(); label = 'yes' in ....lower()
    label = "yes" in answer.strip().lower()
    for kind in TYPES:
        assert rubric(f"longmemeval:{kind}").read(answer) == {"score": float(label)}


def test_an_empty_answer_has_no_verdict() -> None:
    assert contains_yes(" \n") is None
    assert rubric("longmemeval:multi-session").read("<think>yes</think>") is None


def test_thinking_is_ignored() -> None:
    found = rubric("correct")
    assert found.read("<think>yes, yes</think>\nno") == {"score": 0.0}
    assert found.read("it says no, so </think> yes") == {"score": 1.0}
    assert found.read("<think>Okay, yes") is None


@pytest.mark.parametrize(
    ("answer", "marks"),
    [
        ('Fine.\n{"style": 3, "overall": 7}', {"score": 0.7, "style": 0.3}),
        ("{'style': 1, 'more': 'x', 'overall': 10} Done.", {"score": 1.0, "style": 0.1}),
        ('{"style": 1, "overall": 1}? {"style": 2, "overall": 2}', {"score": 0.2, "style": 0.2}),
        ('{"overall": 7}', None),
        ('{"style": 0, "overall": 7}', None),
        ('{"style": 3, "overall": 11}', None),
        ('{"style": 3, "overall": 7.5}', None),
        ('{"style": 3, "overall": true}', None),
        ("style 3, overall 7", None),
        ("{}", None),
        ("", None),
    ],
)  # fmt: skip
def test_ratings_are_the_last_object_of_the_answer(tmp_path: Path, answer: str, marks: dict[str, float] | None) -> None:
    file = tmp_path / "rated.json"
    data = {"version": "1", "source": "me", "licence": "MIT", "parse": "ratings", "max_tokens": 99}
    file.write_text(json.dumps({**data, "ratings": ["style", "overall"], "template": "x"}))
    assert rubric(str(file)).read(answer) == marks


def test_a_rubric_in_the_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    data = {"version": "2", "source": "me", "licence": "MIT", "parse": "yes_no", "max_tokens": 5}
    file.write_text(json.dumps({**data, "templates": {"a": "A {response}?", "b": "B?"}}))
    assert rubric(f"{file}:a").render({"response": "x"}) == "A x?"
    assert rubrics.origin(f"{file}:a").startswith("mine 2 (")
    with pytest.raises(UserError, match=r"unknown rubric '.*mine.json:c'; did you mean .*json:a"):
        rubric(f"{file}:c")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read the rubric"),
        ("[]", "a rubric needs version, source"),
        ("[" * 100_000, "cannot read the rubric"),
        ('{"version": "1", "source": "", "licence": "", "parse": "yes_no", "max_tokens": 1, '
         '"template": 5}', "a rubric needs version, source"),
        ('{"version": "1", "source": "", "licence": "", "parse": "yes_no", "max_tokens": 1, '
         '"templates": {"a": ["x"]}}', "a rubric needs version, source"),
        ('{"version": "1", "source": "", "licence": "", "parse": "ratings", "max_tokens": 1, '
         '"template": "x", "ratings": [["a"]]}', "ratings must be a list of names"),
        ('{"version": "1", "source": "", "licence": "", "parse": "ratings", "max_tokens": 1, '
         '"template": "x"}', "must list what it rates"),
        ('{"version": "1", "source": "", "licence": "", "parse": "stars", "max_tokens": 1, '
         '"template": "x"}', "unknown parse 'stars'; choose from yes_no, contains_yes"),
    ],
)  # fmt: skip
def test_an_invalid_rubric_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        rubric(str(file))


def test_an_unknown_rubric_names_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown rubric 'longmem'; did you mean longmemeval"):
        rubric("longmem")
    with pytest.raises(UserError, match="did you mean longmemeval:"):
        rubric("longmemeval")
