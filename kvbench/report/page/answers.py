"""The responses of a run, question by question, for the page's browser of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

import pandas as pd

from kvbench.report.frames import Results, extras, records
from kvbench.report.samples import Samples

MOST = 5_000_000
"""Characters of responses in a page, so that it stays under 8 MB with everything else."""
LONGEST = 6_000
"""Characters of a response; the middle of a longer one is left out."""
_ENTRY = 40
"""Characters that a response takes besides its text."""

Responses: TypeAlias = Callable[[Sequence[str]], pd.DataFrame]
"""Reads all columns of `samples.parquet`, of the samples with these ids."""

_PLACE = ["model", "task", "length", "seed"]
_QUESTION = [*_PLACE, "sample_id", "question_id", "repeat"]
_Rows: TypeAlias = list[dict[str, Any]]
_Q = TypeVar("_Q")
_OF_CELL = ["cell", "model", "seed", "policy", "budget", "moment"]


def answers(results: Results, responses: Responses) -> dict[str, Any]:
    """The questions with the responses of every setting.

    If they are more than a page can hold, every task shows its first questions.

    Args:
        results: What was run.
        responses: Reads the responses of the samples that may be shown.

    Returns:
        `cells` (policy, budget and moment of each), `texts` (each response once), `questions` (with
        `answers`: index of the cell, index of the text, score, why it ended, tokens) and `total`
        (how many questions the run has).
    """
    if results.samples is None or not len(results.samples):
        return {"cells": [], "texts": [], "questions": [], "total": 0}
    cells = results.cells[_OF_CELL]
    sample_ids, total = _first_samples(results, results.samples)
    # The model of the report, and not of the run: it tells apart what has the same name.
    samples = Samples(responses(sample_ids)).of(cells["cell"])
    samples = samples.drop(columns=["policy", "budget", "moment"]).merge(cells, on="cell")
    order = {str(cell): index for index, cell in enumerate(cells["cell"])}
    samples = samples.assign(_order=samples["cell"].map(order))
    samples = samples.sort_values([*_QUESTION, "_order"], kind="stable")
    known = extras(samples)
    texts: dict[str, int] = {}
    questions: list[dict[str, Any]] = []
    left = MOST
    parts = [list(rows) for _, rows in groupby(records(samples), itemgetter(*_QUESTION))]
    for rows in _by_turns(parts, lambda rows: itemgetter(*_PLACE)(rows[0])):
        mine = {_short(row["error"] or row["response"]) for row in rows} - texts.keys()
        left -= sum(map(len, mine)) + _ENTRY * len(rows) + len(rows[0]["prompt_end"])
        if left < 0 and questions:
            break
        questions.append(_question(rows, known, texts, order))
    return {
        "cells": [
            [str(c) for c in row] for row in cells[["policy", "budget", "moment"]].to_numpy()
        ],
        "texts": list(texts),
        "questions": sorted(
            questions, key=lambda q: [str(q["model"]), str(q["task"]), q["length"]]
        ),
        "total": total,
    }


def _first_samples(results: Results, samples: Samples) -> tuple[list[str], int]:
    """The samples that `answers` may show, and how many questions the run has.

    Responses take at least `_ENTRY` characters each, so only the first questions of a large run can
    be in the page. The responses of all others are not even read.
    """
    questions: list[tuple[Any, str, int]] = []
    for place, cells in results.cells.groupby(_PLACE, sort=False):
        mine = samples.of(cells["cell"])[_QUESTION[len(_PLACE) :]].astype({"sample_id": str})
        counts = mine.value_counts(sort=False).sort_index()
        names = counts.index.get_level_values("sample_id")
        questions += [
            (place, str(name), int(count)) for name, count in zip(names, counts, strict=True)
        ]
    found: dict[str, None] = {}
    left = MOST // _ENTRY
    for part in _by_turns(questions, itemgetter(0)):
        if left < 0:
            break
        found[part[1]] = None
        left -= part[2]
    return list(found), len(questions)


def _by_turns(questions: Iterable[_Q], place_of: Callable[[Any], Any]) -> Iterator[_Q]:
    """One question of every task, then another of each, and so on."""
    places: dict[Any, list[_Q]] = {}
    for question in questions:
        places.setdefault(place_of(question), []).append(question)
    for turn in zip_longest(*places.values()):
        yield from (question for question in turn if question is not None)


def _question(
    rows: _Rows,
    known: dict[str, dict[str, Any]],
    texts: dict[str, int],
    order: dict[str, int],
) -> dict[str, Any]:
    """A question; new texts are added to `texts`."""
    first = rows[0]
    return {
        **{name: first[name] for name in (*_QUESTION, "context_id", "doc_id")},
        "context_tokens": int(first["context_tokens"]),
        "question_tokens": int(first["question_tokens"]),
        "prompt": str(first["prompt_end"]),
        "target": [_short(str(text)) for text in first["target"]],
        "extra": {key: str(value) for key, value in known[first["extra"]].items()},
        "answers": [
            [
                order[str(row["cell"])],
                texts.setdefault(_short(row["error"] or row["response"]), len(texts)),
                None if math.isnan(row["score"]) else float(f"{row['score']:.4g}"),
                "error" if row["error"] else str(row["stop"]),
                int(row["generated_tokens"]),
            ]
            for row in rows
        ],
    }


def _short(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
