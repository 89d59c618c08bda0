"""The prompt of the mathematics tasks, and their metric."""

from __future__ import annotations

from typing import Any

from kvbench.benchmark import Doc
from kvbench_tasks.maths.boxed import boxed
from kvbench_tasks.maths.equal import equal

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def ask(problem: str, answer: str, /, **extra: str | int) -> Doc:
    """Make a row: the problem is the context, the instruction below it the question.

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
    """1 where the last box of the response holds the reference answer; 0 without a box.

    The mean over all responses is the average pass@1 over problems, as each has the same number of
    repeats.
    """
    answer = boxed(results[0])
    return {"accuracy": float(answer is not None and equal(doc["outputs"][0], answer))}
