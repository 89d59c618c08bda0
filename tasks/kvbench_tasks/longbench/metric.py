"""LongBench's measures (metrics.py and eval.py of its repository), called by lm-eval."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

from kvbench import metrics
from kvbench_tasks.longbench.rouge import union_rouge_l

_NUMBER = re.compile(r"\d+")


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score the response with the row's `measure`; the best over its `outputs` counts.

    For a row with `first_line`, only the first non-empty line of the response is scored, because models continue with
    further examples after few-shot prompts.
    """
    response = results[0]
    if doc["first_line"]:
        response = response.lstrip("\n").split("\n")[0]
    if doc["measure"] == "classification":
        scores = [classification(response, answer, doc["classes"]) for answer in doc["outputs"]]
    else:
        scores = [_MEASURES[doc["measure"]](response, answer) for answer in doc["outputs"]]
    return {"score": max(0.0, *scores)}


def classification(response: str, reference: str, classes: Sequence[str]) -> float:
    """Return 1 over the number of classes that the response names, or 0 if the correct one is missing.

    A class whose name is part of the correct one's does not count ("place" in "birth place"). As in LongBench's loop,
    this check is skipped for the class after such a class.
    """
    named_classes = [class_name for class_name in classes if class_name in response]
    index = 0
    while index < len(named_classes):
        if named_classes[index] in reference and named_classes[index] != reference:
            del named_classes[index]
        index += 1
    return 1 / len(named_classes) if reference in named_classes else 0.0


def count(response: str, reference: str) -> float:
    """Return the fraction of the response's numbers that are correct; 0 if it has none."""
    numbers = _NUMBER.findall(response)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(response: str, reference: str) -> float:
    """Apply `count` to the number in a reference of the form "Paragraph 7"."""
    match = re.search(r"Paragraph (\d+)", reference)
    if match is None:
        raise ValueError(f"the answer {reference!r} names no paragraph")
    return count(response, match[1])


def edit_similarity(response: str, reference: str) -> float:
    """Return the `similarity` of the response's first line of code.

    Leading line feeds are dropped. The first line of code is the first line without a backtick, `#` or `//`, which may
    be empty; without such a line, it is "".
    """
    lines = response.lstrip("\n").split("\n")
    comment_marks = ("`", "#", "//")
    code_line = next(
        (code_line for code_line in lines if not any(mark in code_line for mark in comment_marks)),
        "",
    )
    return similarity(code_line, reference)


def similarity(response: str, reference: str) -> float:
    """Return the similarity of two lines of code in hundredths, as `fuzz.ratio` of fuzzywuzzy 0.18.

    It is 2M / T, where T is the number of characters of both texts and M the number of those in matching blocks
    (Ratcliff and Obershelp: the longest common block, then the same to its left and right; `difflib` finds them); 1 if
    both are empty. It is not a Levenshtein distance, and the order of the texts matters. With python-Levenshtein
    installed, fuzzywuzzy gives other numbers.
    """
    return round(100 * SequenceMatcher(None, response, reference).ratio()) / 100


_MEASURES: dict[str, Callable[[str, str], float]] = {
    "f1": metrics.f1,
    "rouge_l": union_rouge_l,
    "count": count,
    "retrieval": retrieval,
    "edit_similarity": edit_similarity,
}
