"""Compares `kvbench run --task NAME` with lmms-eval's own loop, task by task, on the full cache of `reference-vl`.

`python -m benchmarks.lmms_eval_truth` prints a Markdown table, and exits with status 1 if a response or score differs.
The rows are made up, in the schema of the data sets (`lmms_eval_rows`); definitions, prompts, filters and metrics are
lmms-eval's. Both sides generate at most `LIMIT` tokens, because lmms-eval's `huggingface` has another default than its
other models.

The little model rarely answers such prompts well. Both sides therefore also score given answers, of which some are
right.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvbench
from benchmarks.lmms_eval_rows import ROWS, TABLES, served
from benchmarks.lmms_eval_stock import stock_model
from benchmarks.wrong_input import refused
from kvbench.engine.loading import load_config, load_processor, load_tokenizer
from kvbench.errors import unknown
from kvbench.files import cache_dir
from kvbench.harness import lmms_tasks
from kvbench.harness.lmms_eval import LmmsEvalHarness
from kvbench.harness.protocol import Key, LoadedTask, TaskSettings
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
        given: The scores of given answers.
    """

    responses: list[str]
    scores: dict[str, float]
    given: dict[str, float]


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
    def is_equal(self) -> bool:
        """Return whether all responses and scores are equal."""
        return (
            len(self.lmms_eval.responses) == len(self.kvbench.responses) == self.equal_responses
            and equal_scores(self.lmms_eval.scores, self.kvbench.scores)
            and equal_scores(self.lmms_eval.given, self.kvbench.given)
        )


def equal_scores(expected: Mapping[str, float], found: Mapping[str, float]) -> bool:
    """Return whether two sides have the same metrics and scores."""
    return expected.keys() == found.keys() and all(
        math.isclose(score, found[metric], abs_tol=_TOLERANCE) for metric, score in expected.items()
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
    responses, scores = _evaluated(stock_model(reference_path()), task)
    _, given = _evaluated(_canned(TABLES[task].answers()), task)
    return Side(responses, scores, given)


def _evaluated(model: Any, task: str) -> tuple[list[str], dict[str, float]]:
    """Return the responses of a model in lmms-eval, and its scores."""
    from lmms_eval.evaluator import simple_evaluate
    from loguru import logger

    logger.disable("lmms_eval")  # its warnings would stand between the lines of the table
    # Some metrics print, and some write files into the working directory.
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
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
    return [sample["resps"][0][0] for sample in samples], scores


def _canned(answers: Sequence[str]) -> Any:
    """Return a model of lmms-eval that gives some answers, by document."""
    from lmms_eval.api.model import lmms

    class Canned(lmms):  # type: ignore[misc]
        is_simple = False

        def generate_until(self, requests: list[Any]) -> list[str]:
            return [answers[request.args[3]] for request in requests]

        def loglikelihood(self, requests: list[Any]) -> Any:
            raise NotImplementedError

        def generate_until_multi_round(self, requests: list[Any]) -> Any:
            raise NotImplementedError

    return Canned()


def _kvbench_side(task: str, folder: Path) -> Side:
    grid = {
        "models": [NAME],
        "tasks": [f"{lmms_tasks.PREFIX}{task}"],
        "policies": ["full"],
        "samples": ROWS,
        "dtype": "float32",
        "device": "cpu",
        "max_new_tokens": LIMIT,
        "out": str(folder / task),
    }
    samples = kvbench.run(grid, progress=False).samples.sort_values("doc_id")
    ((_, benchmark),) = lmms_tasks.resolve(task) or []
    loaded = LmmsEvalHarness().load(task, _settings(), benchmark)
    answers = TABLES[task].answers()
    given = {(request.sample_id, request.question_id, 0): answers[request.doc_id] for request in loaded.requests}
    keys = zip(samples.sample_id, samples.question_id, samples.repeat, strict=True)
    generated = dict(zip(keys, samples.response, strict=True))
    return Side(samples.response.tolist(), _scores(loaded, generated), _scores(loaded, given))


def _scores(task: LoadedTask, responses: Mapping[Key, str]) -> dict[str, float]:
    return {metric.label: metric.score for metric in task.score_metrics(responses)}


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


def _listed(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{metric} {score:.4g}" for metric, score in scores.items())


@refused()
def main(arguments: Sequence[str] | None = None) -> int:
    """Compare tasks and print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"some of {', '.join(TABLES)} (default: all)")
    tasks = parser.parse_args(arguments).tasks or [*TABLES]
    if unknown_tasks := sorted({*tasks} - {*TABLES}):
        raise unknown("task", unknown_tasks[0], TABLES)
    started = time.perf_counter()
    lines = ["| task | documents | equal responses | of them different | scores | scores of given answers | equal |"]
    lines.append("| --- | --: | --: | --: | --- | --- | --- |")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for task in tasks:
            comparison = compare(task, Path(folder))
            theirs = comparison.lmms_eval
            lines.append(
                f"| {task} | {len(theirs.responses)} | {comparison.equal_responses} | {len({*theirs.responses})} "
                f"| {_listed(theirs.scores)} | {_listed(theirs.given)} | {'yes' if comparison.is_equal else 'NO'} |"
            )
            if not comparison.is_equal:
                failed.append(task)
                print(f"{task} differs: {comparison}", file=sys.stderr)
    print("\n".join(lines))
    print(f"\n{len(tasks) - len(failed)} of {len(tasks)} tasks are equal ({time.perf_counter() - started:.0f} s).")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
