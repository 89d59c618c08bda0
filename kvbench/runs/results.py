"""Scoring of responses into the result tables: scores, intervals, differences from the full cache."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from kvbench import stats
from kvbench.benchmark import Marks
from kvbench.errors import PluginError, UserError, plugin_call
from kvbench.files import digest_of
from kvbench.harness.protocol import Key, MetricScores, Request
from kvbench.judge.base import JudgeError
from kvbench.judge.rubrics import origin
from kvbench.progress import Late, Reporter
from kvbench.runs.cell import Cell
from kvbench.runs.planning import Job
from kvbench.runs.prompt_excerpts import prompt_excerpt
from kvbench.runs.schema import (
    AVERAGED,
    FIDELITY,
    KL_OFFSET,
    LOG_KL,
    MEASURED,
    METRICS_SCHEMA,
    SCHEMA_VERSION,
    SCORES,
    UNBOUNDED,
    Columns,
    Response,
    Row,
    ScoredCell,
)
from kvbench.runs.store import RunStore

_LARGEST_SCORE = 1e150
"""Limit of scores, above which their squares and thus their intervals would be infinite."""

_DIGITS = 9
"""Significant digits of the values in the column `metrics`, which keep it small."""


@dataclass(frozen=True)
class _Measured:
    """A cell's score by one metric.

    Attributes:
        metric: The metric, with values in order of their keys.
        clusters: The context of each value.
        estimate: The score with its uncertainty.
        draws: The score of each bootstrap resample; None if the score is a mean.
    """

    metric: MetricScores
    clusters: Mapping[Key, str]
    estimate: stats.Estimate
    draws: stats.Floats | None = None

    @classmethod
    def of(cls, metric: MetricScores, clusters: Mapping[Key, str]) -> _Measured:
        """Return the score of a metric.

        Args:
            metric: The metric.
            clusters: The context of each value.

        Raises:
            PluginError: The score is not a finite number, or neither the mean of its values nor aggregated from them.
        """
        metric = replace(metric, values={key: metric.values[key] for key in sorted(metric.values)})
        clusters = {key: clusters[key] for key in metric.values}
        numbers = [metric.score] if metric.aggregate else [metric.score, *metric.values.values()]
        if not metric.values or not all(abs(_finite(number)) <= _LARGEST_SCORE for number in numbers):
            raise PluginError(
                f"{metric.label} returned a score that is not a finite number of at most {_LARGEST_SCORE:g}"
            )
        values, contexts = list(metric.values.values()), list(clusters.values())
        if metric.aggregate is not None:
            draws = stats.aggregate_draws(values, contexts, metric.aggregate)
            context_count = len(set(contexts))
            bounds = stats.draws_interval(draws, context_count)
            standard_error = float(np.nanstd(draws, ddof=1)) if math.isfinite(bounds[0]) else math.nan
            estimate = stats.Estimate(metric.score, standard_error, *bounds, len(values), context_count)
            return cls(metric, clusters, estimate, draws)
        estimate = stats.summary(values, contexts, has_bounds=metric.name not in UNBOUNDED)
        if not math.isclose(metric.score, estimate.mean, rel_tol=1e-6, abs_tol=1e-9):
            raise PluginError(f"{metric.label} is not the mean of its values, and has no function that aggregates them")
        return cls(metric, clusters, estimate)

    def difference(self, reference: _Measured) -> stats.Difference:
        """Return the paired difference from another cell, over the responses of which both have a value.

        A score that is not a mean has one only if these are all responses.
        """
        if self.draws is None or reference.draws is None:
            has_bounds = self.metric.name not in UNBOUNDED
            return stats.paired(self.metric.values, reference.metric.values, self.clusters, has_bounds=has_bounds)
        if self.clusters.keys() != reference.clusters.keys():
            return stats.NO_DIFFERENCE
        bounds = stats.draws_interval(self.draws - reference.draws, self.estimate.clusters)
        return stats.Difference(self.estimate.mean - reference.estimate.mean, *bounds, self.estimate.n)


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
            prompt_excerpt(request.context + request.question, request.target),
            list(request.target),
        )


def scored(
    jobs: Iterable[Job], responses_of: Callable[[str], Sequence[Response]], reporter: Reporter | None = None
) -> Iterator[ScoredCell]:
    """Score every cell from its responses, one cell at a time.

    Only the requests of the tasks as loaded count: a store can hold more samples.

    Args:
        responses_of: Returns the responses of a cell, given its hash.
        reporter: Progress reporter, told of every cell once they take seconds.
    """
    jobs = list(jobs)
    progress = Late(reporter, sum(len(job.cells) for job in jobs), "scoring cells")
    for job in jobs:
        scorer = _Scorer(job)
        for cell in sorted(job.cells, key=lambda candidate: not candidate.is_full):
            yield scorer.cell(cell, responses_of(cell.cell))
            progress.advance()
    progress.stop()


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
        self.full: dict[bool, dict[str, _Measured]] = {}

    def cell(self, cell: Cell, responses: Sequence[Response]) -> ScoredCell:
        """Return what the tables say of a cell."""
        counted_responses = [response for response in responses if self._counts(response)]
        cell_row = self._empty_row(cell, counted_responses)
        metrics: list[MetricScores] = []
        measured: dict[str, _Measured] = {}
        if not cell_row["error"]:
            try:
                fidelity = _fidelity(counted_responses)
                metrics = fidelity if self.task.metric in FIDELITY else self._metrics(counted_responses) + fidelity
                measured = self._measured(metrics)
            except PluginError as error:
                cell_row |= {"status": "error", "error": str(error)}
                metrics = []
        if not metrics:
            metrics = [MetricScores(self.task.metric, "", self.task.higher_is_better, {}, math.nan)]
        is_live = cell.moment == "turns"
        if cell.is_full:
            self.full[is_live] = measured
        metric_rows = [
            self._metric_row(cell_row, metric, measured.get(metric.label), self.full.get(is_live, {}), cell)
            for metric in metrics
        ]
        if measured:
            cell_row |= {name: metric_rows[0][name] for name in ("is_mean", *SCORES)} | _means(counted_responses)
            full_cache = self.full.get(is_live, {}).get(metrics[0].label)
            cell_row["discriminative"] = full_cache is not None and self._above_chance(full_cache.estimate)
        return ScoredCell(cell_row, metric_rows, self._samples(cell, counted_responses, metrics))

    def _measured(self, metrics: Sequence[MetricScores]) -> dict[str, _Measured]:
        """Return the scores by all metrics that have one.

        Raises:
            PluginError: The task's metric has no score.
        """
        measured: dict[str, _Measured] = {}
        for metric in metrics:
            clusters = {key: self.requests[key[:2]].context_id for key in metric.values}
            try:
                measured[metric.label] = _Measured.of(metric, clusters)
            except PluginError:
                if metric is metrics[0]:
                    raise
        return measured

    def _metric_row(
        self,
        cell_row: Row,
        metric: MetricScores,
        measured: _Measured | None,
        full_cache: Mapping[str, _Measured],
        cell: Cell,
    ) -> Row:
        """Return the row of a cell and metric in `metrics.parquet`; its scores are NaN if there are none."""
        judge = self.job.judge
        row: Row = {
            **{column: cell_row[column] for column in METRICS_SCHEMA.names if column in cell_row},
            **dict.fromkeys(SCORES, math.nan),
            "metric": metric.name if judge is None or metric.name in FIDELITY else f"{metric.name} ({judge.mark})",
            "filter": metric.filter,
            "higher_is_better": metric.higher_is_better,
            "is_mean": metric.aggregate is None,
        }
        if measured is None:
            return row
        estimate = measured.estimate
        scores = (estimate.mean, estimate.se, estimate.lo, estimate.hi)
        row |= dict(zip(("score", "score_se", "score_lo", "score_hi"), scores, strict=True))
        if (full := full_cache.get(metric.label)) is None:
            return row
        difference = stats.Difference(0.0, 0.0, 0.0) if cell.is_full else measured.difference(full)
        differences = (full.estimate.mean, difference.mean, difference.lo, difference.hi)
        return row | dict(zip(("full_score", "diff", "diff_lo", "diff_hi"), differences, strict=True))

    def _counts(self, response: Response) -> bool:
        """Return whether a response belongs to the loaded task: a store can hold more of them."""
        request = self.requests.get((response.sample_id, response.question_id))
        return request is not None and response.repeat < request.repeats

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
            "informed": cell.policy.is_informed,
            "samples": len({item.sample_id for item in responses if not item.error}),
            "metric": self.task.metric,
            "status": "error" if error else "ok",
            "error": error,
            "higher_is_better": self.task.higher_is_better,
            "is_mean": True,
            "discriminative": False,
            **dict.fromkeys((*SCORES, *AVERAGED), math.nan),
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

    def _metrics(self, responses: Sequence[Response]) -> list[MetricScores]:
        """Score responses by all metrics of the task.

        Raises:
            PluginError: The task's metric failed.
        """
        response_texts = {_key(response): response.response for response in responses}
        try:
            with plugin_call():  # a metric may be plugin code: only its cell fails
                return self.task.score_metrics(response_texts, self._marks(response_texts))
        except PluginError as error:
            cause = error.__cause__
            if isinstance(cause, UserError) and not isinstance(cause, JudgeError):
                raise cause from None  # a user error affects all cells
            raise

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

    def _above_chance(self, full: stats.Estimate) -> bool:
        """Return whether the full cache is better than chance, so that differences are meaningful."""
        if self.task.metric in FIDELITY:
            return True
        if self.task.higher_is_better:
            return stats.discriminative(full.lo, self.task.chance)
        return stats.discriminative(-full.hi, -self.task.chance)

    def _samples(self, cell: Cell, responses: Sequence[Response], metrics: Sequence[MetricScores]) -> Columns:
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
            "score": [_finite(metrics[0].values.get(_key(response))) for response in responses],
            "metrics": [_metrics_text(metrics, _key(response)) for response in responses],
        }


def _key(response: Response) -> Key:
    return (response.sample_id, response.question_id, response.repeat)


def _extra(request: Request) -> str:
    return json.dumps(dict(request.extra), sort_keys=True, ensure_ascii=False, default=str)


def _metrics_text(metrics: Sequence[MetricScores], key: Key) -> str:
    """Return the numbers that the metrics give to a response as JSON; "" if there is only one metric."""
    if len(metrics) == 1:
        return ""
    numbers = {metric.label: _finite(metric.values.get(key)) for metric in metrics}
    rounded = {label: float(f"{number:.{_DIGITS}g}") for label, number in numbers.items() if math.isfinite(number)}
    return json.dumps(rounded, ensure_ascii=False)


def _finite(value: Any) -> float:
    """Return a value as a finite number, else NaN."""
    return float(value) if isinstance(value, Real) and math.isfinite(value) else math.nan


def _means(responses: Sequence[Response]) -> dict[str, float]:
    """Return the mean costs per response; NaN for what no response has."""
    means = {}
    for column in AVERAGED:
        numbers = [float(value) for response in responses if (value := getattr(response, column)) is not None]
        means[column] = sum(numbers) / len(numbers) if numbers else math.nan
    return means


def _fidelity(responses: Sequence[Response]) -> list[MetricScores]:
    """Return the scores by the metrics of fidelity; none if it was not measured."""
    measured = [response for response in responses if response.kl is not None]
    if not measured:
        return []
    scores = []
    for name, higher_is_better in FIDELITY.items():
        values = {_key(response): _fidelity_value(response, name) for response in measured}
        scores.append(MetricScores(name, "", higher_is_better, values, sum(values.values()) / len(values)))
    return scores


def _fidelity_value(response: Response, name: str) -> float:
    """Return a response's value by a metric of fidelity."""
    if name == LOG_KL:
        assert response.kl is not None
        return math.log(response.kl + KL_OFFSET)
    return float(getattr(response, name))
