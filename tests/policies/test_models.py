"""Through whole models `kvbench.kept` gives what the oracles say of the models' own q, k and v.

Every training-free policy, on random Llama and Qwen3 (4 query heads per KV head) and on the shipped
reference model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvbench
from kvbench import registry
from kvbench.engine.loading import load_model
from kvbench.profiles.summaries import FILTERS, SummaryNotes
from kvbench.spelling import policy
from tests.sweeps import slow

from . import oracles as o
from . import oracles_agnostic as agnostic
from . import oracles_allocation as allocation
from . import oracles_attention as attention
from . import oracles_layers as ol
from . import oracles_merging as merging
from . import oracles_profile as profile
from . import oracles_windows as windows
from .test_d2o import accumulated, by_query_head
from .test_head_profile import write
from .test_oracles import Kept, Oracle, made_of, mass

LENGTHS = (63, 45)
window = partial(o.window_score, window=8)


def by_worth(score: Callable[[o.Layer, Any, int], attention.Worth]) -> Oracle:
    def run(layers: list[o.Layer], b: int) -> Kept:
        every = [(layer, attention.everything(layer)) for layer in layers]
        return [attention.kept(score(layer, held, b), held, b) for layer, held in every]

    return run


def of(score: Callable[..., attention.Worth], **how: object) -> Oracle:
    return by_worth(lambda layer, held, b: score(layer, held, **how))


def shares_of(layers: list[o.Layer]) -> list[list[float]]:
    """A head profile that fits: rising from the first head to the last."""
    count = len(layers) * layers[0].heads
    flat = [2 * (i + 1) / (count * (count + 1)) for i in range(count)]
    heads = layers[0].heads
    return [flat[i * heads : (i + 1) * heads] for i in range(len(layers))]


def profiled(score: Any, allocate: Any, select: Any) -> Oracle:
    def run(layers: list[o.Layer], b: int) -> Kept:
        shares = allocate(shares_of(layers), b, layers[0].tokens)
        return [select(layer, score(layer), own) for layer, own in zip(layers, shares, strict=True)]

    return run


def layered(score: Any, allocate: Any) -> Oracle:
    return lambda layers, b: [
        o.top_k(layer, score(layer), own) for layer, own in zip(layers, allocate(layers, b), strict=True)
    ]


def d2o(layers: list[o.Layer], b: int) -> Kept:
    tokens, heads = layers[0].tokens, layers[0].heads
    shares = merging.inverse_variance(by_query_head(layers), tokens, b, kv_heads=heads)
    assert shares is not None
    sums = accumulated(layers)
    return [
        [sorted(merging.important_recent(sums[i][h], [*range(tokens)], tokens, own[h], 0.25, 4)) for h in range(heads)]
        for i, own in enumerate(shares)
    ]


ORACLES: dict[str, Oracle] = {
    "local": made_of(o.recency_score),
    "streaming_llm": made_of(partial(o.recency_score, sinks=4)),
    "knorm": made_of(o.knorm_score),
    "knorm:allocate=global": made_of(o.knorm_score, o.global_shares),
    "keydiff": made_of(o.keydiff_score),
    "h2o": mass(),
    "h2o:observe=16": mass(observe=16),
    "cam": mass(),
    "d2o": d2o,
    "tova": of(attention.tova),
    "roco": by_worth(attention.roco),
    "obcache:window=8": of(attention.obcache, window=8),
    "obcache:window=8:variant=value": of(attention.obcache, window=8, variant="value"),
    "obcache:window=8:variant=key": of(attention.obcache, window=8, variant="key"),
    "rkv": of(attention.rkv),
    "expected_attention:future=32": of(agnostic.expected_attention, future=32),
    "compactor:sketch=0:chunk=16": by_worth(
        lambda layer, held, b: agnostic.compactor(layer, held, None, 1 - b / layer.tokens, chunk=16)
    ),
    "lagkv:lag=8:sinks=4": of(agnostic.lagkv, lag=8, sinks=4),
    "curdkv:sketch=0:local=16": of(agnostic.curdkv, local=16),
    "snapkv:window=8": made_of(window),
    "pyramidkv:window=8": partial(allocation.pyramidkv, window=8),
    "adakv:window=8": made_of(window, o.head_adaptive),
    "ada_pyramidkv:window=8": partial(allocation.ada_pyramidkv, window=8),
    "critical_snapkv:window=8": made_of(window, o.uniform, o.two_stage),
    "criticalkv:window=8": made_of(window, o.head_adaptive, o.two_stage),
    "cake:window=8": layered(partial(ol.cake_score, window=8), partial(ol.cake, window=8)),
    "zigzagkv:window=8": layered(window, partial(ol.zigzagkv, window=8)),
    "simlayerkv:recent=5": layered(partial(o.recency_score, sinks=4), partial(ol.lazy_layers, recent=5)),
    "defensivekv:window=8": partial(allocation.defensivekv, window=8),
    "layer_defensivekv:window=8": partial(allocation.layer_defensivekv, window=8),
    "headkv:window=8": profiled(window, partial(profile.head_profile, window=8), o.top_k),
    "critical_headkv:window=8": profiled(window, partial(profile.head_profile, window=8), o.two_stage),
    "chunkkv:window=8": partial(windows.chunkkv, window=8),
    "pyramidinfer:window=5": partial(windows.pyramidinfer, window=5),
    "scissorhands": windows.scissorhands,
    "finch:window=8:chunk_length=9": partial(windows.finch, question=8, chunk_length=9),
    "duo_attention:sinks=5:recent=9": profiled(
        o.recency_score,
        partial(profile.retrieval, sinks=5, recent=9),
        partial(profile.sinks_and_recent, sinks=5),
    ),
}
APART = {"full", "random", "sirllm", "qfilters", "kvzip"}
"""No equation says what `full` and `random` keep; the others have tests of their own."""
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
}


def test_every_training_free_policy_is_here() -> None:
    trained = {"trimkv", "dbtrimkv", "locret", "kvzap", "lococo"}
    aliases = {"critical_adakv"}
    names = {n for n in registry.names(registry.POLICIES) if "example" not in n}
    names = {n for n in names if kvbench.policy(n).group != "pruning"}  # in test_pruning
    names = {n for n in names if kvbench.policy(n).read is None}  # in test_readers
    names = {n for n in names if not kvbench.policy(n).is_informed}  # in test_oracle
    assert {spec.partition(":")[0] for spec in ORACLES} == names - APART - trained - aliases


@pytest.fixture(scope="module", params=["llama", slow("qwen3"), slow("reference")])
def model(request: pytest.FixtureRequest) -> nn.Module:
    if request.param == "reference":
        return load_model("reference", None, torch.device("cpu"), torch.float32)
    torch.manual_seed(3)
    made: nn.Module
    if request.param == "llama":
        made = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **SHAPE))
    else:
        made = Qwen3ForCausalLM(Qwen3Config(num_attention_heads=8, head_dim=8, **SHAPE))
    for weight in made.parameters():
        if weight.dim() == 1:  # with norms of weight 1 all of Qwen3's keys are equally long
            weight.data += 0.3 * torch.randn_like(weight)
    return made.eval()


@torch.no_grad()
def layers_of(model: Any, ids: Tensor) -> list[o.Layer]:
    """What the model's own attention is called with, for one sequence."""
    seen: list[o.Layer] = []

    def watch(module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Any:
        out = module.o_proj.weight.T.unflatten(0, (q.shape[1], q.shape[-1]))
        theta = model.config.rope_parameters["rope_theta"]
        seen.append(o.Layer(*(x[0].numpy() for x in (q, k, v)), out.numpy(), theta))
        return sdpa_attention_forward(module, q, k, v, *rest, **more)

    AttentionInterface.register("watched", watch)
    before = model.config._attn_implementation
    model.set_attn_implementation("watched")
    model(ids)
    model.set_attn_implementation(before)
    return seen


def tokens_of(model: Any) -> Tensor:
    """No token twice: in the first layer its keys would be equally long, but for rounding."""
    first = 170 if model.config.vocab_size > 500 else 0  # the reference model's pool of words
    g = torch.Generator().manual_seed(1)
    return torch.rand(2, 97, generator=g).argsort(1)[:, :63] + first


def kept_tokens(model: nn.Module, ids: Tensor, chosen: Any, budget: str) -> list[Kept]:
    mask = torch.arange(63) >= 63 - torch.tensor(LENGTHS)[:, None]
    kept = kvbench.kept(model, ids, chosen, budget, attention_mask=mask)
    return [
        [[head.nonzero()[:, 0].sub(63 - t).tolist() for head in layer[r]] for layer in kept if layer is not None]
        for r, t in enumerate(LENGTHS)
    ]


def test_kept_agrees_with_the_oracles(model: nn.Module, tmp_path: Path) -> None:
    ids = tokens_of(model)
    rows = [layers_of(model, ids[r : r + 1, -t:]) for r, t in enumerate(LENGTHS)]
    file = write(tmp_path / "heads.json", shares_of(rows[0]))  # type: ignore[arg-type]
    for spec, oracle in ORACLES.items():
        chosen = policy(spec)
        if "profile" in chosen.allocate.parameters():
            chosen = policy(spec, profile=str(file))
        for budget, entries in (("0.2", (13, 9)), ("5", (5, 5)), ("0.6", (38, 27))):
            got = kept_tokens(model, ids, chosen, budget)
            for r in range(len(LENGTHS)):
                assert got[r] == oracle(rows[r], entries[r]), (spec, budget, r)


@torch.no_grad()
def test_sirllm_keeps_what_surprised_the_model(model: Any) -> None:
    ids = tokens_of(model)
    for budget, entries in (("0.2", (13, 9)), ("3", (3, 3)), ("0.6", (38, 27))):
        got = kept_tokens(model, ids, "sirllm", budget)
        for r, t in enumerate(LENGTHS):
            own = ids[r : r + 1, -t:]
            log = model(own).logits[0].double().log_softmax(-1)
            said = [-float(log[i, own[0, i + 1]]) for i in range(t - 1)]
            assert np.isfinite(said).all() and not math.isnan(max(said))
            layers, heads = len(got[r]), len(got[r][0])
            want = allocation.sirllm([max(said), *said], [0] * t, entries[r], layers, heads)
            assert got[r] == want, (budget, r)


def test_qfilters_keeps_keys_against_the_filter(model: nn.Module, tmp_path: Path) -> None:
    ids = tokens_of(model)
    rows = [layers_of(model, ids[r : r + 1, -t:]) for r, t in enumerate(LENGTHS)]
    shape = (len(rows[0]), rows[0][0].heads, rows[0][0].dim)
    filters = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    FILTERS.save(tmp_path, {"q_filters": filters}, SummaryNotes())
    chosen = policy("qfilters", filters=str(tmp_path))
    for budget, entries in (("0.2", (13, 9)), ("3", (3, 3)), ("0.6", (38, 27))):
        got = kept_tokens(model, ids, chosen, budget)
        for r, row in enumerate(rows):
            for i, layer in enumerate(row):
                held = attention.everything(layer)
                worth = agnostic.qfilters(layer, held, filters[i].numpy())
                assert got[r][i] == attention.kept(worth, held, entries[r]), (budget, r, i)
