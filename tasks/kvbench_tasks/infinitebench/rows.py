"""Conversion of InfiniteBench's raw rows to task rows."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from kvbench.benchmark import Doc, Source
from kvbench.data import sources
from kvbench.errors import UserError

SETS = (
    "passkey",
    "number_string",
    "kv_retrieval",
    "longbook_sum_eng",
    "longbook_qa_eng",
    "longbook_choice_eng",
    "longdialogue_qa_eng",
    "math_find",
    "math_calc",
    "code_debug",
    "code_run",
)
"""Set names; a task is named `infinitebench_` plus the set's name."""

KVPRESS_SETS = ("longbook_choice_eng", "longdialogue_qa_eng", "code_debug")
"""Sets that KVPress scores by its own rules."""

LETTERS = "ABCD"


def source(set_name: str) -> Source:
    """Return a set's raw file; the type of `answer` differs between sets."""
    return Source(
        "xinrongzhang2022/InfiniteBench",
        file=f"{set_name}.jsonl",
        columns=("id", "context", "input", "answer", "options"),
        revision="90f0394333616266d9fe85824ceaf505093cbaa5",
    )


def rows(set_name: str, cache_dir: Path, rules: str = "") -> list[Doc]:
    """Return all rows of a set, in file order; see `Benchmark.docs`.

    Args:
        set_name: Name of the set, such as "passkey".
        cache_dir: Folder with the cached tables.
        rules: Prefix of the measure's name: "" for the official rules, or "kvpress_".
    """
    documents = [_row(set_name, record) for record in sources.rows(source(set_name), cache_dir)]
    return [{**document, "measure": rules + document["measure"]} for document in documents]


@functools.cache
def prompts() -> dict[str, dict[str, Any]]:
    """Return `domain`, `measure`, `max_new_tokens`, `context`, `question` and `gen_prefix` per set."""
    path = Path(__file__).with_name("prompts.json")
    templates: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return templates


def _row(set_name: str, record: dict[str, Any]) -> Doc:
    prompt = prompts()[set_name]
    fields = {
        "context": record["context"],
        "input": record["input"],
        **_question_fields(set_name, record),
    }
    return {
        **{section: prompt[section].format(**fields) for section in ("context", "question", "gen_prefix")},
        "outputs": _answers(record),
        "max_new_tokens": prompt["max_new_tokens"],
        "measure": prompt["measure"],
        "extra": {"domain": prompt["domain"], "id": record["id"]},
    }


def _question_fields(set_name: str, record: dict[str, Any]) -> dict[str, str]:
    """Return the prompt's fields besides the row's context and input."""
    if set_name == "math_find":
        match = re.search(r"The .+ of", record["input"])
        if match is None:
            raise UserError(f"math_find, row {record['id']}: {record['input']!r} names no number to find")
        return {"prefix": f"What is {match[0].lower()[:-3]} in the following list?"}
    if set_name == "code_run":
        match = re.search(r"(func_[0-9]+)\(-?[0-9]+\)", record["input"])
        if match is None:
            raise UserError(f"code_run, row {record['id']}: {record['input']!r} calls no function")
        return {"func": match[1], "call": match[0]}
    return dict(zip("abcd", record["options"], strict=False))


def _answers(record: dict[str, Any]) -> list[str]:
    """Return the answers as text; for a choice, the option and its letter."""
    answers = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
    if answers and isinstance(answers[0], list):
        answers = answers[0]
    if options := record["options"][: len(LETTERS)]:
        if answers[0] not in options:
            raise UserError(f"row {record['id']}: the answer {answers[0]!r} is not one of {options}")
        answers = [answers[0], LETTERS[options.index(answers[0])]]
    return [str(answer) for answer in answers]
