"""Verdicts, smallest sets, searches and swaps of samples whose cause is known by construction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.analysis.causes import diagnosis, trials
from kvbench.analysis.causes.diagnosis import (
    EITHER,
    ELSEWHERE,
    FEW,
    HEAD,
    LAYER,
    MORE,
    NOT_FOUND,
    SPREAD,
    UNSTABLE,
    VALUES,
    WORDING,
    Diagnosis,
    LostSample,
    reproduce_loss,
)
from kvbench.analysis.causes.probe import ProbeResult
from kvbench.analysis.causes.searching import search_evidence
from kvbench.analysis.causes.swaps import BOTH, EVIDENCE, NOT_REPRODUCED, REST, compare_policies
from kvbench.analysis.causes.trials import random_entries

LAYERS, HEADS, COLUMNS, CONTEXT = 5, 3, 41, 37
SPAN = (11, 17)

Rule = Callable[[Tensor], bool]


class Oracle:
    """A model that answers if, and only if, a rule holds for the entries of its cache."""

    def __init__(self, rule: Rule, score: Callable[[Tensor], float] | None = None) -> None:
        self.rule, self.cells = rule, 0
        self.score = score or (lambda kept: float(kept.sum()))

    def measure(self, masks: Sequence[Tensor]) -> list[ProbeResult]:
        self.cells += len(masks)
        results = [self.rule(mask) for mask in masks]
        scores = [self.score(mask) for mask in masks]
        return [
            ProbeResult(r, r, 1000.0 - s - 500.0 * r, 1.0 if r else -1.0) for r, s in zip(results, scores, strict=True)
        ]


def holds(mask: Tensor, layer: int, head: int, span: tuple[int, int] = SPAN) -> bool:
    return bool(mask[layer, head, span[0] : span[1]].all())


def lost(rule: Rule, kept: Tensor | None = None, **more: Any) -> LostSample:
    """A sample whose policy evicts the evidence everywhere."""
    evidence = torch.zeros(COLUMNS, dtype=torch.bool)
    evidence[slice(*SPAN)] = True
    if kept is None:
        kept = torch.ones(LAYERS, HEADS, COLUMNS, dtype=torch.bool) & ~evidence
        kept[..., 18:33] = False
    return LostSample(Oracle(rule), kept, evidence, CONTEXT, more.pop("opening", 0), 7, **more)  # type: ignore[arg-type]


def diagnose(sample: LostSample, units: str, own: ProbeResult | None = None) -> Diagnosis:
    found = reproduce_loss(sample.probe, sample.kept, own)
    if not found.verdict:
        diagnosis.diagnose(sample, found, units)
    return found


def test_evidence_that_one_head_reads_is_found_in_that_head() -> None:
    found = diagnose(lost(lambda mask: holds(mask, 3, 1)), "heads")
    assert (found.verdict, found.layers, found.heads) == (HEAD, ((3,),), ((3, 1),))


def test_evidence_that_a_layer_needs_in_two_heads_is_one_layer() -> None:
    found = diagnose(lost(lambda mask: holds(mask, 2, 0) and holds(mask, 2, 2)), "heads")
    assert (found.verdict, found.layers, found.heads) == (LAYER, ((2,),), ((2, 0), (2, 2)))


def test_heads_of_several_layers_are_few_and_minimal() -> None:
    found = diagnose(lost(lambda mask: holds(mask, 1, 0) and holds(mask, 4, 2)), "heads")
    assert (found.verdict, found.heads) == (FEW, ((1, 0), (4, 2)))
    by_layer = diagnose(lost(lambda mask: holds(mask, 1, 0) and holds(mask, 4, 2)), "layers")
    assert (by_layer.verdict, by_layer.layers, by_layer.heads) == (FEW, ((1,), (4,)), ())


def test_evidence_that_every_head_reads_is_spread() -> None:
    found = diagnose(lost(lambda mask: bool(mask[..., slice(*SPAN)].all())), "heads")
    assert found.verdict == SPREAD and len(found.heads) == LAYERS * HEADS


def test_evidence_that_stands_elsewhere_too_is_sufficient_but_not_necessary() -> None:
    copied = (25, 31)
    found = diagnose(lost(lambda mask: holds(mask, 0, 0) or holds(mask, 0, 0, copied)), "heads")
    assert (found.verdict, found.heads) == (EITHER, ((0, 0),))


def test_evidence_elsewhere_is_neither() -> None:
    assert diagnose(lost(lambda mask: int(mask[0, 0, 18:33].sum()) >= 9), "heads").verdict == ELSEWHERE


@pytest.mark.parametrize(
    ("columns", "name"),
    [((0, 4), "first tokens"), ((37, 41), "question"), ((5, 8), "opening"), ((33, 37), "recent tokens")],
)
def test_a_missing_anchor_is_named(columns: tuple[int, int], name: str) -> None:
    kept = lost(lambda mask: False).kept.clone()
    kept[:, :, slice(*columns)] = False
    sample = lost(lambda mask: holds(mask, 1, 1) and holds(mask, 1, 1, columns), kept, opening=8)
    found = diagnose(sample, "heads")
    assert found.verdict == MORE
    assert name in found.anchors and (len(found.anchors) == 1 or columns[1] <= 8)


def test_an_anchor_that_brings_the_answer_back_without_the_evidence_is_not_missing() -> None:
    kept = lost(lambda mask: False).kept.clone()
    kept[..., 33:41] = False
    recent = diagnose(lost(lambda mask: holds(mask, 1, 1, (33, 37)), kept), "heads")
    assert (recent.verdict, recent.anchors) == (ELSEWHERE, ())
    alone = [row for row in recent.trials.rows if row["intervention"] == "give recent tokens"]
    assert len(alone) == 1 and alone[0]["right"]
    kept[..., :4] = False
    together = lost(lambda mask: all(holds(mask, 1, 1, span) for span in (SPAN, (0, 4), (37, 41))), kept)
    assert diagnose(together, "heads").anchors == ("all anchors",)


def test_a_loss_without_any_evidence_is_called_so_after_what_needs_none() -> None:
    wrong = ProbeResult(False, False, 9.0, -1.0)
    for rule, own, verdict in ((lambda mask: bool(mask.all()), None, NOT_FOUND), (lambda mask: True, wrong, VALUES)):
        sample = lost(rule)
        sample.evidence[:] = False
        assert diagnose(sample, "heads", own).verdict == verdict


def test_values_words_and_an_unreproduced_full_cache_have_their_own_verdicts() -> None:
    wrong = ProbeResult(False, False, 9.0, -1.0)
    assert diagnose(lost(lambda mask: True), "heads", wrong).verdict == VALUES
    assert diagnose(lost(lambda mask: True), "heads").verdict == WORDING
    assert diagnose(lost(lambda mask: False), "heads").verdict == UNSTABLE


def test_a_control_that_changes_the_answer_makes_the_verdict_unstable() -> None:
    kept_entries = int(lost(lambda mask: False).kept.sum())
    assert diagnose(lost(lambda mask: int(mask.sum()) > kept_entries), "heads").verdict == UNSTABLE


def test_controls_have_as_many_entries_in_every_head_and_none_of_the_evidence() -> None:
    sample = lost(lambda mask: False)
    kept = sample.kept.clone()
    kept[1, 2, 12:15] = True
    sample = lost(lambda mask: False, kept)
    for pool in (~kept, sample.full):
        control = sample.control(pool)
        assert not (control & sample.evidence).any() and not control[..., CONTEXT:].any()
        assert not (control & ~pool).any()
        assert torch.equal(control.sum(-1), torch.minimum(sample.evicted_evidence.sum(-1), torch.tensor(6)))
    assert torch.equal(sample.control(~kept), sample.control(~kept))
    counts = torch.tensor([[0, 3]])
    drawn = random_entries(counts, torch.ones(1, 2, 9, dtype=torch.bool), torch.Generator().manual_seed(1))
    assert drawn.sum(-1).tolist() == [[0, 3]]


def test_a_wrong_unit_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole_layer(units: Sequence[trials.Unit], shape: torch.Size) -> Tensor:
        mask = torch.zeros(*shape[:2], 1, dtype=torch.bool)
        for unit in units:
            mask[unit[0]] = True
        return mask

    monkeypatch.setattr(diagnosis, "in_units", whole_layer)
    found = diagnose(lost(lambda mask: holds(mask, 2, 0) and holds(mask, 2, 2)), "heads")
    assert found.heads != ((2, 0), (2, 2))


@pytest.mark.parametrize("span", [(3, 9), (19, 22), (160, 161), (100, 131)])
def test_a_search_finds_the_passage_to_the_token(span: tuple[int, int]) -> None:
    kept = torch.zeros(2, 2, 180, dtype=torch.bool)
    oracle = Oracle(lambda mask: holds(mask, 1, 0, span), lambda mask: float(mask[1, 0, slice(*span)].sum()))
    found = search_evidence(oracle, kept, 171)  # type: ignore[arg-type]
    assert found == (span,)
    assert oracle.cells < 150


def test_a_search_finds_two_passages_or_says_that_there_are_none() -> None:
    kept = torch.zeros(2, 2, 180, dtype=torch.bool)
    spans = ((20, 24), (150, 153))
    both = Oracle(
        lambda mask: all(holds(mask, 0, 0, span) for span in spans),
        lambda mask: float(sum(mask[0, 0, slice(*span)].sum() for span in spans)),
    )
    found = search_evidence(both, kept, 180)  # type: ignore[arg-type]
    assert found == spans
    assert search_evidence(Oracle(lambda mask: False), kept, 180) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("column", [None, 25])
def test_swaps_name_the_entries_and_the_head_that_explain_a_difference(column: int | None) -> None:
    span = SPAN if column is None else (column, column + 6)
    sample = lost(lambda mask: holds(mask, 3, 1, span))
    other = torch.ones_like(sample.kept)
    other[..., 30:36] = False
    if column is not None:
        other[..., 30] = True
    found = compare_policies(sample, other, "heads")
    assert found.explained == (EVIDENCE if column is None else REST)
    assert (found.layers, found.heads, found.swapped_back) == (((3,),), ((3, 1),), True)
    taken = found.outcomes["take other's evidence"].right, found.outcomes["take other's rest"].right
    assert taken == ((False, True) if column is None else (True, False))


def test_a_difference_that_needs_both_parts_or_is_not_in_the_masks_is_called_so() -> None:
    sample = lost(lambda mask: holds(mask, 3, 1) and holds(mask, 3, 1, (25, 31)))
    assert compare_policies(sample, sample.full, "heads").explained == BOTH
    assert compare_policies(lost(lambda mask: False), sample.full, "heads").explained == NOT_REPRODUCED
    sample.evidence[:] = False
    assert compare_policies(sample, sample.full, "heads").explained == NOT_FOUND


def test_unit_names() -> None:
    assert trials.named([(3,), (7,)]) == "3 7" and trials.named([(3, 0), (7, 2)]) == "3.0 7.2"
