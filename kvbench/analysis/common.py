"""What both analyses share: the grid and its cells, models, contexts, compressions, tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.models import check_single, load_model
from kvbench.engine.prefix import Prefix, Request, engine
from kvbench.errors import UserError, reason_of
from kvbench.plugin import Moment, Need, Policy
from kvbench.progress import Reporter
from kvbench.runs.answers import Prompt
from kvbench.runs.cell import Cell
from kvbench.runs.grid import Grid
from kvbench.runs.planning import Job, Stage, plan
from kvbench.spelling import policy as make_policy

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
        """Compress for a cell, or give None if its policy fails now.

        Args:
            prefix: What is compressed; after a failure it may be spoiled.
            cell: Budget, moment and seed.
            policy: What the cell's policy is, or a policy that selects the same.
            reserve: Rows of room per segment.
        """
        moment: Moment = "question" if cell.moment == "question" else "context"
        wish = Request(policy, Budget.parse(cell.budget), moment, cell.seed)
        try:
            return prefix.compress([wish], reserve)[0]
        except (Exception, SystemExit) as error:  # a policy is foreign code: its cell fails
            reason = reason_of(error).replace(str(policy), cell.policy)
            self.failed[cell.cell] = reason
            where = f"{cell.task}, {cell.policy} at {cell.budget}"
            self.reporter.message(f"{where} failed: {reason}")
            return None


def make_grid(given: Mapping[str, Any]) -> Grid:
    """The grid of an analysis.

    Raises:
        UserError: As `Grid.from_dict`; or a moment at which nothing is analysed, or nothing but the
            full cache.
    """
    grid = Grid.from_dict({**given, "full": False, "repeats": 1})
    for moment in grid.moments:
        if moment not in MOMENTS:
            raise UserError(f"--moment {moment}: an analysis compresses at {' or '.join(MOMENTS)}")
    policies = [p for p in grid.canonical_policies if p != "full"]
    if not policies:
        raise UserError("the policy full evicts nothing: name another, as --policy snapkv")
    if not [b for b in grid.budgets if b != "full"]:
        raise UserError("at the budget full nothing is evicted: name another, as --budget 0.2")
    return grid


def stages(grid: Grid, message: Callable[[str], None]) -> list[Stage]:
    """Models, tasks, prompts and cells, the full cache left out."""
    found = plan(grid, message)
    for stage in found:
        for job in stage.jobs:
            job.cells = [cell for cell in job.cells if not cell.is_full]
    return found


@contextmanager
def loaded(stage: Stage, grid: Grid) -> Iterator[nn.Module]:
    """The stage's model with kvbench's attention in it."""
    model = load_model(
        stage.model,
        grid.revision,
        stage.device,
        stage.dtype,
        device_map=grid.device_map,
        quantization=grid.quantization,
    )
    check_single(model, "an analysis")
    with engine(model), torch.no_grad():
        yield model


def contexts(job: Job) -> list[list[Prompt]]:
    """The job's prompts, those of one context together."""
    return [list(group) for _, group in groupby(job.prompts, key=lambda p: p.context_ids)]


def policies_of(cells: Sequence[Cell]) -> dict[str, Policy]:
    """Policies by cell id."""
    made = {cell.policy: make_policy(cell.policy) for cell in cells}
    return {cell.cell: made[cell.policy] for cell in cells}


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
    own = {k: v for k, v in grid.to_dict().items() if k not in ("full", "out", "attn")}
    packages = {name: version(name) for name in ("kvbench", "torch", "transformers")}
    path.write_text(json.dumps({**own, **more, "versions": packages}, indent=2) + "\n")
    return path
