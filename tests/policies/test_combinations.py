"""Any registered score with any allocator, selector and merger, at every moment."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

import kvbench
from kvbench import spelling
from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import engine, forward
from kvbench.engine.prefix import Compression, Prefix
from kvbench.parts import TopK, Uniform
from kvbench.plugin import ModelInfo, Moment, Policy, Scores, View

from .drawing import (
    EVERY,
    HEADS,
    LAYERS,
    PARTS,
    equipped,
    llama,
    padded,
    policies,
    tokens,
    unless_refused,
)
from .views import Case, decide, random_case

LATER: tuple[Moment, ...] = ("decode", "chunked", "turns")
fixed = functools.partial(settings, deadline=None, derandomize=True, database=None)


def columns(cache: RaggedCache) -> list[list[list[int]]]:
    """Which columns every segment of every layer holds, in the order in which it holds them."""
    return [
        [layer.col[a : a + n].tolist() for a, n in zip(layer.start, layer.length, strict=True)]
        for layer in cache.ragged
    ]


def merged(policy: Policy, views: Sequence[View], kept: Sequence[Tensor]) -> list[Tensor]:
    """Keys and values of what is kept, layer by layer, as they would be stored."""
    found = []
    for view, keep in zip(views, kept, strict=True):
        key, value = view.key, view.value
        if policy.merge is not None:
            key, value = policy.merge.merge(view, keep, {})
            assert key.shape == value.shape == view.key.shape
            assert key.dtype == value.dtype == view.key.dtype
        found.append(torch.cat([key, value], -1)[keep])
        assert bool(found[-1].isfinite().all())
    return found


def shown(case: Case, policy: Policy, budget: Sequence[int], rubbish: float) -> list[View]:
    """Every layer, with rubbish where keys and values are padding."""
    views = case.views(policy, budget)
    for view in views:
        gap = ~view.valid[..., None]
        view.key, view.value = (x.masked_fill(gap, rubbish) for x in (view.key, view.value))
    return views


def given_to(views: Sequence[View]) -> list[Tensor]:
    return [x for v in views for x in (v.key, v.value, v.valid, v.position, v.col, *v.obs.values())]


RUBBISH = (100.0, 1e30, float("inf"), float("nan"))


@pytest.mark.parametrize(("kind", "name"), EVERY)
@fixed(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    group=st.sampled_from([1, 2, 4]),
    heads=st.integers(1, 3),
    layers=st.integers(1, 3),
    bf16=st.booleans(),
    rubbish=st.sampled_from(RUBBISH),
    data=st.data(),
)
def test_every_part_meets_budgets_sees_no_padding_and_changes_no_input(
    kind: str,
    name: str,
    lengths: list[int],
    group: int,
    heads: int,
    layers: int,
    bf16: bool,
    rubbish: float,
    data: st.DataObject,
) -> None:
    """A row keeps and merges what it keeps and merges alone."""
    policy = data.draw(policies(kind, name))
    budget = [data.draw(st.integers(1, t)) for t in lengths]
    dtype = torch.bfloat16 if bf16 else torch.float32
    case = random_case(lengths, group=group, heads=heads, layers=layers, seed=sum(lengths), dtype=dtype)
    policy = equipped(policy, case.info)
    with unless_refused():
        views = shown(case, policy, budget, rubbish)
        before = [x.clone() for x in given_to(views)]
        kept = decide(policy, views, budget)  # checks shares, validity, counts and finite scores
        found = merged(policy, views, kept)
        for x, y in zip(given_to(views), before, strict=True):
            assert torch.equal(x.nan_to_num(), y.nan_to_num())
        for r, t in enumerate(lengths):
            own = (x[r : r + 1, :, -t:] for xs in (case.q, case.k, case.v) for x in xs)
            q, k, v = ([next(own) for _ in range(layers)] for _ in range(3))
            alone = Case([t], q, k, v, case.w_o)
            single = alone.views(policy, budget[r : r + 1])
            for view in single:
                view.seed = torch.tensor([r])
            mine = decide(policy, single, budget[r : r + 1])
            if t < 15:  # so few scores may be equal but for rounding
                continue
            expected = merged(policy, single, mine)
            for layer in range(layers):
                assert torch.equal(kept[layer][r, :, -t:], mine[layer][0])
                rows = kept[layer].nonzero()[:, 0] == r
                torch.testing.assert_close(found[layer][rows], expected[layer])


def plain(scores: Scores | Tensor) -> Tensor:
    return scores.value if isinstance(scores, Scores) else scores


class Wide(Case):
    """A case of bfloat16 in float32: the same numbers."""

    def __init__(self, narrow: Case) -> None:
        self.narrow = narrow
        every = (narrow.q, narrow.k, narrow.v, narrow.w_o)
        super().__init__(narrow.lengths, *([x.float() for x in xs] for xs in every))

    @property
    def info(self) -> ModelInfo:
        project = self.narrow.info.project
        return dataclasses.replace(super().info, project=lambda layer, x: project(layer, x.bfloat16()).float())

    def hidden(self, layer: int) -> Tensor:
        return self.narrow.hidden(layer).float()


@pytest.mark.parametrize(("kind", "name"), EVERY)
@fixed(max_examples=3)
@given(data=st.data(), group=st.sampled_from([1, 2, 4]))
def test_every_part_computes_in_float32(kind: str, name: str, data: st.DataObject, group: int) -> None:
    policy = data.draw(policies(kind, name))
    case = random_case((63, 50), group=group, dtype=torch.bfloat16)
    policy = equipped(policy, case.info)
    with unless_refused():
        kept, found, scores = [], [], []
        for views in (case.views(policy, [13, 10]), Wide(case).views(policy, [13, 10])):
            assert policy.score is not None
            scores.append([plain(policy.score.score(v)) * v.valid for v in views])
            kept.append(decide(policy, views, [13, 10]))
            found.append(merged(policy, views, kept[0]))
    for narrow, wide in (*zip(*scores, strict=True), *zip(*kept, strict=True)):
        assert torch.equal(narrow, wide)
    for narrow, wide in zip(*found, strict=True):
        assert torch.equal(narrow, wide.bfloat16())


lengths_of = st.lists(st.integers(1, 40), min_size=1, max_size=3)


@fixed(max_examples=40)
@given(policy=policies(), group=st.sampled_from([1, 2, 4]), lengths=lengths_of, data=st.data())
@torch.no_grad()
def test_keeps_its_budget_and_goes_on(policy: Policy, group: int, lengths: list[int], data: st.DataObject) -> None:
    model, rows = llama(group), tokens(lengths)
    policy = equipped(policy, model)
    ids, valid = padded(rows)
    share = st.sampled_from(["0.07", "0.2", "0.5", "0.93"])
    budget = Budget.parse(data.draw(st.integers(1, max(lengths)) | share))
    note(repr((policy, group, lengths, str(budget))))
    width, tail = ids.shape[1], torch.tensor([[3, 5, 8, 2]]).expand(len(rows), -1)
    mask = torch.cat([valid, torch.ones_like(tail, dtype=torch.bool)], 1)
    caches, logits = [], []
    for steps in ((4,), (1, 3)):
        with kvbench.attach(model, policy, budget) as cache:
            with unless_refused():
                model(ids, attention_mask=valid.long(), past_key_values=cache)
            kept = torch.stack([m for m in cache.kept() if m is not None])
            counts = [LAYERS * HEADS * budget.per_head(n) for n in lengths]
            assert kept.sum((0, 2, 3)).tolist() == counts
            assert not bool((kept & ~valid[:, None]).any())
            before, at, found = columns(cache), width, None
            for n in steps:
                found = model(
                    tail[:, at - width : at - width + n],
                    attention_mask=mask[:, : at + n].long(),
                    past_key_values=cache,
                ).logits
                at += n
            assert found is not None
            logits.append(found[:, -1])
            appended = list(range(width, width + 4))
            for old, new in zip(before, columns(cache), strict=True):
                assert new == [[*segment, *appended] for segment in old]
                assert all(segment == sorted(set(segment)) for segment in new)
            caches.append(cache)
    assert bool(torch.stack(logits).isfinite().all())
    # Token by token each attends to those before it, so that it comes to the same.
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


def run(
    model: LlamaForCausalLM,
    policy: Policy,
    budget: int,
    moment: Moment,
    rows: Sequence[Tensor],
    tails: Sequence[Tensor],
) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Drive an attached cache through a context and its tails.

    Returns:
        Of every row, head by head, the positions that are held in the end; of every row, how many
        entries it holds after every forward (`turns`: after every cut).
    """
    ids, valid = padded(rows)
    held: list[list[int]] = [[] for _ in rows]

    def count(cache: RaggedCache) -> None:
        for row, counts in enumerate(held):
            counts.append(cache.live_entries(row))

    with kvbench.attach(model, policy, budget, moment=moment) as cache:
        for number, new in enumerate([ids, *tails]):
            if number:
                new = new.expand(len(rows), -1)
                valid = torch.cat([valid, torch.ones_like(new, dtype=torch.bool)], 1)
                if moment == "turns":
                    cache.compress()
                    count(cache)
            out = model(new, attention_mask=valid.long(), past_key_values=cache).logits
            assert bool(out[valid[:, -new.shape[1] :]].isfinite().all())
            if moment != "turns":
                count(cache)
        return [positions(cache, row) for row in range(len(rows))], held


def positions(cache: RaggedCache, row: int) -> list[list[int]]:
    """The positions that a row holds, layer by layer and head by head."""
    assert cache.valid is not None
    first = cache.valid.shape[1] - int(cache.valid[row].sum())
    mine = slice(row * HEADS, (row + 1) * HEADS)
    return [[c - first for c in segment] for layer in columns(cache) for segment in layer[mine]]


SIZES = {"context": (3,), "decode": (1,) * 7, "chunked": (7, 1, 4), "turns": (5, 3)}


def tails_of(moment: Moment) -> list[Tensor]:
    return [torch.arange(n)[None] + 11 * i for i, n in enumerate(SIZES[moment])]


def meets_its_budget(held: list[int], tokens: int, budget: int, moment: Moment, policy: Policy) -> None:
    """A cut leaves the budget exactly; between cuts at decode no more than the buffer is added."""
    heads, sizes = LAYERS * HEADS, SIZES[moment]
    for number, count in enumerate(held):
        least = heads * min(budget, tokens + sum(sizes[:number]))
        if moment == "decode":
            assert least <= count < heads * (budget + max(1, policy.buffer))
        elif moment == "turns" or (moment == "chunked" and (not number or sizes[number - 1] > 1)):
            assert count == least


# Long enough and kept enough of, so that no two scores are equal but for rounding.
@pytest.mark.parametrize("moment", ["context", *LATER])
@fixed(max_examples=15)
@given(
    policy=policies(),
    group=st.sampled_from([1, 2, 4]),
    lengths=st.lists(st.integers(15, 30), min_size=2, max_size=3),
    budget=st.integers(8, 30),
)
@torch.no_grad()
def test_a_padded_row_keeps_what_it_keeps_alone(
    moment: Moment, policy: Policy, group: int, lengths: list[int], budget: int
) -> None:
    note(repr((moment, policy, group, lengths, budget)))
    model, rows, tails = llama(group), tokens(lengths), tails_of(moment)
    policy = equipped(policy, model)
    with unless_refused():
        together, held = run(model, policy, budget, moment, rows, tails)
        for r, row in enumerate(rows):
            alone, own = run(model, policy, budget, moment, [row], tails)
            assert together[r] == alone[0]
            assert held[r] == own[0]
            meets_its_budget(held[r], lengths[r], budget, moment, policy)


@pytest.mark.parametrize("moment", ["decode", "chunked"])
@fixed(max_examples=15)
@given(
    policy=policies(),
    group=st.sampled_from([1, 2, 4]),
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=3),
    budget=st.integers(1, 30),
)
@torch.no_grad()
def test_rows_of_one_batch_do_not_depend_on_each_other(
    moment: Moment, policy: Policy, group: int, lengths: list[int], budget: int
) -> None:
    """Each prefilled alone, as the runner does: equal to the bit, whatever the budget."""
    note(repr((moment, policy, group, lengths, budget)))
    model, rows = llama(group), tokens(lengths)
    policy = equipped(policy, model)
    cell = Compression(policy, Budget.parse(budget), moment, 0)
    with engine(model), unless_refused():
        made = []
        for row in rows:
            prefix = Prefix(model, policy.needs)
            prefix.extend(row[None])
            made.append(prefix.fork().compress([cell])[0])
        company = [list(range(len(rows))), *([r] * len(rows) for r in range(len(rows)))]
        ends: list[list[list[list[int]]]] = []
        last: list[Tensor] = []
        for members in company:
            cache = RaggedCache.stack([made[r].fork() for r in members])
            for new in tails_of(moment):
                logits = forward(model, cache, new.expand(len(rows), -1))
            assert bool(logits.isfinite().all())
            ends.append([positions(cache, row) for row in range(len(rows))])
            last.append(logits)
        for r in range(len(rows)):
            assert ends[0][r] == ends[r + 1][r]
            assert torch.equal(last[0][r], last[r + 1][r])


def assert_same(model: Any, cache: RaggedCache, other: RaggedCache, rows: int) -> None:
    """The same entries, values and state, to the bit, and the same next logits."""
    assert columns(cache) == columns(other)
    for layer, same in zip(cache.ragged, other.ragged, strict=True):
        live, theirs = layer.rows(), same.rows()
        assert layer.key is not None and layer.value is not None
        assert same.key is not None and same.value is not None
        assert torch.equal(layer.key[live], same.key[theirs])
        assert torch.equal(layer.value[live], same.value[theirs])
        assert set(layer.extras) == set(same.extras)
        for name, extra in layer.extras.items():
            assert torch.equal(extra[live], same.extras[name][theirs])
    step = torch.full((rows, 1), 9)
    assert torch.equal(forward(model, cache, step), forward(model, other, step))


@fixed(max_examples=15)
@given(
    drawn=st.lists(policies(), min_size=2, max_size=4),
    order=st.randoms(use_true_random=False),
    lengths=lengths_of,
    budget=st.integers(1, 40),
    moment=st.sampled_from(["context", "decode", "chunked"]),
)
@torch.no_grad()
def test_cells_do_not_depend_on_their_order(
    drawn: list[Policy], order: Any, lengths: list[int], budget: int, moment: Moment
) -> None:
    note(repr((drawn, lengths, budget, moment)))
    model = llama(2)
    ids, valid = padded(tokens(lengths))
    # A second cell of the first policy's score, so that cells share one.
    drawn = [equipped(p, model) for p in drawn]
    drawn.append(Policy("other", drawn[0].score, Uniform(), TopK()))
    cells = [Compression(p, Budget.parse(budget), moment, 0) for p in drawn]
    needs = frozenset().union(*(p.needs for p in drawn))

    def prefill() -> Prefix:
        prefix = Prefix(model, needs)
        prefix.extend(ids, valid)
        return prefix

    with engine(model), unless_refused():
        alone = [prefill().compress([cell])[0] for cell in cells]
        shuffled = list(range(len(cells)))
        order.shuffle(shuffled)
        together = prefill().compress([cells[i] for i in shuffled])
        for i, cache in zip(shuffled, together, strict=True):
            assert_same(model, cache, alone[i], len(lengths))


@fixed(max_examples=25)
@given(
    drawn=st.lists(policies(), min_size=1, max_size=2),
    length=st.integers(20, 60),
    budgets=st.lists(st.integers(1, 60), min_size=2, max_size=4, unique=True),
)
@torch.no_grad()
def test_budgets_decided_together_are_those_decided_alone(drawn: list[Policy], length: int, budgets: list[int]) -> None:
    note(repr((drawn, length, budgets)))
    model = llama(2)
    ids, valid = padded(tokens([length]))
    drawn = [equipped(p, model) for p in drawn]
    cells = [Compression(p, Budget.parse(b), "context", 0) for b in budgets for p in drawn]
    needs = frozenset().union(*(p.needs for p in drawn))
    with engine(model), unless_refused():
        prefix = Prefix(model, needs)
        prefix.extend(ids, valid)
        together = prefix.compress(cells, reserve=4)
        for cell, cache in zip(cells, together, strict=True):
            fresh = Prefix(model, needs)
            fresh.extend(ids, valid)
            (alone,) = fresh.compress([cell], reserve=4)
            assert cache.held_entries == alone.held_entries
            assert cache.allocated_bytes() == alone.allocated_bytes()
            assert_same(model, cache, alone, 1)


def test_every_registered_part_is_drawn() -> None:
    assert {"score": "window", "allocate": "uniform", "select": "topk"}.items() <= {
        (kind, name) for kind, names in PARTS.items() for name in names
    }
    for kind, names in PARTS.items():
        for name in names:
            made = spelling.part(kind, name)
            assert dataclasses.is_dataclass(made), (kind, name)
