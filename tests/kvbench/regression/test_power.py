"""How many contexts see a drop, held against simulated comparisons."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.errors import UserError
from kvbench.regression.power import MOST, Goal, assume, contexts_needed, needs, smallest_seen
from kvbench.regression.show_power import sentences, tables
from kvbench.regression.significance import paired_p
from kvbench.tables.outputs import plain_text

from .conftest import one_cell, rescored, usual


def seen(contexts: int, questions: int, loss: float, gain: float, icc: float) -> float:
    """Share of 200 simulated comparisons in which the difference is significant.

    With probability `icc` all questions about a context share one fate, so that the correlation of
    their differences is `icc`.
    """
    rng = np.random.default_rng([contexts, questions])
    names = [str(i) for i in range(contexts) for _ in range(questions)]
    keys = range(len(names))
    clusters, zeros = dict(zip(keys, names, strict=True)), dict.fromkeys(keys, 0.0)
    hits = 0
    for _ in range(200):
        fate = rng.random((contexts, questions))
        same = rng.random(contexts) < icc
        fate[same] = fate[same][:, :1]
        gaps = (fate > 1 - gain) * 1.0 - (fate < loss)
        scores = dict(zip(keys, gaps.ravel().tolist(), strict=True))
        hits += paired_p(scores, zeros, clusters, draws=1000) < 0.05
    return hits / 200


@pytest.mark.parametrize(
    ("drop", "discordance", "questions", "icc"),
    [(5, 0.1, 1, 1.0), (5, 0.05, 1, 1.0), (10, 0.3, 1, 1.0), (10, 0.2, 4, 0.3), (10, 0.2, 4, 1.0)],
)
@pytest.mark.slow
def test_the_contexts_that_are_named_see_the_drop(drop: float, discordance: float, questions: int, icc: float) -> None:
    """200 comparisons have a standard error of 2.8 points; half of the contexts see far less."""
    plan = assume(Goal(drop=drop), 0.6, discordance, questions, icc)
    loss, gain = (discordance + drop / 100) / 2, (discordance - drop / 100) / 2
    assert seen(plan.contexts, questions, loss, gain, icc) >= 0.74
    assert seen(plan.contexts // 2, questions, loss, gain, icc) < 0.7


def test_the_numbers_of_the_documents() -> None:
    assert assume(Goal(), 0.8, 0.1).contexts == 2059
    assert assume(Goal(), 0.8).contexts == 6612
    assert assume(Goal(), 0.8, 0.1, 4, 0.3).design_effect == pytest.approx(1.9)


def test_more_is_needed_to_see_less() -> None:
    base = contexts_needed(0.3, 0.05, Goal(), unit_scaled=True)
    assert contexts_needed(0.3, 0.02, Goal(), unit_scaled=True) > 5 * base
    assert contexts_needed(0.4, 0.05, Goal(), unit_scaled=True) > 1.5 * base
    assert contexts_needed(0.3, 0.05, Goal(power=0.95), unit_scaled=True) > 1.4 * base
    assert contexts_needed(0.3, 0.05, Goal(cells=20), unit_scaled=True) > 1.4 * base


def test_a_drop_has_a_spread_of_its_own() -> None:
    """Runs that agree on everything so far will not do so once one drops by 20 points."""
    needed = contexts_needed(0.0, 0.2, Goal(), unit_scaled=True)
    assert needed == contexts_needed(0.4, 0.2, Goal(), unit_scaled=True)  # sqrt(0.2 * 0.8)
    assert needed > 30


def test_what_is_seen_is_the_inverse_of_what_is_needed() -> None:
    for sd in (0.1, 0.5):
        drop = smallest_seen(sd, 300, Goal(), unit_scaled=True)
        assert contexts_needed(sd, drop, Goal(), unit_scaled=True) <= 300
        assert contexts_needed(sd, 0.98 * drop, Goal(), unit_scaled=True) > 300
    assert smallest_seen(0.3, 4, Goal(), unit_scaled=True) == math.inf
    assert smallest_seen(3.0, 100, Goal(), unit_scaled=False) == pytest.approx(0.28 * 3.0, rel=0.05)


def test_a_run_is_judged_by_its_differences_to_full() -> None:
    goal, found = needs(usual(60), Goal(drop=5))
    assert goal.cells == len(found) == 8
    assert {need.place.policy for need in found} == {"snapkv", "keydiff"}
    for need in found:
        assert need.contexts == need.samples == 60
        assert need.design_effect == pytest.approx(1.0)
        assert need.needed == contexts_needed(need.sd, 0.05, goal, unit_scaled=True)


def test_against_a_baseline_the_differences_are_those_of_compare() -> None:
    goal, found = needs(rescored(usual(), [0.0] * 10), Goal(), usual())
    assert goal.cells == 1  # one cell differs
    assert sum(need.sd > 0 for need in found) == 1
    assert needs(usual(), Goal(), usual(), cell_count=7)[0].cells == 7


def test_contexts_that_are_shared_count_as_a_design_effect() -> None:
    rng = np.random.default_rng(0)
    lost = np.tile(rng.random(20) < 0.5, 3)  # the three questions of a context share their fate
    scores = (1.0 - lost).tolist()
    _, (need,) = needs(one_cell(scores, contexts=20), Goal(), one_cell([1.0] * 60, contexts=20))
    assert need.design_effect == pytest.approx(3.0, rel=0.05)
    assert need.contexts == 20 and need.samples == 60
    assert need.needed_samples == 3 * need.needed


def test_a_baseline_of_zero_outside_zero_to_one_has_no_percent() -> None:
    scores = [10.0, -10.0] * 10
    _, (need,) = needs(one_cell([5.0] * 20), Goal(), one_cell(scores))
    assert need.needed == MOST


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((1.2,), "--rate 1.2"),
        ((0.8, 0.01), "use a number from 0.02 to 0.42"),
        ((0.8, 0.5), "contradicts a drop of 2 points"),
        ((0.01,), "cannot drop by 2 points"),
        ((0.8, 0.1, 0), "--questions-per-context 0"),
        ((0.8, 0.1, 10**20), "--questions-per-context 100000000000000000000 is out of range"),
        ((0.8, 0.1, 2, 1.5), "--icc 1.5"),
    ],
)
def test_assumptions_that_cannot_be(arguments: tuple, says: str) -> None:
    with pytest.raises(UserError, match=says):
        assume(Goal(), *arguments)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drop": 0.0}, "--drop 0"),
        ({"power": 1.0}, "--power 1"),
        ({"alpha": 2.0}, "--alpha 2"),
        ({"cells": 0}, "--cells 0"),
        ({"cells": 10**20}, "--cells 100000000000000000000 is out of range"),
        ({"cells": 10**5000}, "--cells <int of thousands of digits> is out of range"),
        ({"alpha": 5e-324}, "--alpha 4.94066e-324 is too small"),
    ],
)
def test_what_is_asked_must_be_possible(options: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Goal(**options)


def test_a_billion_cells_are_corrected_for() -> None:
    plan = assume(Goal(alpha=1e-9, cells=MOST), 0.8, 0.1)
    assert assume(Goal(), 0.8, 0.1).contexts < plan.contexts < MOST


def test_a_run_with_nothing_to_compare_with() -> None:
    with pytest.raises(UserError, match="no full cache to compare with"):
        needs(usual(with_full=False), Goal())
    with pytest.raises(UserError, match="no common cells"):
        needs(usual(), Goal(), usual(model="other"))
    with pytest.raises(UserError, match="has one context"):
        needs(one_cell([1.0]), Goal(), one_cell([1.0]))


def test_informed_policies_are_marked_and_give_no_advice() -> None:
    frames = usual(policies=("snapkv", "oracle"), tasks=("vt",))
    goal, found = needs(rescored(frames, [0.0] * 20, policy="oracle"), Goal())
    (table,) = tables(found, goal)
    assert {plain_text(row.cells[1]) for row in table.rows} == {"snapkv", "oracle (informed)"}
    assert "snapkv at 0." in plain_text(next(sentences(found, goal)))
    informed = [need for need in found if need.place.policy == "oracle"]
    assert plain_text(next(sentences(informed, goal))).startswith("No number of samples is advised")


def test_metrics_of_fidelity_have_no_drop_to_plan_for() -> None:
    cells, samples = usual()
    with pytest.raises(UserError, match="power plans for scores; vt, cwe: kl is relative to the full cache"):
        needs((cells.assign(metric="kl"), samples), Goal())
    mixed = cells.assign(metric=np.where(cells["task"] == "vt", "kl", cells["metric"]))
    with pytest.warns(UserWarning, match="left out: power plans for scores; vt: kl"):
        _, found = needs((mixed, samples), Goal())
    assert {need.place.task for need in found} == {"cwe"}
