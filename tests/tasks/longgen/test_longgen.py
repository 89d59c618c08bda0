"""Long answers: solvable from the prompts, within their length, and judged place by place."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import UserError
from kvbench.harness.encode import split_encode
from kvbench.harness.lm_eval import LmEvalTask
from kvbench.reference import grammar
from kvbench_tasks.longgen import BENCHMARK
from kvbench_tasks.longgen.metric import placed

from ...loading import load_task

LEXICONS = ("natural", "reference")


@pytest.fixture(params=["word", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"{request.param}_tokenizer")


def load(leaf: str, lexicon: str, tokenizer: Any, cache: Path, **changes: Any) -> LmEvalTask:
    settings = {"length": 512, "samples": 3, "chat_template": tokenizer.chat_template is not None}
    return load_task(leaf, BENCHMARK, tokenizer, cache, lexicon=lexicon, **settings | changes)


def used(request: Any, tokenizer: Any) -> int:
    head, tail = split_encode(tokenizer, request.context, request.question)
    return len(head) + len(tail) + int(request.max_new_tokens)


def solve(leaf: str, lexicon: str, context: str, question: str) -> list[str]:
    """The items of the answer, read out of a prompt."""
    if leaf == "longgen_list":
        pattern = r"item #(\d+) (\w+ \w+) \."
        if lexicon == "natural":
            pattern = r"Item (\d+) of the list is ([\w-]+)\."
        told = {int(n): text for n, text in re.findall(pattern, context)}
        assert sorted(told) == list(range(1, len(told) + 1))
        if lexicon == "natural":
            assert f"tells the {len(told)} items" in context
            assert f"from item 1 to item {len(told)}," in question
        return [told[n] for n in sorted(told)]
    if leaf == "longgen_copy":
        if lexicon == "reference":
            (passage,) = re.findall(r"\bbegin (.*) end\b", context)
            return passage.split()
        (passage,) = re.findall(r"\[BEGIN\]\n(.*)\n\[END\]", context, re.DOTALL)
        return passage.split("\n")
    if lexicon == "reference":
        follows = dict(re.findall(r"\blet (\w+) (\w+) \.", context))
        at, chain = question.split("<|")[0].split()[1], []
        while at in follows:
            at = follows.pop(at)
            chain.append(at)
        assert not follows
        return chain
    wanted = re.search(r"value (\d+)\?", question)
    assert wanted is not None
    holds = {b: a for a, b in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", context)}
    at = holds[wanted[1]]
    steps = [f"VAR {at} = {wanted[1]}"]
    while at in holds:
        steps.append(f"VAR {holds[at]} = VAR {at}")
        at = holds[at]
    assert len(holds) == 2 * len(steps)
    return steps


def written(leaf: str, lexicon: str, items: list[str] | tuple[str, ...]) -> str:
    """The answer as a model would write it, without the stop string."""
    if lexicon == "reference" and leaf == "longgen_list":
        return " , ".join(f"#{i} {item}" for i, item in enumerate(items, 1))
    if lexicon == "reference":
        return " ".join(items)
    if leaf == "longgen_list":
        return "\n" + "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1)) + "\n"
    return "\n" + "\n".join(items) + "\n"


@pytest.mark.parametrize("lexicon", LEXICONS)
@pytest.mark.parametrize("leaf", BENCHMARK.leaves)
def test_the_answer_is_in_the_prompt_is_long_and_fits(leaf: str, lexicon: str, tokenizer: Any, tmp_path: Path) -> None:
    task = load(leaf, lexicon, tokenizer, tmp_path)
    assert (task.metric, task.higher_is_better, task.chance) == ("placed", True, 0.0)
    gold, reversed_, half = {}, {}, {}
    for request in task.requests:
        items = solve(leaf, lexicon, request.context, request.question)
        assert items == list(request.target)
        assert len(set(items)) == len(items) >= 4
        assert request.dialogue == ""
        key = (request.sample_id, 0, 0)
        gold[key] = written(leaf, lexicon, items)
        reversed_[key] = written(leaf, lexicon, items[::-1])
        half[key] = written(leaf, lexicon, items[: len(items) // 2])
        tokens = len(tokenizer(gold[key], add_special_tokens=False)["input_ids"])
        word_level = lexicon == "reference" and tokenizer.chat_template is not None
        if not word_level:  # the reference's sizes are in its own tokens
            assert tokens <= request.max_new_tokens
            assert tokens >= (26 if leaf == "longgen_chain" else 48) - 1
        total = used(request, tokenizer)
        assert 512 - 40 <= total <= 512
        assert not any(item in request.question for item in items)
    count = len(task.requests[0].target)
    assert task.score(gold)[1] == 1.0
    assert task.score(half)[0]["0", 0, 0] == pytest.approx(count // 2 / count)
    assert task.score(reversed_)[0]["0", 0, 0] == pytest.approx(count % 2 / count)
    assert task.score(dict.fromkeys(gold, ""))[1] == 0.0
    assert task.score(dict.fromkeys(gold, "I do not know."))[1] == 0.0


@pytest.mark.parametrize("lexicon", LEXICONS)
@pytest.mark.parametrize("leaf", BENCHMARK.leaves)
def test_a_sample_depends_on_its_index_and_seed_alone(
    leaf: str, lexicon: str, bpe_tokenizer: Any, tmp_path: Path
) -> None:
    few = load(leaf, lexicon, bpe_tokenizer, tmp_path / "a", samples=2)
    grown = load(leaf, lexicon, bpe_tokenizer, tmp_path / "a", samples=3)
    many = load(leaf, lexicon, bpe_tokenizer, tmp_path / "b", samples=3)
    assert few.requests == many.requests[:2]
    assert grown.requests == many.requests
    assert few.data_hash == many.data_hash == grown.data_hash
    other = load(leaf, lexicon, bpe_tokenizer, tmp_path, samples=2, seed=1)
    assert {r.context for r in other.requests}.isdisjoint(r.context for r in few.requests)


def test_the_reference_model_is_asked_what_it_was_trained_on(word_tokenizer: Any, tmp_path: Path) -> None:
    known = set(grammar.VOCABULARY)
    wanted = {"longgen_list": (32, 128), "longgen_copy": (80, 81), "longgen_chain": (25, 26)}
    for leaf, (items, tokens) in wanted.items():
        for request in load(leaf, "reference", word_tokenizer, tmp_path).requests:
            words = (request.context + request.question).split()
            assert set(words) <= known
            assert (len(request.target), request.max_new_tokens) == (items, tokens)
            assert request.until == (grammar.STOP,)
            assert used(request, word_tokenizer) == 512
            counts = Counter(words)
            times = {"longgen_list": 0, "longgen_copy": 1, "longgen_chain": 2}[leaf]
            if times:
                assert {counts[word] for word in request.target[:-1]} == {times}


def test_short_lengths_have_fewer_items_and_then_none(word_tokenizer: Any, tmp_path: Path) -> None:
    counts = []
    for length in (512, 200, 120, 60):
        (request,) = load("longgen_list", "reference", word_tokenizer, tmp_path, length=length, samples=1).requests
        counts.append(len(request.target))
        assert used(request, word_tokenizer) <= length
    assert counts == [32, 18, 13, 6]
    for leaf in BENCHMARK.leaves:
        for lexicon in LEXICONS:
            with pytest.raises(UserError, match=rf"^{leaf} does not fit into --length 12 "):
                load(leaf, lexicon, word_tokenizer, tmp_path, length=12)


def test_natural_answers_grow_with_the_length(bpe_tokenizer: Any, tmp_path: Path) -> None:
    for leaf in BENCHMARK.leaves:
        small, large = (
            load(leaf, "natural", bpe_tokenizer, tmp_path, length=n, samples=1).requests[0] for n in (600, 1800)
        )
        assert 2 * len(small.target) < len(large.target)
        assert 1800 / 5 < large.max_new_tokens < 1800 / 3


# --- the metric -----------------------------------------------------------------------------------


def score(form: str, outputs: list[str], response: str) -> float:
    return placed({"form": form, "outputs": outputs}, [response])["placed"]


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ("1. old cat\n2. wet dog\n3. red hen", 1),
        (" old cat\n2. wet dog", 1 / 3),  # the first has no number
        ("#1 old cat , #2 wet dog , #3 red hen", 1),
        ("Item 1: Old Cat.\n\n- 2) **wet dog**\n**3.** red  hen!", 1),
        ("1. old cat\n3. red hen", 2 / 3),  # the number is the place
        ("3. red hen, 1. old cat, 2. wet dog", 1),
        ("1. wet dog\n1. old cat\n2. wet dog", 1 / 3),  # the first of a number counts
        ("1. old cat\n2. wet\n4. red hen\n5. more", 1 / 3),
        ("1. old cat and mouse\n2.\n12. wet dog", 0),
        ("old cat, wet dog, red hen", 0),
        ("", 0),
    ],
)
def test_items_of_a_list_are_placed_by_their_number(response: str, wanted: float) -> None:
    assert score("numbered", ["old cat", "wet dog", "red hen"], response) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ("a b c d", 1),
        ("a  b\nc D e f", 1),
        ("a b x d", 3 / 4),
        ("a c d", 1 / 4),  # what is left out moves the rest
        ("x a b c d", 0),
        ("a b", 1 / 2),
        ("", 0),
    ],
)
def test_words_are_placed_by_position(response: str, wanted: float) -> None:
    assert score("words", ["a", "b", "c", "d"], response) == wanted


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ("\nOne is here.\nTwo, too.\nVAR C = VAR B\nmore", 1),
        ("One is here. Two, too. VAR C = VAR B.", 1),
        ("1. One is here\n\n2. two, too\n* var c = var b", 1),
        ("One is here.\nVAR C = VAR B\nTwo, too.", 1 / 3),
        ("Two, too.\nVAR C = VAR B", 0),
        ("One is here, Two, too.", 0),
    ],
)
def test_lines_and_sentences_are_placed_by_position(response: str, wanted: float) -> None:
    outputs = ["One is here.", "Two, too.", "VAR C = VAR B"]
    assert score("lines", outputs, response) == pytest.approx(wanted)
