"""Checks whether a task fits the moments, budgets and policies of a grid."""

from __future__ import annotations

from collections.abc import Callable

from kvbench.engine.pruning import depth_problem, prunes
from kvbench.engine.vision import Vision
from kvbench.errors import UserError
from kvbench.harness.protocol import LoadedTask
from kvbench.runs.grid import Grid
from kvbench.runs.prompts import Prompts
from kvbench.view import AnswerAttention


def check_moments(
    grid: Grid, task: LoadedTask, prompts: Prompts, truncated: int, notify: Callable[[str], None]
) -> None:
    """Check that a task can run at all moments and budgets, and report where nothing would be evicted.

    Args:
        grid: The moments and budgets.
        task: The task.
        truncated: Number of contexts truncated to fit the model.
        notify: Receives a message where nothing would be evicted.

    Raises:
        UserError: A moment or a budget does not apply to the task: `turns` needs dialogues that fit, dialogues without
            reference answers need `turns`, whole texts are compressed only while they are fed, and a task may have
            nothing before its questions.
    """
    task_name = task.name
    if not all(policy.is_full for policy in grid.built_policies):
        _check_early_moments(grid, task, prompts)
    has_other_moments = any(timing.moment != "turns" for timing in grid.timings)
    if has_other_moments and prompts.dialogues and not all(request.answer for request in task.requests):
        raise UserError(
            f"{task_name} has no reference answers for the history of its dialogues, so they are live; "
            "use --moment turns alone"
        )
    if grid.has_moment("chunked") and prompts.shows:
        raise UserError(f"{task_name} shows images, which moment chunked does not split; use another --moment")
    if any(budget.visual for budget in grid.parsed_budgets) and not prompts.shows:
        raise UserError(f"{task_name} shows no images; use a budget such as 0.2 instead of a visual one")
    if grid.has_moment("turns"):
        if not prompts.dialogues:
            raise UserError(f"{task_name} has no turns; moment turns needs dialogues such as --task dialogue")
        if truncated:
            raise UserError(
                f"{task_name}: a live dialogue is never truncated; use another --moment, or dialogues that fit"
            )
    if grid.has_moment("decode"):
        _say_idle_buffers(grid, task_name, prompts.limit, notify)
    _say_no_room(grid, task_name, prompts, notify)
    for timing in grid.timings:
        if timing.chunk and prompts.longest <= timing.chunk:
            notify(
                f"{task_name}: no prompt is longer than a chunk of {timing.chunk} tokens, so the cache is evicted from "
                f"only once; use --moment chunked:{max(1, prompts.longest // 4)}"
            )


def _check_early_moments(grid: Grid, task: LoadedTask, prompts: Prompts) -> None:
    """Refuse moments at which a task has nothing to compress.

    Raises:
        UserError: There is one.
    """
    early_timings = [str(timing) for timing in grid.timings if timing.moment not in ("decode", "chunked")]
    if prompts.rolls and early_timings:
        raise UserError(
            f"{task.name} measures whole texts, so there is nothing to compress before them at moment "
            f"{', '.join(early_timings)}; use --moment decode (budget in tokens) or chunked"
        )
    fractions = [str(budget) for budget in grid.parsed_budgets if budget.absolute is None and not budget.is_full]
    if prompts.rolls and grid.has_moment("decode") and fractions:
        raise UserError(
            f"{task.name} measures whole texts without a prompt to which a fraction could refer at moment decode; "
            f"use a budget in tokens such as 128 instead of {', '.join(fractions)}"
        )
    for timing in grid.timings:
        if timing.moment in task.refused:
            raise UserError(task.refused[timing.moment])


def unfit_policies(grid: Grid, task_name: str, prompts: Prompts, depth: int) -> dict[str, str]:
    """Return why policies cannot run on a task, by policy; these can only come from `all`.

    Args:
        grid: The policies and moments.
        depth: Layers of the model.

    Raises:
        UserError: A policy named explicitly cannot run.
    """
    problems: dict[str, str] = {}
    late_timings = [str(timing) for timing in grid.timings if timing.moment not in ("context", "question")]
    for policy in grid.built_policies:
        if policy.is_informed and late_timings:
            problems[str(policy)] = (
                "it sees question and answer, and evicts once before them; "
                f"use --moment context or question instead of {', '.join(late_timings)}"
            )
        elif policy.is_informed and prompts.only_measured:
            problems[str(policy)] = "it sees the answer, but the task measures texts instead"
        elif AnswerAttention("reference") in policy.needs and not prompts.has_targets:
            problems[str(policy)] = "a sample has no reference answer for it to see; use target=full"
        if not prunes(policy):
            continue
        if not prompts.shows:
            problems[str(policy)] = f"it prunes images, but {task_name} shows none"
        elif late_timings:
            problems[str(policy)] = (
                f"it prunes once, in the prefill; use --moment context or question instead of {', '.join(late_timings)}"
            )
        elif policy.score is not None and (problem := depth_problem(policy.score, depth)):
            problems[str(policy)] = problem
    for policy_name, reason in problems.items():
        if policy_name in grid.named_policies:
            raise UserError(f"{policy_name} cannot run on {task_name}: {reason}")
    return problems


def say_visual_budgets(
    grid: Grid, task_name: str, prompts: Prompts, vision: Vision, notify: Callable[[str], None]
) -> None:
    """Report budgets that keep all of the images, and those that leave none to policies that prune them.

    Args:
        grid: The budgets and policies.
        vision: Counts the visual tokens.
        notify: Receives one line per budget.
    """
    visual_counts = prompts.visual_tokens(vision)
    token_counts = [
        (context_length, visual_count)
        for (context_length, _), visual_count in zip(prompts.lengths(), visual_counts, strict=True)
    ]
    policy_names = [str(policy) for policy in grid.built_policies if prunes(policy)]
    for budget in grid.parsed_budgets:
        if budget.visual and budget.tokens and budget.tokens >= max(visual_counts):
            notify(
                f"{task_name}: budget {budget} keeps everything, because no prompt has more than "
                f"{max(visual_counts)} visual tokens"
            )
        if budget.visual or not policy_names:
            continue
        image_prompts = [(token_count, visual_count) for token_count, visual_count in token_counts if visual_count]
        bare_count = sum(
            budget.per_head(token_count, visual_count) <= token_count - visual_count
            for token_count, visual_count in image_prompts
        )
        if bare_count:
            more_policies, verb = " and others" * (len(policy_names) > 3), "keep" + "s" * (len(policy_names) == 1)
            notify(
                f"{task_name}: budget {budget} is spent on text first, so {', '.join(policy_names[:3])}{more_policies} "
                f"{verb} no image tokens in {bare_count} of {len(image_prompts)} prompts; "
                f"use a budget such as visual:{budget}"
            )


def _say_no_room(grid: Grid, task_name: str, prompts: Prompts, notify: Callable[[str], None]) -> None:
    """Report where fixed-size windows fill the budget, so that a score decides nothing.

    An allocator that reserves entries warns when it divides the budget.
    """
    prompt_lengths = prompts.lengths()
    lengths = {
        "context": [context_length for context_length, _ in prompt_lengths],
        "question": [sum(pair) for pair in prompt_lengths],
    }
    filled = []
    for policy in grid.built_policies:
        if policy.score is None or policy.allocate.reserved(max(lengths["question"])):
            continue
        budgets = [
            str(budget)
            for budget in grid.parsed_budgets
            if any(budget.is_filled(policy.score.reserved, lengths.get(timing.moment, ())) for timing in grid.timings)
        ]
        if budgets:
            filled.append(f"{policy} ({', '.join(budgets)})")
    if filled:
        notify(
            f"{task_name}: a fixed-size window fills the budget of {', '.join(filled)}, so that no score decides what "
            "is kept; use a larger --budget, or a smaller window (`kvbench list policies NAME` shows the parameters)"
        )


def _say_idle_buffers(grid: Grid, task_name: str, longest: int, notify: Callable[[str], None]) -> None:
    """Report where nothing can be evicted during decoding."""
    evicting = [policy for policy in grid.built_policies if policy.evicts and not policy.is_informed]
    idle_policies = [policy for policy in evicting if policy.buffer >= longest]
    if idle_policies:
        notify(
            f"{task_name}: no answer is longer than the buffer of {', '.join(map(str, idle_policies[:3]))}"
            f"{' and others' * (len(idle_policies) > 3)}, so nothing is evicted while it is generated; "
            f"use {idle_policies[0].name}:buffer={max(1, longest // 8)}"
        )
