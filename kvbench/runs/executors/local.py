"""Local executor: generates responses in this process, one model after the other."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.progress import Reporter
from kvbench.runs.executors.base import Unfinished, answer, memory_of, worker_of
from kvbench.runs.grid import Grid
from kvbench.runs.store import RunStore
from kvbench.runs.worker import loaded_model


def run_here(unfinished: Sequence[Unfinished], grid: Grid, store: RunStore, reporter: Reporter) -> None:
    """Run the local executor; see `kvbench.runs.executors.base.Executor`."""
    for stage, missing_count in unfinished:
        reporter.message(f"loading model {stage.model}")
        with loaded_model(stage, grid, reporter.message) as model:
            reporter.start(missing_count, stage.model)
            try:
                worker = worker_of(model, stage, grid, store, reporter)
                with memory_of(stage.model):
                    for job in stage.jobs:
                        answer(worker, job.prompts, job.cells)
            finally:
                reporter.stop()
