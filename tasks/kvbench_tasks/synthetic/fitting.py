"""Fitting of seeded samples to an exact length in tokens."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from kvbench.errors import LeftOut, UserError
from kvbench.harness.chat import Shot

Doc = dict[str, Any]

_ENDLESS = 1 << 40


class Size(Protocol):
    """Counter of the tokens of a prompt as the model sees it."""

    def __call__(self, context: str, question: str, gen_prefix: str = "", shots: Sequence[Shot] = ()) -> int: ...

    def dialogue(self, row: Doc) -> int:
        """Return the tokens of the prompt at a dialogue's last turn."""
        ...


class Streams:
    """Independent random generators of one sample, by purpose.

    Args:
        seed_parts: Everything that the sample depends on: task, length, seed, index.
    """

    def __init__(self, *seed_parts: str | int) -> None:
        self._name = "|".join(map(str, seed_parts))
        self._generators: dict[str, random.Random] = {}

    def __getitem__(self, purpose: str) -> random.Random:
        """Return the generator for a purpose, which continues from its last use."""
        if purpose not in self._generators:
            self._generators[purpose] = self.fresh(purpose)
        return self._generators[purpose]

    def fresh(self, purpose: str) -> random.Random:
        """Return the generator for a purpose, restarted."""
        seed = hashlib.sha256(f"{self._name}|{purpose}".encode()).digest()
        return random.Random(int.from_bytes(seed, "big"))


@dataclass(frozen=True)
class HaystackPlan:
    """A sample with a haystack of variable size.

    Attributes:
        build: Builds the row with a haystack of n units, deterministically.
        min_units: The smallest n.
        max_units: The largest n.
        exhausted: Names the source that `max_units` uses up. If room remains, the task is skipped rather than made
            shorter than `length`; "": the row may be shorter.
    """

    build: Callable[[int], Doc]
    min_units: int = 0
    max_units: int = _ENDLESS
    exhausted: str = ""


def fit(task: str, plans: Sequence[HaystackPlan], length: int, size: Size) -> Doc:
    """Build the largest row of the first plan that fits.

    Args:
        task: Named in the error message.
        plans: In order of preference; later ones need less room.
        length: Maximum tokens of prompt and answer. A dialogue leaves room for the longest answers to all its
            questions, so that it stays within `length` even if the model continues from its own answers.
        size: Counts a prompt.

    Raises:
        UserError: No plan fits.
        LeftOut: The first plan that fits is exhausted before it fills `length`.
    """

    def cost(doc: Doc) -> int:
        if "turns" in doc:
            return size.dialogue(doc) + sum(int(turn["max_new_tokens"]) for turn in doc["turns"])
        prompt_parts = doc["context"], doc["question"], doc.get("gen_prefix", "")
        prompt_tokens = size(*prompt_parts, shots=doc["shots"]) if "shots" in doc else size(*prompt_parts)
        return prompt_tokens + int(doc["max_new_tokens"])

    required_lengths = []
    for plan in plans:
        smallest_doc = plan.build(plan.min_units)
        required_lengths.append(cost(smallest_doc))
        if required_lengths[-1] <= length:
            return _fill(plan, smallest_doc, required_lengths[-1], cost, length)
    raise UserError(
        f"{task} does not fit into --length {length} with this tokenizer; it needs at least {min(required_lengths)}"
    )


def _fill(
    plan: HaystackPlan,
    smallest_doc: Doc,
    smallest_cost: int,
    cost: Callable[[Doc], int],
    max_tokens: int,
) -> Doc:
    """Find the row of n units with cost(n) <= max_tokens < cost(n + 1), by interpolation and bisection.

    A unit has at least one token, so at most `max_tokens` units are tried, even if a tokenizer drops unknown words.
    """
    lower_size, lower_cost, best_doc = plan.min_units, smallest_cost, smallest_doc
    upper_size, upper_cost = min(plan.max_units, plan.min_units + max_tokens) + 1, None
    probe_size = lower_size + 16
    step_count = 0
    while upper_size - lower_size > 1 and lower_cost < max_tokens:
        probe_size = min(max(probe_size, lower_size + 1), upper_size - 1)
        doc = plan.build(probe_size)
        probe_cost = cost(doc)
        if probe_cost <= max_tokens:
            lower_size, lower_cost, best_doc = probe_size, probe_cost, doc
        else:
            upper_size, upper_cost = probe_size, probe_cost
        step_count += 1
        if upper_cost is None:
            unit_cost = (lower_cost - smallest_cost) / (lower_size - plan.min_units)
            probe_size = lower_size + (
                int((max_tokens - lower_cost) / unit_cost) if unit_cost > 0 else lower_size - plan.min_units
            )
        elif step_count % 8 == 0:
            probe_size = (lower_size + upper_size) // 2
        else:
            # Costs are nearly linear: step from the nearer side to just past the crossing, so the bracket closes from
            # both sides.
            unit_cost = max(1, upper_cost - lower_cost) / (upper_size - lower_size)
            gap_below, gap_above = max_tokens - lower_cost, upper_cost - max_tokens
            if gap_below < gap_above:
                probe_size = lower_size + int(1.25 * gap_below / unit_cost) + 1
            else:
                probe_size = upper_size - int(1.25 * gap_above / unit_cost) - 1
    if lower_size == plan.max_units and lower_cost < max_tokens and plan.exhausted:
        raise LeftOut(
            f"{plan.exhausted} fill only {lower_cost} of the {max_tokens} tokens of --length; use a shorter --length"
        )
    return best_doc


def largest(cost: Callable[[int], int], max_cost: int, max_count: int) -> int:
    """Find the largest count, at most `max_count`, whose cost is at most `max_cost`; else 0.

    Args:
        cost: Grows with the count.
        max_cost: Largest cost.
        max_count: Largest count.
    """
    lower, upper = 0, max_count + 1
    while upper - lower > 1:
        middle = (lower + upper) // 2
        if cost(middle) <= max_cost:
            lower = middle
        else:
            upper = middle
    return lower


def scatter(units: Sequence[str], statements: Sequence[tuple[float, str]]) -> list[str]:
    """Insert statements between the units of a haystack.

    Args:
        units: The haystack.
        statements: Depth (0 before everything, 1 after everything) and text.
    """
    segments: list[str] = []
    unit_index = 0
    for depth, statement_text in sorted(statements, key=lambda statement: statement[0]):
        insert_index = int(depth * len(units))
        segments += [*units[unit_index:insert_index], statement_text]
        unit_index = insert_index
    return [*segments, *units[unit_index:]]


def apart(generator: random.Random, part_count: int) -> Callable[[int], list[int]]:
    """Return a function that splits a total into uneven parts and returns their sizes."""
    weights = [generator.gammavariate(3, 1) for _ in range(part_count)]
    fractions = [sum(weights[: part_index + 1]) / sum(weights) for part_index in range(part_count - 1)]

    def sizes(total: int) -> list[int]:
        boundaries = [0, *(int(fraction * total) for fraction in fractions), total]
        return [end - begin for begin, end in pairwise(boundaries)]

    return sizes


def fewer(count: int) -> Iterator[int]:
    """Count down to 4 in steps of a quarter, for progressively smaller plans."""
    yield count
    while count > 4:
        count = max(4, count * 3 // 4)
        yield count


def shuffle(generator: random.Random, items: list[Any]) -> None:
    """Shuffle in place exactly as `random.shuffle` does, in half the time."""
    random_bits = generator.getrandbits
    for index in range(len(items) - 1, 0, -1):
        bit_count = (index + 1).bit_length()
        swap_index = random_bits(bit_count)
        while swap_index > index:
            swap_index = random_bits(bit_count)
        items[index], items[swap_index] = items[swap_index], items[index]
