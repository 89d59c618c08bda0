"""Interface and common steps of the executors."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

from torch import nn

from kvbench.engine.driver import listening
from kvbench.errors import UserError, out_of_memory, reason_of
from kvbench.progress import Reporter
from kvbench.runs.answers import Prompt
from kvbench.runs.cell import Cell
from kvbench.runs.contexts import answer_contexts
from kvbench.runs.dialogues import answer_dialogues
from kvbench.runs.grid import Grid
from kvbench.runs.planning import Stage
from kvbench.runs.store import RunStore
from kvbench.runs.work import Missing, total_work
from kvbench.runs.worker import ResponseSink, Worker, loaded_model, model_of

_FROZEN_BY_PYTHON = gc.get_freeze_count()
"""Objects that some versions of Python leave alone from the start."""


class Unfinished(NamedTuple):
    """A model and the jobs that lack responses."""

    stage: Stage
    jobs: list[Missing]

    @property
    def responses(self) -> int:
        """Return the number of missing responses."""
        return sum(missing.responses for missing in self.jobs)


class Executor(Protocol):
    """Generates the missing responses of a run."""

    def __call__(self, unfinished: Sequence[Unfinished], grid: Grid, store: RunStore, reporter: Reporter) -> None:
        """Generate every response that the store lacks, and append it to the store.

        Args:
            unfinished: The models that lack responses.
            store: Holds the finished responses; only this process writes to it.
            reporter: Progress reporter.

        Raises:
            UserError: The device has too little memory, or a machine cannot do its part.
        """
        ...


def worker_of(model: nn.Module, stage: Stage, grid: Grid, store: ResponseSink, reporter: Reporter) -> Worker:
    """Return a worker for a stage's model with the options of a grid."""
    return Worker(
        model,
        reporter,
        stage.vision,
        partial(model_of, stage, grid),
        tokenizer=stage.tokenizer,
        store=store,
        batch_size=grid.batch_size,
        cache_memory=grid.cache_memory,
        prefill_batch=grid.prefill_batch,
        fidelity=grid.fidelity,
    )


def answer(worker: Worker, prompts: Sequence[Prompt], cells: Sequence[Cell]) -> None:
    """Answer the prompts of one task for cells at any moment.

    If memory runs out, missing responses are generated again in batches of half the size.
    """
    with _new_garbage_only():
        while True:
            try:
                return _answer(worker, prompts, cells)
            except Exception as error:
                if not out_of_memory(error) or not worker.batching.halve():
                    raise
            row_count = worker.batching.rows
            worker.reporter.message(f"out of memory: now decoding {row_count} responses at once")


@contextmanager
def _new_garbage_only() -> Iterator[None]:
    """Have Python look for garbage only among new objects: a pass over the modules and the model takes 0.2 s."""
    if gc.get_freeze_count() > _FROZEN_BY_PYTHON:  # whoever did this ends it
        yield
        return
    gc.freeze()
    gc.collect(0)  # of none now; the command line, which puts this off during imports, waits for the first one
    try:
        yield
    finally:
        gc.collect()  # otherwise that of many small tasks would add up
        gc.unfreeze()


def _answer(worker: Worker, prompts: Sequence[Prompt], cells: Sequence[Cell]) -> None:
    worker.meter.forget_begun()
    live_cells = [cell for cell in cells if cell.moment == "turns"]
    if live_cells:
        answer_dialogues(worker, prompts, live_cells)
    other_cells = [cell for cell in cells if cell.moment != "turns"]
    if other_cells:
        answer_contexts(worker, prompts, other_cells)


@contextmanager
def memory_of(model: str) -> Iterator[None]:
    """Turn an out-of-memory error into a message that says what to do.

    Raises:
        UserError: The machine or the device has too little memory for the model's work.
    """
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise UserError(
            f"model {model}: {reason_of(error)}; use a smaller --batch-size or shorter prompts "
            "(the same command continues from here)"
        ) from error


def run_here(unfinished: Sequence[Unfinished], grid: Grid, store: RunStore, reporter: Reporter) -> None:
    """Run the local executor; see `kvbench.runs.executors.base.Executor`."""
    for stage, missing_jobs in unfinished:
        reporter.message(f"loading model {stage.model}")
        with loaded_model(stage, grid, reporter.message) as model:
            worker = worker_of(model, stage, grid, store, reporter)
            planned = total_work(missing.work for missing in missing_jobs)
            with (
                listening(model, worker.meter.fed),
                worker.meter.running(planned, stage.model),
                memory_of(stage.model),
            ):
                for missing in missing_jobs:
                    with worker.meter.job(missing.work):
                        answer(worker, missing.job.prompts, missing.job.cells)
