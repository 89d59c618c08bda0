"""Prompts are lm-eval's, character by character, and the line is where the document's own text begins or ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval.models.huggingface import HFLM

from kvbench.engine.loading import load_tokenizer
from kvbench.errors import UserError
from kvbench.files import cache_dir
from kvbench.harness.harnesses import HARNESSES
from kvbench.harness.named_tasks.benchmarks import HARNESS, build, resolve
from kvbench.harness.named_tasks.building import seeded
from kvbench.harness.named_tasks.harness import NamedTask
from kvbench.harness.named_tasks.prompts import Rendered, document_end, fields, longest_passage
from kvbench.harness.protocol import HarnessFlags, TaskSettings

CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRIMMING = CHATML.replace("message['content']", "message['content'].strip()")
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
TEMPLATES = {"plain": None, "chat": CHATML, "trimming": TRIMMING, "no_system": NO_SYSTEM}
MULTIPLE_INPUT = """task: own_blank
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/blanks.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{answer}}"
doc_to_choice: "{{['the cat sat on ' + first, 'the cat sat on ' + second]}}"
doc_to_target: after
metric_list: [{metric: acc}]
"""


def loaded(folder: Path, name: str, template: str | None = None, samples: int = 9, **flags: Any) -> NamedTask:
    tokenizer = load_tokenizer("reference", None)
    tokenizer.chat_template = template
    if template is not None:
        flags = {"apply_chat_template": "default", **flags}
    benchmark = resolve(name, [str(folder)])
    assert benchmark is not None
    settings = TaskSettings(
        0, samples, 0, tokenizer, "reference", "reference", template is not None, cache_dir(),
        flags=HarnessFlags(**flags),
    )  # fmt: skip
    task = HARNESSES[HARNESS].load(name, settings, benchmark)
    assert isinstance(task, NamedTask)
    return task


@pytest.mark.parametrize("template", [*TEMPLATES])
@pytest.mark.parametrize(
    "flags", [{}, {"num_fewshot": 0}, {"system_instruction": "be short"}, {"fewshot_as_multiturn": False}]
)
@pytest.mark.parametrize("name", ["own_choice", "own_text"])
def test_the_prompt_is_lm_evals(own_tasks: Path, name: str, template: str, flags: dict[str, Any]) -> None:
    text = TEMPLATES[template]
    if flags.keys() == {"fewshot_as_multiturn"} and text is None:
        pytest.skip("turns need a template")
    task = loaded(own_tasks, name, text, **flags)
    benchmark = resolve(name, [str(own_tasks)])
    assert benchmark is not None
    tokenizer = load_tokenizer("reference", None)
    tokenizer.chat_template = text
    theirs = build(benchmark.specs[name], benchmark.include_path, {})
    if "num_fewshot" in flags or theirs.config.num_fewshot is None:
        theirs.set_config("num_fewshot", flags.get("num_fewshot", 0))
    theirs.set_fewshot_seed(1234)
    model = HFLM.__new__(HFLM)
    model.tokenizer, model.chat_template_args = tokenizer, {}
    theirs.build_all_requests(
        apply_chat_template=text is not None,
        fewshot_as_multiturn=flags.get("fewshot_as_multiturn", text is not None),
        system_instruction=flags.get("system_instruction"),
        chat_template=model.apply_chat_template if text is not None else None,
    )
    prompts = [instance.args[0] for instance in theirs.instances if instance.idx == 0]
    assert [request.context + request.question for request in task.requests] == prompts
    for request, document in zip(task.requests, task.documents, strict=True):
        own_text = f"{document['passage']}\nwhat is the {document['question']} ?\nanswer :"
        expected = {"fewshot": 0, "document": len(document["passage"])}[str(task.recorded["context"])]
        assert request.question.startswith(own_text[expected:])
        if name == "own_choice":
            arguments = [i.args for i in theirs.instances if i.doc_id == request.doc_id]
            found = [("" if c.alone else request.context + c.question, c.text) for c in request.continuations]
            assert found == arguments


def test_several_prompts_of_a_document_share_its_context(own_tasks: Path, tmp_path: Path) -> None:
    rows = [{"first": "red", "second": "green", "after": "number 3", "answer": "1"}] * 2
    (tmp_path / "blanks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "blank.yaml").write_text(MULTIPLE_INPUT.replace("FOLDER", str(tmp_path)))
    task = loaded(tmp_path, "own_blank")
    request = task.requests[0]
    prompts = [request.context + entry.question for entry in request.continuations]
    assert prompts == ["the cat sat on red", "the cat sat on green"]
    assert request.context == "the cat sat on " and [entry.text for entry in request.continuations] == [" number 3"] * 2
    assert "context" in task.refused and request.target == ("number 3",)


def test_the_same_examples_are_one_context_but_independent_samples(own_tasks: Path) -> None:
    task = loaded(own_tasks, "own_choice")
    assert len({request.context for request in task.requests}) == 1
    assert len({request.context_id for request in task.requests}) == 6
    passages = loaded(own_tasks, "own_text")
    assert len({request.context_id for request in passages.requests}) == 6


def test_examples_that_are_drawn_for_every_document_are_told(own_tasks: Path, tmp_path: Path) -> None:
    text = (own_tasks / "own_choice.yaml").read_text()
    (tmp_path / "own_choice.yaml").write_text(text.replace("fewshot_config: {sampler: first_n}\n", ""))
    (note,) = loaded(tmp_path, "own_choice", num_fewshot=1).notes
    assert note.startswith("own_choice: its 6 documents have 2 different contexts") and "first_n" in note
    assert loaded(own_tasks, "own_choice").notes == loaded(own_tasks, "own_text").notes == ()


def test_documents_of_one_context_are_neighbours(own_tasks: Path, tmp_path: Path) -> None:
    rows = [{"passage": f"the cat number {i % 2} sat on the mat", "question": f"is it {i}"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "two.yaml").write_text(
        "task: two\ndataset_path: json\ntest_split: test\noutput_type: generate_until\ndoc_to_target: question\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        'doc_to_text: "{{passage}}\\n{{question}}"\n'
    )
    task = loaded(tmp_path, "two")
    assert [request.doc_id for request in task.requests] == [0, 2, 4, 1, 3, 5]
    assert [request.sample_id for request in task.requests] == ["0", "2", "4", "1", "3", "5"]
    assert len({request.context_id for request in task.requests}) == 2
    assert [request.doc_id for request in loaded(tmp_path, "two", samples=3).requests] == [0, 2, 1]


@pytest.mark.parametrize(
    ("flags", "rule", "ends_with"),
    [
        ({}, "fewshot", "\n\n"),
        ({"context": "document"}, "document", " ."),
        ({"context": "prompt"}, "prompt", "answer :"),
        ({"context_field": "question"}, "document", None),
        ({"context": "fewshot", "num_fewshot": 0, "system_instruction": "read this"}, "fewshot", "read this"),
    ],
)
def test_a_rule_decides_what_the_context_is(
    own_tasks: Path, flags: dict[str, Any], rule: str, ends_with: str | None
) -> None:
    task = loaded(own_tasks, "own_choice", **flags)
    assert task.recorded["context"] == rule and not task.refused
    for request, document in zip(task.requests, task.documents, strict=True):
        assert request.context.endswith(document["question"] if ends_with is None else ends_with)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"context": "fewshot", "num_fewshot": 0}, "no examples and no instruction in 6 of 6 prompts; use --moment"),
        ({"context_field": "nothing"}, "no text of the field 'nothing' before the question"),
    ],
)  # fmt: skip
def test_what_has_no_context_refuses_the_moment_in_one_line(own_tasks: Path, flags: dict[str, Any], says: str) -> None:
    task = loaded(own_tasks, "own_choice", **flags)
    assert says in task.refused["context"] and "\n" not in task.refused["context"]


def test_the_longest_field_with_text_behind_it_is_the_passage() -> None:
    document = {"short": "one", "story": {"text": "a long story"}, "all": "a long story and what ?"}
    prompt = Rendered("Read: a long story and what ?", 6, 29)
    assert document_end(document, prompt) == 18
    assert document_end(document, prompt, "story.text") == 18
    assert document_end(document, prompt, "short") == 0
    assert document_end({"short": "a"}, prompt) == 0  # less than half of it
    assert longest_passage(document, prompt.text) == (6, 18)
    assert longest_passage(document, "a long story") == (0, 0)
    assert dict(fields({"a": ["x", {"b": "y"}]})) == {"a[0]": "x", "a[1].b": "y"}


def test_a_template_that_rewrites_the_question_is_refused(own_tasks: Path) -> None:
    shouting = CHATML.replace("message['content']", "message['content'] | upper")
    with pytest.raises(UserError, match="own_text, document 0: the chat template rewrites the question"):
        loaded(own_tasks, "own_text", shouting)


def test_seeds_are_restored() -> None:
    import random

    random.seed(5)
    expected = random.random()
    random.seed(5)
    with seeded(0):
        random.random()
    assert random.random() == expected
