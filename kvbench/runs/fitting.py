"""Whether a task can run at the moments and budgets of a grid, and with its policies."""

from __future__ import annotations

from collections.abc import Callable

from kvbench.engine.pruning import depth_problem, prunes
from kvbench.engine.vision import Vision
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
    _say_no_room(grid, leaf, prompts, say)
    for timing in grid.timings:
        if timing.chunk and prompts.longest <= timing.chunk:
            say(
                f"{leaf}: no prompt is longer than a chunk of {timing.chunk} tokens, so the "
                f"cache is cut only once; use --moment chunked:{max(1, prompts.longest // 4)}"
            )


def unfit_policies(grid: Grid, leaf: str, prompts: Prompts, depth: int) -> dict[str, str]:
    """Why policies cannot run on a task, by policy; only `all` may have included them.

    Args:
        grid: The policies and moments.
        leaf: The task.
        prompts: Its prompts.
        depth: Layers of the model.

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
        elif policy.score is not None and (problem := depth_problem(policy.score, depth)):
            found[str(policy)] = problem
    for name, reason in found.items():
        if name in grid.named_policies:
            raise UserError(f"{name} cannot run on {leaf}: {reason}")
    return found


def say_visual_budgets(
    grid: Grid, leaf: str, prompts: Prompts, vision: Vision, say: Callable[[str], None]
) -> None:
    """Say which budgets keep all of the images, and which leave none to policies that prune them.

    Args:
        grid: The budgets and policies.
        leaf: The task.
        prompts: Its prompts.
        vision: Counts the visual tokens.
        say: Told in one line for each budget.
    """
    visual = prompts.visual_tokens(vision)
    pairs = [(n, v) for (n, _), v in zip(prompts.lengths(), visual, strict=True)]
    names = [str(policy) for policy in grid.built_policies if prunes(policy)]
    for budget in grid.parsed_budgets:
        if budget.visual and budget.tokens and budget.tokens >= max(visual):
            say(
                f"{leaf}: budget {budget} keeps everything, because no prompt has more than "
                f"{max(visual)} visual tokens"
            )
        if budget.visual or not names:
            continue
        shown = [(n, v) for n, v in pairs if v]
        bare = sum(budget.per_head(n, v) <= n - v for n, v in shown)
        if bare:
            more, verb = " and others" * (len(names) > 3), "keep" + "s" * (len(names) == 1)
            say(
                f"{leaf}: budget {budget} is spent on text first, so {', '.join(names[:3])}{more} "
                f"{verb} nothing of the images in {bare} of {len(shown)} prompts; use a budget "
                f"such as visual:{budget}"
            )


def _say_no_room(grid: Grid, leaf: str, prompts: Prompts, say: Callable[[str], None]) -> None:
    """Say where windows of a fixed size fill the budget, so that a score decides nothing.

    An allocator that reserves entries warns when it divides the budget.
    """
    pairs = prompts.lengths()
    lengths = {"context": [c for c, _ in pairs], "question": [c + q for c, q in pairs]}
    found = []
    for policy in grid.built_policies:
        if policy.score is None or policy.allocate.reserved(max(lengths["question"])):
            continue
        budgets = [
            str(budget)
            for budget in grid.parsed_budgets
            if any(
                budget.is_filled(policy.score.reserved, lengths.get(timing.moment, ()))
                for timing in grid.timings
            )
        ]
        if budgets:
            found.append(f"{policy} ({', '.join(budgets)})")
    if found:
        say(
            f"{leaf}: a window of a fixed size fills the budget of {', '.join(found)}, so that no "
            "score decides what is kept; use a larger --budget, or a smaller window "
            "(`kvbench list policies` shows the parameters)"
        )


def _say_idle_buffers(grid: Grid, leaf: str, longest: int, say: Callable[[str], None]) -> None:
    """Say where nothing can be cut while an answer is generated."""
    idle = [p for p in grid.built_policies if p.evicts and p.buffer >= longest]
    if idle:
        say(
            f"{leaf}: no answer is longer than the buffer of {', '.join(map(str, idle[:3]))}"
            f"{' and others' * (len(idle) > 3)}, so nothing is cut while it is generated; use "
            f"{idle[0].name}:buffer={max(1, longest // 8)}"
        )
