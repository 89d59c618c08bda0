"""TOVA, RoCo, OBCache and R-KV keep what loops over their equations keep, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.plugin import AttentionMass, Moment, Policy, Scores, View, protect_nothing
from kvbench.spelling import policy
from kvbench_policies import obcache, rkv
from kvbench_policies.tova import sum_over_holders
from tests.sweeps import slow_but

from . import oracles_attention as o
from .oracles import Layer
from .views import Case, random_case

Score = Callable[[Layer, o.Held, int], o.Worth]


def of(score: Callable[..., o.Worth], **how: object) -> Score:
    """A score that does not read the budget."""
    return lambda layer, held, b: score(layer, held, **how)


SCORES: dict[str, Score] = {
    "tova": of(o.tova),
    "roco": o.roco,
    "roco:b_std=0.5:window=3:sinks=0": partial(o.roco, b_std=0.5, window=3, sinks=0),
    "roco:b_std=0.29:window=0:sinks=9": partial(o.roco, b_std=0.29, window=0, sinks=9),
    "obcache": of(o.obcache),
    "obcache:window=1": of(o.obcache, window=1),
    "obcache:window=8:variant=value": of(o.obcache, window=8, variant="value"),
    "obcache:window=8:variant=key:group=mean": of(o.obcache, window=8, variant="key", group="mean"),
    "obcache:window=5:kernel=5:pool=avg:group=max": of(o.obcache, window=5, kernel=5, pool="avg", group="max"),
    "obcache:window=5:kernel=7": of(o.obcache, window=5, kernel=7),
    "rkv": of(o.rkv),
    "rkv:redundancy=0": of(o.rkv, redundancy=0.0),
    "rkv:redundancy=1": of(o.rkv, redundancy=1.0),
    "rkv:variant=release": of(o.rkv, variant="release"),
    "rkv:variant=release:redundancy=1:window=5": of(o.rkv, variant="release", redundancy=1.0, window=5),
    "rkv:redundancy=0.3:window=3:kernel=1:group=mean": of(o.rkv, redundancy=0.3, window=3, kernel=1, group="mean"),
}

SHAPES = [((63,), 1), ((63, 40, 20), 4), ((70, 69, 33), 2), ((101,), 4), ((40, 7, 1), 2)]


@pytest.fixture(scope="module", params=slow_but(SHAPES, SHAPES[1], SHAPES[-1]), ids=lambda s: f"T{s[0]}-G{s[1]}")
def case(request: pytest.FixtureRequest) -> tuple[Case, list[list[Layer]]]:
    lengths, group = request.param
    made = random_case(lengths, group=group, seed=3 * len(lengths) + group)
    for k in made.k:  # every fifth key says nearly what the one three tokens before it says
        for r, t in enumerate(lengths):
            own = k[r, :, -t:]
            like = own[:, 3::5]
            own[:, 3::5] = own[:, : t - 3 : 5][:, : like.shape[1]] + 0.3 * like
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


@pytest.mark.parametrize("spec", SCORES)
def test_kept_sets_agree_with_the_oracle(spec: str, case: tuple[Case, list[list[Layer]]]) -> None:
    layers, rows = case
    for budget in budgets(layers.lengths):
        got = layers.keep(policy(spec), budget)
        for r, row in enumerate(rows):
            first = max(layers.lengths) - layers.lengths[r]
            for i, layer in enumerate(row):
                held = o.everything(layer)
                expected = o.kept(SCORES[spec](layer, held, budget[r]), held, budget[r])
                assert tokens(got[i][r], first) == expected, (budget, r, i)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_rkv_applies_the_models_soft_cap(group: int) -> None:
    made = replace(random_case((63, 40), group=group, seed=group), cap=0.4)
    spec = policy("rkv:redundancy=0:kernel=1")
    got, plain = made.keep(spec, [25, 16]), replace(made, cap=None).keep(spec, [25, 16])
    for r, budget in enumerate((25, 16)):
        first = max(made.lengths) - made.lengths[r]
        for i, layer in enumerate(made.row(r)):
            held = o.everything(layer)
            worth = o.rkv(layer, held, redundancy=0.0, kernel=1, cap=0.4)
            assert tokens(got[i][r], first) == o.kept(worth, held, budget)
    assert any(not torch.equal(a, b) for a, b in zip(got, plain, strict=True))


def tokens(keep: Tensor, first: int) -> list[list[int]]:
    return [(head.nonzero()[:, 0] - first).tolist() for head in keep]


# --- later cuts -----------------------------------------------------------------------------------


def some_held(layers: Case, share: float, seed: int) -> list[list[o.Held]]:
    """By row and layer, what every head holds: its own tokens and how many, the newest always."""
    g = np.random.default_rng(seed)
    out: list[list[o.Held]] = []
    for t in layers.lengths:
        of_row: list[o.Held] = []
        for k in layers.k:
            heads = []
            for _ in range(k.shape[1]):
                chosen = g.random(t) < g.uniform(share, 1)
                chosen[-9:] = True  # what came since the last cut
                heads.append(tuple(int(i) for i in chosen.nonzero()[0]))
            of_row.append(tuple(heads))
        out.append(of_row)
    return out


def later_views(
    layers: Case,
    chosen: Policy,
    budget: Sequence[int],
    held: list[list[o.Held]],
    moment: Moment = "decode",
) -> list[View]:
    """The layers as a packed cache shows them: entries of a head first, then places without any."""
    views = layers.views(chosen, budget)
    for i, v in enumerate(views):
        n = max(len(head) for row in held for head in row[i])
        col = torch.zeros(*v.shape[:2], n, dtype=torch.int64)
        live = torch.zeros(col.shape, dtype=torch.bool)
        for r, row in enumerate(held):
            for h, head in enumerate(row[i]):
                first = max(layers.lengths) - layers.lengths[r]
                col[r, h, : len(head)] = torch.tensor(head) + first
                col[r, h, len(head) :] = first  # a place without an entry shows some other one
                live[r, h, : len(head)] = True
        wide = col[..., None].expand(-1, -1, -1, v.key.shape[-1])
        by_query_head = col.repeat_interleave(v.model.group, 1)
        v.obs = {
            need: x.gather(-1, by_query_head) if isinstance(need, AttentionMass) else x for need, x in v.obs.items()
        }
        v.position, v.turns_ago = v.position.gather(-1, col), torch.zeros_like(col)
        v.key, v.value = v.key.gather(2, wide), v.value.gather(2, wide)
        v.moment, v.col, v.valid = moment, col, live
    return views


def later_kept(chosen: Policy, views: list[View], share: Sequence[int]) -> list[Tensor]:
    """Scores of a later cut, each row cut to its share in every head."""
    out = []
    for v in views:
        assert chosen.score is not None
        found = chosen.score.score(v)
        scores = found if isinstance(found, Scores) else Scores(found, protect_nothing(v))
        assert bool((scores.value.isfinite() | ~v.valid).all())
        each = torch.tensor(list(share))[:, None].expand(v.shape[:2])
        out.append(chosen.select.select(v, scores, each))
    return out


def names(keep: Tensor, held: o.Held) -> list[list[int]]:
    return [[h[x] for x in k.nonzero()[:, 0].tolist()] for k, h in zip(keep, held, strict=True)]


@pytest.mark.parametrize("spec", [s for s in SCORES if "roco" not in s])
def test_a_later_cut_sees_what_each_head_still_holds(spec: str) -> None:
    layers = random_case((50, 41, 30), group=2, heads=3, seed=5)
    held = some_held(layers, 0.4, seed=1)
    share = [13, 11, 10]
    got = later_kept(policy(spec), later_views(layers, policy(spec), share, held), share)
    for r in range(3):
        for i, layer in enumerate(layers.row(r)):
            expected = o.kept(SCORES[spec](layer, held[r][i], share[r]), held[r][i], share[r])
            assert names(got[i][r], held[r][i]) == expected, (r, i)


@pytest.mark.parametrize("moment", ["decode", "turns"])
@pytest.mark.parametrize("share", [1, 4, 11, 13, 16, 30])
def test_roco_counts_from_positions_at_a_later_cut(moment: Moment, share: int) -> None:
    layers = random_case((90, 80), group=2, heads=3, seed=6)
    held = some_held(layers, 0.5, seed=2)
    chosen = policy("roco")
    got = later_kept(chosen, later_views(layers, chosen, [share] * 2, held, moment), [share] * 2)
    for r in range(2):
        for i, layer in enumerate(layers.row(r)):
            mean, std = o.mean_and_std(layer)
            value, classes = [], []
            for h, head in enumerate(held[r][i]):
                value.append([mean[h][x] for x in head])
                b_std, sinks = (0.3, 0) if moment == "decode" else (0.1, 4)
                spread = [std[h][x] for x in head]
                newest = layer.tokens - 1
                classes.append(o.roco_protection(spread, head, newest, share, b_std, 10, sinks))
            expected = o.kept(o.Worth(value, classes), held[r][i], share)
            assert names(got[i][r], held[r][i]) == expected, (r, i)


# --- what each method is known by -----------------------------------------------------------------


def test_tova_keeps_the_same_tokens_in_every_head_and_need_not_keep_the_newest() -> None:
    made = random_case((50, 31), group=2, heads=3, layers=1, seed=8)
    for r in range(2):  # the newest token's key is where no query looks
        made.q[0][r, :, -1, 0], made.k[0][r, :, -1] = 9.0, 0.0
        made.k[0][r, :, -1, 0] = -9.0
    for r, t in enumerate(made.lengths):
        for budget in ([1, 1], [7, 7], [49, 30]):
            (kept,) = made.kept_tokens(policy("tova"), budget, r)
            assert kept[0] == kept[1] == kept[2]
            assert t - 1 not in kept[0]
    (view,) = made.views(policy("tova"), [5, 5])
    value = policy("tova").score.score(view)  # type: ignore[union-attr]
    assert bool((value == value[:, :1]).all())
    torch.testing.assert_close(value[:, 0].sum(-1), torch.ones(2))


def test_a_token_counts_once_for_every_head_that_holds_it() -> None:
    position = torch.tensor([[[0, 2, 5, 2], [2, 3, 5, 7]]])
    valid = torch.tensor([[[True, True, True, False], [True] * 4]])
    value = torch.tensor([[[1.0, 2.0, 4.0, 100.0], [8.0, 16.0, 32.0, 64.0]]])
    expected = [[[1.0, 10.0, 36.0, 0.0], [10.0, 16.0, 36.0, 64.0]]]
    assert sum_over_holders(value, position, valid).tolist() == expected


def test_roco_gives_up_what_it_protects_in_order() -> None:
    made = random_case((80,), layers=1, heads=1, seed=4)
    last = list(range(70, 80))
    expected = {
        1: [79],
        3: [0, 1, 79],
        5: [0, 1, 2, 3, 79],
        9: [0, 1, 2, 3, 75, 76, 77, 78, 79],
        14: [0, 1, 2, 3, *last],
    }
    for budget, tokens in expected.items():
        assert made.kept_tokens(policy("roco"), [budget], 0) == [[tokens]]
    (kept,) = made.kept_tokens(policy("roco:b_std=1"), [20], 0)[0]
    mean, std = o.mean_and_std(made.row(0)[0])
    protected = set(sorted(range(80), key=lambda i: std[0][i])[-20:]) - {0, 1, 2, 3, *last}
    stay = sorted(protected, key=lambda i: mean[0][i])[-6:]
    assert len(protected) > 6
    assert kept == sorted([0, 1, 2, 3, *stay, *last])


def test_roco_protects_uneven_attention_that_is_small_on_average() -> None:
    made = random_case((60,), layers=1, heads=1, group=1, seed=1)
    chosen = policy("roco:b_std=0.1:window=0:sinks=0")
    (view,) = made.views(chosen, [10])
    power, square = AttentionMass(), AttentionMass(power=2)
    count = torch.arange(60, 0, -1).float()
    even = torch.full((60,), 0.02) * count
    even[7] *= 0.5  # the least mean attention of all, from one query
    squares = (even / count).square() * count
    squares[7] = even[7].square()
    view.obs = {power: even[None, None], square: squares[None, None]}
    scores = chosen.score.score(view)  # type: ignore[union-attr]
    assert isinstance(scores, Scores)
    assert int(scores.value[0, 0].argmin()) == 7
    assert scores.protect[0, 0].nonzero()[:, 0].tolist() == [7]
    assert int(scores.protect[0, 0, 7]) == Scores.CHOSEN


@pytest.mark.parametrize("variant", ["joint", "value", "key"])
def test_obcache_is_the_second_order_term_of_the_change_of_the_output(variant: str) -> None:
    """The squared change of a query's output when a logit, a value or both shrink by `step`.

    Its value and its gradient are 0 at `step = 0`, so half its second derivative is its limit over
    `step^2`; the score is that. With the value alone it is no approximation, at any step.
    """
    made = random_case((40,), layers=1, heads=2, group=1, seed=2)
    chosen = policy("obcache", window=1, variant=variant)
    (view,) = made.views(chosen, [5])
    scores = chosen.score.score(view)  # type: ignore[union-attr]
    assert isinstance(scores, Scores)
    layer = made.row(0)[0]
    for step in (1e-3, 1e-4) if variant != "value" else (1e-3, 1.0):
        for h in range(2):
            z = np.array([o.logit(layer, h, 39, i) for i in range(40)])
            before = np.array(o.softmax(list(z))) @ layer.v[h]
            changes = []
            for i in range(39):
                logits, values = z.copy(), layer.v[h].copy()
                if variant != "value":
                    logits[i] *= 1 - step
                if variant != "key":
                    values[i] *= 1 - step
                after = np.array(o.softmax(list(logits))) @ values
                changes.append(o.square(after - before) / step**2)
            expected = torch.tensor(changes, dtype=torch.float64)
            found = scores.value[0, h, :39].double()
            tolerance = 1e-4 if variant == "value" else 30 * step
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-9)


@pytest.mark.parametrize("variant", ["joint", "value", "key"])
def test_obcache_does_not_depend_on_its_blocks(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = random_case((63, 20), group=2, layers=1)
    chosen = policy("obcache", window=8, variant=variant)
    (view,) = made.views(chosen, [5, 5])
    whole = chosen.score.score(view).value  # type: ignore[union-attr]
    monkeypatch.setattr(obcache, "_BLOCK", 5 * 2 * 2 * 8)
    again = chosen.score.score(view).value  # type: ignore[union-attr]
    torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-5)  # squares cancel


def test_rkv_spares_the_most_recent_of_those_that_say_the_same() -> None:
    key = torch.eye(4)[[0, 0, 1, 0, 2]][None, None] * torch.tensor([1.0, 5, 2, 3, 1])[:, None]
    past = torch.ones(1, 1, 5, dtype=torch.bool)
    # Rows 0 and 1 spare token 3, row 3 spares token 1; token 0 is spared by none.
    mean = torch.tensor([2.0, 1.0, 0.0, 0.0, 0.0]) / 5
    torch.testing.assert_close(rkv.repetition(key, past), mean.softmax(-1)[None, None])


def test_rkv_holds_blocks_and_does_not_depend_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    key = torch.randn(1, 3, 161, 8, generator=torch.Generator().manual_seed(0))
    past = torch.rand(1, 3, 161, generator=torch.Generator().manual_seed(1)) < 0.7
    past[0, 2] = False
    whole = rkv.repetition(key, past)
    torch.testing.assert_close(whole.sum(-1), past.any(-1).float())
    sizes, plain = [], Tensor.masked_fill_

    def watch(self: Tensor, *rest: Tensor) -> Tensor:
        sizes.append(self.numel())
        return plain(self, *rest)  # type: ignore[call-overload]

    monkeypatch.setattr(Tensor, "masked_fill_", watch)
    monkeypatch.setattr(rkv, "_BLOCK", 3 * 161 * 4)
    torch.testing.assert_close(rkv.repetition(key, past), whole)
    assert max(sizes) == 3 * 161 * 4  # and never 161 x 161


# --- any input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "roco:b_std=1.1",
        "roco:b_std=nan",
        "roco:window=-1",
        "roco:sinks=-1",
        "obcache:window=0",
        "obcache:kernel=2",
        "obcache:variant=half",
        "rkv:redundancy=-0.1",
        "rkv:window=0",
        "rkv:kernel=4",
        "rkv:group=sum",
    ],
)
def test_what_is_out_of_range_is_refused(spec: str) -> None:
    with pytest.raises(UserError, match=f"^{spec.split(':')[1].split('=')[0]}=") as error:
        policy(spec)
    assert "\n" not in str(error.value)
