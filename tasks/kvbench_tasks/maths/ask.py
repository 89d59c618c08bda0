"""Prompt and metric of the mathematics tasks."""

from __future__ import annotations

from typing import Any

from kvbench.benchmark import Doc
from kvbench_tasks.maths.boxed import boxed
from kvbench_tasks.maths.equal import equal

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def ask(problem: str, answer: str, /, **extra: str | int) -> Doc:
    """Return a row: the problem is the context, the instruction after it the question.

    Args:
        problem: Statement of the problem.
        answer: Reference answer.
        extra: Fields that a report may group by.
    """
    return {
        "context": problem.strip() + "\n",
        "question": INSTRUCTION,
        "outputs": [answer],
        "extra": extra,
    }


def accuracy(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return 1 if the response's last box holds the reference answer, else 0.

    Every problem has the same number of repeats, so the mean over all responses is the mean pass@1.
    """
    answer = boxed(results[0])
    return {"accuracy": float(answer is not None and equal(doc["outputs"][0], answer))}
