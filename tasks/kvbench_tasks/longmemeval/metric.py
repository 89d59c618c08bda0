"""LongMemEval's accuracy: a judge decides whether a response contains the answer."""

from __future__ import annotations

from typing import Any

from kvbench.benchmark import Ask, Doc


def ask(doc: Doc, response: str) -> Ask:
    """Ask the judge with the rubric of the question's type; see `Benchmark.ask`."""
    fields = {"question": doc["asked"], "answer": doc["outputs"][0], "response": response.strip()}
    return Ask(doc["rubric"], fields)


def accuracy(doc: Doc, results: list[Any]) -> dict[str, float]:
    """Return 1 if the judge says yes, else 0; called by lm-eval."""
    _, marks = results
    return {"accuracy": marks["score"]}
