"""One prefill serves every cell, as if each had its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvbench
from kvbench.budget import Budget
from kvbench.engine.driver import engine
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.prefix import Compression, Prefix
from kvbench.errors import BudgetError
from kvbench.parts import FunctionScore, TopK, Uniform
from kvbench.plugin import Policy, Score, Scores, Selector, View
from tests.sweeps import slow

from .conftest import batch, build

CELLS = [
    ("random", 0.2),
    ("random:allocate=global", 0.2),
    ("snapkv:window=8", 0.1),
    ("snapkv:window=8", 0.5),
    ("adakv:window=8", 0.3),
    ("criticalkv:window=8", 0.3),
    ("h2o", 12),
    ("full", "full"),
]


def wishes() -> list[Compression]:
    return [Compression(kvbench.policy(p), Budget.parse(b), "context", 0) for p, b in CELLS]


@torch.no_grad()
def test_a_shared_prefill_equals_one_per_cell(family: Any) -> None:
    ids, _ = batch(1, 45, [0])
    with engine(family):
        needs = {n for w in wishes() for n in w.policy.needs}
        prefix = Prefix(family, needs)
        prefix.extend(ids)
        shared = [cache.kept() for cache in prefix.compress(wishes())]
    for (policy, budget), kept in zip(CELLS, shared, strict=True):
        alone = kvbench.kept(family, ids, policy, budget)
        for a, b in zip(alone, kept, strict=True):
            assert (a is None and b is None) or torch.equal(a, b), policy


@pytest.mark.parametrize(("most", "packings"), [(1 << 24, 1), (1, 5)])
@torch.no_grad()
def test_what_all_policies_keep_is_packed_at_once_if_it_is_little(
    llama: Any, monkeypatch: pytest.MonkeyPatch, most: int, packings: int
) -> None:
    calls: list[int] = []
    pack = RaggedLayer.pack

    def counted(self: RaggedLayer, *args: Any, **options: Any) -> None:
        pack(self, *args, **options)
        calls.append(self.batch)

    monkeypatch.setattr(RaggedLayer, "pack", counted)
    monkeypatch.setattr("kvbench.engine.prefix._PACKED", most)
    cells = [("snapkv:window=8", b) for b in (0.1, 0.5)] + [("adakv:window=8", b) for b in (0.3, 5)]
    cells += [("random:allocate=global", 0.2), ("full", "full"), ("full", 0.5)]
    wanted = [Compression(kvbench.policy(p), Budget.parse(b), "context", 0) for p, b in cells]
    ids, _ = batch(1, 30, [0])
    with engine(llama):
        prefix = Prefix(llama, {n for w in wanted for n in w.policy.needs})
        prefix.extend(ids)
        caches = prefix.compress(wanted)
    assert len(calls) == 3 * packings, "three layers"
    assert sum(calls) == 3 * len(cells)
    for (policy, budget), cache in zip(cells, caches, strict=True):
        alone = kvbench.kept(llama, ids, policy, budget)
        for a, b in zip(alone, cache.kept(), strict=True):
            assert torch.equal(a, b), policy


@torch.no_grad()
def test_question_is_compressed_in_a_fork(llama: Any) -> None:
    ids, _ = batch(1, 45, [0])
    policy = kvbench.policy("snapkv:window=8")
    wish = Compression(policy, Budget.parse(0.3), "question", 0)
    with engine(llama):
        prefix = Prefix(llama, policy.needs)
        prefix.extend(ids[:, :38])
        longer = prefix.fork()
        logits = longer.extend(ids[:, 38:])
        (late,) = longer.compress([wish])
        (early,) = prefix.compress([wish])
    whole = kvbench.kept(llama, ids, policy, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(late.kept(), whole, strict=True))
    assert early.kept()[0].shape[-1] == 38
    assert torch.allclose(logits, llama(ids).logits[:, -1], atol=1e-4)


OBSERVING = ("h2o", "obcache", "sirllm", "expected_attention", "compactor:chunk=7", "kvzip")


@pytest.mark.parametrize("pads", [[0, 7, 29], slow([0, 0, 0])])
@torch.no_grad()
def test_the_sequences_of_a_batch_are_prefixes_of_their_own(family: Any, pads: list[int]) -> None:
    ids, mask = batch(3, 45, pads)
    ids = ids * mask
    policies = [kvbench.policy(p) for p in OBSERVING]
    cells = wishes() + [Compression(p, Budget.parse(9), "context", 0) for p in policies]
    needs = {n for cell in cells for n in cell.policy.needs}
    question = torch.tensor([[5, 3, 8]])
    with engine(family):
        together = Prefix(family, needs)
        together.extend(ids, mask.bool() if any(pads) else None)
        assert together.separable
        for row, pad in enumerate(pads):
            own, alone = together.sequence(row), Prefix(family, needs)
            keys = [layer.key for layer in own.cache.ragged if layer.key is not None]
            assert all(key.untyped_storage().nbytes() == key.nbytes for key in keys), "a view keeps the whole batch"
            alone.extend(ids[row : row + 1, pad:])
            for mine, theirs in zip(own.compress(cells), alone.compress(cells), strict=True):
                for a, b in zip(mine.kept(), theirs.kept(), strict=True):
                    assert (a is None and b is None) or torch.equal(a, b)
            # A question is read with the same positions, and observed with what came before.
            logits = [x.extend(question, question=True) for x in (own, alone)]
            torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
            for mine, theirs in zip(own.compress(cells), alone.compress(cells), strict=True):
                for a, b in zip(mine.kept(), theirs.kept(), strict=True):
                    assert (a is None and b is None) or torch.equal(a, b)
    shares = [together.sequence(row).seconds for row in range(3)]
    assert sum(shares) == pytest.approx(together.seconds)


def test_scores_are_shared_unless_they_read_the_budget(llama: Any) -> None:
    calls = {"plain": 0, "reads": 0}

    def plain(v: View) -> torch.Tensor:
        calls["plain"] += 1
        return v.noise()

    def reads(v: View) -> torch.Tensor:
        calls["reads"] += 1
        return v.noise() * v.budget[:, None, None]

    ids, _ = batch(1, 30, [0])
    with torch.no_grad(), engine(llama):
        prefix = Prefix(llama, [])
        prefix.extend(ids)
        for function in (plain, reads):
            policy = Policy("p", FunctionScore.of(function), Uniform(), TopK())
            prefix.compress([Compression(policy, Budget.parse(n), "context", 0) for n in (3, 5)])
    assert calls == {"plain": 1, "reads": 2}, "three layers at once, two budgets"


@pytest.mark.parametrize("policy", ["h2o", "compactor:chunk=7", "roco", "sirllm", "simlayerkv", "defensivekv:window=8"])
@torch.no_grad()
def test_budgets_that_a_score_reads_are_decided_together_as_alone(llama: Any, policy: str) -> None:
    wanted = [Compression(kvbench.policy(policy), Budget.parse(n), "context", 0) for n in (20, 9, 31, 44, 45)]
    ids, _ = batch(1, 45, [0])
    with engine(llama):
        prefix = Prefix(llama, wanted[0].policy.needs)
        prefix.extend(ids)
        caches = prefix.compress(wanted)
    for wish, cache in zip(wanted, caches, strict=True):
        alone = kvbench.kept(llama, ids, wish.policy, wish.budget)
        assert all(torch.equal(a, b) for a, b in zip(alone, cache.kept(), strict=True)), wish.budget


class Sized(Selector):
    """Chooses by the size of the values, which is the same for every budget."""

    def __init__(self, spoil: bool = False) -> None:
        self.calls, self.spoil = 0, spoil

    def select(self, v: View, scores: Scores, share: torch.Tensor) -> torch.Tensor:
        size = v.once("size", self.size)
        if self.spoil:
            size += 1
        return TopK().select(v, Scores(size, scores.protect), share)

    def size(self, v: View) -> torch.Tensor:
        self.calls += 1
        return v.value.norm(dim=-1)


def test_what_once_makes_is_shared_by_budgets_until_the_context_grows(llama: Any) -> None:
    sized = Sized()
    policy = Policy("sized", FunctionScore.of(lambda v: v.noise()), Uniform(), sized)
    wanted = [Compression(policy, Budget.parse(n), "context", 0) for n in (3, 5)]
    ids, _ = batch(1, 30, [0])
    with torch.no_grad(), engine(llama):
        prefix = Prefix(llama, [])
        prefix.extend(ids[:, :20])
        caches = prefix.compress(wanted)
        assert sized.calls == 1, "three layers at once, two budgets"
        assert all(cache.seconds > 0 for cache in caches)
        prefix.extend(ids[:, 20:])
        grown = prefix.compress(wanted)
    assert sized.calls == 2
    for wish, cache in zip(wanted, grown, strict=True):
        alone = kvbench.kept(llama, ids, policy, wish.budget)
        assert all(torch.equal(a, b) for a, b in zip(alone, cache.kept(), strict=True))


def test_nobody_may_change_what_once_made(llama: Any) -> None:
    policy = Policy("spoils", FunctionScore.of(lambda v: v.noise()), Uniform(), Sized(spoil=True))
    with torch.no_grad(), engine(llama):
        prefix = Prefix(llama, [])
        prefix.extend(batch(1, 30, [0])[0])
        with pytest.raises(BudgetError, match="changed size in place"):
            prefix.compress([Compression(policy, Budget.parse(3), "context", 0)])


class Greedy(Selector):
    """Keeps one entry more than its share."""

    def select(self, v: View, scores: Scores, share: torch.Tensor) -> torch.Tensor:
        return TopK().select(v, scores, share + 1)


class NotFinite(Score):
    """Says NaN."""

    def score(self, v: View) -> torch.Tensor:
        return v.noise() / 0.0 * 0.0


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy("greedy", FunctionScore.of(lambda v: v.noise()), Uniform(), Greedy()), "exactly"),
        (Policy("nan", NotFinite(), Uniform(), TopK()), "not finite"),
        (Policy("flat", FunctionScore.of(lambda v: v.noise()[0]), Uniform(), TopK()), "shape"),
    ],
    ids=["surplus", "nan", "shape"],
)
def test_a_policy_off_its_budget_fails_loudly(policy: Policy, message: str) -> None:
    model = build("llama")
    with torch.no_grad(), engine(model):
        prefix = Prefix(model, [])
        prefix.extend(batch(1, 30, [0])[0])
        with pytest.raises(BudgetError, match=message):
            prefix.compress([Compression(policy, Budget.parse(0.5), "context", 0)])
