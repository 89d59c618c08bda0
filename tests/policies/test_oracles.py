"""Every policy keeps exactly the entries that an independent loop over its equations keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from kvbench.spelling import policy
from tests.sweeps import slow_but

from . import oracles as o
from .views import Case, random_case

Kept = list[list[list[int]]]
Oracle = Callable[[list[o.Layer], int], Kept]


def made_of(
    score: Callable[..., o.Ranked],
    allocate: Callable[..., list[list[int]]] = o.uniform,
    select: Callable[..., list[list[int]]] = o.top_k,
) -> Oracle:
    return lambda layers, b: o.keep(layers, score, partial(allocate, b=b), select)


def mass(**how: object) -> Oracle:
    return lambda layers, b: o.keep(layers, partial(o.mass_score, b=b, **how), partial(o.uniform, b=b))


def release(window: int, safeguard: float) -> Oracle:
    score = partial(o.window_score, window=window)
    allocate = partial(o.head_adaptive, safeguard=safeguard)

    return made_of(score, allocate, partial(o.two_stage, release=safeguard))


window = o.window_score
ORACLES: dict[str, Oracle] = {
    "local": made_of(o.recency_score),
    "streaming_llm": made_of(partial(o.recency_score, sinks=4)),
    "streaming_llm:sinks=7": made_of(partial(o.recency_score, sinks=7)),
    "knorm": made_of(o.knorm_score),
    "keydiff": made_of(o.keydiff_score),
    "h2o": mass(),
    "h2o:observe=16:recent=0.29:group=max": mass(observe=16, recent=0.29, group="max"),
    "h2o:recent=0:group=sum": mass(recent=0, group="sum"),
    "snapkv": made_of(window),
    "snapkv:window=5:kernel=5:pool=avg": made_of(partial(window, window=5, kernel=5, pool="avg")),
    "snapkv:window=8:kernel=3:group=max": made_of(partial(window, window=8, kernel=3, group="max")),
    "snapkv:window=1:kernel=1:group=sum": made_of(partial(window, window=1, kernel=1, group="sum")),
    "adakv": made_of(window, o.head_adaptive),
    "adakv:window=2:safeguard=0.8": made_of(partial(window, window=2), partial(o.head_adaptive, safeguard=0.8)),
    "adakv:window=8:safeguard=0.55": made_of(partial(window, window=8), partial(o.head_adaptive, safeguard=0.55)),
    "snapkv:window=8:allocate=global": made_of(partial(window, window=8), o.global_shares),
    "knorm:allocate=global": made_of(o.knorm_score, o.global_shares),
    "keydiff:allocate=head_adaptive:safeguard=0": made_of(o.keydiff_score, partial(o.head_adaptive, safeguard=0)),
    "critical_snapkv": made_of(window, o.uniform, o.two_stage),
    "critical_snapkv:window=4:norm=l2:first_stage=0.29:eps=0.01": made_of(
        partial(window, window=4),
        o.uniform,
        partial(o.two_stage, norm="l2", first_stage=0.29, eps=0.01),
    ),
    "criticalkv": made_of(window, o.head_adaptive, o.two_stage),
    "criticalkv:window=8": made_of(partial(window, window=8), o.head_adaptive, o.two_stage),
    "criticalkv:variant=release": release(32, 0.2),
    "criticalkv:window=2:safeguard=0.8:variant=release": release(2, 0.8),
    "knorm:select=two_stage": made_of(o.knorm_score, o.uniform, o.two_stage),
    "knorm:select=two_stage:variant=release": made_of(o.knorm_score, o.uniform, partial(o.two_stage, release=0.2)),
    "local:select=two_stage:variant=release:first_stage=0.25": made_of(
        o.age_score, o.uniform, partial(o.two_stage, release=0.2, first_stage=0.25)
    ),
    "keydiff:allocate=global:select=two_stage": made_of(o.keydiff_score, o.global_shares, o.two_stage),
}

SHAPES = [((63,), 1), ((63, 40, 20), 4), ((100, 99, 33), 2), ((257,), 4), ((100, 7, 64), 1)]


@pytest.fixture(scope="module", params=slow_but(SHAPES, SHAPES[1], SHAPES[-1]), ids=lambda s: f"T{s[0]}-G{s[1]}")
def case(request: pytest.FixtureRequest) -> tuple[Case, list[list[o.Layer]]]:
    lengths, group = request.param
    made = random_case(lengths, group=group, seed=len(lengths) + group)
    return made, [made.row(r) for r in range(len(lengths))]


def budgets(lengths: Sequence[int]) -> list[list[int]]:
    """One entry, fewer than the window, a fifth, most, all."""
    return [
        [1] * len(lengths),
        [min(6, t) for t in lengths],
        [max(1, round(0.2 * t)) for t in lengths],
        [100 if t > 100 else max(1, round(0.73 * t)) for t in lengths],
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


def test_random_keeps_the_largest_noise(case: tuple[Case, list[list[o.Layer]]]) -> None:
    layers, rows = case
    chosen = policy("random")
    budget = budgets(layers.lengths)[2]
    noise = [v.noise() for v in layers.views(chosen, budget)]
    for r in range(len(rows)):
        t = layers.lengths[r]
        ranked = [o.given_score(x[r, :, -t:].numpy()) for x in noise]
        expected = [o.top_k(*row) for row in zip(rows[r], ranked, o.uniform(ranked, budget[r]), strict=True)]
        assert layers.kept_tokens(chosen, budget, r) == expected


@pytest.mark.parametrize("safeguard", [0.0, 0.2, 0.35, 1.0])
def test_mixed_safeguard_agrees_with_the_oracle(safeguard: float, case: tuple[Case, list[list[o.Layer]]]) -> None:
    layers, rows = case
    w = 4
    chosen = policy("adakv", window=w, safeguard=safeguard, safeguard_mode="mix")
    for budget in budgets(layers.lengths)[1:4]:
        for r, row in enumerate(rows):
            b = budget[r]
            if not w < b < layers.lengths[r] - 2:  # at the edges see the exact counts below
                continue
            expected = o.keep(
                row,
                partial(o.window_score, window=w),
                partial(o.head_adaptive_mix, b=b, window=w, safeguard=safeguard),
            )
            assert layers.kept_tokens(chosen, budget, r) == expected
