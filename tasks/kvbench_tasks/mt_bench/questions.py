"""Conversion of MT-Bench's questions to dialogues without reference answers in their history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvbench.benchmark import Doc
from kvbench.errors import UserError

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_TURNS = 2
_FRAME = {"user": "USER: ", "assistant": "\n\nASSISTANT: ", "end": "\n\n"}
"""Without a chat template: the words of StreamingLLM's `run_streaming_llama.py`."""


def dialogue(record: Mapping[str, Any]) -> Doc:
    """Convert a question to a dialogue of two turns.

    Args:
        record: The raw question: `category`, `prompt` (its two messages) and `reference` (two answers, or none; an
            answer can be empty).

    Raises:
        UserError: It has another number of messages or answers.
    """
    return {"turns": _turns(record), "frame": _FRAME}


def stream(records: Iterable[Mapping[str, Any]]) -> Doc:
    """Convert all questions to one dialogue, in which every question follows the answers to those before it.

    Raises:
        UserError: A question has another number of messages or answers than `dialogue` expects.
    """
    return {"turns": [turn for record in records for turn in _turns(record)], "frame": _FRAME}


def _turns(record: Mapping[str, Any]) -> list[Doc]:
    messages, references = record["prompt"], record["reference"] or [""] * _TURNS
    if len(messages) != _TURNS or len(references) != _TURNS or record["category"] not in CATEGORIES:
        raise UserError(
            f"MT-Bench: a {record['category']} question has {len(messages)} messages and {len(references)} reference "
            f"answers, not {_TURNS} in one of its categories; fetch the data again"
        )
    return [
        {
            "context": message,
            "question": "",
            "outputs": [reference],
            "messages": [*messages],
            "references": [*references],
            "category": record["category"],
            "turn": turn,
            "extra": {"category": record["category"], "turn": turn},
        }
        for turn, (message, reference) in enumerate(zip(messages, references, strict=True))
    ]
