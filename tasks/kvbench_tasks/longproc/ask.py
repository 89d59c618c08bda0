"""Conversion of LongProc's rows: where a prompt is split, and answer limits."""

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
"""Text at which the question begins (its last occurrence; earlier ones are in examples). The subject of the question
precedes it, so that no two rows have the same context.
"""

_TOKENS = {"0.5k": 1024, "2k": 3072, "8k": 10240}
"""Answer limits of the official configuration files (HELMET, `longproc_addon/configs`)."""


def ask(kind: str, length: str, record: dict[str, Any]) -> Doc:
    """Return a row; context and question concatenate to exactly the official prompt.

    Args:
        kind: One of the six tasks.
        length: "0.5k", "2k" or "8k".
        record: `id`, `input_prompt`, `reference_output` and `metadata` (JSON), all text.
    """
    prompt = record["input_prompt"]
    question_start = prompt.rfind(_QUESTION[kind])
    if question_start <= 0:  # without the mark, everything is context, and its last token starts the answer
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
    """Reject a task that runs model-written code, unless the user allows it.

    Raises:
        LeftOut: The user has not allowed it, or this machine cannot run it.
    """
    if kind == "pseudo_to_code" and (reason := obstacle()):
        raise LeftOut(reason)
