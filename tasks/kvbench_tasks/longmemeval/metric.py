"""LongMemEval's accuracy: a judge decides whether a response contains the answer."""

from __future__ import annotations

from typing import Any

from kvbench.judge import verdicts


def accuracy(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1 if the judge says yes, by the rubric of the question's type; called by lm-eval."""
    item = {
        "question": doc["asked"],
        "answer": doc["outputs"][0],
        "response": results[0].strip(),
    }
    return {"accuracy": verdicts(doc["rubric"], [item])[0]}
