"""The responses of a run, question by question, for the page's browser of samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any, TypeAlias

from kvbench.report.frames import Results, extras, records

MOST = 5_000_000
"""Characters of responses in a page, so that it stays under 8 MB with everything else."""
LONGEST = 6_000
"""Characters of a response; the middle of a longer one is left out."""
_ENTRY = 40
"""Characters that a response takes besides its text."""

_PLACE = ["model", "task", "length", "seed"]
_QUESTION = [*_PLACE, "sample_id", "question_id", "repeat"]
_Rows: TypeAlias = list[dict[str, Any]]
_OF_CELL = ["cell", "model", "seed", "policy", "budget", "moment"]


def answers(results: Results) -> dict[str, Any]:
    """The questions with the responses of every setting.

    If they are more than a page can hold, every task shows its first questions.

    Returns:
        `cells` (policy, budget and moment of each), `texts` (each response once), `questions` (with
        `answers`: index of the cell, index of the text, score, why it ended, tokens) and `total`
        (how many questions the run has).
    """
    if results.samples is None or not len(results.samples):
        return {"cells": [], "texts": [], "questions": [], "total": 0}
    cells = results.cells[_OF_CELL]
    # The model of the report, and not of the run: it tells apart what has the same name.
    samples = results.samples.of(cells["cell"]).drop(columns=["policy", "budget", "moment"])
    samples = samples.merge(cells, on="cell")
    order = {str(cell): index for index, cell in enumerate(cells["cell"])}
    samples = samples.assign(_order=samples["cell"].map(order))
    samples = samples.sort_values([*_QUESTION, "_order"], kind="stable")
    known = extras(samples)
    texts: dict[str, int] = {}
    questions: list[dict[str, Any]] = []
    left = MOST
    parts = [list(rows) for _, rows in groupby(records(samples), itemgetter(*_QUESTION))]
    for rows in _by_turns(parts):
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
        "total": len(parts),
    }


def _by_turns(parts: Iterable[_Rows]) -> Iterator[_Rows]:
    """One question of every task, then another of each, and so on."""
    places: dict[tuple[Any, ...], list[_Rows]] = {}
    for rows in parts:
        places.setdefault(itemgetter(*_PLACE)(rows[0]), []).append(rows)
    for turn in zip_longest(*places.values()):
        yield from (rows for rows in turn if rows is not None)


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
