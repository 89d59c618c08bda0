"""CAKE, ZigZagKV and SimLayerKV keep exactly what loops over their equations keep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvbench.errors import UserError
from kvbench.plugin import Scored, Scores, protect_nothing
from kvbench.spelling import policy
from tests.sweeps import slow_but

from . import oracles as o
from . import oracles_layers as ol
from .test_attention_scores import later_views, some_held
from .views import Case, random_case

LAYERS = 3
Kept = list[list[list[int]]]


def keep(
    score: Callable[[o.Layer], o.Ranked],
    shares: Callable[[list[o.Layer], int], ol.Shares],
    layers: list[o.Layer],
    b: int,
) -> Kept:
    return [o.top_k(layer, score(layer), own) for layer, own in zip(layers, shares(layers, b), strict=True)]


def of(score: Callable[[o.Layer], o.Ranked], shares: Callable[..., ol.Shares]) -> Callable[..., Kept]:
    return partial(keep, score, shares)


def simlayerkv(sinks: int, recent: int, window: int) -> Callable[..., Kept]:
    shares = partial(ol.lazy_layers, sinks=sinks, recent=recent, window=window)
    return of(partial(o.recency_score, sinks=sinks), shares)


ORACLES: dict[str, Callable[[list[o.Layer], int], Kept]] = {
    "cake": of(ol.cake_score, ol.cake),
    "cake:window=5": of(partial(ol.cake_score, window=5), partial(ol.cake, window=5)),
    "cake:window=3:tau1=1.6:tau2=0.4:gamma=2:kernel=1": of(
        partial(ol.cake_score, window=3, gamma=2, kernel=1),
        partial(ol.cake, window=3, tau1=1.6, tau2=0.4),
    ),
    "cake:window=1": of(partial(ol.cake_score, window=1), partial(ol.cake, window=1)),
    "zigzagkv": of(o.window_score, ol.zigzagkv),
    "zigzagkv:window=4:mass=0.5:bound=0": of(
        partial(o.window_score, window=4), partial(ol.zigzagkv, window=4, mass=0.5, bound=0)
    ),
    "knorm:allocate=zigzagkv:bound=0.63": of(o.knorm_score, partial(ol.zigzagkv, bound=0.63)),
    "knorm:allocate=cake:window=6": of(o.knorm_score, partial(ol.cake, window=6)),
    "simlayerkv": simlayerkv(4, 1024, 32),
    "simlayerkv:recent=7": simlayerkv(4, 7, 32),
    "simlayerkv:sinks=1:recent=3:window=1": simlayerkv(1, 3, 1),
    "knorm:allocate=lazy_layers:recent=5": of(o.knorm_score, partial(ol.lazy_layers, recent=5)),
}

SHAPES = [((63,), 1), ((63, 40, 20), 4), ((100, 99, 33), 2), ((40, 7, 1), 2)]


@pytest.fixture(scope="module", params=slow_but(SHAPES, SHAPES[1], SHAPES[-1]), ids=lambda s: f"T{s[0]}-G{s[1]}")
def case(request: pytest.FixtureRequest) -> tuple[Case, list[list[o.Layer]]]:
    lengths, group = request.param
    made = random_case(lengths, group=group, layers=LAYERS, seed=20 + len(lengths) + group)
    for q, sharpness in zip(made.q, (0.1, 0.3, 0.7), strict=True):
        q.mul_(sharpness)
    return made, [made.row(r) for r in range(len(lengths))]


def budgets(lengths: list[int]) -> list[list[int]]:
    """One entry, fewer than the window, a fifth, two fifths, most, all."""
    shares = (0.2, 0.42, 0.73)
    return [
        [1] * len(lengths),
        [min(6, t) for t in lengths],
        *([max(1, round(share * t)) for t in lengths] for share in shares),
        list(lengths),
    ]


@pytest.mark.parametrize("spec", ORACLES)
def test_kept_sets_agree_with_the_oracle(spec: str, case: tuple[Case, list[list[o.Layer]]]) -> None:
    layers, rows = case
    for budget in budgets(layers.lengths):
        for r, row in enumerate(rows):
            expected = ORACLES[spec](row, budget[r])
            assert layers.kept_tokens(policy(spec), budget, r) == expected, (budget, r)


@pytest.mark.parametrize("spec", ["cake:window=5", "zigzagkv", "simlayerkv:recent=5"])
def test_shares_are_kept_while_decoding(spec: str) -> None:
    made = random_case((50, 41), heads=2, layers=LAYERS, seed=3)
    held, chosen = some_held(made, 0.4, seed=1), policy(spec)
    counts = torch.tensor([[[len(h) for h in layer] for layer in row] for row in held])
    total = counts.sum((1, 2)) - 4 * 2 * LAYERS  # four entries were added to every head
    budget = (total // (2 * LAYERS)).tolist()
    views = later_views(made, chosen, budget, held)
    scored = [Scored(v, Scores(torch.zeros(v.shape), protect_nothing(v))) for v in views]
    assert chosen.allocate.allocate(scored, total).tolist() == (counts - 4).tolist()
    for v in views:
        v.moment = "turns"  # new context follows, so layers are measured again
    again = chosen.allocate.allocate(scored, total)
    assert again.sum((1, 2)).tolist() == total.tolist()
    assert again.tolist() != (counts - 4).tolist()


def shares_of(made: Case, spec: str, b: int) -> list[int]:
    return [len(layer[0]) for layer in made.kept_tokens(policy(spec), [b], 0)]


def test_attention_that_is_wide_and_changes_gets_more() -> None:
    made = random_case((80,), layers=3, heads=1, group=1)
    made.q[0] *= 0.0  # even
    made.q[2][..., 0], made.k[2][..., 0] = 9.0, 0.0
    made.k[2][..., 7, 0] = 90.0  # all on one token
    assert shares_of(made, "cake:window=8", 20) == [8, 44, 8]
    even, changing, narrow = shares_of(made, "zigzagkv:window=8:bound=0.5", 20)
    assert even > changing > narrow >= 10
    assert even + changing + narrow == 60


def test_the_budget_says_how_many_layers_are_lazy() -> None:
    made = random_case((80,), layers=3, heads=2, group=2)
    for i, boost in enumerate((0.0, 2.0, 1.0)):  # how much queries look for the first token
        made.q[i][..., 0] += 3.0 * boost
        made.k[i][..., 0, 0] = 9.0
    spec = "simlayerkv:sinks=2:recent=6"
    assert shares_of(made, spec, 8) == [8, 8, 8]
    assert shares_of(made, spec, 32) == [80, 8, 8]
    assert shares_of(made, spec, 42) == [80, 8, 38]
    assert shares_of(made, spec, 57) == [80, 11, 80]


def test_a_budget_below_the_recent_tokens_is_warned_of() -> None:
    made = random_case((80,), layers=2)
    with pytest.warns(UserWarning, match=r"simlayerkv .* 1024 recent .* no layer keeps the whole"):
        made.keep(policy("simlayerkv"), [20])


@pytest.mark.parametrize(
    "spec",
    [
        "cake:tau1=0",
        "cake:tau2=-1",
        "cake:gamma=-1",
        "cake:window=0",
        "cake:kernel=2",
        "zigzagkv:mass=1.2",
        "zigzagkv:bound=-0.1",
        "simlayerkv:recent=0",
        "simlayerkv:sinks=-1",
    ],
)
def test_what_is_out_of_range_is_refused(spec: str) -> None:
    with pytest.raises(UserError, match=f"^{spec.split(':')[1].split('=')[0]}=") as error:
        policy(spec)
    assert "\n" not in str(error.value)
