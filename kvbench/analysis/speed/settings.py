"""Benchmark settings: the product of policies, budgets, moments and sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from kvbench.budget import Budget
from kvbench.engine.pruning import prunes
from kvbench.errors import UserError, quoted
from kvbench.moments import Moment, Timing
from kvbench.plugin import Policy
from kvbench.spelling import policy as make_policy

LARGEST = "max"
"""Spelling of the largest batch that fits into the memory."""

PROMPT = "prompt"
"""Spelling of a budget of as many tokens as the prompt has (D2O, table 5)."""

MOMENTS: tuple[Moment, ...] = ("context", "decode", "chunked")
"""Supported moments; random prompts have neither a question nor turns."""

_ONCE = Timing("context")
_SIZE = re.compile(r"([0-9]{1,9})\+([0-9]{1,9})")


@dataclass(frozen=True)
class Setting:
    """One benchmark setting.

    Attributes:
        policy: The policy.
        budget: The budget.
        context: Tokens per prompt.
        batch: Batch size; None: the largest that fits.
        generate: Decode steps after the prompt.
        timing: When the cache is compressed, with the chunk size of a chunked prefill.
        budget_name: The budget as shown; "" for its own spelling.
    """

    policy: Policy
    budget: Budget
    context: int
    batch: int | None
    generate: int
    timing: Timing = _ONCE
    budget_name: str = ""

    @property
    def size(self) -> tuple[int, int | None, int, int]:
        """Context, batch, decode steps and chunk size, which comparable settings share."""
        return (self.context, self.batch, self.generate, self.timing.chunk)

    @property
    def name(self) -> str:
        """Policy, budget, moment and size, for messages."""
        moment = "" if self.timing == _ONCE else f", {self.timing}"
        batch = LARGEST if self.batch is None else self.batch
        return f"{self.policy} {self.budget_name or self.budget}{moment} at context {self.context}, batch {batch}"


@dataclass(frozen=True)
class SpeedSettings:
    """Benchmark of one or more models.

    Attributes:
        model: The models as the user named them, comma-separated.
        policies: Spellings; the full cache is always measured, too.
        budgets: Spellings; `PROMPT` is as many tokens as the prompt has.
        contexts: Tokens per prompt.
        batches: Batch sizes; None is the largest that fits.
        generates: Decode steps.
        repeats: Number of repetitions, each in a new order.
        seed: Seed of prompts, order and noise.
        device: As for a run.
        dtype: As for a run.
        attn: As for a run.
        revision: Revision of a hub model.
        moments: Spellings of the moments: `context`, `decode`, `chunked` or `chunked:512`.
        sizes: Prompts with their decode steps such as `256+1024`, instead of `contexts` and `generates`.
        memory: Bytes that the largest batch may take at its peak; None: the memory of the GPUs.
        device_map: As for a run.
    """

    model: str
    policies: tuple[str, ...]
    budgets: tuple[str, ...] = ("0.2",)
    contexts: tuple[int, ...] = (1024,)
    batches: tuple[int | None, ...] = (1,)
    generates: tuple[int, ...] = (32,)
    repeats: int = 5
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    attn: str = "auto"
    revision: str | None = None
    moments: tuple[str, ...] = ("context",)
    sizes: tuple[str, ...] = ()
    memory: int | None = None
    device_map: str | None = None

    @property
    def models(self) -> list[str]:
        """The names of the models."""
        return [name.strip() for name in self.model.split(",") if name.strip()]

    def settings(self) -> list[Setting]:
        """Return the settings of one repetition, the full cache first for every size and chunk size.

        Raises:
            UserError: A policy, budget or moment is unknown, or a number is out of range.
        """
        lengths = [_parse_size(size) for size in self.sizes] or [*product(self.contexts, self.generates)]
        flag_counts = {
            "--context": [context for context, _ in lengths],
            "--batch": [batch for batch in self.batches if batch is not None],
            "--generate": [generate for _, generate in lengths],
            "--repeats": [self.repeats],
        }
        for flag, flag_values in flag_counts.items():
            if any(flag_value < 1 for flag_value in flag_values):
                raise UserError(f"{flag} {min(flag_values)} is out of range; use 1 or more")
        if self.memory is not None and None not in self.batches:
            raise UserError(f"--memory limits the largest batch that fits; add --batch {LARGEST}")
        timings = [_timing(moment) for moment in self.moments]
        policies = [make_policy(policy) for policy in self.policies]
        settings: dict[Setting, None] = {}
        for context, generate in lengths:
            named = [
                (PROMPT, Budget(tokens=context)) if name == PROMPT else ("", Budget.parse(name))
                for name in self.budgets
            ]
            full = ("", Budget.parse("full"))
            pairs = [
                (policy, name, budget)
                for policy in policies
                for name, budget in (named if policy.has_budget else [full])
                if not policy.is_full and budget.is_full != policy.has_budget
            ]
            _check([(policy, budget) for policy, _, budget in pairs])
            for batch in self.batches:
                full_chunks: set[int] = set()
                for timing in timings:
                    cell_size = (context, batch, generate, timing)
                    if timing.chunk not in full_chunks:  # the full cache is the same at context and decode
                        settings[Setting(make_policy("full"), full[1], *cell_size)] = None
                        full_chunks.add(timing.chunk)
                    settings |= {
                        Setting(policy, budget, *cell_size, budget_name): None for policy, budget_name, budget in pairs
                    }
        return list(settings)


def _parse_size(size: str) -> tuple[int, int]:
    """Parse a prompt length with its decode steps, such as `256+1024`."""
    if not (match := _SIZE.fullmatch(size)):
        raise UserError(f"--size {quoted(size)} is not a prompt with its decode steps; use 256+1024")
    return int(match[1]), int(match[2])


def _timing(moment: str) -> Timing:
    """Parse a moment that a benchmark supports."""
    timing = Timing.parse(moment)
    if timing.moment not in MOMENTS:
        raise UserError(
            f"--moment {timing}: prompts of random tokens have no question and no turns; use {', '.join(MOMENTS)}"
        )
    return timing


def _check(pairs: Sequence[tuple[Policy, Budget]]) -> None:
    for policy, budget in pairs:
        if prunes(policy):
            raise UserError(f"{policy} prunes images, and the prompts of a benchmark have none")
        if budget.visual:
            raise UserError(f"budget {budget} needs images, which the prompts do not have")
