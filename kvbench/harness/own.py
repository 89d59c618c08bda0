"""The user's own data as a task: `--task ./mine.jsonl`.

Each line is an object with `context`, `question` and `answers` (a string or a list of strings).
It may also have `metric` (one of `METRICS`; default `contains_all`), `max_new_tokens` (default 128)
and `until` (a string or a list of strings that end the answer). Other fields are errors. Lines with
the same context share its prefill.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbench import metrics
from kvbench.benchmark import Benchmark, Doc
from kvbench.data.spool import Spool
from kvbench.errors import UserError, nearest, quoted, unknown
from kvbench.harness.rows import complete, read_rows

_MAX_NEW_TOKENS = 128
_LARGEST = 2**31 - 1
_METRIC = "contains_all"
_REQUIRED = ("context", "question", "answers")
_OTHERWISE = {
    "context": ("document", "passage", "prompt", "text"),
    "question": ("input", "query", "instruction"),
    "answers": ("outputs", "output", "answer", "targets", "target", "references", "reference"),
}
"""What other data sets call the required keys."""
_KEYS = (*_REQUIRED, "metric", "max_new_tokens", "until")


def own_benchmark(path: str | Path) -> Benchmark:
    """Make a benchmark of a JSONL file; its one task is named after the file.

    Args:
        path: The file.

    Raises:
        UserError: The file cannot be read, or a line is not valid; the message names it.
    """
    file = Path(path)
    if not file.stem:
        raise UserError(f"{path} has no name to call a task by")
    rows: Spool[Doc] = Spool()
    named = set()
    for number, row in read_rows(file):
        rows.append(_row(row, f"{file}:{number}"))
        named.add(row.get("metric", _METRIC))
    if not rows:
        raise UserError(f"{file} has no rows")
    return Benchmark(
        name="own",
        leaves=(file.stem,),
        docs=functools.partial(_docs, rows),
        yaml=Path(__file__).parent,
        summary=f"the rows of {file}",
        source=str(file),
        metric=named.pop() if len(named) == 1 else "score",
        sized=False,
    )


def _docs(rows: Sequence[Doc], leaf: str, **_: Any) -> Sequence[Doc]:
    return rows


def _row(row: Any, where: str) -> Doc:
    """Check a line and bring it into the form of `Benchmark.docs`."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: must be an object with context, question and answers")
    for name in _REQUIRED:
        if name not in row:
            raise UserError(f"{where}: {name!r} is missing{_spelt(name, row)}")
    for name in row:
        if name not in _KEYS:
            hint = nearest(name, _KEYS, n=1) or f"; there are {', '.join(_KEYS)}"
            raise UserError(f"{where}: unknown key {quoted(name)}{hint}")
    for name in ("context", "question"):
        if not isinstance(row[name], str) or not row[name].strip():
            raise UserError(f"{where}: {name!r} must be a text that is not empty")
    answers = [row["answers"]] if isinstance(row["answers"], str) else row["answers"]
    if not isinstance(answers, list) or not answers or not all(map(_filled, answers)):
        raise UserError(f"{where}: 'answers' must be a text or a list of texts that are not empty")
    metric = row.get("metric", _METRIC)
    if not isinstance(metric, str) or metric not in METRICS:
        raise UserError(f"{where}: {unknown('metric', metric, METRICS)}")
    limit = row.get("max_new_tokens", _MAX_NEW_TOKENS)
    if type(limit) is not int or not 1 <= limit <= _LARGEST:
        raise UserError(f"{where}: 'max_new_tokens' must be a whole number from 1 to {_LARGEST}")
    until = row.get("until", [])
    until = [until] if isinstance(until, str) else until
    if not isinstance(until, list) or not all(map(_filled, until)):
        raise UserError(f"{where}: 'until' must be a text or a list of texts that are not empty")
    parted = row["context"][-1].isspace() or row["question"][0].isspace()
    doc = {
        "context": row["context"] + ("" if parted else "\n"),
        "question": row["question"],
        "outputs": answers,
        "metric": metric,
        "max_new_tokens": limit,
        "until": until,
    }
    return complete(doc, where)


def _filled(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _spelt(name: str, row: dict[str, Any]) -> str:
    other = next((key for key in _OTHERWISE.get(name, ()) if key in row), "")
    if not other:
        near = nearest(name, map(str, row), n=1)
        other = near.removeprefix("; did you mean ").removesuffix("?")
    return f"; rename {quoted(other)} to {name!r}" if other else ""


# --- metrics --------------------------------------------------------------------------------------


def process_results(doc: Doc, results: list[str]) -> dict[str, float]:
    """Score a response with the metric that its row names; called by lm-eval."""
    value = METRICS[doc["metric"]](results[0], doc["outputs"])
    return {"score": value, doc["metric"]: value}


def contains_all(response: str, answers: Sequence[str]) -> float:
    """The fraction of the answers that the response contains, ignoring case."""
    low = response.lower()
    return sum(answer.lower() in low for answer in answers) / len(answers)


def exact(response: str, answers: Sequence[str]) -> float:
    """1 if the response equals an answer, ignoring case, punctuation, articles and white space."""
    return float(_words(response) in [_words(answer) for answer in answers])


def f1(response: str, answers: Sequence[str]) -> float:
    """F1 of the words shared with the best answer, as SQuAD defines it (arXiv:1606.05250)."""
    found = _words(response)
    return max(metrics.f1_words(found, _words(answer), both_empty=1.0) for answer in answers)


def rouge_l(response: str, answers: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words with the best answer (ROUGE-L, unstemmed)."""
    return metrics.best(metrics.rouge_l, response, answers)


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "contains_all": contains_all,
    "exact": exact,
    "f1": f1,
    "rougeL": rouge_l,
}

_words = functools.partial(metrics.answer_words, split_first=True)
