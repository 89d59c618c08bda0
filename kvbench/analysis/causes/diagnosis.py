"""The verdict on one lost sample: which entries its answer lacks.

Every cache is a mask over the full cache's prefill. `give` adds the evicted evidence to what the policy keeps, and asks
whether that is sufficient; `take` removes the same entries from the full cache, and asks whether they are necessary.
Controls do the same with as many random entries of each head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.analysis.causes.probe import AnswerProbe, ProbeResult
from kvbench.analysis.causes.trials import Trial, Trials, Unit, in_units, random_entries, smallest_set

RIGHT, WORDING, VALUES, UNSTABLE = "right", "wording", "values", "unstable"
HEAD, LAYER, FEW, SPREAD = "one head", "one layer", "few heads", "spread"
EITHER, MORE, ELSEWHERE, NOT_FOUND = "either", "evidence and more", "elsewhere", "not found"
VERDICTS = {
    RIGHT: "the sample is not lost",
    HEAD: "the evicted evidence is sufficient and necessary, and one KV head of it is sufficient",
    LAYER: "the same, and one layer of it is sufficient",
    FEW: "the same, and at most 8 KV heads (with --units layers: 8 layers) of it are sufficient",
    SPREAD: "the same, and more are needed",
    EITHER: "the evicted evidence is sufficient, and not necessary: the full cache answers without it",
    MORE: "the evicted evidence is necessary, and not sufficient: other entries are missing as well",
    ELSEWHERE: "the evicted evidence is neither sufficient nor necessary",
    NOT_FOUND: "a search found no evidence: not even the four best of 16 chunks together bring the answer back",
    VALUES: "the kept entries are sufficient, the keys and values that the policy has written there are not",
    WORDING: "the policy's own words lead elsewhere; after the full cache's words it answers",
    UNSTABLE: "a control changes the verdict, or the answer with everything is not the full cache's",
}
"""Verdicts with their meaning, in the order of the figures."""

MOST_FEW = 8
_FIRST, _RECENT = 4, 32
"""First and last tokens of the context that can be a missing anchor."""


@dataclass(frozen=True)
class LostSample:
    """A sample that the full cache answers and a policy does not.

    Attributes:
        probe: Measures caches.
        kept: Entries that the policy keeps, bool `[L, H, columns]`.
        evidence: Columns of the evidence, bool `[columns]`; none if no evidence was found.
        context_columns: Columns of the context; the question, if it is in the cache, is behind them.
        opening: Columns at the beginning that all prompts of the task share, such as a system prompt.
        seed: Seed of the controls.
    """

    probe: AnswerProbe
    kept: Tensor
    evidence: Tensor
    context_columns: int
    opening: int
    seed: int

    @property
    def evicted_evidence(self) -> Tensor:
        """Return the evidence that the policy evicts, bool `[L, H, columns]`."""
        return self.evidence & ~self.kept

    @property
    def full(self) -> Tensor:
        """Return a mask of all entries."""
        return torch.ones_like(self.kept)

    def control(self, pool: Tensor) -> Tensor:
        """Draw as many random entries of the context as the evicted evidence has, in every head."""
        generator = torch.Generator().manual_seed(self.seed)
        in_context = torch.arange(self.kept.shape[-1]) < self.context_columns
        return random_entries(self.evicted_evidence.sum(-1), pool & in_context & ~self.evidence, generator)


@dataclass
class Diagnosis:
    """Why a sample is lost.

    Attributes:
        verdict: One of `VERDICTS`; empty if it depends on the evidence, which has not been examined.
        anchors: Entries that are missing besides the evidence, because they are sufficient with it and not without it:
            each alone; else `all anchors`, if all of them are; else empty.
        layers, heads: Smallest sets of layers and KV heads whose evicted evidence brings the answer back; empty if it
            is not sufficient.
        outcomes: Outcomes of the main interventions by name.
        trials: All interventions.
    """

    verdict: str
    outcomes: dict[str, ProbeResult]
    trials: Trials
    anchors: tuple[str, ...] = ()
    layers: tuple[Unit, ...] = ()
    heads: tuple[Unit, ...] = ()


def reproduce_loss(probe: AnswerProbe, kept: Tensor, own: ProbeResult | None) -> Diagnosis:
    """Measure a lost sample with the policy's entries and with all; the verdict is set if it needs no evidence.

    Args:
        probe: Measures caches.
        kept: Entries that the policy keeps, bool `[L, H, columns]`.
        own: Result with the policy's own keys and values, if it changes them.
    """
    trials, full = Trials(probe), torch.ones_like(kept)
    mask_outcome, full_outcome = probe.measure([kept, full])
    trials.add(Trial("mask", kept), mask_outcome, 0.0, 0)
    trials.add(Trial("full", full), full_outcome, mask_outcome.nll - full_outcome.nll, int((~kept).sum()))
    outcomes = {"mask": mask_outcome, "full": full_outcome}
    if own is not None:
        outcomes["own"] = own
        trials.add(Trial("own", kept), own, mask_outcome.nll - own.nll, 0)
    return Diagnosis(early_verdict(outcomes), outcomes, trials)


def diagnose(sample: LostSample, diagnosis: Diagnosis, units: str) -> None:
    """Find out what the evidence has to do with a loss, and complete its diagnosis.

    Args:
        sample: The sample.
        diagnosis: Its diagnosis without a verdict.
        units: `heads`, or `layers` to stop there.
    """
    if not sample.evidence.any():
        diagnosis.verdict = NOT_FOUND
        return
    trials, outcomes = diagnosis.trials, diagnosis.outcomes
    kept, full, evicted = sample.kept, sample.full, sample.evicted_evidence
    policy_cache, full_cache = Trial("mask", kept), Trial("full", full)
    additions = [Trial("give", kept | evicted), Trial("give random", kept | sample.control(~kept))]
    removals = [Trial("take", full & ~evicted), Trial("take random", full & ~sample.control(full))]
    for group, reference in ((additions, policy_cache), (removals, full_cache)):
        nll = outcomes[reference.intervention].nll
        for trial, outcome in zip(group, trials.run(group, reference, nll), strict=True):
            outcomes[trial.intervention] = outcome
    if outcomes["give"].right:
        _localise(diagnosis, sample, policy_cache, units)
    else:
        diagnosis.anchors = _missing_anchors(trials, sample, policy_cache, outcomes["mask"].nll)
    diagnosis.verdict = verdict_of(outcomes, diagnosis.layers, diagnosis.heads)


def early_verdict(outcomes: Mapping[str, ProbeResult]) -> str:
    """Return the verdict that needs no evidence, or ""."""
    own = outcomes.get("own", outcomes["mask"])
    if not outcomes["full"].right:
        return UNSTABLE
    if own.right:
        return WORDING
    return VALUES if outcomes["mask"].right else ""


def verdict_of(outcomes: Mapping[str, ProbeResult], layers: tuple[Unit, ...], heads: tuple[Unit, ...]) -> str:
    """Return the verdict that follows from the main interventions.

    Args:
        outcomes: By name: `give`, `take`, and their controls `give random` and `take random`.
        layers, heads: Smallest sets that are sufficient; no heads if only layers were tried.
    """
    is_sufficient, is_necessary = outcomes["give"].right, not outcomes["take"].right
    if outcomes["give random"].right or not outcomes["take random"].right:
        return UNSTABLE
    if not is_sufficient:
        return MORE if is_necessary else ELSEWHERE
    if not is_necessary:
        return EITHER
    if len(heads) == 1:
        return HEAD
    if len(layers) == 1:
        return LAYER
    return FEW if 0 < len(heads or layers) <= MOST_FEW else SPREAD


def _localise(diagnosis: Diagnosis, sample: LostSample, policy_cache: Trial, units: str) -> None:
    """Find the layers, and the heads in them, whose evicted evidence is sufficient."""
    kept, evicted = sample.kept, sample.evicted_evidence
    nll = diagnosis.outcomes["mask"].nll

    def give(chosen: Sequence[Unit]) -> Tensor:
        return kept | (evicted & in_units(chosen, kept.shape))

    lacking = evicted.any(-1)
    layers: list[Unit] = [(layer,) for layer in lacking.any(-1).nonzero().flatten().tolist()]
    diagnosis.layers = smallest_set(diagnosis.trials, "give layers", layers, give, policy_cache, nll)
    if units == "heads":
        heads: list[Unit] = [
            (layer, head) for (layer,) in diagnosis.layers for head in lacking[layer].nonzero().flatten().tolist()
        ]
        diagnosis.heads = smallest_set(diagnosis.trials, "give heads", heads, give, policy_cache, nll)


def _missing_anchors(trials: Trials, sample: LostSample, policy_cache: Trial, nll: float) -> tuple[str, ...]:
    """Return which entries bring the answer back together with the evidence, and not without it."""
    columns = torch.arange(sample.kept.shape[-1])
    anchors = {
        "first tokens": columns < _FIRST,
        "recent tokens": (columns >= sample.context_columns - _RECENT) & (columns < sample.context_columns),
        "question": columns >= sample.context_columns,
        "opening": columns < sample.opening,
    }
    with_evidence = sample.kept | sample.evicted_evidence
    tried = {name: mask for name, mask in anchors.items() if bool((mask & ~with_evidence).any())}
    if len(tried) > 1:
        tried["all anchors"] = torch.stack([*tried.values()]).any(0)

    def is_right(added: Mapping[str, Tensor]) -> list[bool]:
        masks = [Trial(f"give {name}", sample.kept | mask) for name, mask in added.items()]
        return [outcome.right for outcome in trials.run(masks, policy_cache, nll)]

    evidence = sample.evicted_evidence
    with_it = is_right({f"and {name}": evidence | mask for name, mask in tried.items()})
    without_it = is_right({name: mask & ~evidence for name, mask in tried.items()})
    missing = [name for name, right, alone in zip(tried, with_it, without_it, strict=True) if right and not alone]
    return tuple(name for name in missing if name != "all anchors" or len(missing) == 1)
