"""Runner: plan, execute and score a grid. Home of `kvbench.run`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from kvbench import native
from kvbench.engine.hardware import describe_hardware
from kvbench.engine.kernels import launch
from kvbench.errors import UserError
from kvbench.files import check_writable
from kvbench.progress import Reporter, Silent, duration
from kvbench.progress import reporter as terminal_reporter
from kvbench.runs.estimate import estimate
from kvbench.runs.executors.base import Executor, Unfinished, run_here
from kvbench.runs.executors.ray import run_on_ray
from kvbench.runs.file_names import GRID, RESPONSES
from kvbench.runs.grid import Grid
from kvbench.runs.groups import group_rows
from kvbench.runs.integrity import rows_of_cells
from kvbench.runs.planning import Job, RunPlan, Say, plan
from kvbench.runs.results import check_requests, scored
from kvbench.runs.store import RunStore
from kvbench.runs.work import missing_of
from kvbench.terminal import console

_EXECUTORS: dict[str, Executor] = {"local": run_here, "ray": run_on_ray}


@dataclass(frozen=True)
class Run:
    """The results of a run.

    Attributes:
        path: Its folder.
        cells: One row per cell, as in `cells.parquet` (see docs/results.md).
        failed: Why cells have no score, by cell.
        left_out: Why tasks and policies were left out, by name.
    """

    path: Path
    cells: pd.DataFrame
    failed: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    _samples: pq.ParquetFile = field(repr=False, kw_only=True)

    @functools.cached_property
    def samples(self) -> pd.DataFrame:
        """Return one row per response, as in `samples.parquet`.

        The file is read at first use. A later run that replaces it changes nothing here.
        """
        samples: pd.DataFrame = self._samples.read().to_pandas()
        return samples


def run(grid: Grid | Mapping[str, Any] | str | Path, *, progress: bool = True, extend: bool = False) -> Run:
    """Run a grid, or continue it where an earlier call stopped.

    A folder with more samples or repeats than the grid keeps them.

    Args:
        grid: A `Grid`, its dictionary, or the path of its YAML file.
        extend: Whether the folder may hold a smaller grid, with fewer policies, budgets, models, tasks, moments or
            lengths. Its responses are kept.
        progress: Whether to print progress, and why tasks are left out, to stderr. `Run.left_out` also holds the
            reasons.

    Raises:
        UserError: Something in the grid is unknown or out of range.
    """
    if isinstance(grid, (str, Path)):
        grid = Grid.from_yaml(grid)
    elif isinstance(grid, Mapping):
        grid = Grid.from_dict(grid)
    elif not isinstance(grid, Grid):
        raise UserError(f"{type(grid).__name__} is not a grid; give a Grid, a dict or the path of a YAML file")
    reporter = terminal_reporter(console(stderr=True)) if progress else Silent()
    try:
        return execute(grid, reporter, extend=extend)
    finally:
        reporter.stop()


def execute(grid: Grid, reporter: Reporter | None = None, *, fresh: bool = False, extend: bool = False) -> Run:
    """Execute a grid.

    Args:
        reporter: Progress reporter; None reports nothing.
        fresh: Whether to discard earlier results in the same folder.
        extend: Whether the folder may hold a smaller grid; see `run`.

    Raises:
        UserError: Something in the grid is unknown or out of range, and nothing was run; or the device has too little
            memory.
    """
    reporter = Silent() if reporter is None else reporter
    folder = grid.path.absolute()  # a plugin may change the working directory
    say = _each_once(reporter.message)
    planned = plan(grid, say, reporter=reporter)
    with RunStore(folder, fresh, grid.fidelity) as store:
        stored_grid = _check_same_grid(grid, folder, extend=extend)
        grid, planned = _with_held(grid, planned, stored_grid, folder, say)
        store.save_grid(grid.to_dict())
        done_keys = store.keys()
        stages = [Unfinished(stage, missing_of(stage, done_keys, fidelity=grid.fidelity)) for stage in planned.stages]
        open_stages = [unfinished for unfinished in stages if unfinished.jobs]
        jobs = [job for stage in planned.stages for job in stage.jobs]
        check_requests(jobs, store)
        if open_stages:  # fail now if a judge cannot answer, not after hours of generation
            for judge in dict.fromkeys(job.judge for job in jobs if job.judge is not None):
                judge.check()
        runs_here = bool(open_stages) and grid.executor == "local"  # the machines of Ray's workers are unknown here
        machines = store.add_machine(_machine(jobs if runs_here else [], say))
        if open_stages:
            _EXECUTORS[grid.executor](open_stages, grid, store, reporter)
        facts = {"samples": grid.samples, "repeats": grid.repeats, **machines}
        tasks = [job.task for job in jobs]
        reporter.busy("scoring")
        scored_cells = scored(jobs, store.responses_of, reporter)
        cells = store.write_scored(scored_cells, facts, functools.partial(group_rows, tasks))
        samples = store.samples()
        reporter.stop()
    failures = {str(cell_row.cell): str(cell_row.error) for cell_row in cells.itertuples() if cell_row.status != "ok"}
    return Run(folder, cells, failures, planned.left_out, _samples=samples)


def _each_once(notify: Say) -> Say:
    """Pass every line on once: a grid is planned again if its folder holds more samples."""
    said: set[str] = set()

    def say(line: str) -> None:
        if line not in said:
            said.add(line)
            notify(line)

    return say


def _machine(jobs: Sequence[Job], say: Say) -> dict[str, list[str]]:
    """Return what generates the responses of some jobs here: the hardware, and the code on a CPU and on a GPU."""
    devices = dict.fromkeys(cell.device for job in jobs for cell in job.cells)
    on_cpu = [device for device in devices if device == "cpu"]
    if on_cpu and (problem := native.problem()):
        say(f"torch computes what native code would compute faster: {problem}")
    return {
        "hardware": [describe_hardware(device) for device in devices],
        "cpu_code": [native.implementation() for _ in on_cpu],
        "gpu_code": [launch.implementation(device) for device in devices if device == "cuda"],
    }


def _check_same_grid(grid: Grid, folder: Path, *, extend: bool) -> Grid | None:
    """Refuse the folder of another grid, whose tables would be lost.

    Call it with the folder locked, so that no other run changes its grid meanwhile.

    Returns:
        The folder's grid; None if it has none.
    """
    grid_path = folder / GRID
    if not grid_path.exists():
        return None
    _check_responses(folder)
    if (stored_grid := Grid.from_yaml(grid_path)).digest == grid.digest:
        return stored_grid
    option_names = grid.lacks(stored_grid) if extend else grid.differs(stored_grid)
    if not option_names:
        return stored_grid
    are_lists = all(isinstance(getattr(grid, option_name), tuple) for option_name in option_names)
    extend_hint = "add to it with --extend, " if are_lists and not extend else ""
    grid_file = grid.path / GRID
    raise UserError(
        f"{grid.path} holds the results of another grid ({grid_file}), with other {', '.join(option_names)}; "
        f"{extend_hint}choose another --out, or discard them with --fresh"
    )


def _check_responses(folder: Path) -> None:
    """Refuse tables without the responses that they were made from, because a run would replace them."""
    responses_path = folder / RESPONSES
    if (not responses_path.exists() or not responses_path.stat().st_size) and rows_of_cells(folder)[0]:
        raise UserError(
            f"{folder} has tables but no {RESPONSES} to go on from; put that file back, choose another "
            "--out, or discard the tables with --fresh"
        )


def _with_held(
    grid: Grid, planned: RunPlan, stored_grid: Grid | None, folder: Path, notify: Say
) -> tuple[Grid, RunPlan]:
    """Keep a folder's samples and repeats if its tables hold more of them than the grid.

    Args:
        stored_grid: The grid of the folder, or None.
        notify: Receives one line if something is kept.

    Returns:
        The grid and its plan, with the larger numbers.
    """
    if stored_grid is None:
        return grid, planned
    row_counts, stored_facts = rows_of_cells(folder)
    larger_samples = {"samples": max(grid.samples, stored_facts.get("samples", stored_grid.samples))}
    for extensions in (
        larger_samples,
        larger_samples | {"repeats": stored_facts.get("repeats", stored_grid.repeats)},
    ):
        if not _shrinks(planned, row_counts):
            break
        larger_grid = replace(grid, **extensions)
        if larger_grid == grid:
            continue
        option_names = [
            option_name for option_name in extensions if getattr(larger_grid, option_name) != getattr(grid, option_name)
        ]
        description = " and ".join(
            f"{getattr(larger_grid, option_name) or 'more'} {option_name}" for option_name in option_names
        )
        notify(
            f"{grid.path} has {description}, which are kept; "
            "to run fewer, choose another --out or discard them with --fresh"
        )
        grid, planned = larger_grid, plan(larger_grid, notify)
    return grid, planned


def _shrinks(planned: RunPlan, row_counts: Mapping[str, int]) -> bool:
    """Return whether a table would lose rows of a cell."""
    return any(
        row_counts.get(cell.cell, 0) > sum(request.repeats for request in job.task.requests)
        for stage in planned.stages
        for job in stage.jobs
        for cell in job.cells
    )


# --- dry run --------------------------------------------------------------------------------------


def describe(grid: Grid, notify: Say, *, fresh: bool = False, reporter: Reporter | None = None) -> list[str]:
    """Return the report of `--dry-run`: cells, samples, existing responses, and a time estimate.

    The estimate runs some of the missing contexts, with all their cells, on the real model.

    Args:
        notify: Receives messages about tasks that are left out.
        fresh: Whether existing results would be discarded.
        reporter: Progress reporter of the planning, if it takes seconds.

    Returns:
        Lines to print.
    """
    folder = grid.path.absolute()
    check_writable(grid.path)
    notify = _each_once(notify)
    planned = plan(grid, notify, reporter=reporter)
    lines = []
    if not fresh:
        _check_responses(folder)
    exists = not fresh and (folder / RESPONSES).exists()
    store = RunStore(folder, fidelity=grid.fidelity) if exists else None
    try:
        if store is not None and (folder / GRID).exists():
            stored_grid = Grid.from_yaml(folder / GRID)
            grid, planned = _with_held(grid, planned, stored_grid, folder, notify)
        for stage in planned.stages:
            cell_count = sum(len(job.cells) for job in stage.jobs)
            response_count = sum(len(job.cells) * len(job.prompts) for job in stage.jobs)
            done_keys = store.keys() if store is not None else set()
            pending_jobs = missing_of(stage, done_keys, fidelity=grid.fidelity)
            missing_count = sum(pending.responses for pending in pending_jobs)
            task_names = ", ".join(dict.fromkeys(job.task.name for job in stage.jobs))
            lines.append(f"{stage.model}: {cell_count} cells over {task_names}")
            lines.append(f"  {response_count} responses, {missing_count} still to generate")
            if pending_jobs:
                worker_note = " for one worker" if grid.executor == "ray" else ""
                lines.append(f"  estimate: {duration(estimate(stage, grid, pending_jobs, notify))}{worker_note}")
    finally:
        if store is not None:
            store.close()
    return [*lines, f"into {grid.path}"]
