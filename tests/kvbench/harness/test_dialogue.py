"""Dialogues under templates of all kinds: prompts that go on from one another, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvbench.benchmark import Benchmark, Doc
from kvbench.errors import UserError
from kvbench.harness import rows as data
from kvbench.harness.lm_eval import LmEvalTask

from ...loading import load_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

YAML = """
task: talk
output_type: generate_until
test_split: test
description: "Be brief.\\n"
doc_to_text: "{{context}}<|kvb_split|>{{question}}"
doc_to_target: outputs
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
generation_kwargs: {until: [], max_gen_toks: 9, do_sample: false}
"""

# White space around an answer, as Llama 2 has it; a system message that is always there.
SPACED = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} "
    "[/INST]{% elif m['role'] == 'assistant' %} {{ m['content'] | trim }} </s>"
    "{% else %}<<{{ m['content'] }}>>{% endif %}{% endfor %}"
)
SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# An answer is closed only when another turn follows.
LATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{% if not loop.first %}</s>{% endif %}"
    "[{{ m['content'] }}]{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
# Only the newest question is marked: what comes before changes when a turn is added.
REWRITING = "{% for m in messages %}{% if loop.last %}<now>{% endif %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def row(turns: int = 3, **changes: Any) -> Doc:
    told = [
        {
            "context": f"Box {i} holds {10 + i}.\n",
            "question": f"Box {i // 2}?",
            "answer": str(10 + i // 2),
            "outputs": [str(10 + i // 2)],
            "max_new_tokens": 4 + i,
            "extra": {"age": i - i // 2},
        }
        for i in range(turns)
    ]
    frame = {"user": "U ", "assistant": "\nA ", "end": "\n"}
    return {"turns": told, "frame": frame, "until": ["\n"], **changes}


def bench(folder: Path, *rows: Doc, yaml: str = YAML) -> Benchmark:
    (folder / "talk.yaml").write_text(yaml)
    return Benchmark(
        name="talk",
        leaves=("talk",),
        docs=lambda leaf, *, samples, **_: list(rows)[:samples],
        yaml=folder,
        metric="exact_match",
    )


def load(talk: Benchmark, tokenizer: Any, cache: Path, chat: bool, samples: int = 1) -> LmEvalTask:
    settings = {"length": 512, "samples": samples, "chat_template": chat}
    return load_task("talk", talk, tokenizer, cache / "cache", **settings)


@pytest.fixture
def templated(bpe_tokenizer: PreTrainedTokenizerFast) -> Iterator[Any]:
    """A tokenizer whose template may be changed."""
    before = bpe_tokenizer.chat_template
    yield bpe_tokenizer
    bpe_tokenizer.chat_template = before


def joined(task: LmEvalTask) -> None:
    """The turns, put together, are the prompts."""
    history = ""
    for request in task.requests:
        if request.turn == 0:
            history = ""
        assert history + request.delta == request.context
        assert request.delta.strip().endswith(f"Box {request.turn} holds {10 + request.turn}.")
        history += request.delta + request.question
        history += request.answer_begin + request.answer + request.answer_end


@pytest.mark.parametrize(
    ("template", "begin", "end"),
    [
        ("", "", "\n"),
        (SPACED, " ", " </s>"),
        (SYSTEM, "", "<|im_end|>\n"),
        (LATE, "", ""),
    ],
)
def test_turns_go_on_from_one_another(template: str, begin: str, end: str, templated: Any, tmp_path: Path) -> None:
    templated.chat_template = template or templated.chat_template
    task = load(bench(tmp_path, row(), row(2)), templated, tmp_path, bool(template), samples=2)
    keys = [(r.sample_id, r.question_id, r.dialogue, r.turn, r.doc_id) for r in task.requests]
    assert keys == [
        *(("0", i, "0", i, i) for i in range(3)),
        *(("1", i, "1", i, 3 + i) for i in range(2)),
    ]
    joined(task)
    assert {(r.answer_begin, r.answer_end) for r in task.requests} == {(begin, end)}
    assert [r.max_new_tokens for r in task.requests] == [4, 5, 6, 4, 5]
    assert task.requests[2].extra == {"age": 1}
    assert task.requests[2].until == ("\n",)
    for request in task.requests:
        assert request.context.count("Be brief.") == 1
        assert data.SENTINEL not in request.context + request.question
    assert len({r.context_id for r in task.requests}) == 2
    gold = {(r.sample_id, r.question_id, 0): r.answer for r in task.requests}
    assert task.score(gold)[1] == 1.0


def test_without_a_template_the_frame_joins(templated: Any, tmp_path: Path) -> None:
    last = load(bench(tmp_path, row()), templated, tmp_path, False).requests[-1]
    assert last.context + last.question == (
        "Be brief.\nU Box 0 holds 10.\nBox 0?\nA 10\nU Box 1 holds 11.\nBox 0?\nA 10\nU Box 2 holds 12.\nBox 1?\nA "
    )
    assert last.delta == "U Box 2 holds 12.\n"


def test_a_template_that_rewrites_history_is_refused(templated: Any, tmp_path: Path) -> None:
    templated.chat_template = REWRITING
    with pytest.raises(UserError, match=r"^talk: the chat template rewrites .*--no-chat-template"):
        load(bench(tmp_path, row()), templated, tmp_path, True)
    assert len(load(bench(tmp_path, row(1)), templated, tmp_path, True).requests) == 1


@pytest.mark.parametrize("template", [True, False])
def test_without_reference_answers_a_turn_adds_the_same(templated: Any, tmp_path: Path, template: bool) -> None:
    bare = row()
    for turn in bare["turns"]:
        del turn["answer"]
    answered = load(bench(tmp_path, row()), templated, tmp_path, template).requests
    unanswered = load(bench(tmp_path, bare), templated, tmp_path, template).requests
    for one, other in zip(answered, unanswered, strict=True):
        assert (other.delta, other.question, other.answer_end) == (one.delta, one.question, one.answer_end)
        assert (one.answer, other.answer) == (one.target[0], "")


def test_a_dialogue_of_which_something_is_wrong_is_named(templated: Any, tmp_path: Path) -> None:
    def wrong(match: str, made: Doc, yaml: str = YAML) -> None:
        with pytest.raises(UserError, match=match):
            load(bench(tmp_path, made, yaml=yaml), templated, tmp_path, True)

    def turn(**changes: Any) -> Doc:
        made = row()
        made["turns"][1] |= changes
        return made

    wrong("row 0: 'turns' must be", row(turns=0))
    wrong("row 0: 'frame' must have the texts user, assistant, end", row(frame={"user": ""}))
    bad = {"user": data.SENTINEL, "assistant": "", "end": ""}
    wrong("row 0: the data must not contain", row(frame=bad))
    wrong("row 0, turn 1: 'answer' must be", turn(answer=" 1"))
    wrong("row 0, turn 1: 'answer' must be", turn(answer=""))
    wrong("row 0, turn 1: 'outputs' must be", turn(outputs=[]))
    unanswered = row()
    del unanswered["turns"][1]["answer"]
    wrong("row 0: either all turns or no turn can have an 'answer'", unanswered)
    wrong("row 0, turn 1: the data must not contain", turn(context=data.SENTINEL))
    wrong("row 0, turn 1: a dialogue cannot have a 'gen_prefix'", turn(gen_prefix="It is"))
    wrong("row 0, turn 0: a turn must be an object", row() | {"turns": ["a"]})
    shots = YAML + (
        'num_fewshot: 1\nfewshot_config: {sampler: first_n, samples: [{context: "a", question: "b", outputs: ["c"]}]}\n'
    )
    wrong("a dialogue cannot have few-shot examples", row(), shots)
