"""Shared parts of all analyses: the grid and its cells, models, contexts and compressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.cache import RaggedCache
from kvbench.engine.models import check_single
from kvbench.engine.pruning import prunes
from kvbench.errors import UserError
from kvbench.plugin import Policy
from kvbench.progress import Reporter
from kvbench.runs.answers import Prompt
from kvbench.runs.cell import Cell
from kvbench.runs.grid import Grid
from kvbench.runs.planning import Job, Stage, plan
from kvbench.runs.worker import ModelRunner, loaded_model, model_of

MOMENTS = ("context", "question")
"""Supported moments: compression once, before or after the question is read."""


def make_grid(
    grid_options: Mapping[str, Any], moments: Sequence[str] = MOMENTS, *, pruning: bool = False, codes: bool = False
) -> Grid:
    """Build the grid of an analysis.

    Args:
        grid_options: Grid options, in the format of `Grid.from_dict`.
        moments: Moments that the analysis supports.
        pruning: Whether the analysis supports policies that prune images in the prefill.
        codes: Whether it supports policies that keep all entries as codes.

    Raises:
        UserError: As in `Grid.from_dict`; or the analysis does not support a moment or policy, or only the full cache
            is left.
    """
    grid = Grid.from_dict({**grid_options, "full": False, "repeats": 1})
    for timing in grid.timings:
        if timing.moment not in moments:
            supported = " or ".join(moments)
            raise UserError(f"--moment {timing}: this analysis compresses at {supported} only")
    for policy in grid.built_policies:
        if not pruning and prunes(policy) and str(policy) in grid.named_policies:
            raise UserError(
                f"{policy} prunes images in the prefill, which this analysis does not do; use kvbench analyze vision"
            )
    if not any(_changes_cache(policy, codes) for policy in grid.built_policies):
        raise UserError(f"the policy {grid.built_policies[0]} evicts nothing; choose another such as --policy snapkv")
    if all(budget.is_full for budget in grid.parsed_budgets):
        raise UserError("the budget full evicts nothing; choose another such as --budget 0.2")
    return grid


def prompts_grid(grid_options: Mapping[str, Any]) -> Grid:
    """Build the grid of an analysis that runs no policy: its prompts are read with the full cache.

    Args:
        grid_options: Grid options without policies, budgets and moments, in the format of `Grid.from_dict`.

    Raises:
        UserError: As in `Grid.from_dict`.
    """
    return Grid.from_dict({**grid_options, "policies": ["full"], "budgets": ["full"], "repeats": 1})


def _changes_cache(policy: Policy, codes: bool) -> bool:
    """Return whether an analysis has something to show of a policy; a reader chooses anew at every step."""
    return policy.evicts or (codes and policy.recodes and policy.read is None)


def stages(grid: Grid, message: Callable[[str], None], *, pruning: bool = False, codes: bool = False) -> list[Stage]:
    """Return models, tasks, prompts and cells, without the full cache.

    Args:
        grid: The grid to analyse.
        message: Receives messages about skipped tasks and policies.
        pruning: Whether to keep cells that prune images in the prefill; `all` may include them.
        codes: As in `make_grid`.

    Raises:
        UserError: A value in the grid is unknown or out of range, or a task has no contexts with questions.
    """

    def is_analysed(cell: Cell) -> bool:
        return _changes_cache(cell.policy, codes) and (pruning or not prunes(cell.policy))

    for policy in grid.built_policies:
        if not policy.is_full and not _changes_cache(policy, codes) and str(policy) in grid.named_policies:
            message(f"{policy} evicts nothing and is left out")
    planned_stages = plan(grid, message, scored=False).stages
    for job in (job for stage in planned_stages for job in stage.jobs):
        if not job.prompts.parted:
            raise UserError(
                f"{job.task.name} measures texts without a context or a question before them, so there is nothing to "
                "analyse; use another --task"
            )
    return [
        replace(
            stage,
            jobs=[replace(job, cells=[cell for cell in job.cells if is_analysed(cell)]) for job in stage.jobs],
        )
        for stage in planned_stages
    ]


@contextmanager
def analysis_runner(stage: Stage, grid: Grid, reporter: Reporter, failed: dict[str, str]) -> Iterator[ModelRunner]:
    """Load a stage's model for an analysis; the progress that is started inside ends with it.

    Args:
        stage: The stage.
        grid: The grid of the analysis.
        reporter: Progress reporter.
        failed: Receives why cells have failed, by cell.

    Raises:
        UserError: The model is on several devices.
    """
    with loaded_model(stage, grid, reporter.message) as model, torch.no_grad():
        check_single(model, "an analysis")
        try:
            yield ModelRunner(model, reporter, stage.vision, partial(model_of, stage, grid), failed)
        finally:
            reporter.stop()


def contexts(job: Job) -> list[list[Prompt]]:
    """Return the job's prompts, grouped by context."""
    return [list(group) for _, group in groupby(job.prompts, key=lambda prompt: (prompt.context_ids, prompt.media))]


def prompt_name(prompt: Prompt) -> str:
    """Return the sample of a prompt, with the question number after the first."""
    request = prompt.request
    return request.sample_id + f"/{request.question_id}" * (request.question_id > 0)


def kept_masks(cache: RaggedCache) -> list[Tensor]:
    """Return the kept entries of a single-sequence cache, bool `[H, columns]` per full-attention layer."""
    return [layer_mask[0] for layer_mask in cache.kept() if layer_mask is not None]
