"""What goes on after the first cut: observed mass, queries, surprisal, turns, later cuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import engine, forward
from kvbench.engine.prefix import Compression, Prefix
from kvbench.plugin import (
    AttentionMass,
    ModelInfo,
    Need,
    PerToken,
    Queries,
    Score,
    Surprisal,
    View,
)
from kvbench.spelling import as_policy
from kvbench.spelling import policy as make_policy

from .conftest import batch, masked_run, step

POLICIES = ("h2o:buffer=0", "snapkv:window=4:buffer=2", "h2o:allocate=global:buffer=3")


class Both(Score):
    """Wants both powers of the attention."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({AttentionMass(), AttentionMass(power=2)})

    def score(self, v: View) -> Tensor:
        return v.grouped(v.obs[AttentionMass()] + v.obs[AttentionMass(power=2)])


class Surprised(Score):
    """Keeps what surprised the model."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Surprisal()})

    def score(self, v: View) -> Tensor:
        return v.obs[Surprisal()]


def cells(model: Any, ids: Tensor, spec: Any, budget: str, moment: Any) -> RaggedCache:
    """One packed cache of a context, `[1, T]`."""
    policy = make_policy(spec)
    prefix = Prefix(model, policy.needs)
    prefix.extend(ids)
    return prefix.compress([Compression(policy, Budget.parse(budget), moment, 0)])[0]


def attention(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Attention weights of every layer, `[B, H_q, T, T]`, by transformers' own eager code."""
    old = model.config._attn_implementation
    model.set_attn_implementation("eager")
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask, position_ids=position, output_attentions=True)
    model.set_attn_implementation(old)
    return tuple(a.double() for a in out.attentions)


@torch.no_grad()
def test_mass_goes_on_over_single_steps_and_chunks(llama: Any) -> None:
    """Nothing is evicted: the sums are those of the whole attention matrix."""
    pads = [0, 6]
    ids, mask = batch(2, 40, pads)
    with kvbench.attach(llama, as_policy(Both(), "both"), 64, moment="decode") as cache:
        first = 0
        for n in (19, 1, 1, 7, 12):
            step(llama, cache, ids[:, first : first + n], mask, first)
            first += n
        whole = attention(llama, ids, mask)
        for layer, a in zip(cache.ragged, whole, strict=True):
            for power in (1, 2):
                held = layer.extras[AttentionMass(power=power)][layer.rows()]
                for row, pad in enumerate(pads):
                    want = (a[row, :, pad:, pad:] ** power).sum(1)  # [H_q, t]
                    want = want.view(2, 4, -1).transpose(1, 2).flatten(0, 1)
                    got, held = held[: len(want)], held[len(want) :]
                    assert torch.allclose(got.double(), want, atol=1e-4)


@torch.no_grad()
def test_surprisal_is_the_models_own(llama: Any) -> None:
    ids, mask = batch(2, 30, [0, 9])
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = llama(ids, attention_mask=mask, position_ids=position).logits.double()
    log = logits.log_softmax(-1)
    with kvbench.attach(llama, as_policy(Surprised(), "s"), 64, moment="decode") as cache:
        for first, n in ((0, 14), (14, 1), (15, 15)):
            step(llama, cache, ids[:, first : first + n], mask, first)
        assert cache.valid is not None
        found = cache.token_observers[Surprisal()].read(cache.valid)
    for row, pad in enumerate([0, 9]):
        want = -log[row, pad:-1].gather(-1, ids[row, pad + 1 :, None])[:, 0]
        assert torch.allclose(found[row, pad + 1 :].double(), want, atol=1e-4)
        assert float(found[row, pad]) == float(found[row, pad + 1 :].max())


@pytest.mark.parametrize("spec", POLICIES)
@torch.no_grad()
def test_rows_together_are_bit_by_bit_what_they_are_alone(llama: Any, spec: str) -> None:
    contexts = [batch(1, n, [0], seed=n)[0] for n in (31, 24, 9)]
    tail = batch(3, 14, [0, 0, 0], seed=5)[0]

    def run(rows: list[int], slots: int) -> list[tuple[Tensor, list[Any]]]:
        caches = [cells(llama, contexts[r], spec, "12", "decode") for r in rows]
        together = RaggedCache.stack([caches[min(i, len(rows) - 1)] for i in range(slots)])
        feed = [rows[min(i, len(rows) - 1)] for i in range(slots)]
        logits = [forward(llama, together, tail[feed, i : i + 1]) for i in range(tail.shape[1])]
        return [
            (
                torch.stack([x[i] for x in logits]),
                [
                    (layer.key[layer.start[s] : layer.start[s] + layer.length[s]], layer.length[s])
                    for layer in together.ragged
                    for s in range(2 * i, 2 * i + 2)
                    if layer.key is not None
                ],
            )
            for i in range(len(rows))
        ]

    with engine(llama):
        together = run([0, 1, 2], 4)
        for row in range(3):
            ((logits, held),) = run([row], 4)
            assert torch.equal(logits, together[row][0])
            for (k, n), (other, m) in zip(held, together[row][1], strict=True):
                assert n == m and torch.equal(k, other)


@pytest.mark.parametrize("spec", ["h2o", "snapkv:window=4", "keydiff:allocate=global", "random"])
@torch.no_grad()
def test_chunks_are_cut_like_a_masked_cache(llama: Any, spec: str) -> None:
    ids, mask = batch(2, 60, [0, 7])
    chunks = list(ids.split(15, 1))
    ours, kept, first = [], [], 0
    with kvbench.attach(llama, spec, 11, moment="chunked") as cache:
        for chunk in chunks:
            ours.append(step(llama, cache, chunk, mask, first))
            kept.append(cache.kept())
            first += chunk.shape[1]
            assert [cache.live_entries(r) for r in (0, 1)] == [3 * 2 * min(11, first - pad) for pad in (0, 7)]
    theirs = masked_run(llama, chunks, mask, [None, *kept[:-1]])
    ours[0][1, :7] = theirs[0][1, :7] = 0
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < 1e-4


@torch.no_grad()
def test_turns_are_cut_to_a_share_of_what_was_seen(llama: Any) -> None:
    ids, mask = batch(2, 50, [0, 5])
    ago: list[list[int]] = []

    def spying(v: View) -> Tensor:
        if v.layer == 0:
            ago.append(v.turns_ago[0, 0][v.valid[0, 0]].unique().tolist())
        return -v.age.float()

    with kvbench.attach(llama, as_policy(spying, "spy"), 0.5, moment="turns") as cache:
        first = 0
        for n in (21, 1, 18, 10):
            step(llama, cache, ids[:, first : first + n], mask, first)
            first += n
            if n > 1:
                cache.compress()
                want = [3 * 2 * ((first - pad + 1) // 2) for pad in (0, 5)]
                assert [cache.live_entries(r) for r in (0, 1)] == want
    assert ago == [[0], [0, 1], [0, 1], [0, 1, 2], [0, 1]], "the later cuts row by row"


@torch.no_grad()
def test_queries_go_on(llama: Any) -> None:
    ids, mask = batch(2, 30, [0, 9])
    with kvbench.attach(llama, "snapkv:window=6", 64, moment="decode") as cache:
        for first, n in ((0, 14), (14, 1), (15, 15)):
            step(llama, cache, ids[:, first : first + n], mask, first)
        parts = [cache.observers[Queries(6)].read(i) for i in range(3)]
    with kvbench.attach(llama, "snapkv:window=6", 64, moment="decode") as cache:
        step(llama, cache, ids, mask, 0)
        whole = [cache.observers[Queries(6)].read(i) for i in range(3)]
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(parts, whole, strict=True))


@dataclass(frozen=True)
class Linear(PerToken):
    """Tells tokens apart by hidden state, value and projections; not by their place."""

    def measure(self, layer: int, hidden: Tensor, key: Tensor, value: Tensor, model: ModelInfo) -> Tensor:
        assert model.project is not None
        own = hidden.mean(-1) + model.project(layer, hidden)[..., ::3].sum(-1)
        return value.sum(-1) + own[:, None] * (layer + 1)


class Gated(Score):
    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Linear()})

    def score(self, v: View) -> Tensor:
        return v.obs[Linear()]


@torch.no_grad()
def test_a_number_of_every_token_stays_beside_it(llama: Any) -> None:
    """Nothing is evicted: in pieces it is what it is in one forward; then the smallest goes."""
    ids, mask = batch(2, 36, [0, 6])
    want = []
    with kvbench.attach(llama, as_policy(Gated(), "g"), 64, moment="decode") as cache:
        step(llama, cache, ids, mask, 0)
        want = [layer.extras[Linear()][layer.rows()] for layer in cache.ragged]
    with kvbench.attach(llama, as_policy(Gated(), "g"), 64, moment="decode") as cache:
        first = 0
        for n in (14, 1, 1, 20):
            step(llama, cache, ids[:, first : first + n], mask, first)
            first += n
        for layer, whole in zip(cache.ragged, want, strict=True):
            assert torch.allclose(layer.extras[Linear()][layer.rows()], whole, atol=1e-4)
    small = make_policy(as_policy(Gated(), "g"), buffer=0)
    with kvbench.attach(llama, small, 9, moment="decode") as cache:
        step(llama, cache, ids[:, :20], mask, 0)
        for i in range(20, 24):
            before = [layer.extras[Linear()][layer.rows()].view(4, 9) for layer in cache.ragged]
            step(llama, cache, ids[:, i : i + 1], mask, i)
            for layer, old in zip(cache.ragged, before, strict=True):
                new = layer.extras[Linear()][layer.rows()].view(4, 9)
                for a, b in zip(old.tolist(), new.tolist(), strict=True):
                    assert sum(x not in b for x in a) <= 1, "one entry goes"
                    assert min(b) >= min(a)


class Steps(Score):
    """Keeps the entries that have seen most forwards, counted in an extra of its own."""

    extras: ClassVar[Mapping[str, torch.dtype]] = {"seen": torch.float32}

    def score(self, v: View) -> Tensor:
        return v.extras["seen"]

    def step(self, v: View) -> None:
        v.extras["seen"] = v.extras["seen"] + 1


@torch.no_grad()
def test_a_score_counts_on_in_its_own_extras(llama: Any) -> None:
    ids, mask = batch(2, 20, [0, 4])
    policy = make_policy(as_policy(Steps(), "steps"), buffer=2)
    with kvbench.attach(llama, policy, 18, moment="decode") as cache:
        step(llama, cache, ids[:, :14], mask, 0)
        for i in range(14, 20):
            step(llama, cache, ids[:, i : i + 1], mask, i)
        for layer in cache.ragged:
            seen = layer.extras["seen"][layer.rows()].tolist()
            col = layer.col[layer.rows()].tolist()
            assert all(s == (6 if c < 14 else 20 - c) for s, c in zip(seen, col, strict=True))
        # Row 0 has reached 18 + 2: the two that saw least have gone.
        assert [cache.live_entries(r) for r in (0, 1)] == [6 * 18, 6 * 16]
        assert int(cache.ragged[0].col[: cache.ragged[0].length[0]].max()) == 17
