"""From LongProc's rows to ours: where a prompt is split, and how long an answer may be."""

from __future__ import annotations

from typing import Any

from kvbench.benchmark import Doc
from kvbench.errors import LeftOut
from kvbench_tasks.longproc.code import obstacle

_QUESTION = {
    "countdown": "Target: ",
    "path_traversal": "Now find the route from ",
    "tom_tracking": "[QUESTION]",
    "html_to_tsv": "[TARGET INFORMATION]",
    "travel_planning": "Find a trip plan ",
    "pseudo_to_code": "[CODE]:",
}
"""Text at which the question begins, at its last occurrence; earlier ones are in examples. What a
row asks about stands before it, so that no two rows have the same context."""

_TOKENS = {"0.5k": 1024, "2k": 3072, "8k": 10240}
"""Answer limits of the official configuration files (HELMET, `longproc_addon/configs`)."""


def ask(kind: str, length: str, record: dict[str, Any]) -> Doc:
    """Make a row. Context and question are the official prompt, to the character.

    Args:
        kind: One of the six tasks.
        length: "0.5k", "2k" or "8k".
        record: `id`, `input_prompt`, `reference_output` and `metadata` (JSON), all text.
    """
    prompt = record["input_prompt"]
    question_start = prompt.rfind(_QUESTION[kind])
    if question_start <= 0:  # without the mark all is context, and its last token starts the answer
        question_start = len(prompt)
    return {
        "context": prompt[:question_start],
        "question": prompt[question_start:],
        "outputs": [record["reference_output"]],
        "max_new_tokens": _TOKENS[length],
        "kind": kind,
        "metadata": record["metadata"],
        "extra": {"id": record["id"]},
    }


def allow(kind: str) -> None:
    """Refuse a task that runs code that a model wrote, unless the user has allowed it.

    Raises:
        LeftOut: The user has not allowed it, or this machine cannot run it.
    """
    if kind == "pseudo_to_code" and (reason := obstacle()):
        raise LeftOut(reason)
