"""What must not happen: leaks, stale state, foreign code that harms others, silent garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvbench
from kvbench.budget import Budget
from kvbench.engine.driver import engine
from kvbench.engine.observers import MassObserver
from kvbench.engine.prefix import Compression, Prefix
from kvbench.errors import BudgetError
from kvbench.parts import FunctionScore, TopK, Uniform
from kvbench.plugin import Merger, ModelInfo, Need, Observer, Policy, Score, View

from .conftest import batch, build, masked_run, step


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def named(score: Any, **parts: Any) -> Policy:
    return Policy("p", score, Uniform(), TopK(), **parts)


def noise(v: View) -> Tensor:
    return v.noise()


def wish(policy: Policy, budget: Any = 0.3) -> Compression:
    return Compression(policy, Budget.parse(budget), "context", 0)


@torch.no_grad()
def test_a_finished_prefix_is_freed_at_once(llama: Any, no_gc: None) -> None:
    policy = kvbench.policy("snapkv:window=4")
    with engine(llama):
        prefix = Prefix(llama, policy.needs)
        prefix.extend(batch(1, 30, [0])[0])
        (cache,) = prefix.compress([wish(policy)])
        dense = weakref.ref(prefix.cache.ragged[0].key)
        packed = weakref.ref(cache.ragged[0].key)
        del prefix
        assert dense() is None and packed() is not None
        del cache
        assert packed() is None


@torch.no_grad()
def test_an_attached_cache_frees_its_prefill_and_itself(llama: Any, no_gc: None) -> None:
    ids, mask = batch(1, 30, [0])
    with kvbench.attach(llama, "h2o", 0.3) as cache:
        step(llama, cache, ids, mask, 0)
        assert not cache.observers, "what only the prefill needed is gone"
        seen = weakref.ref(cache)
    del cache
    assert seen() is None


def test_gradients_do_not_keep_the_context_alive(llama: Any) -> None:
    ids, mask = batch(1, 30, [0])
    with kvbench.attach(llama, "random", 0.3) as cache:
        step(llama, cache, ids, mask, 0)
        step(llama, cache, ids[:, :1], torch.ones(1, 31), 30)
        assert all(x.key.grad_fn is None for x in cache.ragged if x.key is not None)


def test_prefill_in_inference_mode_then_generate(llama: Any) -> None:
    ids, _ = batch(1, 24, [0])
    whole = torch.cat([ids, ids[:, :4]], 1)
    with kvbench.attach(llama, "random", 0.5) as cache:
        with torch.inference_mode():
            llama(ids, past_key_values=cache)
        out = llama.generate(whole, past_key_values=cache, max_new_tokens=30, do_sample=False)
    assert out.shape[1] == 58


@dataclass(frozen=True)
class Counting(Merger):
    """Adds to the values how often this cell's layer was merged."""

    def merge(self, v: View, keep: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        state["n"] = state.get("n", torch.zeros(len(v.length))) + 1
        return v.key, v.value + state["n"][:, None, None, None]


@torch.no_grad()
def test_merger_state_belongs_to_one_cell(llama: Any) -> None:
    policy = named(FunctionScore.of(noise), merge=Counting())
    with engine(llama):
        prefix = Prefix(llama, [])
        prefix.extend(batch(1, 30, [0])[0])
        first, second = prefix.compress([wish(policy), wish(policy)])
    for a, b in zip(first.ragged, second.ragged, strict=True):
        assert a.key is not None and torch.equal(a.value[a.rows()], b.value[b.rows()])
        assert a.state[0]["n"] == b.state[0]["n"] == 1
        assert a.state[0]["n"] is not b.state[0]["n"]


def harmful_key(v: View) -> Tensor:
    v.key.mul_(2.0)
    return v.noise()


def harmful_obs(v: View) -> Tensor:
    next(iter(v.obs.values())).zero_()
    return v.noise()


class Harmful(FunctionScore):
    """Spoils what it observes."""

    @property
    def needs(self) -> frozenset[Need]:
        return kvbench.policy("snapkv:window=4").needs


@pytest.mark.parametrize("score", [FunctionScore.of(harmful_key), Harmful.of(harmful_obs)], ids=["key", "obs"])
@torch.no_grad()
def test_a_policy_that_changes_its_view_fails(llama: Any, score: Score) -> None:
    with engine(llama):
        prefix = Prefix(llama, kvbench.policy("snapkv:window=4").needs)
        prefix.extend(batch(1, 30, [0])[0])
        with pytest.raises(BudgetError, match="in place"):
            prefix.compress([wish(named(score))])
        assert prefix.cache.modified_in_place


@torch.no_grad()
def test_a_model_wide_policy_that_changes_an_early_layer_fails(llama: Any) -> None:
    def early(v: View) -> Tensor:
        if v.layer == 0:
            v.key.mul_(2.0)
        return v.noise()

    wide = kvbench.policy("random:allocate=global").allocate
    policy = Policy("p", FunctionScore.of(early), wide, TopK())
    with engine(llama):
        prefix = Prefix(llama, [])
        prefix.extend(batch(1, 30, [0])[0])
        with pytest.raises(BudgetError, match="changed key in place"):
            prefix.compress([wish(policy)])


@dataclass(frozen=True)
class Broken(Need):
    """Its observer raises."""

    def observer(self, model: ModelInfo) -> Observer:
        class Raises:
            def update(self, *args: Any) -> None:
                raise RuntimeError("observer broke")

            def fork(self) -> Any:
                return self

            def read(self, layer: int) -> Tensor:
                raise AssertionError

        return Raises()


class NeedsBroken(FunctionScore):
    """Needs a broken observer."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Broken()})


@torch.no_grad()
def test_a_broken_observer_fails_only_who_needs_it(llama: Any) -> None:
    bad, good = named(NeedsBroken.of(noise)), kvbench.policy("local")
    with engine(llama):
        prefix = Prefix(llama, bad.needs)
        prefix.extend(batch(1, 30, [0])[0])
        prefix.compress([wish(good)])
        with pytest.raises(RuntimeError, match="observer broke"):
            prefix.compress([wish(bad)])


@torch.no_grad()
def test_an_observer_that_cannot_be_split_fails_only_who_needs_it(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: MassObserver, row: int, tokens: int) -> MassObserver:
        raise RuntimeError("cannot split")

    monkeypatch.setattr(MassObserver, "sequence", broken)
    bad, good = kvbench.policy("h2o"), kvbench.policy("local")
    with engine(llama):
        together = Prefix(llama, bad.needs)
        together.extend(batch(2, 30, [0, 0])[0])
        prefix = together.sequence(1)
        prefix.compress([wish(good)])
        with pytest.raises(RuntimeError, match="cannot split"):
            prefix.compress([wish(bad)])


@torch.no_grad()
def test_interrupting_a_forward_leaves_nothing_behind(llama: Any) -> None:
    ids, mask = batch(1, 20, [0])
    plain = llama(ids).logits

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with kvbench.attach(llama, "random", 0.5) as cache:
        handle = llama.model.layers[1].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(llama, cache, ids, mask, 0)
        handle.remove()
        again = llama(ids, past_key_values=DynamicCache(config=llama.config)).logits
        assert torch.allclose(again, plain, atol=1e-5)
        with pytest.raises(ValueError, match="reset"):
            step(llama, cache, ids, mask, 0)
        cache.reset()
        step(llama, cache, ids, mask, 0)
        assert cache.held_entries == [3 * 2 * 10]


@torch.no_grad()
def test_a_score_that_raises_leaves_no_half_cut_cache(llama: Any) -> None:
    def late(v: View) -> Tensor:
        if v.layer == 1:
            raise RuntimeError("no luck")
        return v.noise()

    ids, mask = batch(1, 20, [0])
    with kvbench.attach(llama, named(FunctionScore.of(late)), 0.5) as cache:
        with pytest.raises(RuntimeError, match="no luck"):
            step(llama, cache, ids, mask, 0)
        with pytest.raises(ValueError, match="reset"):
            step(llama, cache, ids[:, :1], torch.ones(1, 21), 20)


@pytest.mark.parametrize("spec", ["streaming_llm", "h2o", "random:allocate=global", "adakv"])
@torch.no_grad()
def test_decode_with_one_row_below_its_budget(llama: Any, spec: str) -> None:
    """Row 0 is cut at every step, row 1 not for a while: both like the masked cache."""
    ids, mask = batch(2, 32, [0, 18])
    chunks = [ids[:, :24], *ids[:, 24:].split(1, 1)]
    ours, kept, first = [], [], 0
    with kvbench.attach(llama, f"{spec}:buffer=0", 12, moment="decode") as cache:
        for chunk in chunks:
            ours.append(step(llama, cache, chunk, mask, first))
            kept.append(cache.kept())
            first += chunk.shape[1]
            assert cache.live_entries(0) == 3 * 2 * 12
            assert cache.live_entries(1) == 3 * 2 * min(12, first - 18)
    theirs = masked_run(llama, chunks, mask, [None, *kept[:-1]])
    ours[0][1, :18] = theirs[0][1, :18] = 0
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < 1e-4


@torch.no_grad()
def test_full_at_decode_keeps_everything(llama: Any) -> None:
    ids, mask = batch(1, 20, [0])
    with kvbench.attach(llama, "full", "full", moment="decode") as cache:
        step(llama, cache, ids[:, :15], mask, 0)
        step(llama, cache, ids[:, 15:], mask, 15)
        assert cache.live_entries(0) == 3 * 2 * 20


@torch.no_grad()
def test_noise_does_not_change_while_decoding(llama: Any) -> None:
    seeds = []

    def spying(v: View) -> Tensor:
        noise = v.noise()
        seeds.append(int(v.seed[0]))
        return noise

    ids, mask = batch(1, 20, [0])
    policy = named(FunctionScore.of(spying), buffer=0)
    with kvbench.attach(llama, policy, 6, moment="decode") as cache:
        step(llama, cache, ids[:, :15], mask, 0)
        for i in range(15, 18):
            step(llama, cache, ids[:, i : i + 1], mask, i)
    assert len(set(seeds)) == 1 and len(seeds) == 3 + 3  # layers of the prefill, then all of them at every step


@torch.no_grad()
def test_a_tail_without_a_mask_is_right_for_sliding_layers() -> None:
    model = build("gemma3")
    ids, mask = batch(2, 30, [0, 9])
    with kvbench.attach(model, "full", "full") as cache:
        model(ids[:, :24], attention_mask=mask[:, :24], past_key_values=cache)
        bare = model(ids[:, 24:], past_key_values=cache).logits
    with kvbench.attach(model, "full", "full") as cache:
        model(ids[:, :24], attention_mask=mask[:, :24], past_key_values=cache)
        told = model(ids[:, 24:], attention_mask=mask, past_key_values=cache).logits
    assert torch.allclose(bare, told, atol=1e-5)


def test_reset_with_sliding_layers() -> None:
    model = build("gemma3")
    ids, mask = batch(1, 30, [0])
    other, short = batch(1, 13, [0], seed=3)
    with torch.no_grad(), kvbench.attach(model, "random", 0.4) as cache:
        step(model, cache, ids, mask, 0)
        cache.reset()
        again = step(model, cache, other, short, 0)
    assert torch.allclose(again, model(other).logits, atol=1e-4)


@pytest.mark.parametrize("ids", [[1, 2], torch.ones(3), torch.ones(2, 3), torch.ones(0, 3).long(), None])
def test_input_of_the_wrong_kind_is_one_line(llama: Any, ids: Any) -> None:
    with pytest.raises(ValueError, match=r"must be an integer tensor|give \[batch, tokens\]"):
        kvbench.kept(llama, ids, "random", 0.5)


def test_a_row_of_nothing_but_padding_is_named(llama: Any) -> None:
    ids, mask = batch(3, 10, [0, 10, 2])
    with pytest.raises(ValueError, match="row 1"):
        kvbench.kept(llama, ids, "random", 0.5, mask)


def test_the_decoder_is_attached_with_its_model(llama: Any) -> None:
    nested = pytest.raises(ValueError, match="nest")
    with kvbench.attach(llama, "random", 0.5), nested, kvbench.attach(llama.model, "random", 0.5):
        pass


def test_an_unused_cache_has_no_bytes(llama: Any) -> None:
    with kvbench.attach(llama, "random", 0.5) as cache:
        assert cache.live_bytes() == cache.allocated_bytes() == 0
