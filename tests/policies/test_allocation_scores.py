"""Pyramids, DefensiveKV and SirLLM keep exactly what loops over their equations keep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from kvbench.errors import UserError
from kvbench.plugin import Scores
from kvbench.spelling import policy
from kvbench_policies.defensivekv import share_of_heads
from kvbench_policies.pyramidkv import pyramid_shares
from tests.sweeps import slow_but

from . import oracles as o
from . import oracles_allocation as oa
from .views import Case, random_case

if TYPE_CHECKING:
    pass

Oracle = Callable[[list[o.Layer], int], oa.Kept]
LAYERS = 3
NAMES = ["pyramidkv", "ada_pyramidkv", "defensivekv", "layer_defensivekv", "sirllm"]

ORACLES: dict[str, Oracle] = {
    "pyramidkv": partial(oa.pyramidkv, window=32),
    "pyramidkv:window=5": partial(oa.pyramidkv, window=5),
    "pyramidkv:window=4:steepness=1.7": partial(oa.pyramidkv, window=4, steepness=1.7),
    "ada_pyramidkv": partial(oa.ada_pyramidkv, window=32),
    "ada_pyramidkv:window=5": partial(oa.ada_pyramidkv, window=5),
    "ada_pyramidkv:window=3:steepness=3:safeguard=0.55": partial(
        oa.ada_pyramidkv, window=3, steepness=3, safeguard=0.55
    ),
    "defensivekv": oa.defensivekv,
    "defensivekv:window=5": partial(oa.defensivekv, window=5),
    "defensivekv:window=1:mass=0.6:kernel=1": partial(oa.defensivekv, window=1, mass=0.6, kernel=1),
    "defensivekv:variant=release": partial(oa.defensivekv, variant="release"),
    "defensivekv:window=7:kernel=3:variant=release": partial(oa.defensivekv, window=7, kernel=3, variant="release"),
    "defensivekv:window=3:mass=1:variant=release": partial(oa.defensivekv, window=3, mass=1.0, variant="release"),
    "defensivekv:window=5:mass=0": partial(oa.defensivekv, window=5, mass=0.0),
    "layer_defensivekv": oa.layer_defensivekv,
    "layer_defensivekv:window=5": partial(oa.layer_defensivekv, window=5),
    "layer_defensivekv:window=6:variant=release:mass=0.75": partial(
        oa.layer_defensivekv, window=6, variant="release", mass=0.75
    ),
}

SHAPES = [((63,), 1), ((63, 40, 20), 4), ((100, 99, 33), 2), ((129,), 2), ((100, 7, 64), 1)]


@pytest.fixture(scope="module", params=slow_but(SHAPES, SHAPES[1], SHAPES[-1]), ids=lambda s: f"T{s[0]}-G{s[1]}")
def case(request: pytest.FixtureRequest) -> tuple[Case, list[list[o.Layer]]]:
    lengths, group = request.param
    made = random_case(lengths, group=group, layers=LAYERS, seed=10 + len(lengths) + group)
    return made, [made.row(r) for r in range(len(lengths))]


def budgets(lengths: list[int]) -> list[list[int]]:
    """One entry, fewer than the window, a fifth, two fifths, most, all."""
    return [
        [1] * len(lengths),
        [min(6, t) for t in lengths],
        [max(1, round(0.2 * t)) for t in lengths],
        [max(1, round(0.42 * t)) for t in lengths],
        [max(1, round(0.73 * t)) for t in lengths],
        list(lengths),
    ]


@pytest.mark.parametrize("spec", ORACLES)
def test_kept_sets_agree_with_the_oracle(spec: str, case: tuple[Case, list[list[o.Layer]]]) -> None:
    layers, rows = case
    chosen = policy(spec)
    for budget in budgets(layers.lengths):
        for r, row in enumerate(rows):
            expected = ORACLES[spec](row, budget[r])
            assert layers.kept_tokens(chosen, budget, r) == expected, (budget, r)


# --- pyramid --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 9, 33, 40, 101])
@pytest.mark.parametrize(("window", "steepness"), [(1, 20), (4, 20), (32, 20), (7, 1), (8, 2.3)])
def test_pyramid_shares_agree_with_the_oracle(tokens: int, window: int, steepness: float) -> None:
    budget = torch.arange(1, tokens + 1)
    for layers in (1, 2, 3, 7, 32):
        got = pyramid_shares(layers, torch.full_like(budget, tokens), budget, steepness, window)
        expected = [oa.pyramid(layers, tokens, b, window, steepness) for b in budget.tolist()]
        assert got.tolist() == expected
        assert got.sum(1).tolist() == (layers * budget).tolist()
        assert int(got.min()) >= 1
        assert int(got.max()) <= tokens


def test_a_pyramid_falls_and_the_clip_fills_its_first_layer() -> None:
    def shares(tokens: int, b: int) -> list[int]:
        return pyramid_shares(4, torch.tensor([tokens]), torch.tensor([b]), 20, 4)[0].tolist()

    # b' = 20: from 39 to 1, and the window of 4
    assert shares(1000, 24) == [43, 30, 18, 5]
    # b' = 20 in 41 tokens: 39 > 37, so from 37 to 3
    assert shares(41, 24) == [41, 30, 18, 7]
    # 41 < 2 b' = 42: even
    assert shares(41, 25) == [25] * 4
    assert shares(1000, 4) == [4] * 4


@pytest.mark.parametrize("name", ["pyramidkv", "ada_pyramidkv"])
def test_layer_totals_are_whole_heads(name: str) -> None:
    case = random_case((90, 31), layers=5, heads=3)
    chosen = policy(name, window=4)
    shares = chosen.allocate.shares(case.info, torch.tensor([90, 31]), torch.tensor([20, 9]))
    expected = [[3 * x for x in oa.pyramid(5, t, b, 4)] for t, b in ((90, 20), (31, 9))]
    assert shares.tolist() == expected
    assert shares.sum(1).tolist() == [5 * 3 * 20, 5 * 3 * 9]


# --- mass -----------------------------------------------------------------------------------------


MASS_SCORES: dict[str, tuple[Callable[[o.Layer, int], o.Ranked], int]] = {
    "snapkv:window=5": (lambda layer, b: o.window_score(layer, 5), 5),
    "knorm:window=6": (lambda layer, b: o.knorm_score(layer), 6),
    "keydiff": (lambda layer, b: o.keydiff_score(layer), 32),
    "streaming_llm:window=9": (lambda layer, b: o.recency_score(layer, 4), 9),
    "h2o:window=8": (lambda layer, b: o.mass_score(layer, b), 8),
}


@pytest.mark.parametrize("score", MASS_SCORES)
def test_mass_selects_for_any_score(score: str, case: tuple[Case, list[list[o.Layer]]]) -> None:
    layers, rows = case
    ranks, window = MASS_SCORES[score]
    name, *parameters = score.split(":")
    chosen = policy(":".join([name, "select=mass", "mass=0.8", *parameters]))
    for budget in budgets(layers.lengths):
        for r, row in enumerate(rows):
            b = budget[r]
            expected = [oa.by_mass(layer, ranks(layer, b), [b] * layer.heads, b, window, 0.8) for layer in row]
            assert layers.kept_tokens(chosen, budget, r) == expected, (budget, r)


def test_mass_changes_what_is_kept() -> None:
    case = random_case((100,), layers=LAYERS, seed=3)
    plain = policy("defensivekv:window=5:select=topk")
    kept = [case.kept_tokens(p, [30], 0) for p in (plain, policy("defensivekv:window=5"))]
    assert kept[0] != kept[1]


def test_a_share_below_the_first_stage_loses_its_least_attended_entries() -> None:
    case = random_case((100,), layers=4, seed=5)
    case.q = [q / 20 for q in case.q]  # even attention: the first stage is as long as it may be
    chosen = policy("snapkv:window=4:allocate=pyramid:select=mass:mass=1")
    rows = case.row(0)
    shares = oa.pyramid(4, 100, 24, 4)
    assert shares[-1] < 24
    (stage1,) = (oa.first_stage(rows[-1], [list(range(96, 100))] * 2, 24, 4, 1.0),)
    expected = [
        sorted([*sorted(taken, key=lambda i: -taken[i])[: shares[-1] - 4], *range(96, 100)]) for taken in stage1
    ]
    assert [len(taken) for taken in stage1] == [20, 20]
    assert case.kept_tokens(chosen, [24], 0)[-1] == expected


def test_the_first_stage_never_outgrows_the_budget() -> None:
    case = random_case((80, 37), layers=2, seed=4)
    chosen = policy("defensivekv:window=6:mass=1")
    assert chosen.score is not None
    for b in (1, 5, 6, 7, 20, 37):
        for v in case.views(chosen, [b, b]):
            scores = chosen.score.score(v)
            assert isinstance(scores, Scores)
            prepared = chosen.select.prepare(v, scores)
            taken = ((prepared.protect == Scores.CHOSEN) & v.valid).sum(-1)
            assert int(taken.max()) <= max(0, b - 6)
            same = prepared.protect != Scores.CHOSEN
            assert torch.equal(prepared.value[same], scores.value[same])
            assert torch.equal(prepared.protect[same], scores.protect[same])


# --- defensive ------------------------------------------------------------------------------------


def test_defensive_scores_agree_with_the_oracle(case: tuple[Case, list[list[o.Layer]]]) -> None:
    layers, rows = case
    chosen = policy("defensivekv:window=5")
    assert chosen.score is not None
    for at, v in enumerate(layers.views(chosen, layers.lengths)):
        scores = chosen.score.score(v)
        assert isinstance(scores, Scores)
        for r, row in enumerate(rows):
            t = layers.lengths[r]
            past = max(0, t - 5)
            got = scores.value[r, :, -t:][:, :past].numpy()
            expected = np.array(oa.defensive_score(row[at], 5)).reshape(got.shape)
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-7)


def test_heads_share_a_token_wherever_they_hold_it() -> None:
    case = random_case((6,), heads=3, group=1, layers=1)
    (v,) = case.views(policy("knorm"), [6])
    size = torch.tensor([[[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 99]]])
    v.position = torch.tensor([[[0, 2, 3, 5], [0, 1, 2, 3], [0, 4, 5, 0]]])
    v.valid = torch.ones(1, 3, 4, dtype=torch.bool)
    v.valid[0, 2, 3] = False
    got = share_of_heads(v, size)[0]
    expected = [
        [1 / 15, 2 / 9 * 2 / 3, 3 / 11 * 2 / 3, 4 / 15 * 2 / 3],
        [5 / 15, 1 / 3, 7 / 9 * 2 / 3, 8 / 11 * 2 / 3],
        [9 / 15, 1 / 3, 11 / 15 * 2 / 3],
    ]
    for h in range(3):
        torch.testing.assert_close(got[h, : len(expected[h])], torch.tensor(expected[h]))


# --- surprisal ------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.7, 0.0])
@pytest.mark.parametrize("sinks", [4, 0, 2])
@pytest.mark.parametrize("variant", ["paper", "release"])
def test_surprisal_with_turns_agrees_with_the_oracle(decay: float, sinks: int, variant: str) -> None:
    lengths = [63, 40, 3]
    case = random_case(lengths, layers=LAYERS, seed=8)
    column = torch.arange(63).flip(0)
    case.turns_ago = torch.stack([column // 20, column // 7, column // 2])
    chosen = policy("sirllm", decay=decay, sinks=sinks, variant=variant)
    for budget in [*budgets(lengths), [4, 5, 2], [3, 2, 3], [2, 3, 1]]:
        for r, t in enumerate(lengths):
            expected = oa.sirllm(
                case.surprisal[r, -t:].double().tolist(),
                case.turns_ago[r, -t:].tolist(),
                budget[r],
                LAYERS,
                2,
                decay,
                sinks,
                variant,
            )
            assert case.kept_tokens(chosen, budget, r) == expected, (budget, r)


# --- all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "pyramidkv:steepness=0.5",
        "pyramidkv:window=0",
        "ada_pyramidkv:steepness=0",
        "ada_pyramidkv:safeguard=2",
        "defensivekv:window=0",
        "defensivekv:kernel=4",
        "defensivekv:mass=1.5",
        "defensivekv:variant=other",
        "sirllm:decay=1.1",
        "sirllm:sinks=-1",
    ],
)
def test_a_bad_parameter_is_named_in_one_line(spec: str) -> None:
    with pytest.raises(UserError, match=f"^{spec.split(':')[1].split('=')[0]}=") as error:
        policy(spec)
    assert "\n" not in str(error.value)
