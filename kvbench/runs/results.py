"""From responses to the two result tables: scores, intervals, differences to the full cache."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvbench import stats
from kvbench.errors import UserError, reason_of
from kvbench.harness.protocol import Key, LoadedTask, Request
from kvbench.judge import JudgeError, record
from kvbench.runs.cell import Cell
from kvbench.runs.schema import CELLS_SCHEMA, SAMPLES_SCHEMA, SCHEMA_VERSION
from kvbench.runs.store import Response

if TYPE_CHECKING:
    import pandas as pd

_MEANS = (
    "budget_entries held_entries kv_bytes_live kv_bytes_allocated kv_bytes_full "
    "prefill_s compress_s decode_s"
).split()
_SCORES = "score score_se score_lo score_hi full_score diff diff_lo diff_hi".split()


def frames(
    jobs: Sequence[tuple[LoadedTask, Sequence[Cell]]], responses: Sequence[Response]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Score every cell from its responses.

    Only the requests of the tasks as loaded count: a store may hold more samples.

    Args:
        jobs: Tasks with their cells.
        responses: All responses of the run.

    Returns:
        The tables of `kvbench.runs.schema`: cells and samples.
    """
    import pandas as pd

    by_cell: dict[str, list[Response]] = {}
    for response in responses:
        by_cell.setdefault(response.cell, []).append(response)
    cells: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    for task, own in jobs:
        requests = {(r.sample_id, r.question_id): r for r in task.requests}
        # The full cache of live dialogues is one of its own: it has its own history.
        full: dict[bool, tuple[dict[Key, float], stats.Estimate]] = {}
        for cell in sorted(own, key=lambda c: not c.is_full):
            mine = by_cell.get(cell.cell, [])
            got = [r for r in mine if _asked(r, requests)]
            row, scores = _cell(task, cell, got, requests)
            live = cell.moment == "turns"
            if cell.is_full and scores:
                full[live] = (scores, _estimate(scores, requests))
            if scores and live in full:
                row |= _comparison(task, cell, scores, *full[live], requests)
            cells.append(row)
            samples += [_sample(task, cell, r, requests, scores) for r in got]
    return (
        pd.DataFrame(cells, columns=CELLS_SCHEMA.names),
        pd.DataFrame(samples, columns=SAMPLES_SCHEMA.names),
    )


def _asked(response: Response, requests: dict[tuple[str, int], Request]) -> bool:
    """Whether a response belongs to the task as loaded: a store may hold more repeats, too."""
    request = requests.get((response.sample_id, response.question_id))
    return request is not None and response.repeat < request.repeats


def _made(task: LoadedTask) -> dict[str, int]:
    """What is recorded of a cell's prompts and answers."""
    repeats = max((r.repeats for r in task.requests), default=1)
    counts = {"repeats": repeats if repeats > 1 else 0, "truncated": task.truncated}
    return {name: count for name, count in counts.items() if count}


def _key(response: Response) -> Key:
    return (response.sample_id, response.question_id, response.repeat)


def _clusters(scores: dict[Key, float], requests: dict[tuple[str, int], Request]) -> list[str]:
    return [requests[key[:2]].context_id for key in scores]


def _estimate(scores: dict[Key, float], requests: dict[tuple[str, int], Request]) -> stats.Estimate:
    return stats.summary(list(scores.values()), _clusters(scores, requests))


def _cell(
    task: LoadedTask,
    cell: Cell,
    got: Sequence[Response],
    requests: dict[tuple[str, int], Request],
) -> tuple[dict[str, Any], dict[Key, float]]:
    """The row of one cell before it is compared, and the score of each response."""
    error = next((r.error for r in got if r.error), "")
    wanted = sum(r.repeats for r in requests.values())
    if not error and len(got) < wanted:
        error = f"{len(got)} of {wanted} responses"
    row: dict[str, Any] = {
        **cell.row(**_made(task)),
        "schema": SCHEMA_VERSION,
        "samples": len({r.sample_id for r in got if not r.error}),
        "metric": task.metric,
        "status": "error" if error else "ok",
        "error": error,
        "higher_is_better": task.higher_is_better,
        "discriminative": False,
        **dict.fromkeys((*_SCORES, *_MEANS), math.nan),
    }
    if task.judge is not None:
        row |= record(task.judge, task.rubric, row)
    if error:
        return row, {}
    try:
        scores, aggregate = task.score({_key(r): r.response for r in got})
    except Exception as failed:  # a metric is foreign code: its cell fails
        if isinstance(failed, UserError) and not isinstance(failed, JudgeError):
            raise
        return row | {"status": "error", "error": reason_of(failed)}, {}
    if not all(map(math.isfinite, scores.values())):
        text = f"{task.metric} gives a score that is no finite number"
        return row | {"status": "error", "error": text}, {}
    estimate = _estimate(scores, requests)
    if not math.isclose(aggregate, estimate.mean, rel_tol=1e-6, abs_tol=1e-9):
        text = f"{task.metric} is not the mean over samples, and intervals are for means only"
        return row | {"status": "error", "error": text}, {}
    row |= {
        "score": aggregate,
        "score_se": estimate.se,
        "score_lo": estimate.lo,
        "score_hi": estimate.hi,
    }
    for name in _MEANS:
        row[name] = sum(float(getattr(r, name)) for r in got) / len(got)
    return row, scores


def _comparison(
    task: LoadedTask,
    cell: Cell,
    scores: dict[Key, float],
    full: dict[Key, float],
    estimate: stats.Estimate,
    requests: dict[tuple[str, int], Request],
) -> dict[str, Any]:
    """The paired difference to the full cache on the same samples; of full itself it is 0."""
    found = {
        "full_score": estimate.mean,
        "diff": 0.0,
        "diff_lo": 0.0,
        "diff_hi": 0.0,
        "discriminative": _above_chance(task, estimate),
    }
    if not cell.is_full:
        names = {key: requests[key[:2]].context_id for key in scores}
        difference = stats.paired(scores, full, names)
        found |= {"diff": difference.mean, "diff_lo": difference.lo, "diff_hi": difference.hi}
    return found


def _above_chance(task: LoadedTask, full: stats.Estimate) -> bool:
    """Whether the full cache is better than chance, so that differences can say something."""
    if task.higher_is_better:
        return stats.discriminative(full.lo, task.chance)
    return stats.discriminative(-full.hi, -task.chance)


def _sample(
    task: LoadedTask,
    cell: Cell,
    response: Response,
    requests: dict[tuple[str, int], Request],
    scores: dict[Key, float],
) -> dict[str, Any]:
    request = requests[response.sample_id, response.question_id]
    return {
        "cell": cell.cell,
        "task": cell.task,
        "policy": cell.policy,
        "budget": cell.budget,
        "moment": cell.moment,
        "sample_id": response.sample_id,
        "context_id": response.context_id,
        "response": response.response,
        "stop": response.stop,
        "error": response.error,
        "extra": json.dumps(dict(request.extra), sort_keys=True, ensure_ascii=False, default=str),
        "target": list(request.target),
        "schema": SCHEMA_VERSION,
        "length": task.length,
        "doc_id": response.doc_id,
        "question_id": response.question_id,
        "repeat": response.repeat,
        "context_tokens": response.context_tokens,
        "question_tokens": response.question_tokens,
        "generated_tokens": response.generated_tokens,
        "score": scores.get(_key(response), math.nan),
        "budget_entries": response.budget_entries,
        "held_entries": response.held_entries,
        "kv_bytes_live": response.kv_bytes_live,
    }
