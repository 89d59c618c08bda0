"""What of a prompt is stored with its response: the needle, wherever it is, and the question."""

from __future__ import annotations

import pytest

from kvbench.runs.prompt_excerpts import END, prompt_excerpt, reference_spans

HAY = "The grass is green. " * 100
NEEDLE = "The magic number is 4711. "
QUESTION = "What is the magic number?"


def test_a_short_prompt_is_kept_whole() -> None:
    assert prompt_excerpt("4711 " + QUESTION, ["4711"]) == "4711 " + QUESTION


@pytest.mark.parametrize("hay_before", [0, 3, 50, 99, 100])
def test_the_needle_of_a_long_prompt_is_kept_at_any_depth(hay_before: int) -> None:
    cut = hay_before * len("The grass is green. ")
    prompt = HAY[:cut] + NEEDLE + HAY[cut:] + QUESTION
    excerpt = prompt_excerpt(prompt, ["4711"])
    assert NEEDLE in excerpt and excerpt.endswith(prompt[-END:])
    assert len(excerpt) <= END + 2 * 120 + 4 + len("……\n…")


def test_without_a_needle_the_end_is_kept() -> None:
    prompt = HAY + QUESTION
    assert prompt_excerpt(prompt, ["4712"]) == prompt_excerpt(prompt, ["x"]) == "…" + prompt[-END:]
    assert prompt_excerpt(prompt, ["green"]) == "…" + prompt[-END:]  # it is everywhere, so it shows nothing


def test_every_reference_has_an_excerpt_before_any_has_two() -> None:
    names = [f"name{index}" for index in range(5)]
    prompt = "".join(f"{HAY}{name}. {HAY}{name}. " for name in names) + HAY
    excerpt = prompt_excerpt(prompt, names)
    assert [excerpt.count(name) for name in names] == [2, 1, 1, 1, 1]


def test_adjacent_needles_share_an_excerpt() -> None:
    excerpt = prompt_excerpt(HAY + "one two. " + HAY, ["one", "two"])
    assert excerpt.count("one two") == 1 and excerpt.count("\n") == 1


def test_references_are_marked_as_whole_words() -> None:
    text = "in 14711, 4711, 4711. x4711 答案是北京市"
    assert [text[slice(*span)] for span in reference_spans(text, ["4711", " 4711 ", "北京", "x", ""])] == [
        "4711", "4711", "北京",
    ]  # fmt: skip
    assert reference_spans("abcd", ["abc", "bcd", "abcd"]) == [(0, 4)]
