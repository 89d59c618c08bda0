"""LongProc's scores, from the definitions in its repository; README.md names the commit."""

from __future__ import annotations

import itertools
import json
import re
import string
from collections.abc import Callable
from typing import Any

from kvbench.decoding import THOUGHT
from kvbench_tasks.longproc.code import passes
from kvbench_tasks.longproc.table import row_f1

_EQUATION = re.compile(r"\s*(-?\d+)\s*([-+*/])\s*(-?\d+)\s*=\s*(-?\d+)\s*")
_IDLE = re.compile(r"\b(a|an|the|on|in|at|step|thinks|think|believes|believe|is|are|of|location|know|knows|belief)\b")
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")
_TOTAL = re.compile(r"European cities for (\d+) days")
_FLIGHT = re.compile(r".*Day (\d{1,9}).*from (\w+) to (\w+)")


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the row F1 for HTML to TSV, else 1 for a correct answer; called by lm-eval.

    Text before `</think>` is not part of the answer.
    """
    response = results[0].rpartition(THOUGHT)[2]
    return {"score": float(_SCORERS[doc["kind"]](response, doc["outputs"][0], doc["metadata"]))}


def _tagged(response: str, tag: str) -> str | None:
    """Return the text between the first `<tag>` and the first `</tag>`."""
    start, stop = response.find(f"<{tag}>"), response.find(f"</{tag}>")
    return None if start < 0 or stop < 0 else response[start + len(tag) + 2 : stop].strip()


def _path(response: str, reference: str, metadata: str) -> bool:
    """Return whether the route equals the reference exactly."""
    return _tagged(response, "Route") == reference.strip()


def _countdown(response: str, reference: str, metadata: str) -> bool:
    """Return whether every equation is correct and uses two remaining numbers, and the last gives the target."""
    problem = json.loads(metadata)
    remaining = [int(numeral) for numeral in problem["nums"]]
    lines = (_tagged(response, "Solution") or "").split("\n")
    if len(lines) != len(remaining) - 1:
        return False
    for equation in lines:
        match = _EQUATION.fullmatch(equation)
        if match is None or max(map(len, match.groups())) > 18:
            return False
        first, second, result = int(match[1]), int(match[3]), int(match[4])
        for number in (first, second):
            if number not in remaining:
                return False
            remaining.remove(number)
        computed = {"+": first + second, "-": first - second, "*": first * second}.get(match[2])
        is_right = second != 0 and first == second * result if computed is None else computed == result
        if not is_right:
            return False
        remaining.append(result)
    return remaining == [int(problem["target"])]


def _beliefs(response: str, reference: str, metadata: str) -> bool:
    """Return whether the beliefs equal the reference's in number, order and words."""
    return _bullets(response) == _bullets(reference)


def _bullets(text: str) -> list[str]:
    """Return the lines that begin with a hyphen, without punctuation and filler words.

    Only the first of the indented lines with a hyphen counts, because the official code strips lines after joining
    them.
    """
    lines = [line for line in text.splitlines() if line.strip().startswith("-")]
    bullets = "\n".join(lines).strip().split("\n")
    return [words for line in bullets if line.startswith("-") and (words := _words(line))]


def _words(line: str) -> str:
    letters = "".join(
        character for character in line.lower() if character not in string.punctuation and character != "’"
    )
    return " ".join(_IDLE.sub(" ", letters).split())


def _travel(response: str, reference: str, metadata: str) -> bool:
    """Return whether the plan visits the reference's cities in order, each for the same number of days."""
    problem = json.loads(metadata)
    cities = [city for city in problem["ground_truth_cities"].split("**") if city]
    durations = [int(duration) for duration in problem["ground_truth_durations"].split("**") if duration]
    stays = _stays(_tagged(response, "Plan") or "")
    return stays[: len(cities)] == list(zip(cities, durations, strict=True))


def _stays(plan: str) -> list[tuple[str, int]]:
    """Return cities and days of a plan. Flights separate stays; a travel day counts for both."""
    total_days, last_day = "", ""
    flights = []
    for line in plan.split("\n"):
        if match := _TOTAL.search(line):
            total_days = match[1]
        if match := _RANGE.search(line):
            last_day = match[2]
            if last_day == total_days:  # another plan may follow
                break
        if match := _FLIGHT.match(line):
            flights.append(match)
    if not last_day or not flights:
        return []
    cities = [flights[0][2], *(flight[3] for flight in flights)]
    travel_days = [1, *(int(flight[1]) for flight in flights), int(last_day)]
    return [
        (city, departure - arrival + 1)
        for city, (arrival, departure) in zip(cities, itertools.pairwise(travel_days), strict=True)
    ]


def _table(response: str, reference: str, metadata: str) -> float:
    """Return the F1 of the rows in the answer's TSV block, or in the whole answer without a block."""
    _, fence, block = response.partition("```tsv")
    table_text = block if fence else response
    if fence and "```" in block:
        table_text = block.rpartition("```")[0]
    return row_f1(table_text.strip(), reference)


def _code(response: str, reference: str, metadata: str) -> bool:
    """Return whether the C++ in the answer's block passes the tests."""
    _, fence, block = response.replace("```c++", "```cpp").partition("```cpp")
    if not fence or "```" not in block:
        return False
    return passes(block.rpartition("```")[0], json.loads(metadata)["testcases"])


_SCORERS: dict[str, Callable[[str, str, str], float | bool]] = {
    "countdown": _countdown,
    "path_traversal": _path,
    "tom_tracking": _beliefs,
    "html_to_tsv": _table,
    "travel_planning": _travel,
    "pseudo_to_code": _code,
}
