"""RULER's metrics (scripts/eval/synthetic/constants.py), called by lm-eval."""

from __future__ import annotations

import re
from typing import Any

_UNPRINTABLE = re.compile(r"[\x00-\x1f]")


def string_match_all(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the fraction of the reference answers that the response contains, ignoring case."""
    matches = _match_outputs(doc, results)
    return {"string_match": sum(matches) / len(matches)}


def string_match_part(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return 1 if the response contains any of the reference answers, ignoring case, else 0."""
    return {"string_match": float(any(_match_outputs(doc, results)))}


def _match_outputs(doc: dict[str, Any], results: list[str]) -> list[bool]:
    response = _UNPRINTABLE.sub("\n", results[0].strip()).strip().lower()
    return [output.lower() in response for output in doc["outputs"]]
