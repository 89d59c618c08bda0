"""Learned retention as slow, obvious loops, written from its equations alone.

Nothing here imports kvbench. Retention is a plain sum of powers, in decimal numbers of 60 digits,
so that neither a beta within 1e-9 of 1 nor one of 2e-9 loses anything. An entry is named by its
layer, its KV head and its position in the sequence.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

exact = decimal.Context(prec=60, Emin=-decimal.MAX_EMAX, Emax=decimal.MAX_EMAX)
Number = float | decimal.Decimal


class Entry(NamedTuple):
    layer: int
    head: int
    position: int


Learned = dict[Entry, float]  # log beta, or a predicted logit
Worth = Callable[[float, int], Number]  # of a log beta and an age t - i


def retention(log_beta: float, age: int, *, release: bool = False) -> Number:
    """Log of `beta^(t - i)`; the release has `beta^(t + 2 - i)`."""
    return exact.multiply(decimal.Decimal(log_beta), decimal.Decimal(age + 2 * release))


def look_ahead(log_beta: float, age: int, *, horizon: int) -> Number:
    """Log of the sum of `beta^(s - i)` over the steps `s = t + 1 ... t + horizon`."""
    rate = decimal.Decimal(log_beta)
    if horizon == 0:
        first = exact.exp(exact.multiply(rate, decimal.Decimal(age + 1)))
        return exact.ln(exact.divide(first, exact.subtract(decimal.Decimal(1), exact.exp(rate))))
    total, beta = decimal.Decimal(0), exact.exp(rate)
    power = exact.exp(exact.multiply(rate, decimal.Decimal(age)))
    for _ in range(horizon):
        power = exact.multiply(power, beta)
        total = exact.add(total, power)
    return exact.ln(total)


def ranked(entries: list[Entry], learned: Learned, newest: int, worth: Worth) -> list[Entry]:
    """The entries from the most to the least worth keeping; of equals the more recent first."""
    return sorted(
        entries,
        key=lambda e: (-worth(learned[e], newest - e.position), -e.position, e.layer, e.head),
    )


def heads_of(entries: list[Entry]) -> dict[tuple[int, int], list[Entry]]:
    found: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        found.setdefault((entry.layer, entry.head), []).append(entry)
    return found


def cut(
    entries: list[Entry],
    learned: Learned,
    newest: int,
    worth: Worth,
    budget: int,
    *,
    everywhere: bool,
    heads: int,
) -> list[Entry]:
    """What is left of some entries.

    Args:
        entries: What is held.
        learned: Of all of them.
        newest: Position of the newest token.
        worth: How much an entry is worth.
        budget: Entries per (layer, head).
        everywhere: Whether all layers and heads compete for one total.
        heads: How many heads there are, over all layers.
    """
    if everywhere:
        return ranked(entries, learned, newest, worth)[: heads * budget]
    return [entry for mine in heads_of(entries).values() for entry in ranked(mine, learned, newest, worth)[:budget]]


def one_at_a_time(entries: list[Entry], learned: Learned, newest: int, worth: Worth, budget: int) -> list[Entry]:
    """What is left after the least of every head has gone, again and again, while it is full."""
    left = []
    for mine in heads_of(entries).values():
        held = list(mine)
        while len(held) > budget:
            least = held[0]
            for entry in held[1:]:  # from old to new: of equals the oldest goes
                if worth(learned[entry], newest - entry.position) < worth(learned[least], newest - least.position):
                    least = entry
            held.remove(least)
        left += held
    return left


def predicted(entries: list[Entry], learned: Learned, budget: int, *, newest_entries: int) -> list[Entry]:
    """Every head's newest entries, as far as they fit, and then those of largest logit."""
    left = []
    for mine in heads_of(entries).values():
        by_time = sorted(mine, key=lambda e: -e.position)
        kept = by_time[: min(budget, newest_entries)]
        others = sorted((e for e in mine if e not in kept), key=lambda e: (-learned[e], -e.position))
        left += kept + others[: budget - len(kept)]
    return left


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gate(x: np.ndarray, tensors: dict[str, np.ndarray], layer: int) -> np.ndarray:
    """What an untied gate says of one token, `[H]`, before any sigmoid."""
    of = {name.removeprefix(f"layers.{layer}."): t.astype(np.float64) for name, t in tensors.items()}
    if "linear1.weight" in of:
        x = silu(of["linear1.weight"] @ x + of.get("linear1.bias", 0.0))
    return of["linear2.weight"] @ x + of.get("linear2.bias", 0.0) + of.get("bias", 0.0)


def tied_gate(x: np.ndarray, tensors: dict[str, np.ndarray], layer: int, heads: int) -> list[float]:
    """What a gate with a tied readout says of one token, per head."""
    own = {name: t for name, t in tensors.items() if name not in ("readout", "bias")}
    projected = gate(x, own, layer).reshape(heads, -1)
    readout, bias = tensors["readout"].astype(np.float64), float(tensors["bias"])
    return [float(projected[h] @ readout) + bias for h in range(heads)]
