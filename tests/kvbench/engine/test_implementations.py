"""Attention implementations of transformers: the dense prefill and sliding layers use the chosen one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.budget import Budget
from kvbench.engine import implementations, loading
from kvbench.engine.driver import engine, forward
from kvbench.engine.implementations import EAGER, FLASH, SDPA, StockAttention, choose_attention, chosen_attention
from kvbench.engine.loading import load_model, pick_attention
from kvbench.engine.models import decoder_of
from kvbench.engine.prefix import Compression, Prefix
from kvbench.errors import UserError

from .conftest import batch, build
from .test_contract import BY_EAGER, random_model

CPU = torch.device("cpu")


@contextmanager
def choosing(model: Any, implementation: str) -> Iterator[None]:
    choose_attention(model, implementation)
    try:
        yield
    finally:
        choose_attention(model, SDPA)


@torch.no_grad()
def logits(model: Any, implementation: str) -> Tensor:
    """Logits of a padded batch: a context in two chunks, then a question on the evicted and on the full cache."""
    ids, mask = batch(3, 48, pads=[0, 7, 23])
    question = ids[:, :5]
    wish = Compression(kvbench.policy("snapkv:window=4"), Budget.parse(0.4), "context", 0)
    with choosing(model, implementation), engine(model):
        prefix = Prefix(model, wish.policy.needs)
        context = forward(model, prefix.cache, ids[:, :40], mask[:, :40], logit_count=8)
        prefix.extend(ids[:, 40:], mask[:, 40:])
        (cache,) = prefix.compress([wish])
        evicted = forward(model, cache, question, logit_count=5)
    return torch.cat([context, evicted], 1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", *BY_EAGER])
def test_eager_attention_is_used_and_equals_sdpa(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(family, **BY_EAGER[family]) if family in BY_EAGER else build(family)
    for name, parameter in model.named_parameters():
        if "sink" in name:
            parameter.data.normal_(std=2.0)
    attention_class = next(type(m) for m in model.modules() if type(m).__name__.endswith("Attention"))
    module_globals: Any = inspect.unwrap(attention_class.forward).__globals__
    calls = []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        return original(*arguments, **keywords)

    original = module_globals["eager_attention_forward"]
    monkeypatch.setitem(module_globals, "eager_attention_forward", counted)
    expected = logits(model, SDPA)
    assert not calls
    assert (logits(model, EAGER) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert len(calls) >= 2 * model.config.num_hidden_layers


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    query_length: int,
    is_causal: bool,
    softmax_scale: float | None,
    sliding_window: int | None,
    softcap: float | None,
    attn_implementation: str,
    **_: Any,
) -> Tensor:
    """What FlashAttention 2 computes, `[B, n, H_q, d]`: queries end with the keys, and the mask is for padding."""
    assert (attn_implementation, is_causal, query.shape[1]) == (FLASH, True, query_length)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    rows, columns = torch.arange(key.shape[1] - query_length, key.shape[1])[:, None], torch.arange(key.shape[1])
    visible = (columns <= rows)[None, None]
    if sliding_window is not None:
        visible = visible & (columns > rows - sliding_window)
    if mask is not None:
        assert mask.shape == key.shape[:2]
        visible = visible & mask[:, None, None].bool()
    key, value = (t.repeat_interleave(query.shape[2] // key.shape[2], 2) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    weights = torch.einsum("bnhd,bshd->bhns", query.double(), key.double()) * scale
    if softcap is not None:
        weights = softcap * (weights / softcap).tanh()
    weights = weights.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhns,bshd->bnhd", weights, value.double()).to(query.dtype)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2", "deepseek_v3"])
def test_flash_attention_gets_what_it_needs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more: dict[str, Any] = BY_EAGER.get(family, {})
    if family == "deepseek_v3":
        more = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 8}
        more |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        more |= {"first_k_dense_replace": 3, "num_key_value_heads": 8}
    model = build(family) if family in ("llama", "gemma3") else random_model(family, **more)
    calls = []

    def counted(*arguments: Any, **keywords: Any) -> Tensor:
        calls.append(1)
        return flash(*arguments, **keywords)

    monkeypatch.setattr(implementations, "_flash_attention_forward", counted)
    expected = logits(model, SDPA)
    assert not calls
    assert (logits(model, FLASH) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert calls


def test_flash_attention_refuses_sinks_which_transformers_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "_flash_attention_forward", flash)
    with pytest.raises(UserError, match=r"^flint attention has sinks, which FlashAttention 2 does not support; use -"):
        logits(random_model("flint"), FLASH)


def test_what_cannot_run_here_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, half = torch.device("cuda"), torch.bfloat16
    assert pick_attention("auto", CPU, torch.float32) == pick_attention("sdpa", cuda, half) == SDPA
    with pytest.raises(UserError, match=r"^--attn flash_attention_2 needs a GPU, not device cpu; use --attn sdpa$"):
        pick_attention(FLASH, CPU, half)
    with pytest.raises(UserError, match=r"^--attn \S+ needs float16 or bfloat16, not float32; use --dtype bfloat16$"):
        pick_attention(FLASH, cuda, torch.float32)
    monkeypatch.setattr(loading, "is_flash_attn_2_available", lambda: False)
    with pytest.raises(UserError, match=r"needs the package flash-attn; run pip install flash-attn, or use --attn s"):
        pick_attention(FLASH, cuda, half)
    monkeypatch.setattr(loading, "is_flash_attn_2_available", lambda: True)
    assert pick_attention(FLASH, cuda, half) == FLASH


def test_a_family_without_sdpa_says_so(tmp_path: Path) -> None:
    random_model("flint").save_pretrained(tmp_path)
    message = f"^model {tmp_path}: transformers has no sdpa attention for this family; use --attn auto or eager$"
    with pytest.raises(UserError, match=message):
        load_model(str(tmp_path), None, CPU, torch.float32, attn="sdpa")
    model = load_model(str(tmp_path), None, CPU, torch.float32, attn="eager")
    assert chosen_attention(model) == EAGER
    with engine(model):
        assert decoder_of(model).config._attn_implementation == "kvbench_eager"


def test_a_family_without_an_eager_function_says_so() -> None:
    class Odd(torch.nn.Module):
        def forward(self) -> None:
            """Have no eager attention function beside it."""

    with pytest.raises(UserError, match=r"^Odd has no eager attention function; use --attn auto$"):
        StockAttention(EAGER, Odd(), None, 0.0, {})(*[torch.zeros(1, 1, 2, 4)] * 3, None)


def test_runs_with_eager_attention_answer_the_same_and_are_other_cells(tmp_path: Path) -> None:
    grid = {"policy": "snapkv", "budget": "0.4", "task": "niah_single_2", "length": 192, "samples": 3}
    runs = {
        attn: kvbench.run({**grid, "attn": attn, "out": str(tmp_path / attn)}, progress=False)
        for attn in ("auto", "sdpa", "eager")
    }
    cells, samples = ({attn: getattr(run, frame) for attn, run in runs.items()} for frame in ("cells", "samples"))
    assert {attn: set(frame["attention"]) for attn, frame in cells.items()} == {
        "auto": {"sdpa"},
        "sdpa": {"sdpa"},
        "eager": {"eager"},
    }
    assert samples["auto"]["response"].equals(samples["eager"]["response"])
    assert cells["auto"]["cell"].equals(cells["sdpa"]["cell"])
    assert not set(cells["auto"]["cell"]) & set(cells["eager"]["cell"])
    assert cells["auto"]["match"].equals(cells["eager"]["match"])
