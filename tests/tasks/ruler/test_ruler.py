"""RULER's natural prompts, compared with its scripts at commit c3f5e3b."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import LeftOut, UserError
from kvbench.harness.catalogue import resolve_task
from kvbench.harness.encode import split_encode
from kvbench.harness.lm_eval import LmEvalTask
from kvbench_tasks.ruler import BENCHMARK
from kvbench_tasks.synthetic.natural import prompts
from kvbench_tasks.synthetic.ruler_words import adjectives, all_words, nouns

from ...loading import load_task
from ..synthetic.oracles import facts, listed

# constants.py and variable_tracking.py, word for word.
TASK = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {query} in the text above."
)
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables"
    " are assigned the value {query}, they are: "
)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def load(leaf: str, tokenizer: Any, cache: Path, **changes: Any) -> LmEvalTask:
    settings = {"length": 4096, "samples": 3}
    return load_task(leaf, BENCHMARK, tokenizer, cache, **settings | changes)


def rulers_prompt(lines: list[str]) -> tuple[str, list[str]]:
    """RULER's prompt and answers from the lines of its context, by way of the chain they state."""
    statements = [line for line in lines if line.startswith("VAR ")]
    value = statements[0].split("= ")[1]
    variables = [statement.split()[1] for statement in statements]
    chain = [f"VAR {variables[0]} = {value}"]
    for j in range(len(variables) - 1):
        chain.append(f"VAR {variables[j + 1]} = VAR {variables[j]} ")
    sentences = [NOISE] * (len(lines) - len(chain))
    positions = [i - j for j, i in enumerate(lines.index(statement) for statement in statements)]
    assert positions == sorted(set(positions)), "random.sample gives distinct positions"
    assert positions[-1] < len(sentences)
    for insert_pi, j in zip(positions, range(len(chain)), strict=True):
        sentences.insert(insert_pi + j, chain[j])
    context = "\n".join(sentences).replace(". \n", ".\n")
    fields = {"context": context, "query": value, "num_v": len(variables)}
    return (TASK + PREFIX).format(**fields), variables


@pytest.mark.parametrize("length", [4096, 8192])
def test_variable_tracking_is_rulers_to_the_character(length: int, bpe_tokenizer: Any, tmp_path: Path) -> None:
    for request in load("vt", bpe_tokenizer, tmp_path, length=length).requests:
        asked = request.context + request.question
        example, body = (part.split("\nQuestion: ")[0].split("\n") for part in asked.split("text.\n\n")[1:])
        solved, answers = rulers_prompt(example)
        prompt, variables = rulers_prompt(body)
        # `icl_example['input'] + " " + icl_example_out + '\n'`, and one more line feed.
        assert asked == solved + " " + " ".join(answers) + "\n" + "\n" + prompt
        assert request.target == tuple(variables)
        assert {len(name) for name in answers} == {3}
        assert {len(name) for name in variables} == {5}
        # RULER makes the example as long as 500 tokens allow, its answer aside.
        tokens = len(bpe_tokenizer(solved)["input_ids"]) - 1
        assert 500 - len(bpe_tokenizer(NOISE + "\n")["input_ids"]) < tokens <= 500


def test_the_example_of_variable_tracking_takes_an_eighth_of_a_short_length(bpe_tokenizer: Any, tmp_path: Path) -> None:
    for length in (2400, 3200):
        (request,) = load("vt", bpe_tokenizer, tmp_path, length=length, samples=1).requests
        solved = request.context.split("they are: ")[0] + "they are: "
        assert len(bpe_tokenizer(solved)["input_ids"]) - 1 <= length // 8
        assert request.context.count("Memorize") == 2
    (request,) = load("vt", bpe_tokenizer, tmp_path, length=400, samples=1).requests
    assert request.context.count("Memorize") == 1


def lists(asked: str) -> list[str]:
    return re.findall(r"appear most often\.\n(.*?)\nQuestion", asked)


def test_common_words_are_single_words_of_rulers_list(word_tokenizer: Any, tmp_path: Path) -> None:
    for request in load("cwe", word_tokenizer, tmp_path, length=16384).requests:
        example, body = lists(request.context + request.question)
        assert request.context.startswith("Below is a numbered list of words.")
        for text, often, rarely in ((example, 10, 3), (body, 30, 3)):
            counts = Counter(listed(text))
            assert set(counts) <= set(all_words())
            assert Counter(counts.values()) == {often: 10, rarely: len(counts) - 10}
        assert len(set(listed(example))) == 40
        assert len(set(listed(body))) > 2000
        common = [word for word, _ in Counter(listed(body)).most_common(10)]
        assert sorted(request.target) == sorted(common)
    short = load("cwe", word_tokenizer, tmp_path, length=2048, samples=1).requests[0]
    example, body = lists(short.context + short.question)
    assert set(Counter(listed(example)).values()) == {3, 1}
    assert set(Counter(listed(body)).values()) == {6, 1}


def test_the_example_of_common_words_is_a_turn_where_there_is_a_chat_template(
    bpe_tokenizer: Any, tmp_path: Path
) -> None:
    begun = prompts()["common_words_extraction"]["answer_prefix"].strip()
    options = {"length": 2048, "samples": 1}
    (plain,) = load("cwe", bpe_tokenizer, tmp_path, **options).requests
    # RULER's text: the task, its answer, a line feed, the next task.
    assert re.fullmatch(
        r"Below is .*\nQuestion: What are the 10 most common words in the above list\? "
        rf"{re.escape(begun)} 1\. .* 10\. [^\n]*\nBelow is .*\n",
        plain.context,
        re.DOTALL,
    )
    assert plain.question.endswith(f"in the above list? {begun}")
    (chat,) = load("cwe", bpe_tokenizer, tmp_path, chat_template=True, **options).requests
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n|$)", chat.context, re.DOTALL)
    assert [role for role, _ in turns] == ["user", "assistant", "user"]
    assert turns[0][1].endswith("words in the above list?")
    assert turns[1][1].startswith(f"{begun} 1. ")
    assert len(listed(turns[1][1].removeprefix(begun))) == 10
    assert turns[2][1].startswith("Below is")
    assert chat.question.endswith(f"list?<|im_end|>\n<|im_start|>assistant\n{begun}")
    head, tail = split_encode(bpe_tokenizer, chat.context, chat.question)
    assert 2048 - 64 < len(head) + len(tail) + chat.max_new_tokens <= 2048


def test_beyond_its_words_the_task_is_left_out_rather_than_short(word_tokenizer: Any, tmp_path: Path) -> None:
    load("cwe", word_tokenizer, tmp_path, length=45_000, samples=1)
    with pytest.raises(LeftOut, match=r"^its 8,\d+ words fill only \d+ of the 60000 tokens"):
        load("cwe", word_tokenizer, tmp_path, length=60_000, samples=1)


def test_keys_are_pairs_of_rulers_words(bpe_tokenizer: Any, tmp_path: Path) -> None:
    keys = set()
    for leaf in ("niah_single_1", "niah_multikey_2", "niah_multiquery"):
        for request in load(leaf, bpe_tokenizer, tmp_path).requests:
            keys |= set(facts("natural", request.context))
    assert len(keys) > 150
    firsts, seconds = set(adjectives()), set(nouns())
    for key in keys:
        cuts = [i for i, letter in enumerate(key) if letter == "-"]
        assert any(key[:i] in firsts and key[i + 1 :] in seconds for i in cuts), key


def test_a_length_that_is_too_short_is_a_one_line_error(bpe_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^vt does not fit into --length 60 .* at least \d+$"):
        load("vt", bpe_tokenizer, tmp_path, length=60)


def test_the_subset_for_smollm2_needs_no_hub() -> None:
    leaves = [leaf for leaf, group in resolve_task("smollm2") if group is BENCHMARK]
    assert len(leaves) == len(BENCHMARK.subsets["smollm2"]) == 6
    assert not set(leaves) & BENCHMARK.hub_leaves
