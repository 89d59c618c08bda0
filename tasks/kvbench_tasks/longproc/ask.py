"""From LongProc's rows to ours: where a prompt is parted, and how long an answer may be."""

from __future__ import annotations

from typing import Any

from kvbench.benchmark import Doc
from kvbench.errors import LeftOut

_QUESTION = {
    "countdown": "Target: ",
    "path_traversal": "Now find the route from ",
    "tom_tracking": "[QUESTION]",
    "html_to_tsv": "[TARGET INFORMATION]",
    "travel_planning": "Find a trip plan ",
    "pseudo_to_code": "[CODE]:",
}
"""What the question begins with: its last occurrence, the earlier ones are in examples. What a row
asks about stands before it, so that no two rows have the same context."""

_TOKENS = {"0.5k": 1024, "2k": 3072, "8k": 9216}


def ask(kind: str, length: str, row: dict[str, Any]) -> Doc:
    """Make a row. Context and question are the official prompt, to the character.

    Args:
        kind: Which of the six tasks.
        length: "0.5k", "2k" or "8k".
        row: `id`, `input_prompt`, `reference_output` and `metadata` (JSON), all text.
    """
    prompt = row["input_prompt"]
    at = prompt.rfind(_QUESTION[kind])
    if at <= 0:  # no such mark: all is context, and its last token starts the answer
        at = len(prompt)
    return {
        "context": prompt[:at],
        "question": prompt[at:],
        "outputs": [row["reference_output"]],
        "max_new_tokens": _TOKENS[length],
        "kind": kind,
        "metadata": row["metadata"],
        "extra": {"id": row["id"]},
    }


def allow(kind: str) -> None:
    """Keep back what runs code that a model wrote, unless the user has asked for it.

    Raises:
        LeftOut: The user has not, or this machine cannot.
    """
    if kind == "pseudo_to_code":
        from kvbench_tasks.longproc.code import obstacle

        if why := obstacle():
            raise LeftOut(why)
