"""Scoring of responses into the two result tables: scores, intervals, differences from the full cache."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from kvbench import stats
from kvbench.benchmark import Marks
from kvbench.errors import PluginError, UserError, plugin_call
from kvbench.files import digest_of
from kvbench.harness.protocol import Key, Request
from kvbench.judge.base import JudgeError
from kvbench.judge.rubrics import origin
from kvbench.runs.cell import Cell
from kvbench.runs.planning import Job
from kvbench.runs.schema import AVERAGED, MEASURED, SCHEMA_VERSION, Columns, Response
from kvbench.runs.store import RunStore

_PROMPT_END = 400
"""Number of prompt characters stored with its response."""
_SCORES = "score score_se score_lo score_hi full_score diff diff_lo diff_hi".split()

_LARGEST_SCORE = 1e150
"""Limit of scores, above which their squares and thus their intervals would be infinite."""

Row: TypeAlias = dict[str, Any]
"""A row of `cells.parquet`."""


@dataclass(frozen=True)
class _FullCache:
    """Scores of the full cache, the reference of the other cells."""

    scores: dict[Key, float]
    estimate: stats.Estimate


class _Asked(NamedTuple):
    """Table fields of a request, without its prompt: not all prompts fit into memory."""

    doc_id: int
    context_id: str
    repeats: int
    extra: str
    prompt_end: str
    target: list[str]

    @classmethod
    def of(cls, request: Request) -> _Asked:
        """Return the fields of a request."""
        return cls(
            request.doc_id,
            request.context_id,
            request.repeats,
            _extra(request),
            prompt_end(request),
            list(request.target),
        )


def scored(jobs: Iterable[Job], responses_of: Callable[[str], Sequence[Response]]) -> Iterator[tuple[Row, Columns]]:
    """Score every cell from its responses, one cell at a time.

    Only the requests of the tasks as loaded count: a store can hold more samples.

    Args:
        responses_of: Returns the responses of a cell, given its hash.

    Yields:
        A cell's row of `cells.parquet`, and the columns of its part of `samples.parquet`.
    """
    for job in jobs:
        scorer = _Scorer(job)
        for cell in sorted(job.cells, key=lambda candidate: not candidate.is_full):
            yield scorer.cell(cell, responses_of(cell.cell))


def check_requests(jobs: Iterable[Job], store: RunStore) -> None:
    """Check that the responses of a run match the current requests of its tasks.

    Raises:
        UserError: The data of a task has changed under the same version.
    """
    for job in jobs:
        # Digests instead of requests, because not all prompts fit into memory.
        requests = {
            (task_request.sample_id, task_request.question_id): (
                task_request.digest,
                task_request.context_id,
            )
            for task_request in job.task.requests
        }
        for cell in job.cells:
            for response in store.responses_of(cell.cell):
                request = requests.get((response.sample_id, response.question_id))
                if request is None or response.error:
                    continue
                # Earlier versions recorded only the context.
                request_digest, context_id = request
                if (response.request or response.context_id) != (request_digest if response.request else context_id):
                    raise UserError(
                        f"{cell.task}: sample {response.sample_id} is not the one that {store.path} has a response to, "
                        "though the task's version is the same; restore the data, choose another --out, or discard the "
                        "responses with --fresh"
                    )


class _Scorer:
    """Scores the cells of one job; the full cache must come first."""

    def __init__(self, job: Job) -> None:
        self.job, self.task = job, job.task
        self.requests = {(request.sample_id, request.question_id): _Asked.of(request) for request in job.task.requests}
        # The full cache of live dialogues has its own history, so it is a separate baseline.
        self.full: dict[bool, _FullCache] = {}

    def cell(self, cell: Cell, responses: Sequence[Response]) -> tuple[Row, Columns]:
        """Return the row of a cell and the columns of its samples."""
        counted_responses = [response for response in responses if self._counts(response)]
        cell_row = self._empty_row(cell, counted_responses)
        scores: dict[Key, float] = {}
        if not cell_row["error"]:
            try:
                scores, estimate = self._scores(counted_responses)
            except PluginError as error:
                cell_row |= {"status": "error", "error": str(error)}
            else:
                cell_row |= _columns(estimate) | _means(counted_responses)
                is_live = cell.moment == "turns"
                if cell.is_full:
                    self.full[is_live] = _FullCache(scores, estimate)
                if is_live in self.full:
                    cell_row |= self._comparison(cell, scores, self.full[is_live])
        return cell_row, self._samples(cell, counted_responses, scores)

    def _counts(self, response: Response) -> bool:
        """Return whether a response belongs to the loaded task: a store can hold more of them."""
        request = self.requests.get((response.sample_id, response.question_id))
        return request is not None and response.repeat < request.repeats

    def _clusters(self, scores: dict[Key, float]) -> dict[Key, str]:
        """Return the context of each score."""
        return {key: self.requests[key[:2]].context_id for key in scores}

    def _empty_row(self, cell: Cell, responses: Sequence[Response]) -> dict[str, Any]:
        """Return a cell's row without scores; with the error if the cell cannot be scored."""
        error = next((item.error for item in responses if item.error), "")
        expected = sum(item.repeats for item in self.requests.values())
        if not error and len(responses) < expected:
            error = f"{len(responses)} of {expected} responses"
        repeats = max((item.repeats for item in self.requests.values()), default=1)
        extra_counts = {"repeats": repeats if repeats > 1 else 0, "truncated": self.job.truncated}
        cell_row: dict[str, Any] = {
            **cell.row(**{column: count for column, count in extra_counts.items() if count}),
            "schema": SCHEMA_VERSION,
            "samples": len({item.sample_id for item in responses if not item.error}),
            "metric": self.task.metric,
            "status": "error" if error else "ok",
            "error": error,
            "higher_is_better": self.task.higher_is_better,
            "discriminative": False,
            **dict.fromkeys((*_SCORES, *AVERAGED), math.nan),
        }
        return cell_row | self._judge_columns(cell_row)

    def _judge_columns(self, cell_row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row fields changed by a judge; `match` differs because the scores cannot be compared."""
        judge = self.job.judge
        if judge is None:
            return {}
        versions = {"judge": judge.origin, "rubric": origin(self.task.rubric)}
        metric = f"{cell_row['metric']} ({judge.mark})"
        return {
            "metric": metric,
            "versions": json.dumps(json.loads(cell_row["versions"]) | versions, sort_keys=True),
            "match": digest_of([cell_row["match"], metric]),
        }

    def _scores(self, responses: Sequence[Response]) -> tuple[dict[Key, float], stats.Estimate]:
        """Return the score of each response and their mean.

        Raises:
            PluginError: The metric failed, or is not a mean of finite numbers.
        """
        metric = self.task.metric
        response_texts = {_key(response): response.response for response in responses}
        try:
            with plugin_call():  # a metric may be plugin code: only its cell fails
                scores, aggregate = self.task.score(response_texts, self._marks(response_texts))
        except PluginError as error:
            cause = error.__cause__
            if isinstance(cause, UserError) and not isinstance(cause, JudgeError):
                raise cause from None  # a user error affects all cells
            raise
        if not all(abs(score) <= _LARGEST_SCORE for score in scores.values()):  # also false for NaN
            raise PluginError(f"{metric} returned a score that is not a finite number of at most {_LARGEST_SCORE:g}")
        clusters = self._clusters(scores)
        estimate = stats.summary(list(scores.values()), list(clusters.values()))
        if not math.isclose(aggregate, estimate.mean, rel_tol=1e-6, abs_tol=1e-9):
            raise PluginError(f"{metric} is not a mean over samples, and only means have intervals")
        return scores, estimate

    def _marks(self, responses: Mapping[Key, str]) -> list[Marks] | None:
        """Return the judge's marks of all responses, requested together; None without a judge.

        Raises:
            JudgeError: Some have no verdict; the message names the first and counts them.
        """
        if self.job.judge is None:
            return None
        verdicts = self.job.judge.judge(self.task.asks(responses))
        failures = {
            key: verdict for key, verdict in zip(responses, verdicts, strict=True) if isinstance(verdict, JudgeError)
        }
        if failures:
            first_key = min(failures, key=lambda key: (self.requests[key[:2]].doc_id, key))
            count_note = f"{len(failures)} of {len(responses)} responses have no verdict: "
            location = f"sample {first_key[0]}, question {first_key[1]}"
            raise JudgeError(f"{count_note * (len(responses) > 1)}{location}: {failures[first_key]}")
        return [verdict for verdict in verdicts if not isinstance(verdict, JudgeError)]

    def _comparison(self, cell: Cell, scores: dict[Key, float], full_cache: _FullCache) -> dict[str, Any]:
        """Return the paired difference from the full cache on the same samples; 0 for the full cache."""
        columns = {
            "full_score": full_cache.estimate.mean,
            "diff": 0.0,
            "diff_lo": 0.0,
            "diff_hi": 0.0,
            "discriminative": self._above_chance(full_cache.estimate),
        }
        if not cell.is_full:
            difference = stats.paired(scores, full_cache.scores, self._clusters(scores))
            columns |= {
                "diff": difference.mean,
                "diff_lo": difference.lo,
                "diff_hi": difference.hi,
            }
        return columns

    def _above_chance(self, full: stats.Estimate) -> bool:
        """Return whether the full cache is better than chance, so that differences are meaningful."""
        if self.task.higher_is_better:
            return stats.discriminative(full.lo, self.task.chance)
        return stats.discriminative(-full.hi, -self.task.chance)

    def _samples(self, cell: Cell, responses: Sequence[Response], scores: dict[Key, float]) -> Columns:
        requests = [self.requests[response.sample_id, response.question_id] for response in responses]
        labels = {column: cell.labels[column] for column in ("task", "policy", "budget", "moment")}
        shared_columns = {
            "cell": cell.cell,
            **labels,
            "schema": SCHEMA_VERSION,
            "length": self.task.length,
        }
        return {
            **{column: [value] * len(responses) for column, value in shared_columns.items()},
            **{column: [getattr(response, column) for response in responses] for column in MEASURED},
            "extra": [request.extra for request in requests],
            "prompt_end": [request.prompt_end for request in requests],
            "target": [request.target for request in requests],
            "score": [scores.get(_key(response), math.nan) for response in responses],
        }


def _key(response: Response) -> Key:
    return (response.sample_id, response.question_id, response.repeat)


def prompt_end(request: Request) -> str:
    """Return the end of a prompt, as needed to understand its response."""
    prompt_text = request.context + request.question
    return prompt_text if len(prompt_text) <= _PROMPT_END else f"…{prompt_text[-_PROMPT_END:]}"


def _extra(request: Request) -> str:
    return json.dumps(dict(request.extra), sort_keys=True, ensure_ascii=False, default=str)


def _columns(estimate: stats.Estimate) -> dict[str, float]:
    return {
        "score": estimate.mean,
        "score_se": estimate.se,
        "score_lo": estimate.lo,
        "score_hi": estimate.hi,
    }


def _means(responses: Sequence[Response]) -> dict[str, float]:
    """Return the mean costs per response."""
    return {
        column: sum(float(getattr(response, column)) for response in responses) / len(responses) for column in AVERAGED
    }
