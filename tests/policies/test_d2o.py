"""D2O and CaM as wholes: shares, kept sets and what is merged, against their oracles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvbench.errors import BudgetError, UserError
from kvbench.plugin import AttentionMass
from kvbench.spelling import part, policy

from . import oracles as o
from . import oracles_merging as om
from .caches import Cache, ema_oracle, ema_release_oracle, value_oracle
from .views import decide, random_case


def accumulated(row: list[o.Layer]) -> list[list[np.ndarray]]:
    return [[np.array(head) for head in o.mass_score(layer, 1, recent=0.0).value] for layer in row]


def by_query_head(row: list[o.Layer]) -> list[list[np.ndarray]]:
    """Attention that every entry received, [L][H_q] of [T]."""
    return [
        [
            np.sum([o.attention(layer, g, t) for t in range(layer.tokens)], axis=0)
            for g in range(layer.heads * layer.group)
        ]
        for layer in row
    ]


SHARES = [
    "",
    ":heads=kv",
    ":heads=kv:scale=raw",
    ":scale=raw",
    ":scale=standardized",
    ":share=reciprocal",
    ":scale=raw:share=reciprocal",
    ":share=uniform",
    ":share=layer_decay",
    ":variant=release",
    ":variant=release:scale=raw",
    ":recent=0.6:sinks=0",
    ":recent=0:sinks=7",
    ":variant=release:recent=0.1:sinks=1",
]


@pytest.mark.parametrize(("lengths", "group"), [((63,), 1), ((100, 7, 64), 2), ((45,), 4)], ids=str)
def test_d2o_agrees_with_its_oracle_at_one_cut(lengths: tuple[int, ...], group: int) -> None:
    case = random_case(lengths, group=group, layers=5, heads=3, seed=group)
    for i in range(5):  # layers that differ in how evenly they attend
        case.q[i] = case.q[i] * (0.2 + 0.5 * i)
    sequences = [case.row(r) for r in range(len(lengths))]
    rows = [accumulated(row) for row in sequences]
    of_query_heads = [by_query_head(row) for row in sequences]
    refused = 0
    for options in SHARES:
        chosen = policy("d2o" + options)
        given = dict(x.split("=") for x in options.split(":") if x)
        release = given.get("variant") == "release"
        measured = rows if given.get("heads") == "kv" else of_query_heads
        recent = float(given.get("recent", 0.5 if release else 0.25))
        for budget in (
            [1] * len(lengths),
            [min(6, t) for t in lengths],
            [max(1, round(0.2 * t)) for t in lengths],
            [round(0.73 * t) for t in lengths],
            [round(0.97 * t) for t in lengths],
            list(lengths),
        ):
            shares = [
                om.inverse_variance(
                    row,
                    t,
                    b,
                    given.get("scale", "release"),
                    given.get("share", "inverse_variance"),
                    (0, 1, 4) if release else (),
                    kv_heads=3,
                )
                for row, t, b in zip(measured, lengths, budget, strict=True)
            ]
            if any(s is None for s in shares):
                refused += 1
                with pytest.raises(BudgetError, match="keeps layers 0, 1, 4 whole"):
                    case.keep(chosen, budget)
                continue
            kept = case.keep(chosen, budget)
            for r, t in enumerate(lengths):
                found = shares[r]
                assert found is not None
                for layer in range(5):
                    for h in range(3):
                        expected = om.important_recent(
                            rows[r][layer][h],
                            list(range(t)),
                            t,
                            found[layer][h],
                            recent,
                            int(given.get("sinks", 4)),
                        )
                        got = kept[layer][r, h].nonzero()[:, 0] - (max(lengths) - t)
                        assert set(got.tolist()) == expected, (options, budget, r, layer, h)
    assert refused > 0


def test_release_needs_room_for_three_whole_layers() -> None:
    case = random_case((50,), layers=5, heads=2)
    chosen = policy("d2o:variant=release")
    first, second, *others, last = (int(k.sum()) for k in case.keep(chosen, [31]))
    assert (first, second, sum(others), last) == (100, 100, 10, 100)
    with pytest.raises(BudgetError, match=r"300 entries .* at least 4, .* allows 300; use a budget of 31 entries"):
        case.keep(chosen, [30])
    with pytest.raises(BudgetError):
        random_case((50,), layers=3).keep(chosen, [49])
    assert [int(k.sum()) for k in random_case((50,), layers=3).keep(chosen, [50])] == [100] * 3


def test_raw_variances_keep_their_order_where_their_exponentials_vanish() -> None:
    """exp(-F) is 0 in float64 for all layers; one takes all it can, then the next."""
    case = random_case((100,), layers=4, heads=2)
    chosen = policy("d2o:scale=raw")
    views = case.views(chosen, [60])
    for v, height in zip(views, (100.0, 120.0, 140.0, 80.0), strict=True):
        v.obs = {need: torch.zeros_like(x) for need, x in v.obs.items()}
        v.obs[AttentionMass()][..., ::2] = height
    assert [int(k.sum()) for k in decide(chosen, views, [60])] == [200, 78, 2, 200]


def expected_shares(
    caches: list[Cache], r: int, b: int, before: list[list[int]] | None, release: bool
) -> list[list[int]]:
    """D2O's shares of five layers of two heads, at the first cut or at a later one of `decode`."""
    heads = [cache.rows[r].heads for cache in caches]
    tokens = caches[0].lengths[r]
    if before is None:
        found = om.inverse_variance(
            [[x for h in layer for x in h.per_query_head] for layer in heads],
            tokens,
            b,
            whole=(0, 1, 4) * release,
            kv_heads=2,
        )
        assert found is not None
        return found
    if not release:
        return before
    # Three layers keep what they gain, the others make room for it in proportion.
    logs = [math.log(n) for i in (2, 3) for n in before[i]]
    held = [len(h.positions) for i in (2, 3) for h in heads[i]]
    four = om.spread(logs, 10 * b - 6 * tokens, [1] * 4, held)
    whole = [tokens] * 2
    return [whole, whole, four[:2], four[2:], whole]


@pytest.mark.parametrize("spec", ["d2o", "d2o:variant=release", "cam", "cam:merge_span=3"])
@pytest.mark.parametrize(("lengths", "group"), [((63,), 2), ((57, 41, 50), 1)], ids=str)
def test_a_policy_agrees_with_its_oracle_over_cuts_at_decode(spec: str, lengths: tuple[int, ...], group: int) -> None:
    chosen = policy(spec)
    assert chosen.merge is not None
    release, d2o = "release" in spec, spec.startswith("d2o")
    layers, rows = 5, len(lengths)
    budget = [round(0.88 * t) if release else 13 for t in lengths]
    rng = np.random.default_rng(group)
    caches = [Cache(list(lengths), 2, group, rng, layer=i, layers=layers) for i in range(layers)]
    oracles = []
    for cache in caches:
        if not d2o:
            oracles.append(value_oracle(cache, 3 if "merge_span" in spec else 32))
        else:
            oracles.append(ema_release_oracle(0.5) if release else ema_oracle(0.7))
    shares = [[[b] * 2] * layers for b in budget]
    for turn in range(4):
        views = [cache.view("decode", budget) for cache in caches]
        for r in range(rows) if d2o else ():
            shares[r] = expected_shares(caches, r, budget[r], shares[r] if turn else None, release)
        kept = decide(chosen, views, budget)
        got = [[kept[i][r].sum(-1).tolist() for i in range(layers)] for r in range(rows)]
        assert got == shares
        for i, cache in enumerate(caches):
            for r, row in enumerate(cache.rows):
                for h, head in enumerate(row.heads):
                    share = got[r][i][h]
                    recent, sinks = (0.5 if release or not d2o else 0.25), (4 if d2o else 0)
                    expected = om.important_recent(head.mass, head.positions, cache.lengths[r], share, recent, sinks)
                    at = cache.place(views[i].shape[2], len(head.positions))
                    assert set(kept[i][r, h, at].nonzero()[:, 0].tolist()) == expected
            assert cache.cut(views[i], kept[i], chosen.merge, oracles[i]) < 1e-5
        for cache in caches:
            cache.append([5] * rows)


@pytest.mark.parametrize("options", ["", ":heads=kv", ":scale=raw:share=reciprocal"])
def test_between_turns_the_variance_is_that_of_what_every_head_holds(options: str) -> None:
    rng = np.random.default_rng(4)
    caches = [Cache([60, 45], 3, 2, rng, layer=i, layers=4) for i in range(4)]
    merger = policy("d2o").merge
    assert merger is not None
    for cache in caches:  # heads of different lengths
        v = cache.view("turns", [20, 20])
        count = torch.from_numpy(rng.integers(5, 40, (2, 3, 1)))
        noise = torch.from_numpy(rng.random(v.shape)).masked_fill(~v.valid, -1.0)
        keep = noise.argsort(-1, descending=True).argsort(-1) < count
        cache.cut(v, keep, merger, ema_oracle(0.7))
        cache.append([9, 4])
    budget = [17, 11]
    chosen = policy("d2o" + options)
    kept = decide(chosen, [cache.view("turns", budget) for cache in caches], budget)
    given = dict(x.split("=") for x in options.split(":") if x)
    for r in range(2):
        heads = [cache.rows[r].heads for cache in caches]
        expected = om.inverse_variance(
            [
                [h.mass for h in layer] if given.get("heads") == "kv" else [x for h in layer for x in h.per_query_head]
                for layer in heads
            ],
            caches[0].lengths[r],
            budget[r],
            given.get("scale", "release"),
            given.get("share", "inverse_variance"),
            kv_heads=3,
            held=[[len(h.positions) for h in layer] for layer in heads],
        )
        assert [k[r].sum(-1).tolist() for k in kept] == expected


def test_bad_parameters_are_refused() -> None:
    for spec, text in (
        ("d2o:ema=1.5", "ema=1.5"),
        ("d2o:recent=-0.1", "recent=-0.1"),
        ("d2o:sinks=-1", "sinks=-1"),
        ("d2o:share=reciprocal:scale=standardized", "use scale=release or scale=raw"),
        ("cam:merge_span=0", "merge_span=0"),
        ("d2o:observe=0", "observe=0"),
    ):
        with pytest.raises(UserError, match=text):
            policy(spec)
    assert str(policy("d2o:variant=release")) == "d2o:variant=release"
    assert policy("d2o:variant=release").merge == part("merge", "ema").replace(variant="release")
