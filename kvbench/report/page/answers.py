"""The responses of a run, question by question, for the sample browser of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, pairwise, zip_longest
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

import pandas as pd

from kvbench.progress import Late, Reporter
from kvbench.report.frames import Results, extras, records
from kvbench.report.sorted_samples import Samples, natural_key
from kvbench.runs.prompt_excerpts import reference_spans

MOST = 5_000_000
"""Maximum number of response characters in a page, which keeps it under 8 MB in total."""
LONGEST = 6_000
"""Maximum number of characters of a response; the middle of longer ones is removed."""
_ENTRY = 40
"""Characters per response besides its text."""

Responses: TypeAlias = Callable[[Sequence[str]], pd.DataFrame]
"""Loads all columns of `samples.parquet` for some sample ids."""

_PLACE = ["model", "task", "length", "seed"]
_OF_SAMPLE = ["question_id", "repeat"]
_QUESTION = [*_PLACE, "sample_id", *_OF_SAMPLE]
_Rows: TypeAlias = list[dict[str, Any]]
_Q = TypeVar("_Q")
_OF_CELL = ["cell", "model", "seed", "policy", "budget", "moment"]


def answers(results: Results, responses: Responses, reporter: Reporter | None = None) -> dict[str, Any]:
    """Return the questions with the responses of every setting; only the first of every task if a page cannot hold all.

    Args:
        results: The results.
        responses: Loads the responses of some samples.
        reporter: Progress reporter, told of every question once they take seconds.

    Returns:
        `cells` (policy, budget and moment of each), `texts` (each response once), `questions` (with `answers`: index of
        the cell, index of the text, score, stop reason, tokens) and `total` (number of questions in the run).
    """
    if results.samples is None or not len(results.samples):
        return {"cells": [], "texts": [], "questions": [], "total": 0}
    cell_frame = results.cells[_OF_CELL]
    sample_ids, question_count = _first_samples(results, results.samples)
    # The model name of the report, not of the run, because only the former is unique.
    sample_frame = Samples(responses(sample_ids)).of(cell_frame["cell"])
    sample_frame = sample_frame.drop(columns=["policy", "budget", "moment"]).merge(cell_frame, on="cell")
    cell_order = {str(cell_id): cell_index for cell_index, cell_id in enumerate(cell_frame["cell"])}
    sample_names = sorted(sample_frame["sample_id"].unique(), key=natural_key)
    sample_order = {sample_name: sample_index for sample_index, sample_name in enumerate(sample_names)}
    sample_frame = sample_frame.assign(
        _order=sample_frame["cell"].map(cell_order), _sample=sample_frame["sample_id"].map(sample_order).astype(int)
    )
    sample_frame = sample_frame.sort_values([*_PLACE, "_sample", *_OF_SAMPLE, "_order"], kind="stable")
    parsed_extras = extras(sample_frame)
    text_indices: dict[str, int] = {}
    question_records: list[dict[str, Any]] = []
    remaining_letters = MOST
    question_rows = [list(response_rows) for _, response_rows in groupby(records(sample_frame), itemgetter(*_QUESTION))]
    progress = Late(reporter, len(question_rows), "collecting responses")
    for response_rows in _by_turns(question_rows, lambda response_rows: itemgetter(*_PLACE)(response_rows[0])):
        new_texts = {
            _short(response_row["error"] or response_row["response"]) for response_row in response_rows
        } - text_indices.keys()
        remaining_letters -= (
            sum(map(len, new_texts)) + _ENTRY * len(response_rows) + len(response_rows[0]["prompt_end"])
        )
        if remaining_letters < 0 and question_records:
            break
        question_records.append(_question(response_rows, parsed_extras, text_indices, cell_order))
        progress.advance()
    progress.stop()
    return {
        "cells": [
            [str(cell_field) for cell_field in response_row]
            for response_row in cell_frame[["policy", "budget", "moment"]].to_numpy()
        ],
        "texts": list(text_indices),
        "questions": sorted(
            question_records,
            key=lambda question: [
                str(question["model"]),
                str(question["task"]),
                question["length"],
            ],
        ),
        "total": question_count,
    }


def _first_samples(results: Results, samples: Samples) -> tuple[list[str], int]:
    """Return the samples that fit in the page, and the number of questions in the run.

    Responses take at least `_ENTRY` characters each, so only the first questions of a large run fit. The responses of
    the others are not loaded.
    """
    sample_questions: list[tuple[Any, str, int]] = []
    for task_key, task_cells in results.cells.groupby(_PLACE, sort=False):
        task_questions = samples.of(task_cells["cell"])[_QUESTION[len(_PLACE) :]].astype({"sample_id": str})
        response_counts: dict[Any, int] = task_questions.value_counts(sort=False).to_dict()
        question_keys = sorted(response_counts, key=lambda key: [natural_key(key[0]), *key[1:]])
        sample_questions += [(task_key, str(key[0]), response_counts[key]) for key in question_keys]
    first_samples: dict[str, None] = {}
    remaining_responses = MOST // _ENTRY
    for sample_entry in _by_turns(sample_questions, itemgetter(0)):
        if remaining_responses < 0:
            break
        first_samples[sample_entry[1]] = None
        remaining_responses -= sample_entry[2]
    return list(first_samples), len(sample_questions)


def _by_turns(questions: Iterable[_Q], place_of: Callable[[Any], Any]) -> Iterator[_Q]:
    """Yield questions of all tasks in round-robin order."""
    questions_by_task: dict[Any, list[_Q]] = {}
    for question in questions:
        questions_by_task.setdefault(place_of(question), []).append(question)
    for turn in zip_longest(*questions_by_task.values()):
        yield from (question for question in turn if question is not None)


def _question(
    response_rows: _Rows,
    parsed_extras: dict[str, dict[str, Any]],
    text_indices: dict[str, int],
    cell_order: dict[str, int],
) -> dict[str, Any]:
    """Return a question, and add new texts to `text_indices`."""
    first_row = response_rows[0]
    return {
        **{field_name: first_row[field_name] for field_name in (*_QUESTION, "context_id", "doc_id")},
        "context_tokens": int(first_row["context_tokens"]),
        "question_tokens": int(first_row["question_tokens"]),
        "prompt": _marked(str(first_row["prompt_end"]), first_row["target"]),
        "target": [_short(str(target_text)) for target_text in first_row["target"]],
        "extra": {
            extra_name: str(extra_value) for extra_name, extra_value in parsed_extras[first_row["extra"]].items()
        },
        "answers": [
            [
                cell_order[str(response_row["cell"])],
                text_indices.setdefault(_short(response_row["error"] or response_row["response"]), len(text_indices)),
                None if math.isnan(response_row["score"]) else float(f"{response_row['score']:.4g}"),
                "error" if response_row["error"] else str(response_row["stop"]),
                int(response_row["generated_tokens"]),
            ]
            for response_row in response_rows
        ],
    }


def _marked(prompt_text: str, references: Iterable[str]) -> list[str]:
    """Split a prompt into parts, of which every second one is a reference answer."""
    boundaries = [0, *chain.from_iterable(reference_spans(prompt_text, references)), len(prompt_text)]
    return [prompt_text[begin:end] for begin, end in pairwise(boundaries)]


def _short(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters omitted …]\n{text[-half:]}"
