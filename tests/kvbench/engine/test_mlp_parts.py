"""MLPs in parts give what they give at once, and are restored."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import kvbench
from kvbench.engine import mlp_parts
from kvbench.engine.mlp_parts import in_parts, is_gated_mlp, split_mlps
from kvbench.engine.models import cache_inputs

from .conftest import build


@pytest.mark.parametrize("shape", [(1, 1400), (3, 257), (600, 2), (1024,), (512,), (1, 1)])
def test_parts_give_the_whole(llama: Any, shape: tuple[int, ...]) -> None:
    mlp = llama.model.layers[0].mlp
    hidden = torch.randn(*shape, llama.config.hidden_size, generator=torch.Generator().manual_seed(0))
    seen: list[int] = []

    def counted(part: torch.Tensor) -> torch.Tensor:
        seen.append(part.shape[:-1].numel())
        return mlp(part)

    with torch.no_grad():
        found = in_parts(counted, hidden)
        torch.testing.assert_close(found, mlp(hidden), rtol=1e-5, atol=1e-6)
    tokens = hidden.shape[:-1].numel()
    assert sum(seen) == tokens and max(seen) <= 512 and max(seen) - min(seen) <= 1
    assert len(seen) == -(-tokens // 512)


def test_a_prefill_takes_parts_and_the_model_is_restored(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp_parts, "_CPU_TOKENS", 16)
    ids = torch.arange(41)[None] % llama.config.vocab_size
    widths: list[int] = []
    down = llama.model.layers[0].mlp.down_proj
    with torch.no_grad():
        expected = llama(ids).logits
        handle = down.register_forward_pre_hook(lambda module, inputs: widths.append(len(inputs[0])))
        with kvbench.attach(llama, "snapkv", 0.5) as cache:
            found = llama(ids, **cache_inputs(llama, cache)).logits
        handle.remove()
    assert widths == [14, 14, 13]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not any("forward" in module.__dict__ for module in llama.modules())


def test_gradients_pass(llama: Any) -> None:
    mlp = copy.deepcopy(llama.model.layers[0].mlp).requires_grad_()
    hidden = torch.randn(2, 400, llama.config.hidden_size)
    in_parts(mlp, hidden).square().sum().backward()
    parts = mlp.up_proj.weight.grad.clone()
    mlp.zero_grad()
    mlp(hidden).square().sum().backward()
    torch.testing.assert_close(parts, mlp.up_proj.weight.grad, rtol=1e-4, atol=1e-4)


class CodedLinear(nn.Linear):
    """A linear layer whose weights are decoded in its forward."""


def test_other_modules_are_left_alone() -> None:
    model = build("llama")
    coded, moved, plain = (copy.deepcopy(model.model.layers[0].mlp) for _ in range(3))
    coded.up_proj = CodedLinear(4, 4)
    moved.down_proj.forward = lambda hidden: hidden  # as accelerate does for weights elsewhere
    assert is_gated_mlp(plain)
    assert not is_gated_mlp(coded) and not is_gated_mlp(moved) and not is_gated_mlp(nn.Linear(2, 2))
    both = nn.ModuleList([coded, moved, plain])
    handles = split_mlps(both)
    assert [handle.module for handle in handles] == [plain]
    handles[0].remove()
    assert "forward" not in plain.__dict__
