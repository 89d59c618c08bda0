"""What does five-shot multiple choice cost beside lm-eval? `python -m benchmarks.lm_eval_speed --help`.

The questions of one subject share their five examples. lm-eval's `HFLM` reads the examples anew for every question;
kvbench reads them once. Both answer the same questions of the same model in float32: lm-eval some of them, at batch
sizes 1 and 4, kvbench all of them, with the full cache alone and with ten policies at three budgets.

Times are those of one core: CPU seconds of a process with one thread, for answering alone, without loading the model
and without making the prompts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM

from benchmarks.lm_eval_cases import TASKS
from benchmarks.lm_eval_rows import replaced_hub
from benchmarks.lm_eval_truth import processor, quiet, task_manager
from benchmarks.wrong_input import refused
from kvbench.engine.loading import load_model, load_tokenizer
from kvbench.progress import Silent
from kvbench.runs.executors.base import answer
from kvbench.runs.grid import Grid
from kvbench.runs.planning import plan
from kvbench.runs.store import RunStore
from kvbench.runs.worker import Worker, loaded_model

TASK = "made_up_letters"
POLICIES = "streaming_llm knorm keydiff h2o tova snapkv adakv pyramidkv expected_attention criticalkv".split()
BUDGETS = ("0.1", "0.2", "0.5")
SHOTS = 5


class TimedHFLM(HFLM):
    """lm-eval's model class; `seconds` is the CPU time that it has spent answering."""

    seconds = 0.0

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Measure the requests; see `HFLM`."""
        began = time.process_time()
        results = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        self.seconds += time.process_time() - began
        return results


def lm_eval_seconds(model_name: str, model: Any, batch_size: int, questions: int, rows: Path) -> float:
    """Return the CPU seconds per question of lm-eval.

    Args:
        model_name: A model of kvbench.
        model: The loaded model.
        batch_size: Batch size of `HFLM`.
        questions: Number of questions.
        rows: Folder of the rows.
    """
    timed = TimedHFLM(pretrained=model, tokenizer=load_tokenizer(model_name), batch_size=batch_size)
    with replaced_hub(rows):
        lm_eval.simple_evaluate(
            timed, tasks=[TASK], num_fewshot=SHOTS, limit=questions, bootstrap_iters=0, task_manager=task_manager()
        )
    return timed.seconds / questions


def kvbench_seconds(
    model_name: str, policies: list[str], budgets: list[str], questions: int, folder: Path
) -> tuple[float, int, float]:
    """Return the CPU seconds of kvbench per question, its cells, and the mean number of tokens of a prompt.

    Args:
        model_name: A model of kvbench.
        policies: Policies of the grid.
        budgets: Budgets of the grid.
        questions: Number of questions.
        folder: Folder of the rows; the run is stored beside them.
    """
    with tempfile.TemporaryDirectory() as out, replaced_hub(folder):
        grid = Grid.from_dict(
            {
                "policies": policies,
                "budgets": budgets,
                "models": [model_name],
                "tasks": [TASK],
                "moments": ["question"],
                "num_fewshot": SHOTS,
                "include_path": [str(TASKS)],
                "samples": questions,
                "dtype": "float32",
                "device": "cpu",
                "out": out,
            }
        )
        (stage,) = plan(grid, lambda line: None).stages
        with loaded_model(stage, grid, lambda line: None) as model, RunStore(Path(out) / "run") as store:
            worker = Worker(model, Silent(), tokenizer=stage.tokenizer, store=store, cache_memory=grid.cache_memory)
            began = time.process_time()
            for job in stage.jobs:
                answer(worker, job.prompts, job.cells)
            seconds = time.process_time() - began
            if worker.failed:
                raise SystemExit(f"a cell failed: {next(iter(worker.failed.values()))}")
            responses = [*store.responses()]
            cells = sum(len(job.cells) for job in stage.jobs)
    tokens = sum(response.context_tokens + response.question_tokens for response in responses) / len(responses)
    return seconds / questions, cells, tokens


@refused()
def main() -> int:
    """Time both sides in turn and print a table."""
    parser = argparse.ArgumentParser(description="Time five-shot multiple choice beside lm-eval.")
    parser.add_argument("--model", default="smollm2", help="a model of kvbench")
    parser.add_argument("--questions", type=int, default=100, help="questions that kvbench answers (at most 100)")
    parser.add_argument("--lm-eval-questions", type=int, default=20, help="questions that lm-eval answers")
    arguments = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("times are those of one core; set OMP_NUM_THREADS=1")
    torch.set_num_threads(1)
    model = load_model(arguments.model, None, torch.device("cpu"), torch.float32)
    with tempfile.TemporaryDirectory() as name, quiet():
        rows = Path(name)
        theirs = {
            batch_size: lm_eval_seconds(arguments.model, model, batch_size, arguments.lm_eval_questions, rows)
            for batch_size in (1, 4)
        }
        del model
        full, _, tokens = kvbench_seconds(arguments.model, ["full"], [BUDGETS[0]], arguments.questions, rows)
        all_cells, cells, _ = kvbench_seconds(arguments.model, [*POLICIES], [*BUDGETS], arguments.questions, rows)
    print(
        f"{SHOTS} examples, prompts of {tokens:.0f} tokens, {arguments.model} in float32, one core of {processor()}\n"
    )
    print("| | questions | CPU s per question | to kvbench, full cache |")
    print("| --- | --: | --: | --: |")
    for batch_size, seconds in theirs.items():
        count = arguments.lm_eval_questions
        print(f"| lm-eval's HFLM, batch size {batch_size} | {count} | {seconds:.2f} | {seconds / full:.1f}x |")
    print(f"| kvbench, full cache | {arguments.questions} | {full:.2f} | 1.0x |")
    print(f"| kvbench, {cells} cells | {arguments.questions} | {all_cells:.2f} | {all_cells / full:.1f}x |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
