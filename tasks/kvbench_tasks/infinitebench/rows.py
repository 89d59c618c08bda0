"""InfiniteBench's raw rows as rows of a task."""

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
"""The sets; a leaf is named `infinitebench_` and the set's name."""

KVPRESS_SETS = ("longbook_choice_eng", "longdialogue_qa_eng", "code_debug")
"""The sets that KVPress scores by rules of its own."""

LETTERS = "ABCD"


def source(name: str) -> Source:
    """A set's raw file: the type of `answer` differs between the sets."""
    return Source(
        "xinrongzhang2022/InfiniteBench",
        file=f"{name}.jsonl",
        columns=("id", "context", "input", "answer", "options"),
        revision="90f0394333616266d9fe85824ceaf505093cbaa5",
    )


def rows(name: str, cache_dir: Path, rules: str = "") -> list[Doc]:
    """Give all rows of a set, in the order of its file; see `Benchmark.docs`.

    Args:
        name: Name of the set, such as "passkey".
        cache_dir: Folder that holds the copies of tables.
        rules: Prefix of the measure's name: "" for the official rules, or "kvpress_".
    """
    made = [_row(name, raw) for raw in sources.rows(source(name), cache_dir)]
    return [{**row, "measure": rules + row["measure"]} for row in made]


@functools.cache
def prompts() -> dict[str, dict[str, Any]]:
    """By set: `domain`, `measure`, `max_new_tokens`, `context`, `question` and `gen_prefix`."""
    path = Path(__file__).with_name("prompts.json")
    found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _row(name: str, raw: dict[str, Any]) -> Doc:
    prompt = prompts()[name]
    fields = {"context": raw["context"], "input": raw["input"], **_asked(name, raw)}
    return {
        **{part: prompt[part].format(**fields) for part in ("context", "question", "gen_prefix")},
        "outputs": _answers(raw),
        "max_new_tokens": prompt["max_new_tokens"],
        "measure": prompt["measure"],
        "extra": {"domain": prompt["domain"], "id": raw["id"]},
    }


def _asked(name: str, raw: dict[str, Any]) -> dict[str, str]:
    """What a prompt says besides the row's context and input."""
    if name == "math_find":
        found = re.search(r"The .+ of", raw["input"])
        if found is None:
            raise UserError(f"math_find, row {raw['id']}: {raw['input']!r} names no number to find")
        return {"prefix": f"What is {found[0].lower()[:-3]} in the following list?"}
    if name == "code_run":
        found = re.search(r"(func_[0-9]+)\(-?[0-9]+\)", raw["input"])
        if found is None:
            raise UserError(f"code_run, row {raw['id']}: {raw['input']!r} calls no function")
        return {"func": found[1], "call": found[0]}
    return dict(zip("abcd", raw["options"], strict=False))


def _answers(raw: dict[str, Any]) -> list[str]:
    """The answers as text; for a choice, the option and then its letter."""
    found = raw["answer"] if isinstance(raw["answer"], list) else [raw["answer"]]
    if found and isinstance(found[0], list):
        found = found[0]
    if options := raw["options"][: len(LETTERS)]:
        if found[0] not in options:
            raise UserError(f"row {raw['id']}: the answer {found[0]!r} is not one of {options}")
        found = [found[0], LETTERS[options.index(found[0])]]
    return [str(answer) for answer in found]
