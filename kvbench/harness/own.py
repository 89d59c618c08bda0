"""The user's own data as a task: `--task ./mine.jsonl`.

Each line is an object with `context`, `question` and `answers` (a string or a list of strings). It may also have
`metric` (one of `METRICS`; default `contains_all`), `max_new_tokens` (default 128) and `until` (a string or a list of
strings that end the answer). Other fields are errors. Lines with the same context share its prefill.

If no line has `answers`, only the fidelity to the full cache is measured. Then `question` may be missing, too, in all
lines: the model continues the text, without a chat template.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbench import metrics
from kvbench.benchmark import FIDELITY, Benchmark, Doc
from kvbench.data.spool import Spool
from kvbench.errors import UserError, nearest, quoted, unknown
from kvbench.harness.rows import complete, read_rows

_MAX_NEW_TOKENS = 128
_LARGEST = 2**31 - 1
_METRIC = "contains_all"
_REQUIRED = ("context", "question", "answers")
_LEAD = 12
"""Words at the end of a text without a question that take its place: what follows a context is never evicted."""
_OTHERWISE = {
    "context": ("document", "passage", "prompt", "text"),
    "question": ("input", "query", "instruction"),
    "answers": ("outputs", "output", "answer", "targets", "target", "references", "reference"),
}
"""Names of the required keys in other data sets."""
_KEYS = (*_REQUIRED, "metric", "max_new_tokens", "until")


def own_benchmark(path: str | Path) -> Benchmark:
    """Return a benchmark for a JSONL file; its one task is named after the file.

    Raises:
        UserError: The file cannot be read, or a line is invalid; the message names it.
    """
    rows_path = Path(path)
    if not rows_path.stem:
        raise UserError(f"{path} has no name to call a task by; rename the file")
    rows: Spool[Doc] = Spool()
    metric_names = set()
    first_keys: frozenset[str] | None = None
    for line_number, row in read_rows(rows_path):
        location = f"{rows_path}:{line_number}"
        keys = _keys(row, location)
        first_keys = keys if first_keys is None else first_keys
        if keys != first_keys:
            (key, *_) = sorted(keys ^ first_keys)
            raise UserError(f"{location}: {key!r} must be in all rows or in none; row 1 differs")
        rows.append(_row(row, location))
        metric_names.add(row.get("metric", _METRIC) if "answers" in keys else FIDELITY)
    if first_keys is None:
        raise UserError(f"{rows_path} has no rows")
    return Benchmark(
        name="own",
        leaves=(rows_path.stem,),
        docs=functools.partial(_docs, rows),
        yaml=Path(__file__).parent,
        summary=f"the rows of {rows_path}",
        source=str(rows_path),
        metric=metric_names.pop() if len(metric_names) == 1 else "score",
        sized=False,
        plain=frozenset() if "question" in first_keys else frozenset({rows_path.stem}),
    )


def _docs(rows: Sequence[Doc], leaf: str, **_: Any) -> Sequence[Doc]:
    return rows


def _keys(row: Any, location: str) -> frozenset[str]:
    """Return which of the required keys a line has; without answers, the question may be missing, too."""
    if not isinstance(row, dict):
        raise UserError(f"{location}: must be an object with context, question and answers")
    keys = frozenset(key for key in _REQUIRED if key in row)
    for key in _REQUIRED:
        is_optional = key == "answers" or (key == "question" and "answers" not in keys)
        if key not in keys and (not is_optional or _spelt(key, row)):
            raise UserError(f"{location}: {key!r} is missing{_spelt(key, row)}")
    if "answers" not in keys and "metric" in row:
        raise UserError(f"{location}: 'metric' needs 'answers'; without them, fidelity is the metric")
    return keys


def _row(row: dict[str, Any], location: str) -> Doc:
    """Check a line and convert it to the form of `Benchmark.docs`."""
    for key in row:
        if key not in _KEYS:
            suggestion = nearest(key, _KEYS, max_matches=1) or f"; there are {', '.join(_KEYS)}"
            raise UserError(f"{location}: unknown key {quoted(key)}{suggestion}")
    for key in ("context", "question"):
        if key in row and (not isinstance(row[key], str) or not row[key].strip()):
            raise UserError(f"{location}: {key!r} must be a text that is not empty")
    has_answers = "answers" in row
    answers = [row["answers"]] if has_answers and isinstance(row["answers"], str) else row.get("answers", [])
    if has_answers and (not isinstance(answers, list) or not answers or not all(map(_filled, answers))):
        raise UserError(f"{location}: 'answers' must be a text or a list of texts that are not empty")
    context, question = (row["context"], row["question"]) if "question" in row else _parted(row["context"], location)
    metric = row.get("metric", _METRIC)
    if not isinstance(metric, str) or metric not in METRICS:
        raise UserError(f"{location}: {unknown('metric', metric, METRICS)}")
    token_limit = row.get("max_new_tokens", _MAX_NEW_TOKENS)
    if type(token_limit) is not int or not 1 <= token_limit <= _LARGEST:
        raise UserError(f"{location}: 'max_new_tokens' must be a whole number from 1 to {_LARGEST}")
    stop_texts = row.get("until", [])
    stop_texts = [stop_texts] if isinstance(stop_texts, str) else stop_texts
    if not isinstance(stop_texts, list) or not all(map(_filled, stop_texts)):
        raise UserError(f"{location}: 'until' must be a text or a list of texts that are not empty")
    has_space = context[-1].isspace() or question[0].isspace()
    document = {
        "context": context + ("" if has_space else "\n"),
        "question": question,
        "outputs": answers,
        "metric": metric,
        "max_new_tokens": token_limit,
        "until": stop_texts,
    }
    return complete(document, location, has_references=has_answers)


def _parted(text: str, location: str) -> tuple[str, str]:
    """Return a text without its last words, and these."""
    words = [*re.finditer(r"\S+", text)]
    if len(words) <= _LEAD:
        raise UserError(f"{location}: a context without a question needs more than {_LEAD} words")
    lead_start = words[-_LEAD - 1].end()
    return text[:lead_start], text[lead_start:].rstrip()


def _filled(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _spelt(required_key: str, row: dict[str, Any]) -> str:
    misspelt = next((used_key for used_key in _OTHERWISE.get(required_key, ()) if used_key in row), "")
    if not misspelt:
        nearest_hint = nearest(required_key, map(str, row), max_matches=1)
        misspelt = nearest_hint.removeprefix("; did you mean ").removesuffix("?")
    return f"; rename {quoted(misspelt)} to {required_key!r}" if misspelt else ""


# --- metrics --------------------------------------------------------------------------------------


def process_results(doc: Doc, results: list[str]) -> dict[str, float]:
    """Score a response with its row's metric; called by lm-eval."""
    value = METRICS[doc["metric"]](results[0], doc["outputs"])
    return {"score": value, doc["metric"]: value}


def no_results(doc: Doc, results: list[str]) -> dict[str, float]:
    """Return no score for a row without reference answers; called by lm-eval."""
    return {}


def contains_all(response: str, answers: Sequence[str]) -> float:
    """Return the fraction of the answers that the response contains, ignoring case."""
    lowered = response.lower()
    return sum(answer.lower() in lowered for answer in answers) / len(answers)


def exact(response: str, answers: Sequence[str]) -> float:
    """Return 1 if the response equals an answer, ignoring case, punctuation, articles and whitespace."""
    return float(_words(response) in [_words(answer) for answer in answers])


def f1(response: str, answers: Sequence[str]) -> float:
    """Return the F1 of the words shared with the best answer, as SQuAD defines it (arXiv:1606.05250)."""
    response_words = _words(response)
    return max(metrics.f1_words(response_words, _words(answer), both_empty=1.0) for answer in answers)


def rouge_l(response: str, answers: Sequence[str]) -> float:
    """Return the F1 of the longest common subsequence of words with the best answer (ROUGE-L, unstemmed)."""
    return metrics.best(metrics.rouge_l, response, answers)


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "contains_all": contains_all,
    "exact": exact,
    "f1": f1,
    "rougeL": rouge_l,
}

_words = functools.partial(metrics.answer_words, split_first=True)
