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
_IDLE = re.compile(
    r"\b(a|an|the|on|in|at|step|thinks|think|believes|believe|is|are|of|location|know|knows|belief)\b"
)
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")
_TOTAL = re.compile(r"European cities for (\d+) days")
_FLIGHT = re.compile(r".*Day (\d{1,9}).*from (\w+) to (\w+)")


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """F1 of the rows for HTML to TSV, else 1 for a right answer; called by lm-eval.

    What a model thinks before `</think>` is not part of its answer.
    """
    response = results[0].rpartition(THOUGHT)[2]
    return {"score": float(_SCORERS[doc["kind"]](response, doc["outputs"][0], doc["metadata"]))}


def _tagged(response: str, tag: str) -> str | None:
    """The text between the first `<tag>` and the first `</tag>`."""
    begin, end = response.find(f"<{tag}>"), response.find(f"</{tag}>")
    return None if begin < 0 or end < 0 else response[begin + len(tag) + 2 : end].strip()


def _path(response: str, reference: str, metadata: str) -> bool:
    """The route is the reference route, to the character."""
    return _tagged(response, "Route") == reference.strip()


def _countdown(response: str, reference: str, metadata: str) -> bool:
    """Every equation is right and uses two numbers that are left; the last gives the target."""
    given = json.loads(metadata)
    left = [int(n) for n in given["nums"]]
    lines = (_tagged(response, "Solution") or "").split("\n")
    if len(lines) != len(left) - 1:
        return False
    for line in lines:
        match = _EQUATION.fullmatch(line)
        if match is None or max(map(len, match.groups())) > 18:
            return False
        a, b, result = int(match[1]), int(match[3]), int(match[4])
        for number in (a, b):
            if number not in left:
                return False
            left.remove(number)
        made = {"+": a + b, "-": a - b, "*": a * b}.get(match[2])
        right = b != 0 and a == b * result if made is None else made == result
        if not right:
            return False
        left.append(result)
    return left == [int(given["target"])]


def _beliefs(response: str, reference: str, metadata: str) -> bool:
    """The beliefs are the reference's, in number, order and words."""
    return _bullets(response) == _bullets(reference)


def _bullets(text: str) -> list[str]:
    """The lines that begin with a hyphen, without punctuation and idle words.

    Of indented lines only the first line with a hyphen counts: the official code strips the lines
    after it has joined them.
    """
    lines = [line for line in text.splitlines() if line.strip().startswith("-")]
    bullets = "\n".join(lines).strip().split("\n")
    return [words for line in bullets if line.startswith("-") and (words := _words(line))]


def _words(line: str) -> str:
    bare = "".join(c for c in line.lower() if c not in string.punctuation and c != "’")
    return " ".join(_IDLE.sub(" ", bare).split())


def _travel(response: str, reference: str, metadata: str) -> bool:
    """The plan visits the reference's cities in its order, each for as many days."""
    given = json.loads(metadata)
    cities = [c for c in given["ground_truth_cities"].split("**") if c]
    days = [int(d) for d in given["ground_truth_durations"].split("**") if d]
    stays = _stays(_tagged(response, "Plan") or "")
    return stays[: len(cities)] == list(zip(cities, days, strict=True))


def _stays(plan: str) -> list[tuple[str, int]]:
    """Cities and days of a plan. Flights separate stays; a day of travel counts for both."""
    total, last = "", ""
    flights = []
    for line in plan.split("\n"):
        if found := _TOTAL.search(line):
            total = found[1]
        if found := _RANGE.search(line):
            last = found[2]
            if last == total:  # another plan may follow
                break
        if found := _FLIGHT.match(line):
            flights.append(found)
    if not last or not flights:
        return []
    cities = [flights[0][2], *(flight[3] for flight in flights)]
    turns = [1, *(int(flight[1]) for flight in flights), int(last)]
    return [
        (city, end - begin + 1)
        for city, (begin, end) in zip(cities, itertools.pairwise(turns), strict=True)
    ]


def _table(response: str, reference: str, metadata: str) -> float:
    """F1 of the rows in the answer's TSV block, or in the whole answer where it has no block."""
    _, mark, block = response.partition("```tsv")
    body = block if mark else response
    if mark and "```" in block:
        body = block.rpartition("```")[0]
    return row_f1(body.strip(), reference)


def _code(response: str, reference: str, metadata: str) -> bool:
    """The C++ of the answer's block passes the tests."""
    _, mark, block = response.replace("```c++", "```cpp").partition("```cpp")
    if not mark or "```" not in block:
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
