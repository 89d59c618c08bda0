"""Benchmark settings: the product of policies, budgets and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.budget import Budget
from kvbench.engine.pruning import prunes
from kvbench.errors import UserError
from kvbench.plugin import Policy
from kvbench.spelling import policy as make_policy


@dataclass(frozen=True)
class Setting:
    """One benchmark setting.

    Attributes:
        policy: The policy.
        budget: The budget.
        context: Tokens per prompt.
        batch: Batch size.
        generate: Decode steps after the prompt.
    """

    policy: Policy
    budget: Budget
    context: int
    batch: int
    generate: int

    @property
    def size(self) -> tuple[int, int, int]:
        """Context, batch and decode steps, which comparable settings share."""
        return (self.context, self.batch, self.generate)


@dataclass(frozen=True)
class SpeedSettings:
    """Benchmark of one model.

    Attributes:
        model: The model as the user named it.
        policies: Spellings; the full cache is always measured, too.
        budgets: Spellings.
        contexts: Tokens per prompt.
        batches: Batch sizes.
        generates: Decode steps.
        repeats: Number of repetitions, each in a new order.
        seed: Seed of prompts, order and noise.
        device: As for a run.
        dtype: As for a run.
        attn: As for a run.
        revision: Revision of a hub model.
    """

    model: str
    policies: tuple[str, ...]
    budgets: tuple[str, ...] = ("0.2",)
    contexts: tuple[int, ...] = (1024,)
    batches: tuple[int, ...] = (1,)
    generates: tuple[int, ...] = (32,)
    repeats: int = 5
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    attn: str = "auto"
    revision: str | None = None

    def settings(self) -> list[Setting]:
        """Return the settings of one repetition, the full cache first for every size.

        Raises:
            UserError: A policy or budget is unknown, or a number is out of range.
        """
        flag_counts = {
            "--context": self.contexts,
            "--batch": self.batches,
            "--generate": self.generates,
            "--repeats": (self.repeats,),
        }
        for flag, flag_values in flag_counts.items():
            if any(flag_value < 1 for flag_value in flag_values):
                raise UserError(f"{flag} {min(flag_values)} is out of range; use 1 or more")
        full_pair = (make_policy("full"), Budget.parse("full"))
        pairs = [
            (policy, budget)
            for policy in map(make_policy, self.policies)
            for budget in (map(Budget.parse, self.budgets) if policy.has_budget else full_pair[1:])
            if not policy.is_full and budget.is_full != policy.has_budget
        ]
        _check(pairs)
        return [
            Setting(policy, budget, context, batch, generate)
            for context in self.contexts
            for batch in self.batches
            for generate in self.generates
            for policy, budget in dict.fromkeys([full_pair, *pairs])
        ]


def _check(pairs: Sequence[tuple[Policy, Budget]]) -> None:
    for policy, budget in pairs:
        if prunes(policy):
            raise UserError(f"{policy} prunes images, and the prompts of a benchmark have none")
        if budget.visual:
            raise UserError(f"budget {budget} needs images, which the prompts do not have")
