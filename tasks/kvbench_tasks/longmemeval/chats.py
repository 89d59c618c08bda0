"""LongMemEval's prompt: the whole history as JSON by session, then date and question."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import chain, zip_longest
from typing import Any

from kvbench.benchmark import Doc

_TASK = (
    "I will give you several history chats between you and a user. Please answer the question "
    "based on the relevant chat history."
)
_STEPS = (
    " Answer the question step by step: first extract all the relevant information, and then "
    "reason over the information to get the answer."
)
_LIMIT, _STEPS_LIMIT = 500, 800


def asked(record: Mapping[str, Any], *, notes: bool = False) -> Doc:
    """Return a row: the history is the context; date and question are the question.

    Args:
        record: A raw row.
        notes: Ask for the relevant information before the answer.
    """
    sessions = sorted(
        zip(record["haystack_dates"], record["haystack_sessions"], strict=True),
        key=lambda dated_session: dated_session[0],
    )
    history = "".join(
        f"\n### Session {number}:\nSession Date: {date}\nSession Content:\n\n{_turns(session)}\n"
        for number, (date, session) in enumerate(sessions, 1)
    )
    question_type = str(record["question_type"])
    # Unanswerable questions have their own rubric, regardless of type.
    rubric = "abstention" if "_abs" in record["question_id"] else question_type
    answer_cue = "Answer (step by step):" if notes else "Answer:"
    return {
        "context": f"{_TASK}{_STEPS if notes else ''}\n\n\nHistory Chats:\n\n{history}\n\n",
        "question": (f"Current Date: {record['question_date']}\nQuestion: {record['question']}\n{answer_cue}"),
        "outputs": [str(record["answer"])],
        "asked": record["question"],
        "rubric": f"longmemeval:{rubric}",
        "max_new_tokens": _STEPS_LIMIT if notes else _LIMIT,
        "extra": {"question_type": question_type},
    }


def alternating(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Order raw rows so that question types alternate until each is used up."""
    by_type: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_type.setdefault(record["question_type"], []).append(record)
    return [record for record in chain.from_iterable(zip_longest(*by_type.values())) if record]


def _turns(session: list[dict[str, Any]]) -> str:
    """Return the turns of a session as JSON, without the evidence marks."""
    visible_turns = [{key: value for key, value in turn.items() if key != "has_answer"} for turn in session]
    return json.dumps(visible_turns)
