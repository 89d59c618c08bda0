"""InfiniteBench: the official prompts from rows in their true schema, and a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvbench
from kvbench.benchmark import Benchmark
from kvbench.data.sources import keep
from kvbench.errors import NeedsHub, UserError
from kvbench.harness.lm_eval import LmEvalTask
from kvbench_tasks.infinitebench import BENCHMARK, KVPRESS, KVPRESS_SETS, SETS, source

from ...loading import load_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FIXTURES = Path(__file__).parent / "fixtures"

# `yarn_mistral_templates` of src/prompt.py, and DATA_NAME_TO_MAX_NEW_TOKENS of src/eval_utils.py.
OFFICIAL = {
    "passkey": (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        "it. I will quiz you about the important information.\n\n{context}\n\n{input}\n\n"
        "The pass key is",
        6,
    ),
    "number_string": (
        "There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz "
        "you about the important information there.\n\n{context}\n\n{input}\n\n"
        "The sequence of digits is",
        12,
    ),
    "kv_retrieval": (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}",
        50,
    ),
    "longbook_sum_eng": ("Summarize the book below.\n\n{context}\n\nSummary:", 1200),
    "longbook_qa_eng": (
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\n"
        "Question: {input}\nAnswer:",
        40,
    ),
    "longbook_choice_eng": (
        "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n"
        "A. {0}\nB. {1}\nC. {2}\nD. {3}\n\nThe letter of the correct answer is",
        40,
    ),
    "longdialogue_qa_eng": (
        "Below is a dialogue script where one random occurrence of a character name is replaced "
        'with "$$MASK$$", and you should try to guess who that character is.\n\n{context}\n\n'
        "The name that has been replaced with $$MASK$$ is likely",
        40,
    ),
    "math_find": ("{prefix}\n\n{context}\n\n{input}", 3),
    "math_calc": (
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\n"
        "Values: [1, 4, 8]\n\nExpression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\n"
        "Expression: {context}\nValues:",
        30000,
    ),
    "code_debug": (
        "Following is a Python code where exactly one of the functions/methods has a deliberate "
        "error that makes it crash.\n\n{context}\n\nOptions:\nA. {0}\nB. {1}\nC. {2}\nD. {3}\n\n"
        "The correct option is:",
        5,
    ),
    "code_run": (
        "There is a function called {func} in the following Python code.\n\n{context}\n\n"
        "Please compute the exact value of {call}. The value of {call} is",
        5,
    ),
}

# Parts of the prompts that come from the rows' `input`, by row.
READ = [
    {
        "prefix": "What is the largest number in the following list?",
        "func": "func_1",
        "call": "func_1(-9)",
    },
    {
        "prefix": "What is the median number in the following list?",
        "func": "func_1",
        "call": "func_1(12)",
    },
]

RIGHT = {
    "math_find": ["93", "5.5"],
    "math_calc": ["[8, 5, 7, 3]", "[1, 21, -9, -5]"],
    "code_debug": ["C. half", "The correct option is: half"],
    "code_run": ["-5", "19"],
    "longbook_choice_eng": ["C", "Fine"],
}


def raw(name: str) -> list[dict[str, Any]]:
    lines = (FIXTURES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def load(name: str, tokenizer: Any, cache: Path, chat: bool = False, bench: Benchmark = BENCHMARK) -> LmEvalTask:
    leaf = f"infinitebench_{name}"
    return load_task(leaf, bench, tokenizer, cache, length=512, chat_template=chat)


@pytest.mark.parametrize("name", SETS)
def test_prompts_are_the_official_ones(name: str, tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    keep(source(name), raw(name), tmp_path)
    task = load(name, bpe_tokenizer, tmp_path)
    chance = 0.25 if raw(name)[0]["options"] else 0.0
    assert (task.metric, task.length, task.chance) == ("score", 0, chance)
    template, limit = OFFICIAL[name]
    requests = sorted(task.requests, key=lambda r: r.doc_id)
    for request, row, read in zip(requests, raw(name), READ, strict=True):
        fields = {"context": row["context"], "input": row["input"], **read}
        assert request.context + request.question == template.format(*row["options"], **fields)
        assert row["context"] in request.context
        assert (request.max_new_tokens, request.until) == (limit, ())
        assert request.extra["id"] == row["id"]
    said = RIGHT.get(name, [r.target[0] for r in requests])
    right = {(r.sample_id, r.question_id, 0): s for r, s in zip(requests, said, strict=True)}
    # Signs are not read: of -9 and all that follows nothing counts.
    assert task.score(right)[1] == pytest.approx(0.75 if name == "math_calc" else 1.0)
    assert task.score(dict.fromkeys(right, ""))[1] == 0.0


@pytest.mark.parametrize("name", KVPRESS_SETS)
def test_kvpress_scores_the_same_prompts_by_its_own_rules(
    name: str, tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    keep(source(name), raw(name), tmp_path)
    official = load(name, bpe_tokenizer, tmp_path)
    lenient = load(f"kvpress_{name}", bpe_tokenizer, tmp_path, bench=KVPRESS)
    assert [r.context + r.question for r in official.requests] == [r.context + r.question for r in lenient.requests]
    assert (official.version, lenient.version) == ("2", "1")
    assert official.chance == lenient.chance
    assert official.data_hash != lenient.data_hash
    # A letter within a sentence, and a name within another word.
    which = 0 if name == "longdialogue_qa_eng" else 1
    said = {(r.sample_id, 0, 0): f"I say {r.target[which]}-{r.target[which]}" for r in official.requests}
    assert (official.score(said)[1], lenient.score(said)[1]) == (0.0, 1.0)


def test_the_readme_shows_a_raw_row_and_every_set() -> None:
    page = (BENCHMARK.yaml / "README.md").read_text()
    (shown,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert json.loads(shown) == raw("code_debug")[0]
    leaves = (*BENCHMARK.leaves, *KVPRESS.leaves)
    assert tuple(re.findall(r"^\| (infinitebench_\w+)", page, re.MULTILINE)) == leaves


def test_answers_of_choices_are_option_and_letter(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = raw("code_debug")
    keep(source("code_debug"), rows, tmp_path)
    found = [r.target for r in load("code_debug", bpe_tokenizer, tmp_path).requests]
    assert found == [("half", "C"), ("half", "D")]
    rows[0]["answer"] = ["other"]
    keep(source("code_debug"), rows, tmp_path)
    with pytest.raises(UserError, match="the answer 'other' is not one of"):
        load("code_debug", bpe_tokenizer, tmp_path)


def test_with_a_chat_template_the_prefix_opens_the_assistants_turn(
    tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    keep(source("passkey"), raw("passkey"), tmp_path)
    request = load("passkey", bpe_tokenizer, tmp_path, chat=True).requests[0]
    assert request.question.startswith("What is the pass key?")
    assert request.question.endswith("<|im_start|>assistant\nThe pass key is")


@pytest.mark.parametrize(("name", "message"), [("math_find", "no number"), ("code_run", "calls")])
def test_an_input_that_does_not_say_what_to_find_is_refused(
    name: str, message: str, tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    keep(source(name), [{**raw(name)[0], "input": "What?"}], tmp_path)
    with pytest.raises(UserError, match=message):
        load(name, bpe_tokenizer, tmp_path)


def test_without_the_hub_it_is_left_out(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(NeedsHub, match=r"needs the dataset xinrongzhang2022/InfiniteBench "):
        load("passkey", bpe_tokenizer, tmp_path)


def test_a_run_gives_scores(llama_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    asked = ("passkey", "kv_retrieval", "math_find", "code_run", "longbook_qa_eng")
    for name in asked:
        keep(source(name), raw(name), tmp_path / "cache")
    kvbench.run(
        {
            "policy": "snapkv:window=8",
            "budget": "0.2",
            "task": ",".join(f"infinitebench_{name}" for name in asked),
            "model": llama_folder,
            "samples": 2,
            "out": str(tmp_path / "run"),
        }
    )
    cells, samples = kvbench.load(tmp_path / "run")
    assert (cells["status"] == "ok").all()
    assert len(cells) == 2 * len(asked)
    assert cells["score"].between(0, 1).all()
    for _, cell in cells.iterrows():
        mine = samples.loc[samples["cell"] == cell["cell"], "score"]
        assert cell["score"] == pytest.approx(mine.mean())
