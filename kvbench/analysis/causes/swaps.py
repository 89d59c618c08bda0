"""What explains that one policy answers a sample that another loses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvbench.analysis.causes.diagnosis import NOT_FOUND, LostSample
from kvbench.analysis.causes.probe import ProbeResult
from kvbench.analysis.causes.trials import Trial, Trials, Unit, in_units, smallest_set

EVIDENCE, REST, EITHER, BOTH, NOT_REPRODUCED = "evidence", "other entries", "either", "both together", "not reproduced"
OUTCOMES = (
    "other",
    "give other's evidence",
    "give other's rest",
    "take other's evidence",
    "take other's rest",
    "swap back",
)
"""Main interventions."""


@dataclass(frozen=True)
class Swap:
    """Comparison of two policies on one sample.

    Attributes:
        explained: Which entries of the other policy bring the answer back: those of the evidence, the others, either,
            or only both together; `not reproduced` if a mask over the full cache does not answer with what it keeps;
            `not found` if no evidence was found.
        outcomes: By intervention, also those that take the same entries from the other policy.
        layers, heads: Smallest sets of layers and KV heads whose swap brings the answer back.
        swapped_back: Whether the other policy loses the answer with the first one's entries in the same units.
        trials: All interventions.
    """

    explained: str
    outcomes: dict[str, ProbeResult]
    layers: tuple[Unit, ...]
    heads: tuple[Unit, ...]
    swapped_back: bool
    trials: Trials


def compare_policies(sample: LostSample, other: Tensor, units: str) -> Swap:
    """Explain the difference between what two policies keep.

    Args:
        sample: The lost sample.
        other: Entries that the other policy keeps, bool `[L, H, columns]`.
        units: `heads`, or `layers` to stop there.
    """
    kept, evidence = sample.kept, sample.evidence
    trials = Trials(sample.probe)
    mask_outcome, other_outcome = sample.probe.measure([kept, other])
    mine, theirs = Trial("mask", kept), Trial("other", other)
    trials.add(theirs, other_outcome, mask_outcome.nll - other_outcome.nll, int((kept ^ other).sum()))
    additions = [
        Trial("give other's evidence", kept | (other & evidence)),
        Trial("give other's rest", kept | (other & ~evidence)),
    ]
    removals = [
        Trial("take other's evidence", other & ~(evidence & ~kept)),
        Trial("take other's rest", other & (evidence | kept)),
    ]
    results = [
        *trials.run(additions, mine, mask_outcome.nll),
        *trials.run(removals, theirs, other_outcome.nll),
    ]
    outcomes = dict(zip(OUTCOMES, (other_outcome, *results), strict=False))
    explained = explanation(other_outcome.right, results[0].right, results[1].right)
    if explained != NOT_REPRODUCED and not evidence.any():
        explained = NOT_FOUND
    if explained == NOT_REPRODUCED:
        return Swap(explained, outcomes, (), (), False, trials)

    def swapped(chosen: Sequence[Unit]) -> Tensor:
        return kept ^ ((kept ^ other) & in_units(chosen, kept.shape))

    differs = (kept ^ other).any(-1)
    layers: list[Unit] = [(layer,) for layer in differs.any(-1).nonzero().flatten().tolist()]
    found_layers = smallest_set(trials, "swap layers", layers, swapped, mine, mask_outcome.nll)
    found_heads: tuple[Unit, ...] = ()
    if units == "heads":
        heads: list[Unit] = [
            (layer, head) for (layer,) in found_layers for head in differs[layer].nonzero().flatten().tolist()
        ]
        found_heads = smallest_set(trials, "swap heads", heads, swapped, mine, mask_outcome.nll)
    chosen = found_heads or found_layers
    back = other ^ ((kept ^ other) & in_units(chosen, kept.shape))
    (back_outcome,) = trials.run([Trial("swap back", back, chosen)], theirs, other_outcome.nll)
    outcomes["swap back"] = back_outcome
    return Swap(explained, outcomes, found_layers, found_heads, not back_outcome.right, trials)


def explanation(other_is_right: bool, by_evidence: bool, by_rest: bool) -> str:
    """Return which entries of the other policy explain the difference."""
    if not other_is_right:
        return NOT_REPRODUCED
    if by_evidence:
        return EITHER if by_rest else EVIDENCE
    return REST if by_rest else BOTH
