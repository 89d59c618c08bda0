"""Fraction of correct items in correct places."""

from __future__ import annotations

import re
from typing import Any

_NUMBERED = re.compile(r"[\W_]*(?:item\s+)?(\d+)[\W_]+(.*)", re.IGNORECASE)
_LISTED = re.compile(r"^\s*(?:\d+[.):]|[-*•])\s+")
_ENDS = " \t.,;:!?*_`'\""


def placed(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the fraction of the row's `outputs` at their place in the response; called by lm-eval.

    The row's `form` defines items and places:

    - "numbered": line feeds and commas separate items; an item's place is the number that it begins
      with, and of several items with the same number the first counts.
    - "words": items are words; the place is the position.
    - "lines": items are lines, or sentences; the place is the position among those that are not
      empty. Numbers and bullets before an item are dropped.

    Items are compared without regard to case, white space, and punctuation at their ends. Items at places beyond those
    of the answer are not judged.
    """
    outputs = [_bare(output) for output in doc["outputs"]]
    placed_items = _places(doc["form"], results[0])
    matches = [placed_items.get(position) == output for position, output in enumerate(outputs)]
    return {"placed": sum(matches) / len(matches)}


def _places(form: str, response: str) -> dict[int, str]:
    """Return the response's items by place, from 0."""
    if form == "words":
        return dict(enumerate(map(_bare, response.split())))
    placed_items: dict[int, str] = {}
    if form == "numbered":
        for fragment in re.split(r"[\n,]", response):
            if match := _NUMBERED.match(fragment):
                placed_items.setdefault(int(match[1]) - 1, _bare(match[2]))
        return placed_items
    if form == "lines":
        lines = [_LISTED.sub("", line, count=1) for line in response.split("\n")]
        fragments = [fragment for line in lines for fragment in re.split(r"(?<=[.!?])\s", line)]
        return dict(enumerate(filter(None, map(_bare, fragments))))
    raise ValueError(f"no form {form!r}")


def _bare(item: str) -> str:
    return " ".join(item.lower().split()).strip(_ENDS)
