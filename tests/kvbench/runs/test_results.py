"""From responses to tables, against numbers counted by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from kvbench import stats
from kvbench.harness.protocol import Key, LoadedTask, MetricScores, Request
from kvbench.runs.cell import Cell
from kvbench.runs.planning import Job
from kvbench.runs.results import scored
from kvbench.runs.schema import (
    CELLS_SCHEMA,
    METRICS_SCHEMA,
    SAMPLES_SCHEMA,
    SCORES,
    Response,
    ScoredCell,
    from_columns,
    to_table,
)

from .cells import make_cell


@dataclass(frozen=True, eq=False)
class Numbers(LoadedTask):
    """Responses are numbers and score what they say."""

    mean: Callable[[list[float]], float] = statistics.fmean

    def score_metrics(self, responses: Mapping[Key, str], marks: Any = None) -> list[MetricScores]:
        scores = {key: float(text) for key, text in responses.items()}
        score = self.mean(list(scores.values()))
        return [MetricScores(self.metric, "", self.higher_is_better, scores, score)]


def task(**changes: Any) -> Numbers:
    requests = [Request("t", f"{i // 2}", i, i % 2, f"context{i // 2}", "c", "q", (), 4, ("x",)) for i in range(8)]
    usual: dict[str, Any] = {
        "name": "t", "group": "g", "version": "1", "data_hash": "d", "metric": "score",
        "higher_is_better": True, "chance": 0.0, "length": 64, "requests": tuple(requests),
    }  # fmt: skip
    return Numbers(**{**usual, **changes})


def cell(policy: str) -> Cell:
    return make_cell(policy, "0.5", task="t", group="g", length=64)


def tables(task: LoadedTask, cells: list[Cell], got: list[Response]) -> Any:
    rows, parts = [], []
    for scored_cell in scored([Job(task, [], cells)], lambda cell: [r for r in got if r.cell == cell]):
        rows.append(scored_cell.row)
        parts.append(from_columns(scored_cell.samples, SAMPLES_SCHEMA))
    return pd.DataFrame(rows), pa.concat_tables(parts).to_pandas()


def responses(of: Cell, numbers: list[float], error: str = "") -> list[Response]:
    return [
        Response(
            of.cell, f"{i // 2}", i, i % 2, 0, f"context{i // 2}", str(x), "stop", error,
            60, 4, 2, 10, 10, 80 + i, 80 + i, 100, 160, 9, 3 + i, 32, 0.5, 0.25, 1.0 + i,
        )
        for i, x in enumerate(numbers)
    ]  # fmt: skip


FULL = [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
MINE = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0]


def by_policy(found: pd.DataFrame) -> dict[str, Any]:
    return {row["policy"]: row for row in found.to_dict("records")}


def test_scores_differences_and_costs() -> None:
    mine, full = cell("snapkv"), cell("full")
    got = responses(mine, MINE) + responses(full, FULL)
    cells, samples = tables(task(), [mine, full], got)
    rows = by_policy(cells)
    assert rows["full"]["score"] == rows["full"]["full_score"] == 7 / 8
    assert rows["full"]["diff"] == rows["full"]["diff_lo"] == rows["full"]["diff_hi"] == 0.0
    assert rows["snapkv"]["score"] == 4 / 8
    assert rows["snapkv"]["diff"] == pytest.approx(-3 / 8)
    assert rows["snapkv"]["diff_lo"] <= -3 / 8 <= rows["snapkv"]["diff_hi"] <= 1
    assert rows["snapkv"]["decode_s"] == 4.5
    assert rows["snapkv"]["kv_bytes_live"] == 83.5
    assert rows["snapkv"]["state_bytes"] == 32
    assert rows["snapkv"]["visual_tokens"] == 9 and rows["snapkv"]["held_visual"] == 6.5
    assert rows["snapkv"]["discriminative"] and rows["full"]["discriminative"]
    assert list(samples.score) == FULL + MINE
    assert set(samples.prompt_end) == {request.context + request.question for request in task().requests}
    to_table(cells, CELLS_SCHEMA)
    to_table(samples, SAMPLES_SCHEMA)


def test_more_responses_than_are_asked_for_do_not_count() -> None:
    mine = cell("snapkv")
    short = replace(task(), requests=task().requests[:4])
    cells, samples = tables(short, [mine], responses(mine, MINE))
    assert cells.score[0] == 2 / 4 and len(samples) == 4
    assert cells.samples[0] == 2, "samples are counted, not questions"


def test_every_repeat_is_a_response_and_none_is_a_sample() -> None:
    mine = cell("snapkv")
    asked = replace(task(), requests=tuple(replace(r, repeats=2) for r in task().requests))
    first = responses(mine, MINE)
    second = [replace(r, repeat=1, response="1") for r in first]
    third = [replace(r, repeat=2, response="1") for r in first]
    cells, samples = tables(asked, [mine], first + second + third)
    assert cells.score[0] == (4 / 8 + 1) / 2 and len(samples) == 16
    assert cells.samples[0] == 4
    assert json.loads(cells.versions[0])["generation"] == {"repeats": 2}
    half, _ = tables(asked, [mine], first + second[:3])
    assert half.error[0] == "11 of 16 responses"


@pytest.mark.parametrize(("numbers", "error"), [(MINE[:5], ""), (MINE, "no luck")])
def test_a_cell_that_is_not_whole_has_no_score(numbers: list[float], error: str) -> None:
    mine, full = cell("snapkv"), cell("full")
    got = responses(mine, numbers, error) + responses(full, FULL)
    rows = by_policy(tables(task(), [mine, full], got)[0])
    assert rows["snapkv"]["status"] == "error" and rows["full"]["status"] == "ok"
    assert rows["snapkv"]["error"] == (error or "5 of 8 responses")
    assert math.isnan(rows["snapkv"]["score"])


def test_a_score_that_is_neither_a_mean_nor_aggregated_from_its_values_is_refused() -> None:
    full = cell("full")
    cells, _ = tables(task(mean=statistics.median), [full], responses(full, FULL))
    assert cells.status[0] == "error" and "not the mean of its values" in cells.error[0]


@dataclass(frozen=True, eq=False)
class Words(Numbers):
    """Responses are numbers, scored by their geometric mean, their mean, and by a metric of few of them."""

    def score_metrics(self, responses: Mapping[Key, str], marks: Any = None) -> list[MetricScores]:
        (numbers,) = super().score_metrics(responses)
        pairs = {key: (math.log(value), 1) for key, value in numbers.values.items()}
        last = {key: value for key, value in numbers.values.items() if key[0] == "3"}
        return [
            MetricScores("perplexity", "", False, pairs, geometric_mean([*pairs.values()]), geometric_mean),
            replace(numbers, name="mean", filter="strict"),
            replace(numbers, name="last", values=last, score=statistics.fmean(last.values())),
            replace(numbers, name="broken", score=math.nan),
        ]


def geometric_mean(pairs: Sequence[tuple[float, int]]) -> float:
    return math.exp(sum(value for value, _ in pairs) / sum(count for _, count in pairs))


def all_metrics(task: LoadedTask, cells: list[Cell], got: list[Response]) -> list[ScoredCell]:
    return [*scored([Job(task, [], cells)], lambda cell: [r for r in got if r.cell == cell])]


def words() -> Words:
    return Words(**{entry.name: getattr(task(), entry.name) for entry in dataclasses.fields(Numbers)})


def test_a_metric_that_is_no_mean_is_computed_on_every_resample() -> None:
    mine, full = cell("snapkv"), cell("full")
    before, after = [1.0, 2.0, 4.0, 1.0, 2.0, 2.0, 1.0, 8.0], [1.0, 4.0, 4.0, 1.0, 2.0, 8.0, 1.0, 8.0]
    rows = [c.row for c in all_metrics(words(), [mine, full], responses(full, before) + responses(mine, after))]
    whole, part = rows
    assert not whole["is_mean"] and not part["is_mean"]
    assert whole["score"] == pytest.approx(statistics.geometric_mean(before))
    assert part["score"] == pytest.approx(statistics.geometric_mean(after))
    assert part["diff"] == pytest.approx(part["score"] - whole["score"])
    # Four contexts have few enough resamples to count them all.
    means = [statistics.fmean(map(math.log, after[2 * k : 2 * k + 2])) for k in range(4)]
    every = [math.exp(statistics.fmean(drawn)) for drawn in product(means, repeat=4)]
    low, high = np.quantile(every, [stats.tail(4), 1 - stats.tail(4)])
    assert part["score_lo"] == pytest.approx(low, rel=0.05) and part["score_hi"] == pytest.approx(high, rel=0.05)
    assert part["score_se"] == pytest.approx(np.std(every), rel=0.1)
    # The draws are paired: contexts 0 and 2 make all the difference.
    assert part["diff_lo"] >= 0 and whole["diff_lo"] == whole["diff_hi"] == 0


def test_all_metrics_of_a_cell_have_scores_intervals_and_differences() -> None:
    mine, full = cell("snapkv"), cell("full")
    got = responses(mine, [x + 1 for x in MINE]) + responses(full, [x + 1 for x in FULL])
    whole, part = all_metrics(words(), [mine, full], got)
    assert [(row["metric"], row["filter"]) for row in part.metric_rows] == [
        ("perplexity", ""), ("mean", "strict"), ("last", ""), ("broken", "")
    ]  # fmt: skip
    perplexity, mean, last, broken = part.metric_rows
    assert all(perplexity[name] == part.row[name] for name in SCORES)
    assert (mean["score"], mean["full_score"], mean["diff"]) == (1 + 4 / 8, 1 + 7 / 8, pytest.approx(-3 / 8))
    assert mean["higher_is_better"] and not perplexity["higher_is_better"]
    assert (last["score"], last["full_score"]) == (2, 2)
    assert math.isnan(broken["score"]) and math.isnan(broken["diff"]) and part.row["status"] == "ok"
    assert whole.metric_rows[1]["diff"] == 0
    assert all(math.isnan(score) for score in part.samples["score"]), "pairs are no numbers"
    values = [json.loads(text) for text in part.samples["metrics"]]
    assert values[1] == {"mean,strict": 1.0, "broken": 1.0}
    assert values[7] == {"mean,strict": 2.0, "last": 2.0, "broken": 2.0}
    to_table(pd.DataFrame(whole.metric_rows + part.metric_rows), METRICS_SCHEMA)


def test_a_failed_cell_has_a_row_without_scores_and_one_metric_needs_no_text() -> None:
    mine, full = cell("snapkv"), cell("full")
    whole, part = all_metrics(task(), [mine, full], responses(full, FULL) + responses(mine, MINE[:3]))
    assert set(whole.samples["metrics"]) == {""} and len(whole.metric_rows) == 1
    (row,) = part.metric_rows
    assert row["metric"] == "score" and all(math.isnan(row[name]) for name in SCORES)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("four", "ValueError: could not convert"),
        ("nan", "not a finite number"),
        ("inf", "not a finite"),
        ("1e200", "of at most 1e+150"),
    ],
)
def test_a_metric_that_fails_takes_no_other_cell_with_it(said: str, error: str) -> None:
    mine, full = cell("snapkv"), cell("full")
    got = [*responses(mine, MINE[:-1]), replace(responses(mine, MINE)[-1], response=said)]
    cells, samples = tables(task(), [mine, full], got + responses(full, FULL))
    rows = by_policy(cells)
    assert rows["full"]["score"] == 7 / 8
    assert rows["snapkv"]["status"] == "error" and error in rows["snapkv"]["error"]
    assert math.isnan(rows["snapkv"]["score"]) and len(samples) == 16


def test_lower_is_better_discriminates_below_chance() -> None:
    full = cell("full")
    near, far = [5.0, 6.0] * 4, [99.0, 104.0] * 4
    low = task(higher_is_better=False, chance=100.0)
    assert tables(low, [full], responses(full, near))[0].discriminative[0]
    assert not tables(low, [full], responses(full, far))[0].discriminative[0]
