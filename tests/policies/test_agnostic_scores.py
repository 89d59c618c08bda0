"""Scores that know no question keep what loops over their equations keep, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool1d

from kvbench.errors import UserError
from kvbench.plugin import Need, Policy
from kvbench.profiles.summaries import FILTERS, STATISTICS, SummaryNotes
from kvbench.spelling import policy
from kvbench_policies.expected_attention import QueryMoments
from kvbench_policies.non_causal import ChunkAttention
from kvbench_policies.projections import gaussian
from tests.sweeps import slow_but

from . import oracles_agnostic as oa
from . import oracles_attention as o
from .oracles import Layer
from .test_attention_scores import later_kept, later_views, names, some_held, tokens
from .views import Case, random_case

Score = Callable[[Layer, o.Held, list[np.ndarray], float], o.Worth]
"""A layer, what its heads hold, normal noise for every head, and `b / T`."""


def of(score: Callable[..., o.Worth], **how: object) -> Score:
    """A score that draws no noise and reads no budget."""
    return lambda layer, held, noise, kept: score(layer, held, **how)


def curdkv(sketch: int, **how: object) -> Score:
    return lambda layer, held, noise, kept: oa.curdkv(layer, held, [x / sketch**0.5 for x in noise], **how)


SCORES: dict[str, Score] = {
    "lagkv": of(oa.lagkv),
    "lagkv:lag=8:sinks=4": of(oa.lagkv, lag=8, sinks=4),
    "lagkv:lag=5:sinks=0:cross=true": of(oa.lagkv, lag=5, sinks=0, cross=True),
    "lagkv:lag=1:sinks=2": of(oa.lagkv, lag=1, sinks=2),
    "expected_attention": of(oa.expected_attention),
    "expected_attention:future=3:sinks=0:eps=0.1:norm=output": of(
        oa.expected_attention, future=3, sinks=0, eps=0.1, norm="output"
    ),
    "expected_attention:covariance=false:norm=none:sinks=9": of(
        oa.expected_attention, covariance=False, norm="none", sinks=9
    ),
    "knorm:score=leverage": lambda layer, held, noise, kept: oa.leverage(layer, held, noise),
    "knorm:score=leverage:sketch=0": of(oa.leverage),
    "knorm:score=non_causal": of(oa.non_causal),
    "knorm:score=non_causal:chunk=16": of(oa.non_causal, chunk=16),
    "knorm:score=non_causal:chunk=16:variant=release": of(oa.non_causal, chunk=16, padded=True),
    "compactor": lambda layer, held, noise, kept: oa.compactor(layer, held, noise, 1 - kept),
    "compactor:blend=0.35:chunk=8:sinks=3:recent=0:sketch=0": of(
        oa.compactor, noise=None, blend=0.35, chunk=8, sinks=3, recent=0
    ),
    "compactor:blend=2:chunk=11:recent=9:variant=release:sketch=5": (
        lambda layer, held, noise, kept: oa.compactor(layer, held, noise, 2.0, recent=9, chunk=11, padded=True)
    ),
    "curdkv": curdkv(20),
    "curdkv:sketch=3:leverage=mean": curdkv(3, leverage="mean"),
    "curdkv:sketch=0:local=16": of(oa.curdkv, local=16),
    "curdkv:sketch=0:leverage=key:sinks=0": of(oa.curdkv, leverage="key", sinks=0),
    "curdkv:sketch=0:leverage=value:local=5": of(oa.curdkv, leverage="value", local=5),
}

SHAPES = [((63,), 1), ((63, 40, 20), 4), ((70, 69, 33), 2), ((40, 7, 1), 2)]


@pytest.fixture(scope="module", params=slow_but(SHAPES, SHAPES[1], SHAPES[-1]), ids=lambda s: f"T{s[0]}-G{s[1]}")
def case(request: pytest.FixtureRequest) -> tuple[Case, list[list[Layer]]]:
    lengths, group = request.param
    made = random_case(lengths, group=group, seed=5 * len(lengths) + group)
    return made, [made.row(r) for r in range(len(lengths))]


def budgets(lengths: Sequence[int]) -> list[list[int]]:
    """One entry, fewer than any protection, some, most, all."""
    return [
        [1] * len(lengths),
        [min(6, t) for t in lengths],
        [max(1, round(0.3 * t)) for t in lengths],
        [max(1, round(0.77 * t)) for t in lengths],
        list(lengths),
    ]


@pytest.mark.parametrize("group", [1, 2, 4])
def test_expected_attention_has_the_models_sinks(group: int) -> None:
    """A sink weighs a head's attention in the mean of its group; alone, a head's order stays."""
    sinks = torch.tensor([-9.0, 6.0] * group)
    made = replace(random_case((63, 40), group=group, seed=group), sinks=sinks)
    spec = policy("expected_attention:norm=none")
    got, plain = made.keep(spec, [25, 16]), replace(made, sinks=None).keep(spec, [25, 16])
    for r, budget in enumerate((25, 16)):
        first = max(made.lengths) - made.lengths[r]
        for i, layer in enumerate(made.row(r)):
            held = o.everything(layer)
            worth = oa.expected_attention(layer, held, norm="none", sink_logits=sinks.tolist())
            assert tokens(got[i][r], first) == o.kept(worth, held, budget)
    assert any(not torch.equal(a, b) for a, b in zip(got, plain, strict=True)) == (group > 1)


def noise_of(chosen: Policy, made: Case, budget: Sequence[int]) -> list[np.ndarray]:
    """Normal noise that every layer draws for its random projection, `[B, H, d, sketch]`."""
    assert chosen.score is not None
    sketch = chosen.score.parameters().get("sketch", 0)
    return [gaussian(v, v.model.head_dim, sketch).double().numpy() for v in made.views(chosen, budget)]


@pytest.mark.parametrize("spec", SCORES)
def test_kept_sets_agree_with_the_oracle(spec: str, case: tuple[Case, list[list[Layer]]]) -> None:
    layers, rows = case
    chosen = policy(spec)
    for budget in budgets(layers.lengths):
        got = layers.keep(chosen, budget)
        noise = noise_of(chosen, layers, budget)
        for r, row in enumerate(rows):
            first = max(layers.lengths) - layers.lengths[r]
            for i, layer in enumerate(row):
                held = o.everything(layer)
                worth = SCORES[spec](layer, held, list(noise[i][r]), budget[r] / layer.tokens)
                expected = o.kept(worth, held, budget[r])
                assert tokens(got[i][r], first) == expected, (budget, r, i)


@pytest.mark.parametrize("spec", SCORES)
def test_a_later_cut_sees_what_each_head_still_holds(spec: str) -> None:
    layers = random_case((50, 41, 30), group=2, heads=3, seed=5)
    held = some_held(layers, 0.4, seed=1)
    share, chosen = [13, 11, 10], policy(spec)
    got = later_kept(chosen, later_views(layers, chosen, share, held), share)
    noise = noise_of(chosen, layers, share)
    for r in range(3):
        for i, layer in enumerate(layers.row(r)):
            worth = SCORES[spec](layer, held[r][i], list(noise[i][r]), share[r] / layer.tokens)
            expected = o.kept(worth, held[r][i], share[r])
            assert names(got[i][r], held[r][i]) == expected, (r, i)


def test_lagkv_takes_the_same_share_of_every_partition() -> None:
    made = random_case((4 + 6 * 8 + 3,), layers=1, heads=1, group=1)
    (kept,) = made.kept_tokens(policy("lagkv:lag=8:sinks=4"), [4 + 5 * 3 + 11], 0)[0]
    assert [sum(4 + 8 * p <= i < 12 + 8 * p for i in kept) for p in range(6)] == [3] * 5 + [8]
    assert kept[:4] == [0, 1, 2, 3]
    assert kept[-11:] == list(range(44, 55))


def test_lagkv_finds_channels_that_leave_the_range_of_what_follows() -> None:
    made = random_case((32,), layers=1, heads=1, group=1)
    for x in (made.k[0], made.v[0]):
        x[..., 5, 0] += 30.0  # far out of the range of the partition behind it
        x[..., :3] = 7.0 * x[..., :3]  # the scale of a channel does not matter
    value = policy("lagkv:lag=8:sinks=0:cross=true").score.score(  # type: ignore[union-attr]
        made.views(policy("lagkv:lag=8:sinks=0"), [9])[0]
    )
    assert int(value.value[0, 0, :8].argmax()) == 5  # type: ignore[union-attr]
    assert float(value.value[0, 0, :8].sum()) == pytest.approx(2.0)  # type: ignore[union-attr]


def test_normal_noise_has_its_moments_and_differs_by_layer_head_seed_and_stream() -> None:
    made = random_case((3, 3), layers=2, heads=2)
    views = made.views(policy("curdkv"), [1, 1])
    noise = torch.stack([gaussian(v, 128, 48, s) for v in views for s in (0, 1)])
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.var()) - 1) < 0.03
    assert abs(float(noise.pow(4).mean()) - 3) < 0.2
    rows = noise.flatten(0, 2).flatten(1)
    correlation = (rows @ rows.T) / rows.square().sum(1)
    assert float((correlation - torch.eye(len(rows))).abs().max()) < 0.1
    torch.testing.assert_close(gaussian(views[0], 128, 48), noise[0])


SIZES = [[23], [1, 9, 2, 11], [3, 20], [1] * 23]


def in_pieces(need: Need, made: Case, sizes: Sequence[int]) -> Any:
    """The observer of a need after forwards of some sizes; padding holds NaN."""
    for x in (made.q[0], made.k[0], made.v[0]):
        x.masked_fill_(~made.valid[:, None, :, None], float("nan"))
    observer: Any = need.observer(made.info)
    at = 0
    for size in sizes:
        before, observer = observer, observer.fork()
        at += size
        new = slice(at - size, at)
        q, k, v = made.q[0][:, :, new], made.k[0][:, :, :at], made.v[0][:, :, :at]
        held = before._held.get(0)
        observer.update(0, q, k, v, made.hidden(0)[:, new], made.valid[:, :at], 1.0)
        assert before._held.get(0) is held  # a fork changes nothing of the other
    return observer


@pytest.mark.parametrize("sizes", SIZES)
def test_moments_of_queries_do_not_depend_on_the_pieces_they_come_in(sizes: list[int]) -> None:
    made = random_case((23, 19, 2), layers=1)
    observer = in_pieces(QueryMoments(3), made, sizes)
    found = observer.read(0)
    for r in range(2):
        for g in range(4):
            mean, covariance = oa.moments(made.row(r)[0], g, 3)
            expected = torch.from_numpy(np.vstack([mean, covariance])).float()
            torch.testing.assert_close(found[r, g], expected)
    assert not bool(found[2].any())  # two tokens, three are skipped
    joined = type(observer).stack([observer, observer]).read(0)
    assert torch.equal(joined, torch.cat([found, found]))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 3), (5, 1)])
def test_chunks_do_not_depend_on_the_pieces_they_come_in(sizes: list[int], first: int, last: int) -> None:
    made = random_case((23, 19, 2), layers=1)
    need = ChunkAttention(4, first, last, padded=first == 2)
    observer = in_pieces(need, made, sizes)
    found = observer.read(0)
    for r, t in enumerate(made.lengths):
        pooled = avg_pool1d(found[r], 3, stride=1, padding=1)[:, :t]
        expected = oa.chunk_attention(made.row(r)[0], 4, first, last, padded=first == 2)
        torch.testing.assert_close(pooled, torch.tensor(expected).float())
    short = in_pieces(need, random_case((7,), layers=1), [7])
    joined = type(observer).stack([short, observer])
    assert torch.equal(joined.read(0)[1:], found)
    assert torch.equal(joined.read(0)[0, :, :7], short.read(0)[0])


def test_expected_attention_finds_keys_where_queries_spread() -> None:
    """With queries of mean 0, a key is worth more the more the queries vary along it."""
    made = random_case((60,), layers=1, heads=1, group=1)
    q = torch.randn(1, 1, 60, 8, generator=torch.Generator().manual_seed(0))
    made.q[0] = q * torch.tensor([1.0, 1, 1, 9, 1, 1, 1, 9])  # the slowest pair of channels
    made.k[0] = torch.randn_like(made.k[0]) * 0.1
    made.k[0][0, 0, 33] = torch.tensor([0.0, 0, 0, 1, 0, 0, 0, 1])
    chosen = policy("expected_attention:norm=none:sinks=0:future=4")
    (view,) = made.views(chosen, [3])
    scores = chosen.score.score(view)  # type: ignore[union-attr]
    assert int(scores.value[0, 0].argmax()) == 33  # type: ignore[union-attr]
    assert float(scores.value.sum()) == pytest.approx(1.0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "spec",
    [
        "lagkv:lag=0",
        "lagkv:sinks=-1",
        "curdkv:sketch=-1",
        "expected_attention:future=0",
        "expected_attention:eps=-1",
        "curdkv:local=-1",
    ],
)
def test_what_is_out_of_range_is_refused(spec: str) -> None:
    with pytest.raises(UserError, match=f"^{spec.split(':')[1].split('=')[0]}=") as error:
        policy(spec)
    assert "\n" not in str(error.value)


# --- statistics that were measured before ---------------------------------------------------------


def test_expected_attention_reads_measured_statistics(case: tuple[Case, list[list[Layer]]], tmp_path: Path) -> None:
    layers, rows = case
    draw = torch.Generator().manual_seed(4)
    heads = rows[0][0].group * 2
    mean = torch.randn(2, heads, 8, generator=draw)
    root = torch.randn(2, heads, 8, 8, generator=draw)
    covariance = root @ root.mT
    STATISTICS.save(tmp_path, {"query_mean": mean, "query_cov": covariance}, SummaryNotes())
    chosen = policy("expected_attention", statistics=str(tmp_path), future=7)
    assert not chosen.needs
    for budget in budgets(layers.lengths):
        got = layers.keep(chosen, budget)
        for r, row in enumerate(rows):
            first = max(layers.lengths) - layers.lengths[r]
            for i, layer in enumerate(row):
                held = o.everything(layer)
                given = mean[i].double().numpy(), covariance[i].double().numpy()
                worth = oa.expected_attention(layer, held, future=7, given=given)
                assert tokens(got[i][r], first) == o.kept(worth, held, budget[r]), (budget, r, i)


# --- Q-Filters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recent", [0, 9])
def test_qfilters_keeps_keys_against_the_filter(
    recent: int, case: tuple[Case, list[list[Layer]]], tmp_path: Path
) -> None:
    layers, rows = case
    filters = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(3))
    FILTERS.save(tmp_path, {"q_filters": filters}, SummaryNotes())
    chosen = policy("qfilters", filters=str(tmp_path), recent=recent)
    for budget in budgets(layers.lengths):
        got = layers.keep(chosen, budget)
        for r, row in enumerate(rows):
            first = max(layers.lengths) - layers.lengths[r]
            for i, layer in enumerate(row):
                worth = oa.qfilters(layer, o.everything(layer), filters[i].numpy(), recent)
                expected = o.kept(worth, o.everything(layer), budget[r])
                assert tokens(got[i][r], first) == expected, (budget, r, i)


def test_filters_for_another_model_are_refused(tmp_path: Path) -> None:
    FILTERS.save(tmp_path, {"q_filters": torch.ones(2, 2, 4)}, SummaryNotes())
    chosen = policy("qfilters", filters=str(tmp_path))
    with pytest.raises(UserError, match="of 4 channels, but model test has 2 layers by"):
        random_case((9,)).keep(chosen, [3])
