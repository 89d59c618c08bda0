"""Whether a task can run at the moments and budgets of a grid, and with its policies."""

from __future__ import annotations

from collections.abc import Callable

from kvbench.engine.pruning import prunes
from kvbench.errors import UserError
from kvbench.runs.grid import Grid
from kvbench.runs.prompts import Prompts


def check_moments(
    grid: Grid, leaf: str, prompts: Prompts, truncated: int, say: Callable[[str], None]
) -> None:
    """Check that a task can run at all moments and budgets, and say where nothing would be cut.

    Args:
        grid: The moments and budgets.
        leaf: The task.
        prompts: Its prompts.
        truncated: How many of their contexts were cut to fit the model.
        say: Told where nothing would be cut.

    Raises:
        UserError: Moment `turns` needs dialogues that fit.
    """
    if grid.has_moment("chunked") and prompts.shows:
        raise UserError(
            f"{leaf} shows images, which moment chunked does not split; use another --moment"
        )
    if any(b.visual for b in grid.parsed_budgets) and not prompts.shows:
        raise UserError(f"{leaf} shows no images; use a budget such as 0.2 instead of a visual one")
    if grid.has_moment("turns"):
        if not prompts.dialogues:
            raise UserError(
                f"{leaf} has no turns; moment turns needs dialogues such as --task dialogue"
            )
        if truncated:
            raise UserError(
                f"{leaf}: a live dialogue is never truncated; use another --moment, or "
                "dialogues that fit"
            )
    if grid.has_moment("decode"):
        _say_idle_buffers(grid, leaf, prompts.limit, say)
    for timing in grid.timings:
        if timing.chunk and prompts.longest <= timing.chunk:
            say(
                f"{leaf}: no prompt is longer than a chunk of {timing.chunk} tokens, so the "
                f"cache is cut only once; use --moment chunked:{max(1, prompts.longest // 4)}"
            )


def unfit_policies(grid: Grid, leaf: str, prompts: Prompts) -> dict[str, str]:
    """Why policies cannot run on a task, by policy; only `all` may have included them.

    Raises:
        UserError: One of them is named.
    """
    found: dict[str, str] = {}
    late = [str(t) for t in grid.timings if t.moment not in ("context", "question")]
    for policy in grid.built_policies:
        if not prunes(policy):
            continue
        if not prompts.shows:
            found[str(policy)] = f"it prunes images, and {leaf} shows none"
        elif late:
            found[str(policy)] = (
                "it prunes once, in the prefill; use --moment context or question instead of "
                f"{', '.join(late)}"
            )
    for name, reason in found.items():
        if name in grid.named_policies:
            raise UserError(f"{name} cannot run on {leaf}: {reason}")
    return found


def _say_idle_buffers(grid: Grid, leaf: str, longest: int, say: Callable[[str], None]) -> None:
    """Say where nothing can be cut while an answer is generated."""
    idle = [p for p in grid.built_policies if p.evicts and p.buffer >= longest]
    if idle:
        say(
            f"{leaf}: no answer is longer than the buffer of {', '.join(map(str, idle[:3]))}"
            f"{' and others' * (len(idle) > 3)}, so nothing is cut while it is generated; use "
            f"{idle[0].name}:buffer={max(1, longest // 8)}"
        )
