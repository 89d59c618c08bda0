"""From a grid to results: plan, execute, score. `kvbench.run` and `kvbench.load` live here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError, reason_of
from kvbench.judge.choosing import check_judges
from kvbench.progress import Reporter, Silent, duration
from kvbench.runs.cell import Cell
from kvbench.runs.grid import Grid
from kvbench.runs.planning import Job, Stage, plan
from kvbench.runs.store import GRID, RunStore, load_frames

if TYPE_CHECKING:
    import pandas as pd

    from kvbench.runs.answers import Prompt


@dataclass(frozen=True)
class Run:
    """A run's results.

    Attributes:
        path: Its folder.
        cells: A row per cell, as `cells.parquet` (see docs/results.md).
        samples: A row per response, as `samples.parquet`.
        failed: Cells that have no score, with the reason.
    """

    path: Path
    cells: pd.DataFrame
    samples: pd.DataFrame
    failed: Mapping[str, str] = field(default_factory=dict)


def run(grid: Grid | Mapping[str, Any] | str | Path) -> Run:
    """Run a grid, or go on with it where an earlier call stopped.

    Args:
        grid: A `Grid`, its dictionary, or the path of its YAML file.

    Raises:
        UserError: Something in the grid is unknown or out of range.
    """
    if isinstance(grid, (str, Path)):
        grid = Grid.from_yaml(grid)
    elif isinstance(grid, Mapping):
        grid = Grid.from_dict(grid)
    elif not isinstance(grid, Grid):
        raise UserError(f"{type(grid).__name__} is no grid; a Grid, a dict or a YAML file is")
    return execute(grid)


def load(paths: str | Path | Iterable[str | Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the results of one run or several as the data frames (cells, samples)."""
    return load_frames(paths)


def execute(grid: Grid, *, reporter: Reporter | None = None, fresh: bool = False) -> Run:
    """Carry out a grid.

    Args:
        grid: What to run.
        reporter: Told of the progress.
        fresh: Throw away what an earlier run of the same folder left.

    Raises:
        UserError: Something in the grid is unknown or out of range, and nothing was run; or the
            device's memory does not suffice.
    """
    from torch import OutOfMemoryError

    from kvbench.runs.worker import Executor, pending

    reporter = Silent() if reporter is None else reporter
    stages = plan(grid, reporter.message)
    with RunStore(grid.path, fresh=fresh) as store:
        _same_grid(grid)
        store.save_grid(grid.to_dict())
        left = [
            sum(1 for job in stage.jobs for _ in pending(store, job.prompts, job.cells))
            for stage in stages
        ]
        if any(left):
            check_judges(job.task.judge for stage in stages for job in stage.jobs)
        for stage, count in zip(stages, left, strict=True):
            if not count:
                continue
            with _loaded(stage, grid) as model:
                reporter.start(count, stage.model)
                try:
                    executor = Executor(model, stage.tokenizer, store, reporter, grid.batch_size)
                    for job in stage.jobs:
                        executor.run(job.task, job.prompts, job.cells)
                except OutOfMemoryError as error:
                    raise UserError(
                        f"model {stage.model}: {reason_of(error)}; a smaller --batch-size or "
                        "shorter prompts would be right, and the same command goes on from here"
                    ) from error
                finally:
                    reporter.stop()
        from kvbench.runs.results import frames

        jobs = [(job.task, job.cells) for stage in stages for job in stage.jobs]
        cells, samples = frames(jobs, store.responses())
        store.write(cells, samples)
    failed = {str(r.cell): str(r.error) for r in cells.itertuples() if r.status != "ok"}
    return Run(grid.path, cells, samples, failed)


def _same_grid(grid: Grid) -> None:
    """Refuse a folder in which another grid has run: its tables would be lost."""
    file = grid.path / GRID
    if not file.exists():
        return
    if Grid.from_yaml(file).digest != grid.digest:
        raise UserError(
            f"{grid.path} holds the results of another grid ({file}); another --out, or --fresh to "
            "throw them away, would be right"
        )


def describe(grid: Grid, message: Callable[[str], None], *, fresh: bool = False) -> list[str]:
    """What `--dry-run` says: cells, samples, what is there already, and an estimate.

    The estimate times the first context that is still to do, with its first cell, on the real
    model.

    Args:
        grid: What would be run.
        message: Told of tasks that cannot be had here.
        fresh: Whether what is there already would be thrown away.

    Returns:
        Lines to print.
    """
    from kvbench.runs.worker import pending

    _writable(grid.path)
    stages = plan(grid, message)
    lines = []
    there = not fresh and (grid.path / "responses.jsonl").exists()
    store = RunStore(grid.path) if there else None
    try:
        for stage in stages:
            cells = sum(len(job.cells) for job in stage.jobs)
            total = sum(len(job.cells) * len(job.prompts) for job in stage.jobs)
            todo = []
            for job in stage.jobs:
                if store is None:
                    todo += [(job, c, p) for c in job.cells for p in job.prompts]
                else:
                    todo += [(job, c, p) for c, p in pending(store, job.prompts, job.cells)]
            tasks = ", ".join(dict.fromkeys(job.task.name for job in stage.jobs))
            lines.append(f"{stage.model}: {cells} cells over {tasks}")
            lines.append(f"  {total} responses, {len(todo)} still to generate")
            if todo:
                lines.append(f"  estimate: {duration(_estimate(stage, grid, todo))}")
    finally:
        if store is not None:
            store.close()
    return [*lines, f"into {grid.path}"]


def _writable(path: Path) -> None:
    """Refuse a folder that could not be made or written to.

    Raises:
        UserError: It could not.
    """
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not there.is_dir():
        raise UserError(f"cannot write {path}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK):
        raise UserError(f"cannot write {path}: permission denied in {there}")


def _estimate(stage: Stage, grid: Grid, todo: Sequence[tuple[Job, Cell, Prompt]]) -> float:
    """Seconds for what is to do: measured on one context and one full batch of it, scaled up."""
    import tempfile

    from kvbench.runs.worker import Executor

    job, _, prompt = todo[len(todo) // 2]
    contexts = {(j.task.name, j.task.length, p.context_ids) for j, _, p in todo}
    tokens = sum(len(ids) for _, _, ids in contexts)
    steps = sum(p.limit for _, _, p in todo)
    with tempfile.TemporaryDirectory() as folder, _loaded(stage, grid) as model:
        for i in range(2):  # the first pass warms up
            with RunStore(Path(folder) / str(i)) as scratch:
                executor = Executor(model, stage.tokenizer, scratch, Silent(), grid.batch_size)
                executor.run(job.task, [prompt], job.cells)
                done = scratch.responses()
    prefill = done[0].prefill_s / max(1, len(prompt.context_ids))
    compress = sum(r.compress_s for r in done) / len(done)
    generated = sum(max(1, r.generated_tokens) for r in done)
    decode = sum(r.decode_s for r in done) / generated
    return prefill * tokens + compress * len(todo) + decode * steps


def _loaded(stage: Stage, grid: Grid) -> Any:
    from contextlib import contextmanager

    from kvbench.engine.models import load_model
    from kvbench.engine.prefix import engine

    @contextmanager
    def loaded() -> Any:
        model = load_model(
            stage.model,
            grid.revision,
            stage.device,
            stage.dtype,
            device_map=grid.device_map,
            quantization=grid.quantization,
        )
        with engine(model):
            yield model

    return loaded()
