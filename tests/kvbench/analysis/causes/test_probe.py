"""The masked forward equals stock transformers with masks, and the engine's own eviction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from kvbench.analysis.causes.probe import AnswerProbe
from kvbench.engine.driver import engine, forward
from kvbench.engine.masks import everything, masked_copies
from kvbench.engine.prefix import Prefix

CONTEXT, FED = 61, 7


@pytest.fixture(scope="module")
def sample(folder: str) -> Any:
    """Model, context, fed tokens and three random masks, float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(10, 200, (1, CONTEXT + FED), generator=generator)
    config = model.config
    shape = (3, config.num_hidden_layers, config.num_key_value_heads, CONTEXT)
    kept = torch.rand(shape, generator=generator) < torch.tensor([0.2, 0.6, 1.1]).view(3, 1, 1, 1)
    kept[..., 0] = True
    return model, tokens[:, :CONTEXT], tokens[:, CONTEXT:], kept


def stock_logits(model: Any, context: Tensor, fed: Tensor, kept: Tensor) -> Tensor:
    """Logits of the fed tokens by transformers' eager attention with one mask per layer and head."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(context, past_key_values=cache)
        causal = torch.ones(FED, FED, dtype=torch.bool).tril()
        with _layer_masks(model, kept, causal, group):
            logits: Tensor = model(fed, past_key_values=cache).logits
    return logits


@contextmanager
def _layer_masks(model: Any, kept: Tensor, causal: Tensor, group: int) -> Iterator[None]:
    def hook(layer: int) -> Any:
        def replace(module: Any, args: Any, kwargs: Any) -> Any:
            seen = kept[layer].repeat_interleave(group, 0)[:, None].expand(-1, FED, -1)
            visible = torch.cat([seen, causal.expand(len(seen), -1, -1)], -1)
            mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
            return args, {**kwargs, "attention_mask": mask[None]}

        return replace

    handles = [
        layer.self_attn.register_forward_pre_hook(hook(index), with_kwargs=True)
        for index, layer in enumerate(model.model.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def masked_logits(model: Any, context: Tensor, fed: Tensor, kept: Tensor) -> Tensor:
    with torch.no_grad(), engine(model):
        prefix = Prefix(model, ())
        prefix.extend(context)
        copies = masked_copies(prefix.cache, [*kept.transpose(0, 1)], FED)
        return forward(model, copies, fed.expand(len(kept), -1), logit_count=FED)


def test_masked_copies_equal_stock_transformers_with_masks(sample: Any) -> None:
    model, context, fed, kept = sample
    ours = masked_logits(model, context, fed, kept)
    for row, mask in zip(ours, kept, strict=True):
        torch.testing.assert_close(row, stock_logits(model, context, fed, mask)[0], atol=1e-4, rtol=1e-4)


def test_one_entry_more_or_less_is_noticed(sample: Any) -> None:
    model, context, fed, kept = sample
    changed = kept.clone()
    changed[0, 1, 0, int(kept[0, 1, 0].nonzero()[-1])] = False
    ours = masked_logits(model, context, fed, changed)
    stock = stock_logits(model, context, fed, kept[0])[0]
    assert (ours[0] - stock).abs().max() > 1e-3


def test_an_outcome_is_that_of_the_logits(sample: Any) -> None:
    model, context, fed, kept = sample
    stock = stock_logits(model, context, fed, kept[1])[0]
    answer = stock[-3:].argmax(-1).tolist()
    answer[1] = (answer[1] + 1) % stock.shape[-1]
    with torch.no_grad(), engine(model):
        prefix = Prefix(model, ())
        prefix.extend(context)
        right, wrong = (
            AnswerProbe(model, prefix.cache, fed[0].tolist(), answer, judged) for judged in ([0, 2], [0, 1])
        )
        first, second = right.measure([kept[1]])[0], wrong.measure([kept[1], kept[2]])[0]
        assert len(everything(prefix.cache)) == len(kept[0])
    likelihood = stock[-3:].log_softmax(-1)
    assert (first.right, first.same) == (True, False) and (second.right, second.same) == (False, False)
    assert first.nll == pytest.approx(float(-likelihood[0, answer[0]] - likelihood[2, answer[2]]), abs=1e-3)
    top = stock[-3:].topk(2).values
    assert first.margin == pytest.approx(float((top[:, 0] - top[:, 1])[[0, 2]].min()), abs=1e-3)
    assert second.margin < 0 and (right.cells, wrong.cells) == (1, 2)
