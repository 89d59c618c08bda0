"""What both analyses share: the grid and its cells, models, contexts, compressions, tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvbench.engine.cache import RaggedCache
from kvbench.engine.models import check_single
from kvbench.engine.prefix import Compression, Prefix
from kvbench.errors import PluginError, UserError, plugin_call
from kvbench.moments import Moment
from kvbench.plugin import Policy
from kvbench.progress import Reporter
from kvbench.runs.answers import Prompt
from kvbench.runs.cell import Cell
from kvbench.runs.grid import Grid
from kvbench.runs.planning import Job, Stage, plan
from kvbench.runs.worker import loaded_model
from kvbench.view import Need

if TYPE_CHECKING:
    import pandas as pd

MOMENTS = ("context", "question")
"""When an analysis can compress: once, before or after the question."""

SCHEMA_VERSION = 1


@dataclass
class Bench:
    """One model with the cells that are compressed on it, and what failed.

    Attributes:
        model: The model, inside `engine`.
        reporter: Told of failures.
        failed: Reason by cell id; a cell that failed once is not tried again.
    """

    model: nn.Module
    reporter: Reporter
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def prefill(self, ids: Sequence[int], needs: frozenset[Need]) -> Prefix:
        """Prefill one context."""
        prefix = Prefix(self.model, needs)
        prefix.extend(self.tensor(ids))
        return prefix

    def tensor(self, ids: Sequence[int]) -> Tensor:
        """Token ids as a batch of one, `[1, n]`."""
        return torch.tensor([list(ids)], device=self.device)

    def compress(
        self, prefix: Prefix, cell: Cell, policy: Policy, reserve: int | None = None
    ) -> RaggedCache | None:
        """Compress a prefix for a cell; None if its policy fails.

        Args:
            prefix: The prefilled context. After a failure `prefix.spoiled` tells whether it must
                be prefilled again.
            cell: Budget, moment and seed.
            policy: The cell's policy, or a policy that selects the same entries.
            reserve: Free rows behind every segment.
        """
        moment: Moment = "question" if cell.moment == "question" else "context"
        wanted = Compression(policy, cell.budget, moment, cell.seed)
        try:
            with plugin_call():
                return prefix.compress([wanted], reserve)[0]
        except PluginError as error:
            reason = str(error).replace(str(policy), str(cell.policy))
            self.failed[cell.cell] = reason
            self.reporter.message(f"{cell} failed: {reason}")
            return None


def make_grid(given: Mapping[str, Any]) -> Grid:
    """The grid of an analysis.

    Raises:
        UserError: As `Grid.from_dict`; or an analysis has no such moment, or only the full cache is
            left.
    """
    grid = Grid.from_dict({**given, "full": False, "repeats": 1})
    for timing in grid.timings:
        if timing.moment not in MOMENTS:
            raise UserError(f"--moment {timing}: analyses compress at {' or '.join(MOMENTS)} only")
    if all(policy.is_full for policy in grid.built_policies):
        raise UserError("the policy full evicts nothing; choose another such as --policy snapkv")
    if all(budget.is_full for budget in grid.parsed_budgets):
        raise UserError("the budget full evicts nothing; choose another such as --budget 0.2")
    return grid


def stages(grid: Grid, message: Callable[[str], None]) -> list[Stage]:
    """Models, tasks, prompts and cells, without the full cache."""
    return [
        replace(
            stage,
            jobs=[
                replace(job, cells=[cell for cell in job.cells if not cell.is_full])
                for job in stage.jobs
            ],
        )
        for stage in plan(grid, message).stages
    ]


@contextmanager
def loaded(stage: Stage, grid: Grid, message: Callable[[str], None]) -> Iterator[nn.Module]:
    """The stage's model with kvbench's attention, on one device."""
    with loaded_model(stage, grid, message) as model, torch.no_grad():
        check_single(model, "an analysis")
        yield model


def contexts(job: Job) -> list[list[Prompt]]:
    """The job's prompts, those of one context together."""
    return [list(group) for _, group in groupby(job.prompts, key=lambda p: p.context_ids)]


def held(cache: RaggedCache) -> list[Tensor]:
    """What the only sequence of a cache keeps, by full-attention layer bool `[H, columns]`."""
    return [kept[0] for kept in cache.kept() if kept is not None]


def folder_of(out: str | None, default: Path) -> Path:
    """The folder to write to, made if it is absent, before any work is done.

    Raises:
        UserError: It cannot be written to.
    """
    path = Path(out) if out else default
    try:
        if path.exists() and not path.is_dir():
            raise UserError(f"cannot write {path}: it is a file, not a folder")
        (path / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    return path


def write_table(frame: pd.DataFrame, path: Path) -> Path:
    """Write a frame as parquet; text columns are dictionaries."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame.assign(schema=SCHEMA_VERSION), preserve_index=False)
    pq.write_table(table, path, compression="zstd")
    return path


def write_settings(grid: Grid, path: Path, **more: Any) -> Path:
    """Write what an analysis was made with as JSON."""
    own = {k: v for k, v in grid.to_dict().items() if k not in ("full", "out")}
    packages = {name: version(name) for name in ("kvbench", "torch", "transformers")}
    path.write_text(json.dumps({**own, **more, "versions": packages}, indent=2) + "\n")
    return path
