"""Compares `kvbench run --task NAME` with lmms-eval's own loop, task by task, on the full cache of `reference-vl`.

`python -m benchmarks.lmms_eval_truth` prints a Markdown table, and exits with status 1 if any response or score differs.
The rows are made up, in the schema of the data sets (`lmms_eval_rows`); definitions, prompts, filters and metrics are
lmms-eval's. Both sides generate at most `LIMIT` tokens, because lmms-eval's `huggingface` has another default than its
other models.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import kvbench
from benchmarks.lmms_eval_rows import ROWS, TABLES, served
from benchmarks.lmms_eval_stock import stock_model
from kvbench.engine.loading import load_config, load_tokenizer
from kvbench.engine.vision import load_processor
from kvbench.files import cache_dir
from kvbench.harness import catalogue, lmms_tasks
from kvbench.harness.lmms_eval import LmmsEvalHarness
from kvbench.harness.protocol import TaskSettings
from kvbench.named import lexicon_of
from kvbench.reference_vl import NAME
from kvbench.reference_vl import path as reference_path

LIMIT = 16
"""Tokens of an answer."""

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Side:
    """What one side says of a task.

    Attributes:
        responses: The response to each document.
        scores: The score by each metric; `metric,filter` if there are several filters.
    """

    responses: list[str]
    scores: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """A task on both sides."""

    task: str
    lmms_eval: Side
    kvbench: Side

    @property
    def equal_responses(self) -> int:
        """Return how many responses are equal."""
        return sum(map(str.__eq__, self.lmms_eval.responses, self.kvbench.responses))

    @property
    def equal_scores(self) -> int:
        """Return by how many of lmms-eval's metrics the scores are equal."""
        return sum(
            math.isclose(score, self.kvbench.scores.get(metric, math.nan), abs_tol=_TOLERANCE)
            for metric, score in self.lmms_eval.scores.items()
        )

    @property
    def is_equal(self) -> bool:
        """Return whether all responses and scores are equal."""
        return (
            len(self.lmms_eval.responses) == len(self.kvbench.responses) == self.equal_responses
            and self.lmms_eval.scores.keys() == self.kvbench.scores.keys()
            and self.equal_scores == len(self.lmms_eval.scores)
        )


def compare(task: str, folder: Path) -> Comparison:
    """Run a task on both sides.

    Args:
        task: A key of `TABLES`.
        folder: Folder for the run of kvbench.
    """
    with served():
        return Comparison(task, _lmms_eval_side(task), _kvbench_side(task, folder))


@functools.cache
def _task_manager() -> Any:
    from lmms_eval.tasks import TaskManager

    return TaskManager(verbosity="ERROR")


def _lmms_eval_side(task: str) -> Side:
    model = stock_model(reference_path())
    from lmms_eval.evaluator import simple_evaluate

    found = simple_evaluate(
        model=model,
        tasks=[task],
        task_manager=_task_manager(),
        gen_kwargs=f"max_new_tokens={LIMIT}",
        bootstrap_iters=0,
        process_docs_parallel=1,
        verbosity="ERROR",
    )
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    filters = {key.partition(",")[2] for key in found["results"][task] if "," in key}
    scores = {
        key if len(filters) > 1 else key.partition(",")[0]: float(value)
        for key, value in found["results"][task].items()
        if "," in key and "_stderr" not in key and isinstance(value, float | int)
    }
    return Side([sample["resps"][0][0] for sample in samples], scores)


def _kvbench_side(task: str, folder: Path) -> Side:
    def resolve(spec: str, *_: Any) -> Any:
        return lmms_tasks.resolve(spec)

    grid = {
        "models": [NAME],
        "tasks": [task],
        "policies": ["full"],
        "samples": ROWS,
        "dtype": "float32",
        "device": "cpu",
        "max_new_tokens": LIMIT,
        "out": str(folder / task),
    }
    with mock.patch.object(catalogue, "resolve_task", resolve):
        samples = kvbench.run(grid, progress=False).samples.sort_values("doc_id")
    loaded = LmmsEvalHarness().load(task, _settings(), dict(resolve(task))[task])
    keys = zip(samples.sample_id, samples.question_id, samples.repeat, strict=True)
    metrics = loaded.score_metrics(dict(zip(keys, samples.response, strict=True)))
    return Side(samples.response.tolist(), {metric.label: metric.score for metric in metrics})


def _settings() -> TaskSettings:
    tokenizer = load_tokenizer(NAME)
    return TaskSettings(
        length=0,
        samples=ROWS,
        seed=0,
        tokenizer=tokenizer,
        tokenizer_id=NAME,
        lexicon=lexicon_of(tokenizer),
        chat_template=True,
        cache_dir=cache_dir(),
        processor=load_processor(NAME, None, load_config(NAME).model_type, tokenizer),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare tasks and print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"some of {', '.join(TABLES)} (default: all)")
    tasks = parser.parse_args(arguments).tasks or [*TABLES]
    started = time.perf_counter()
    lines = ["| task | documents | equal responses | different responses there are | metrics | equal scores |"]
    lines.append("| --- | --: | --: | --: | --- | --: |")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for task in tasks:
            comparison = compare(task, Path(folder))
            theirs = comparison.lmms_eval
            scores = ", ".join(f"{metric} {score:.4g}" for metric, score in theirs.scores.items())
            lines.append(
                f"| {task} | {len(theirs.responses)} | {comparison.equal_responses} | {len(set(theirs.responses))} "
                f"| {scores} | {comparison.equal_scores} of {len(theirs.scores)} |"
            )
            if not comparison.is_equal:
                failed.append(task)
                print(f"{task} differs: {comparison}", file=sys.stderr)
    print("\n".join(lines))
    print(f"\n{len(tasks) - len(failed)} of {len(tasks)} tasks are equal ({time.perf_counter() - started:.0f} s).")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
