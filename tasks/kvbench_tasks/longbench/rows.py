"""LongBench's raw rows as rows of a task."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from kvbench.benchmark import Doc, Source
from kvbench.data import sources

DOMAINS = {
    "single_doc_qa": ("narrativeqa", "qasper", "multifieldqa_en"),
    "multi_doc_qa": ("hotpotqa", "2wikimqa", "musique"),
    "summarization": ("gov_report", "qmsum", "multi_news"),
    "few_shot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"),
    "code": ("lcc", "repobench-p"),
}
"""The sets by domain; a leaf is named `longbench_` and the set's name."""

SETS = tuple(name for sets in DOMAINS.values() for name in sets)

FIELDS = ("input", "context", "answers", "length", "all_classes", "_id")


def source(set_name: str) -> Source:
    """A set's table. The dataset's repository holds a loading script and one archive of tables."""
    return Source(
        "zai-org/LongBench",
        file=f"data.zip:data/{set_name}.jsonl",
        columns=FIELDS,
        revision="4a90f81c8db79f60c15f77dcd207a1099038c775",
    )


def rows(set_name: str, cache_dir: Path) -> list[Doc]:
    """Give all rows of a set, in the order of its file; see `Benchmark.docs`.

    Args:
        set_name: Name of the set, such as "hotpotqa".
        cache_dir: Folder that holds the copies of tables.
    """
    prompt = prompts()[set_name]
    return [_row(prompt, record) for record in sources.rows(source(set_name), cache_dir)]


@functools.cache
def prompts() -> dict[str, dict[str, Any]]:
    """By set: `domain`, `measure`, `max_new_tokens`, and the prompt's `context` and `question`."""
    path = Path(__file__).with_name("prompts.json")
    templates: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return templates


def _row(prompt: dict[str, Any], record: dict[str, Any]) -> Doc:
    return {
        "context": prompt["context"].format(context=record["context"]),
        "question": prompt["question"].format(input=record["input"]),
        "outputs": [str(answer) for answer in record["answers"]],
        "max_new_tokens": prompt["max_new_tokens"],
        "measure": prompt["measure"],
        "first_line": prompt["domain"] == "few_shot",
        "classes": list(record["all_classes"] or []),
        "extra": {"domain": prompt["domain"], "words": int(record["length"]), "id": record["_id"]},
    }
