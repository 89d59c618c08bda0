"""MMDU's ratings: a judge rates each answer from 1 to 10 in six aspects and overall."""

from __future__ import annotations

from typing import Any

from kvbench.benchmark import Ask, Doc


def ask(doc: Doc, response: str) -> Ask:
    """Ask the judge for all ratings of an answer at once; see `Benchmark.ask`."""
    fields = {"question": doc["asked"], "answer": doc["outputs"][0], "response": response.strip()}
    return Ask("dialogue_answer", fields)


def ratings(doc: Doc, results: list[Any]) -> dict[str, float]:
    """Return the ratings overall and for the six aspects, from 0.1 to 1; called by lm-eval."""
    _, marks = results
    return {
        "overall": marks["score"],
        **{respect: rating for respect, rating in marks.items() if respect != "score"},
    }
