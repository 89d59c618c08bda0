"""LongBench's raw rows as rows of a task."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from kvbench.benchmark import Doc
from kvbench.data import sources
from kvbench_tasks.longbench import source


def rows(name: str, cache_dir: Path) -> list[Doc]:
    """All rows of a set, in the order of its file; see `Benchmark.docs`.

    Args:
        name: Of the set, e.g. "hotpotqa".
        cache_dir: Where copies of tables are.
    """
    prompt = prompts()[name]
    return [_row(prompt, raw) for raw in sources.rows(source(name), cache_dir)]


@functools.cache
def prompts() -> dict[str, dict[str, Any]]:
    """By set: `domain`, `measure`, `max_new_tokens`, and the prompt's `context` and `question`."""
    path = Path(__file__).with_name("prompts.json")
    found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _row(prompt: dict[str, Any], raw: dict[str, Any]) -> Doc:
    return {
        "context": prompt["context"].format(context=raw["context"]),
        "question": prompt["question"].format(input=raw["input"]),
        "outputs": [str(answer) for answer in raw["answers"]],
        "max_new_tokens": prompt["max_new_tokens"],
        "measure": prompt["measure"],
        "first_line": prompt["domain"] == "few_shot",
        "classes": list(raw["all_classes"] or []),
        "extra": {"domain": prompt["domain"], "words": int(raw["length"]), "id": raw["_id"]},
    }
