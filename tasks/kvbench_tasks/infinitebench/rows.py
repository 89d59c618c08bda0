"""InfiniteBench's raw rows as rows of a task."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from kvbench.benchmark import Doc
from kvbench.data import sources
from kvbench.errors import UserError
from kvbench_tasks.infinitebench import source

LETTERS = "ABCD"


def rows(name: str, cache_dir: Path) -> list[Doc]:
    """All rows of a set, in the order of its file; see `Benchmark.docs`.

    Args:
        name: Of the set, e.g. "passkey".
        cache_dir: Where copies of tables are.
    """
    return [_row(name, raw) for raw in sources.rows(source(name), cache_dir)]


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
    """What a prompt says beside the row's context and input."""
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
    """The answers as text; of a choice, the option and then its letter."""
    found = raw["answer"] if isinstance(raw["answer"], list) else [raw["answer"]]
    if found and isinstance(found[0], list):
        found = found[0]
    if options := raw["options"][: len(LETTERS)]:
        if found[0] not in options:
            raise UserError(f"row {raw['id']}: the answer {found[0]!r} is none of {options}")
        found = [found[0], LETTERS[options.index(found[0])]]
    return [str(answer) for answer in found]
