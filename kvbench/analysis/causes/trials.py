"""Interventions on the entries of one lost sample, and the smallest sets that bring its answer back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.analysis.causes.probe import AnswerProbe, ProbeResult

Unit = tuple[int, ...]
"""A layer, `(layer,)`, or a KV head, `(layer, head)`."""

_MOST_DROPPED = 12
"""Largest set from which units are dropped one by one; the drops of a larger one take too long."""


class Trial(NamedTuple):
    """One cache to measure.

    Attributes:
        intervention: What is done to the cache.
        kept: Its entries, bool `[L, H, columns]`.
        units: Layers or heads that are changed; empty for all.
    """

    intervention: str
    kept: Tensor
    units: tuple[Unit, ...] = ()


@dataclass
class Trials:
    """Measured interventions of one sample.

    Attributes:
        probe: Measures caches.
        rows: One row per cache; `units` are those of its trial.
    """

    probe: AnswerProbe
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self, trials: Sequence[Trial], reference: Trial, nll: float) -> list[ProbeResult]:
        """Measure caches.

        Args:
            trials: The caches.
            reference: The cache that they are changes of.
            nll: Its negative log-likelihood.
        """
        outcomes = self.probe.measure([trial.kept for trial in trials])
        for trial, outcome in zip(trials, outcomes, strict=True):
            self.add(trial, outcome, nll - outcome.nll, int((trial.kept ^ reference.kept).sum()))
        return outcomes

    def add(self, trial: Trial, outcome: ProbeResult, gain: float, entries: int) -> None:
        """Record a measured cache."""
        row = {"intervention": trial.intervention, "units": trial.units, "entries": entries}
        self.rows.append({**row, **outcome._asdict(), "gain": gain})


def named(units: Sequence[Unit]) -> str:
    """Return the names of layers, such as `3 7`, or of heads, such as `3.0 7.2`."""
    return " ".join(".".join(map(str, unit)) for unit in units)


def in_units(units: Sequence[Unit], shape: torch.Size) -> Tensor:
    """Return a mask of layers or heads, bool `[L, H, 1]`."""
    mask = torch.zeros(*shape[:2], 1, dtype=torch.bool)
    for unit in units:
        mask[unit] = True
    return mask


def random_entries(counts: Tensor, pool: Tensor, generator: torch.Generator) -> Tensor:
    """Draw entries of every head without replacement.

    Args:
        counts: Number of entries, int64 `[L, H]`; all of the pool if it has fewer.
        pool: Entries to draw from, bool `[L, H, columns]`.
        generator: Source of randomness.
    """
    keys = torch.rand(pool.shape, generator=generator).masked_fill(~pool, -1.0)
    ranks = keys.argsort(-1, descending=True).argsort(-1)
    return (ranks < counts[..., None]) & pool


def smallest_set(
    trials: Trials,
    intervention: str,
    units: Sequence[Unit],
    changed: Callable[[Sequence[Unit]], Tensor],
    reference: Trial,
    nll: float,
) -> tuple[Unit, ...]:
    """Find few units whose change makes an answer right, if the change of all of them does.

    Every unit is changed alone; then the units with the largest gains together, until the answer is right; then units
    are dropped from that set while it stays right. The set is minimal in that no single unit can be left out; there may
    be others, also smaller ones.

    Args:
        trials: Measures caches.
        intervention: Its name in the rows.
        units: The units.
        changed: Returns the entries of a cache in which some units are changed.
        reference, nll: As in `Trials.run`.
    """

    def run(unit_sets: Sequence[Sequence[Unit]]) -> list[ProbeResult]:
        return trials.run([Trial(intervention, changed(chosen), tuple(chosen)) for chosen in unit_sets], reference, nll)

    alone = dict(zip(units, run([[unit] for unit in units]), strict=True))
    ranked = sorted(units, key=lambda unit: alone[unit].nll)
    for unit in ranked:
        if alone[unit].right:
            return (unit,)
    prefixes = [ranked[:size] for size in _sizes(len(ranked))]
    chosen = next((prefix for prefix, outcome in zip(prefixes, run(prefixes), strict=True) if outcome.right), ranked)
    while 2 < len(chosen) <= _MOST_DROPPED:
        shorter = [[unit for unit in chosen if unit != dropped] for dropped in chosen]
        remaining = [rest for rest, outcome in zip(shorter, run(shorter), strict=True) if outcome.right]
        if not remaining:
            break
        chosen = remaining[-1]  # without the unit of the smallest gain
    return tuple(sorted(chosen))


def _sizes(count: int) -> list[int]:
    """Return the sizes of sets to try: 2, 3, 4, 6, 8, 12, ..., below all units."""
    sizes, size = [], 2
    while size < count:
        sizes.append(size)
        size += max(1, 1 << (size.bit_length() - 2))
    return sizes
