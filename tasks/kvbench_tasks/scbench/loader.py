"""Conversion of SCBench's rows to dialogues or separate questions."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from kvbench.benchmark import Doc
from kvbench.errors import UserError

Raw = Mapping[str, Any]

_LIMITS = {
    "scbench_choice_eng": 40,
    "scbench_qa_eng": 40,
    "scbench_qa_chn": 40,
    "scbench_kv": 150,
    "scbench_mf": 5,
    "scbench_prefix_suffix": 150,
    "scbench_repoqa": 1024,
    "scbench_summary": 200,
    "scbench_vt": 30,
    "scbench_many_shot": 10,
}
_MIXED = {
    "scbench_summary_with_needles": {"scbench_summary": 800, "scbench_passkey": 15},
    "scbench_repoqa_and_kv": {"scbench_repoqa": 1024, "scbench_kv": 80},
}
"""New tokens per answer; in a mixed task, by the kind of turn."""

_FRAME = {"user": "", "assistant": "", "end": "\n\n"}


@functools.cache
def prompts() -> dict[str, dict[str, str]]:
    """Return SCBench's prompts, verbatim except for field names."""
    json_text = files("kvbench_tasks.scbench").joinpath("prompts.json").read_text(encoding="utf-8")
    templates: dict[str, dict[str, str]] = json.loads(json_text)
    return templates


def dialogues(task: str, records: Sequence[Raw]) -> list[Doc]:
    """Convert to multi-turn mode: a row is a dialogue whose first turn gives the context."""
    functions = _functions(records)
    documents = []
    for record in records:
        raw_turns = record["multi_turns"]
        context = _context(task, record, _prefix(raw_turns[0]) if task == "scbench_mf" else "")
        turns = []
        for turn_index, turn in enumerate(raw_turns):
            is_first = turn_index == 0
            doc = _doc(task, record, turn, functions, bare=is_first)
            turns.append({**doc, "context": f"{context}\n\n" if is_first else ""})
        documents.append({"turns": turns, "frame": _FRAME})
    return documents


def requests(task: str, records: Sequence[Raw]) -> list[Doc]:
    """Convert to multi-request mode: each question follows the context directly, as in the official code."""
    functions = _functions(records)
    documents = []
    for record in records:
        raw_turns = record["multi_turns"]
        context = _context(task, record, raw_turns[0]["input"])
        for turn in raw_turns:
            doc = _doc(task, record, turn, functions)
            documents.append({**doc, "context": context})
    return documents


def _context(task: str, record: Raw, prefix: str) -> str:
    # In variable tracking, the context is `input`; in Math.Find, it is a list of numbers.
    context = record["context"] if "context" in record else record["input"]
    return prompts()[task]["context"].format(context=context, prefix=prefix)


def _prefix(turn: Raw) -> str:
    """Turn Math.Find's "The second smallest number is" into a question."""
    match = re.search(r"The .+ is", turn["input"])
    if match is None:
        raise UserError(f"scbench_mf: {turn['input'][:60]!r} does not say which number to find")
    return f"What is {match[0].lower()[:-3]}?"


def _doc(
    task: str,
    record: Raw,
    turn: Raw,
    functions: Mapping[str, Mapping[str, str]],
    bare: bool = False,
) -> Doc:
    """Return a question with everything that its metric needs.

    Args:
        task: Name of the SCBench task.
        record: The raw row.
        turn: The turn of the row that asks the question.
        functions: The functions of each repository.
        bare: Whether Math.Find's prefix already precedes the context.
    """
    kind = turn["task"] if task in _MIXED else task
    template = "{input}" if bare and task == "scbench_mf" else prompts()[task]["question"]
    fields = {"input": turn["input"], "prefix": ""}
    answer = turn["answer"]
    outputs = [str(alternative) for alternative in answer] if isinstance(answer, list) else [str(answer)]
    if kind == "scbench_mf":
        fields["prefix"] = _prefix(turn)
    if kind == "scbench_choice_eng":
        options = turn["options"]
        fields |= dict(zip("abcd", options, strict=True))
        outputs.append("ABCD"[options.index(answer)])
    doc: Doc = {
        "question": template.format(**fields),
        "outputs": outputs,
        "answer": str(answer).strip(),
        "kind": kind,
        "max_new_tokens": _MIXED[task][kind] if task in _MIXED else _LIMITS[task],
        "until": [],
    }
    if "repoqa" in task:
        candidates = functions[record["repo"]] if kind == "scbench_repoqa" else {}
        function_name = turn["name"] if kind == "scbench_repoqa" else ""
        doc |= {
            "lang": record["lang"],
            "name": function_name,
            "names": list(candidates),
            "codes": list(candidates.values()),
        }
    if task in _MIXED:
        doc["extra"] = {"task": kind}
    return doc


def _functions(records: Iterable[Raw]) -> dict[str, dict[str, str]]:
    """Return the functions that any row asks for, by repository: the candidates of every answer."""
    functions: dict[str, dict[str, str]] = {}
    for record in records:
        for turn in record["multi_turns"]:
            if "repo" in record and turn.get("task", "scbench_repoqa") == "scbench_repoqa":
                functions.setdefault(record["repo"], {})[turn["name"]] = turn["answer"]
    return functions
