"""Shared parts of all analyses: the grid and its cells, models, contexts and compressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.benchmark import Medium
from kvbench.engine.cache import RaggedCache
from kvbench.engine.integrity import Weights
from kvbench.engine.models import check_single
from kvbench.engine.prefix import Compression, Prefix
from kvbench.engine.pruning import prunes
from kvbench.engine.vision import Pixels, Vision
from kvbench.errors import PluginError, UserError, plugin_call
from kvbench.moments import LATER
from kvbench.plugin import Policy
from kvbench.progress import Reporter
from kvbench.runs.answers import Prompt
from kvbench.runs.cell import Cell
from kvbench.runs.grid import Grid
from kvbench.runs.planning import Job, Stage, plan
from kvbench.runs.worker import loaded_model
from kvbench.view import Need

MOMENTS = ("context", "question")
"""Supported moments: compression once, before or after the question is read."""


@dataclass
class CellBench:
    """One model with the cells to compress on it, and failures.

    Attributes:
        model: The model, inside `engine`.
        reporter: Receives failures.
        failed: Reason by cell id; failed cells are not retried.
        vision: Turns media into pixels; None for a text model.
    """

    model: nn.Module
    reporter: Reporter
    failed: dict[str, str] = field(default_factory=dict)
    vision: Vision | None = None

    def __post_init__(self) -> None:
        self._weights = Weights(self.model)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def prefill(self, token_ids: Sequence[int], needs: frozenset[Need], media: Sequence[Medium] = ()) -> Prefix:
        """Prefill one context, including its images and videos."""
        prefix = Prefix(self.model, needs)
        prefix.extend(self.tensor(token_ids), pixels=self.pixels(media))
        return prefix

    def pixels(self, media: Sequence[Medium]) -> Pixels | None:
        """Return the model's inputs for media, or None without media."""
        if not media:
            return None
        assert self.vision is not None
        return self.vision.pixels(media, self.device)

    def tensor(self, token_ids: Sequence[int]) -> Tensor:
        """Return token ids as a batch of one, `[1, n]`."""
        return torch.tensor([list(token_ids)], device=self.device)

    def compress(self, prefix: Prefix, cell: Cell, policy: Policy, reserve: int | None = None) -> RaggedCache | None:
        """Compress a prefix for a cell; None if its policy fails.

        Args:
            prefix: The prefilled context; if `prefix.modified_in_place` is set afterwards, prefill it again.
            cell: Budget, moment and seed.
            policy: The cell's policy, or a policy that selects the same entries.
            reserve: Free rows after every segment.

        Raises:
            UserError: The policy changed the model's parameters.
        """
        compression = Compression(policy, cell.budget, cell.moment, cell.seed)
        if cell.moment in LATER:
            reserve = None
        try:
            with plugin_call():
                return prefix.compress([compression], reserve)[0]
        except PluginError as error:
            self.fail(cell, str(error).replace(str(policy), str(cell.policy)))
            return None
        finally:
            if changed := self._weights.changed():
                self._weights.restore(changed)

    def fail(self, cell: Cell, reason: str) -> None:
        """Mark a cell as failed."""
        self.failed[cell.cell] = reason
        self.reporter.message(f"{cell} failed: {reason}")


def make_grid(grid_options: Mapping[str, Any], moments: Sequence[str] = MOMENTS, *, pruning: bool = False) -> Grid:
    """Build the grid of an analysis.

    Args:
        grid_options: Grid options, in the format of `Grid.from_dict`.
        moments: Moments that the analysis supports.
        pruning: Whether the analysis supports policies that prune images in the prefill.

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
    if all(not policy.evicts for policy in grid.built_policies):
        raise UserError("the policy full evicts nothing; choose another such as --policy snapkv")
    if all(budget.is_full for budget in grid.parsed_budgets):
        raise UserError("the budget full evicts nothing; choose another such as --budget 0.2")
    return grid


def stages(grid: Grid, message: Callable[[str], None], *, pruning: bool = False) -> list[Stage]:
    """Return models, tasks, prompts and cells, without the full cache.

    Args:
        grid: The grid to analyse.
        message: Receives messages about skipped tasks and policies.
        pruning: Whether to keep cells that prune images in the prefill; `all` may include them.
    """

    def is_analysed(cell: Cell) -> bool:
        return cell.policy.evicts and (pruning or not prunes(cell.policy))

    return [
        replace(
            stage,
            jobs=[replace(job, cells=[cell for cell in job.cells if is_analysed(cell)]) for job in stage.jobs],
        )
        for stage in plan(grid, message, scored=False).stages
    ]


@contextmanager
def analysis_model(stage: Stage, grid: Grid, message: Callable[[str], None]) -> Iterator[nn.Module]:
    """Load the stage's model with kvbench's attention on one device."""
    with loaded_model(stage, grid, message) as model, torch.no_grad():
        check_single(model, "an analysis")
        yield model


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
