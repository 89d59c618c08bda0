"""Through whole models `kvbench.kept` gives what the oracles say of the models' own q, k and v."""

from __future__ import annotations

from functools import partial
from typing import Any

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

from . import oracles as o
from .test_oracles import Oracle, made_of, mass

LENGTHS = (63, 45)
window = partial(o.window_score, window=8)
ORACLES: dict[str, Oracle] = {
    "streaming_llm": made_of(partial(o.recency_score, sinks=4)),
    "knorm:allocate=global": made_of(o.knorm_score, o.global_shares),
    "keydiff": made_of(o.keydiff_score),
    "h2o": mass(),
    "h2o:observe=16": mass(observe=16),
    "snapkv:window=8": made_of(window),
    "adakv:window=8": made_of(window, o.head_adaptive),
    "critical_snapkv:window=8": made_of(window, o.uniform, o.two_stage),
    "criticalkv:window=8": made_of(window, o.head_adaptive, o.two_stage),
}
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> nn.Module:
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
        seen.append(o.Layer(*(x[0].numpy() for x in (q, k, v)), out.numpy()))
        return sdpa_attention_forward(module, q, k, v, *rest, **more)

    AttentionInterface.register("watched", watch)
    before = model.config._attn_implementation
    model.set_attn_implementation("watched")
    model(ids)
    model.set_attn_implementation(before)
    return seen


def test_kept_agrees_with_the_oracles(model: nn.Module) -> None:
    # No token twice: in the first layer its keys would be equally long, but for rounding.
    ids = torch.rand(2, 97, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :63]
    mask = torch.arange(63) >= 63 - torch.tensor(LENGTHS)[:, None]
    rows = [layers_of(model, ids[r : r + 1, -t:]) for r, t in enumerate(LENGTHS)]
    for spec, oracle in ORACLES.items():
        for budget, entries in (("0.2", (13, 9)), ("5", (5, 5)), ("0.6", (38, 27))):
            kept = kvbench.kept(model, ids, spec, budget, attention_mask=mask)
            for r, t in enumerate(LENGTHS):
                got = [
                    [head.nonzero()[:, 0].sub(63 - t).tolist() for head in layer[r]]
                    for layer in kept
                    if layer is not None
                ]
                assert got == oracle(rows[r], entries[r]), (spec, budget, r)
