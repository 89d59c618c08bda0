"""LongBench v2's accuracy (`extract_answer` of its pred.py), called by lm-eval."""

from __future__ import annotations

import re
from typing import Any


def accuracy(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1 where the response gives the answer's letter; 0 where it gives another or none."""
    return {"accuracy": float(letter(results[0]) == doc["outputs"][0])}


def letter(response: str) -> str | None:
    """The letter in "The correct answer is (A)", or else in "The correct answer is A".

    Asterisks are dropped first; no other wording counts.
    """
    reply = response.replace("*", "")
    for pattern in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        if match := re.search(pattern, reply):
            return match[1]
    return None
