"""Samples that depend on their seed alone and fill their length to the token."""

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
    """Counts the tokens of a prompt as the model will see it."""

    def __call__(
        self, context: str, question: str, gen_prefix: str = "", shots: Sequence[Shot] = ()
    ) -> int: ...

    def dialogue(self, row: Doc) -> int:
        """Tokens of the prompt of a dialogue's last turn."""
        ...


class Streams:
    """Independent random generators of one sample, by purpose.

    Args:
        parts: Everything that the sample depends on: task, length, seed, index.
    """

    def __init__(self, *parts: str | int) -> None:
        self._name = "|".join(map(str, parts))
        self._made: dict[str, random.Random] = {}

    def __getitem__(self, purpose: str) -> random.Random:
        """The generator for a purpose, which continues where its last use stopped."""
        if purpose not in self._made:
            self._made[purpose] = self.fresh(purpose)
        return self._made[purpose]

    def fresh(self, purpose: str) -> random.Random:
        """The generator for a purpose, from its start."""
        seed = hashlib.sha256(f"{self._name}|{purpose}".encode()).digest()
        return random.Random(int.from_bytes(seed, "big"))


@dataclass(frozen=True)
class Plan:
    """A sample whose haystack can have any size.

    Attributes:
        build: Builds the row with a haystack of n units; the same n gives the same row.
        least: The smallest n.
        most: The largest n.
        exhausted: Names what `most` units use up. Where they leave room, the task is left out
            rather than made shorter than `length`; empty: the row may stay shorter.
    """

    build: Callable[[int], Doc]
    least: int = 0
    most: int = _ENDLESS
    exhausted: str = ""


def fit(task: str, plans: Sequence[Plan], length: int, size: Size) -> Doc:
    """Build the largest row of the first plan that fits.

    Args:
        task: Named in the error message.
        plans: In order of preference; later ones need less room.
        length: Tokens of prompt and answer at most.
        size: Counts a prompt.

    A dialogue leaves room for the longest answers to all its questions, so that it stays within
    `length` even where the model continues from its own answers.

    Raises:
        UserError: No plan fits.
        LeftOut: The first plan that fits is exhausted before it fills `length`.
    """

    def cost(doc: Doc) -> int:
        if "turns" in doc:
            return size.dialogue(doc) + sum(int(turn["max_new_tokens"]) for turn in doc["turns"])
        text = doc["context"], doc["question"], doc.get("gen_prefix", "")
        used = size(*text, shots=doc["shots"]) if "shots" in doc else size(*text)
        return used + int(doc["max_new_tokens"])

    needs = []
    for plan in plans:
        least = plan.build(plan.least)
        needs.append(cost(least))
        if needs[-1] <= length:
            return _fill(plan, least, needs[-1], cost, length)
    raise UserError(
        f"{task} does not fit into --length {length} with this tokenizer; "
        f"it needs at least {min(needs)}"
    )


def _fill(plan: Plan, least: Doc, least_cost: int, cost: Callable[[Doc], int], room: int) -> Doc:
    """The row of n units with cost(n) <= room < cost(n + 1), by interpolation and halving.

    A unit has at least one token, so more than `room` units are not tried, even where a tokenizer
    drops what it does not know.
    """
    low, low_cost, best = plan.least, least_cost, least
    high, high_cost = min(plan.most, plan.least + room) + 1, None
    probe = low + 16
    steps = 0
    while high - low > 1 and low_cost < room:
        probe = min(max(probe, low + 1), high - 1)
        doc = plan.build(probe)
        found = cost(doc)
        if found <= room:
            low, low_cost, best = probe, found, doc
        else:
            high, high_cost = probe, found
        steps += 1
        if high_cost is None:
            rate = (low_cost - least_cost) / (low - plan.least)
            probe = low + (int((room - low_cost) / rate) if rate > 0 else low - plan.least)
        elif steps % 8 == 0:
            probe = (low + high) // 2
        else:
            # Costs are nearly linear: step from the nearer side to just beyond the crossing, so
            # that the bracket closes from both sides.
            rate = max(1, high_cost - low_cost) / (high - low)
            under, over = room - low_cost, high_cost - room
            if under < over:
                probe = low + int(1.25 * under / rate) + 1
            else:
                probe = high - int(1.25 * over / rate) - 1
    if low == plan.most and low_cost < room and plan.exhausted:
        raise LeftOut(
            f"{plan.exhausted} fill only {low_cost} of the {room} tokens of --length; "
            "use a shorter --length"
        )
    return best


def largest(cost: Callable[[int], int], room: int, limit: int) -> int:
    """Find the largest count, at most `limit`, whose cost is at most `room`; 0 where none is.

    Args:
        cost: Grows with the count.
        room: Largest cost.
        limit: Largest count.
    """
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        if cost(middle) <= room:
            low = middle
        else:
            high = middle
    return low


def scatter(units: Sequence[str], statements: Sequence[tuple[float, str]]) -> list[str]:
    """Insert statements between the units of a haystack.

    Args:
        units: The haystack.
        statements: Depth (0 before everything, 1 after everything) and text.
    """
    pieces: list[str] = []
    done = 0
    for depth, text in sorted(statements, key=lambda statement: statement[0]):
        at = int(depth * len(units))
        pieces += [*units[done:at], text]
        done = at
    return [*pieces, *units[done:]]


def apart(rng: random.Random, parts: int) -> Callable[[int], list[int]]:
    """Make a function that splits any whole into uneven parts and returns their sizes."""
    weights = [rng.gammavariate(3, 1) for _ in range(parts)]
    ends = [sum(weights[: i + 1]) / sum(weights) for i in range(parts - 1)]

    def sizes(whole: int) -> list[int]:
        cuts = [0, *(int(end * whole) for end in ends), whole]
        return [b - a for a, b in pairwise(cuts)]

    return sizes


def fewer(count: int) -> Iterator[int]:
    """Count down to 4 in steps of a quarter, for plans that need less and less room."""
    yield count
    while count > 4:
        count = max(4, count * 3 // 4)
        yield count


def shuffle(rng: random.Random, items: list[Any]) -> None:
    """Shuffle in place exactly as `random.shuffle` does, in half the time."""
    bits = rng.getrandbits
    for i in range(len(items) - 1, 0, -1):
        size = (i + 1).bit_length()
        j = bits(size)
        while j > i:
            j = bits(size)
        items[i], items[j] = items[j], items[i]
