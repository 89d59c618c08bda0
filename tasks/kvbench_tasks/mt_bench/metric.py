"""MT-Bench's ratings: FastChat's judge prompts, by turn and by whether there is a reference answer."""

from __future__ import annotations

from typing import Any

from kvbench.benchmark import Ask, Doc

_NEED_REFERENCE = ("math", "reasoning", "coding")
"""FastChat's `NEED_REF_CATS`."""


def ask(doc: Doc, response: str) -> Ask:
    """Ask the judge for the rating of an answer; see `Benchmark.ask`.

    The judge of a second turn sees the first turn with the model's own answer.
    """
    turn, messages = doc["turn"], doc["messages"]
    references = doc["references"][: turn + 1]
    fields = {"question": messages[turn], "answer": references[turn], "response": response.strip()}
    has_references = doc["category"] in _NEED_REFERENCE and all(references)
    variant = "single-math-v1" if has_references else "single-v1"
    if turn:
        fields |= {
            "first_question": messages[0],
            "first_answer": references[0],
            "first_response": doc["history"][-1].strip(),
        }
        variant += "-multi-turn"
    return Ask(f"mt_bench:{variant}", fields)


def rating(doc: Doc, results: list[Any]) -> dict[str, float]:
    """Return the rating, from 0.1 to 1; called by lm-eval."""
    _, marks = results
    return {"rating": marks["score"]}
