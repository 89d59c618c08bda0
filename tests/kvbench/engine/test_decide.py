"""Eviction steps show several layers to a policy at once, and decide as if it saw them one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvbench
from benchmarks.family_models import FAMILIES
from kvbench import native
from kvbench.budget import Budget
from kvbench.engine import attachment, decide
from kvbench.engine.dense import causal_attention
from kvbench.engine.driver import engine
from kvbench.engine.prefix import Compression, Prefix
from kvbench.errors import BudgetError
from kvbench.parts import FunctionScore, TopK, Uniform
from kvbench.plugin import (
    AttentionMass,
    Merger,
    ModelInfo,
    Need,
    Policy,
    Queries,
    Score,
    Scores,
    View,
    protect_nothing,
)
from kvbench_policies.expected_attention import _Moments

from .conftest import SIZE, batch, step

SPECS = (
    "h2o",
    "streaming_llm",
    "snapkv:window=4",
    "rkv:window=4",
    "adakv:window=4",
    "pyramidkv:window=4",
    "cake:window=4",
    "d2o",
    "cam",
    "roco",
    "scissorhands:window=2",
    "random",
    "snapkv:window=4:bits=4:group_size=4:residual=2",
    "h2o:allocate=global",
)


PREFILL_SPECS = (
    *SPECS,
    "criticalkv:window=4",
    "criticalkv:window=4:variant=release",
    "critical_snapkv:window=4",
    "defensivekv:window=4",
    "zigzagkv:window=4",
    "simlayerkv",
    "keydiff",
    "knorm",
    "sirllm",
    "expected_attention",
    "keydiff:select=two_stage",
    "h2o:allocate=head_adaptive:select=two_stage",
)


@torch.no_grad()
def decoded(model: Any, policy: Any, padding: list[int], budget: int = 7) -> tuple[list[Any], list[Tensor]]:
    """What is kept after every step of decoding, and the logits."""
    kept, logits = [], []
    ids, mask = batch(len(padding), 33, padding)
    with kvbench.attach(model, policy, budget, moment="decode") as cache:
        logits.append(step(model, cache, ids[:, :23], mask, 0))
        for column in range(23, 33):
            logits.append(step(model, cache, ids[:, column : column + 1], mask, column))
            kept.append(cache.kept())
    return kept, logits


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("padding", [[0], [0, 4, 14]], ids=["alone", "padded"])
def test_layers_together_are_decided_as_alone(
    llama: Any, monkeypatch: pytest.MonkeyPatch, spec: str, padding: list[int]
) -> None:
    together, logits = decoded(llama, f"{spec}:buffer=3", padding)
    monkeypatch.setattr(decide, "_TOGETHER", 0)
    alone, other_logits = decoded(llama, f"{spec}:buffer=3", padding)
    assert str(together) == str(alone)
    for ours, theirs in zip(logits, other_logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def prefilled(model: Any, policy: Policy, padding: list[int]) -> list[Any]:
    """What a prefill keeps for several budgets."""
    ids, mask = batch(len(padding), 33, padding)
    with engine(model):
        prefix = Prefix(model, policy.needs)
        prefix.extend(ids, mask.bool())
        budgets = [Budget.parse(budget) for budget in (5, 9, 19, 32)]
        caches = prefix.compress([Compression(policy, budget, "context", 0) for budget in budgets])
    return [cache.kept() for cache in caches]


@pytest.mark.parametrize("spec", PREFILL_SPECS)
@pytest.mark.parametrize("padding", [[0], [0, 4, 14]], ids=["alone", "padded"])
def test_layers_of_a_prefill_are_decided_as_alone(
    llama: Any, monkeypatch: pytest.MonkeyPatch, spec: str, padding: list[int]
) -> None:
    policy = kvbench.policy(spec)
    together = prefilled(llama, policy, padding)
    monkeypatch.setattr(decide, "_COPIED", 0)
    assert str(together) == str(prefilled(llama, policy, padding))


def spied(calls: list[tuple[int, bool]], *, asks: bool) -> Policy:
    def score(v: View) -> Tensor:
        value = v.key.float().square().sum(-1)
        calls.append((len(v.key), asks))
        return value + v.layer if asks else value

    return Policy("spied", FunctionScore.of(score), Uniform(), TopK(), buffer=0)


def test_a_score_sees_all_layers_in_one_call_unless_it_asks_which_one(llama: Any) -> None:
    calls: list[tuple[int, bool]] = []
    decoded(llama, spied(calls, asks=False), [0])
    assert [size for size, _ in calls] == [1, 1, 1, *[3] * 10], "the prefill layer by layer, then 3 layers a step"
    calls.clear()
    decoded(llama, spied(calls, asks=True), [0])
    assert [size for size, _ in calls] == [1, 1, 1, *[3, 1, 1, 1] * 10]
    calls.clear()
    prefilled(llama, spied(calls, asks=False), [0])
    assert [size for size, _ in calls] == [3], "all layers and budgets of a prefill that is shared"
    calls.clear()
    prefilled(llama, spied(calls, asks=True), [0])
    assert [size for size, _ in calls] == [3, 1, 1, 1]


@dataclass(frozen=True)
class _WindowScore(Score):
    """Notes the window attention that it sees, of all 32 queries and of the last 5, and changes it."""

    seen: list[Tensor] = field(hash=False)
    asks_for_layer: bool

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Queries(32)})

    def score(self, v: View) -> Scores:
        if self.asks_for_layer:
            assert v.layer < v.model.layers
        received = v.window_attention_sum(32).mul_(-1.0)
        self.seen.extend([-received, v.window_attention_sum(32), v.window_attention_sum(32, 5)])
        return Scores(v.grouped(received), protect_nothing(v))


def window_model(name: str) -> Any:
    """A Llama with a group of 4 or of 64 query heads, or a model of latents."""
    if name == "deepseek_v2":
        return next(family for family in FAMILIES if family.name == name).build()
    heads = {"num_attention_heads": 64, "num_key_value_heads": 1} if name == "wide" else {}
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**SIZE | {"head_dim": 64} | heads)).eval()


@pytest.mark.skipif(native.library() is None, reason="no C compiler, or native code is turned off")
@pytest.mark.parametrize("asks_for_layer", [False, True], ids=["together", "by layer"])
@pytest.mark.parametrize("padding", [[0], [0, 0], [0, 4, 14]], ids=["alone", "batch", "padded"])
@pytest.mark.parametrize(
    ("name", "tokens", "dtype"),
    [
        ("llama", 70, torch.float32),
        ("llama", 32, torch.bfloat16),
        ("llama", 31, torch.float32),
        ("wide", 70, torch.float32),
        ("deepseek_v2", 70, torch.float32),
    ],
)
def test_window_attention_is_the_same_whether_a_policy_of_the_prefill_needs_that_of_all_queries(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tokens: int,
    dtype: torch.dtype,
    padding: list[int],
    asks_for_layer: bool,
) -> None:
    model = window_model(name).to(dtype)
    windows: list[int] = []
    sum_window = native.window_attention_sum

    def counted(query: Tensor, key: Tensor, scale: float) -> Tensor:
        windows.append(query.shape[2])
        return sum_window(query, key, scale)

    def attend(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Any:
        """Keys and values expanded from latents are contiguous in no model that is known today."""
        return causal_attention(query, key.contiguous(), value.contiguous(), *others)

    monkeypatch.setattr(native, "has_matrix_code", lambda dtype: False)
    monkeypatch.setattr(native, "window_attention_sum", counted)
    monkeypatch.setattr(attachment, "causal_attention", attend)

    @torch.no_grad()
    def compressed(other_needs: set[Need]) -> tuple[list[Tensor], list[Any], set[int]]:
        """What a score sees, what is kept, and the windows that were summed by calls of their own."""
        policy = Policy("spied", _WindowScore([], asks_for_layer), Uniform(), TopK())
        windows.clear()
        ids, mask = batch(len(padding), tokens, padding)
        with engine(model):
            prefix = Prefix(model, policy.needs | other_needs)
            prefix.extend(ids, mask.bool())
            budgets = [Budget.parse(budget) for budget in (5, 19)]
            caches = prefix.compress([Compression(policy, budget, "context", 0) for budget in budgets])
        assert isinstance(policy.score, _WindowScore)
        return policy.score.seen, [cache.kept() for cache in caches], set(windows)

    alone, kept, summed = compressed(set())
    beside_all, kept_beside_all, summed_beside_all = compressed({AttentionMass()})
    assert summed == (set() if any(padding) else {32, 5})
    comes_with_all = name == "llama" and tokens >= 32
    assert summed_beside_all == (summed - {32} if comes_with_all else summed)
    assert str(kept) == str(kept_beside_all)
    layers = model.config.num_hidden_layers if asks_for_layer else 1
    assert len(alone) == len(beside_all) == 3 * layers
    for sums, sums_beside_all in zip(alone, beside_all, strict=True):
        assert torch.equal(sums, sums_beside_all)
    assert torch.equal(beside_all[0], beside_all[1]), "a policy changed what it got"


@pytest.mark.skipif(native.library() is None, reason="no C compiler, or native code is turned off")
@torch.no_grad()
def test_two_of_three_sequences_see_their_own_window_attention(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy("spied", _WindowScore([], asks_for_layer=False), Uniform(), TopK())
    with engine(llama):
        prefix = Prefix(llama, policy.needs | {AttentionMass()})
        prefix.extend(batch(3, 70, [0, 0, 0])[0])
    seeds = torch.zeros(3, dtype=torch.int64)
    of_all, of_two = (
        decide.EvictionStep(policy, prefix.cache, prefix.info, "context", [5] * len(rows or seeds), seeds, rows=rows)
        for rows in (None, [2, 0])
    )
    monkeypatch.setattr(native, "window_attention_sum", None)
    for index, layer in enumerate(prefix.cache.ragged):
        expected = of_all.view(layer, index).window_attention_sum(32)[[2, 0]]
        assert torch.equal(of_two.view(layer, index).window_attention_sum(32), expected)


def test_small_caches_only_are_shown_together(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, bool]] = []
    monkeypatch.setattr(decide, "_TOGETHER", 2 * 8 * llama.config.num_attention_heads)
    decoded(llama, spied(calls, asks=False), [0])
    assert [size for size, _ in calls[3:5]] == [2, 1]
    calls.clear()
    monkeypatch.setattr(decide, "_COPIED", 2 * 33 * llama.config.num_key_value_heads)
    prefilled(llama, spied(calls, asks=False), [0])
    assert [size for size, _ in calls] == [2, 1]


def test_layers_with_sinks_of_their_own_are_shown_one_by_one() -> None:
    family = next(family for family in FAMILIES if family.name == "gpt_oss")
    model = replace(family, settings={**family.settings, "layer_types": ["full_attention"] * 3}).build()
    layer_count = model.config.num_hidden_layers
    calls: list[tuple[int, bool]] = []
    decoded(model, spied(calls, asks=False), [0])
    prefilled(model, spied(calls, asks=False), [0])
    assert [size for size, _ in calls] == [1] * layer_count * 12, "prefill, 10 steps and another prefill"


def test_a_wrong_layer_is_named_though_it_was_shown_with_others(llama: Any) -> None:
    def score(v: View) -> Tensor:
        value = v.key.float().square().sum(-1)
        if len(value) == 3:
            value[1, 0, 0] = torch.nan
        return value

    policy = Policy("wrong", FunctionScore.of(score), Uniform(), TopK(), buffer=0)
    with pytest.raises(BudgetError, match="a score of layer 1 is not finite"):
        decoded(llama, policy, [0])


@dataclass(frozen=True)
class Counted(Score):
    """Counts the eviction steps of every entry in place, and asks for its layer afterwards."""

    name: ClassVar[str] = "counted"
    extras: ClassVar[Mapping[str, torch.dtype]] = {"steps": torch.float32}

    def score(self, v: View) -> Scores:
        v.extras["steps"] += 1
        assert v.layer >= 0
        return Scores(v.noise() * (v.extras["steps"] % 3), protect_nothing(v))


@dataclass(frozen=True)
class Uneven(Merger):
    """Has state in one layer only, or state of as many numbers as the layer holds entries."""

    name: ClassVar[str] = "uneven"
    sized: bool = False

    def merge(self, v: View, keep: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if self.sized:
            state["kept"] = torch.zeros(len(keep), int(keep.sum(-1).max()))
        elif v.layer == 0:
            state["first"] = keep.float().sum(-1)
        return v.key, v.value


@dataclass(frozen=True)
class Sloped(Uniform):
    """Gives the first layer what it takes from the last."""

    name: ClassVar[str] = "sloped"

    def shares(self, model: ModelInfo, length: Tensor, budget: Tensor) -> Tensor:
        even = super().shares(model, length, budget)
        slope = torch.zeros_like(even)
        slope[:, 0], slope[:, -1] = 2 * model.kv_heads, -2 * model.kv_heads
        return even + slope


@dataclass(frozen=True)
class Overwriting(TopK):
    """Writes into scores of its own before it asks for its layer."""

    def prepare(self, v: View, scores: Scores) -> Scores:
        return Scores(scores.value.clone(), scores.protect.clone())

    def select(self, v: View, scores: Scores, budget: Tensor) -> Tensor:
        scores.value.neg_()
        assert v.layer >= 0
        return super().select(v, scores, budget)


def norm(v: View) -> Tensor:
    return v.key.float().square().sum(-1)


@pytest.mark.parametrize(
    "policy",
    [
        Policy("p", Counted(), Uniform(), TopK(), buffer=0),
        Policy("p", FunctionScore.of(norm), Uniform(), TopK(), merge=Uneven(), buffer=0),
        Policy("p", FunctionScore.of(norm), Sloped(), TopK(), merge=Uneven(True), buffer=0),
        Policy("p", FunctionScore.of(norm), Uniform(), Overwriting(), buffer=0),
    ],
    ids=["state in place", "state of one layer", "state of several sizes", "scores in place"],
)
def test_a_part_that_asks_late_has_changed_nothing(llama: Any, monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    together, logits = decoded(llama, policy, [0, 4])
    monkeypatch.setattr(decide, "_TOGETHER", 0)
    alone, other_logits = decoded(llama, policy, [0, 4])
    assert str(together) == str(alone)
    for ours, theirs in zip(logits, other_logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_step_of_one_sequence_reads_only_what_was_observed_of_it(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all sequences for each of them would take time that grows with the square of the batch."""
    read, batches = _Moments.read, []

    def recorded(self: _Moments, layer: int) -> Tensor:
        moments = read(self, layer)
        batches.append(len(moments))
        return moments

    monkeypatch.setattr(_Moments, "read", recorded)
    decoded(llama, "expected_attention:buffer=3", [0, 4, 14])
    assert 1 in batches
    assert set(batches[batches.index(1) :]) == {1}, "after the prefill"
