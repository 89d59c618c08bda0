"""Keys turned back by `ModelInfo.rotary` are those that the model had before RoPE."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbench.engine.driver import engine, forward
from kvbench.engine.models import attention_modules, model_info
from kvbench.engine.prefix import Prefix
from kvbench.view.rope import angles, turn, turn_back

from . import test_vision
from .conftest import FAMILIES, build

TEXT = [f for f in FAMILIES if f != "mistral_sliding"]


def model_of(name: str) -> Any:
    return build(name) if name in TEXT else test_vision.build(name).model


@pytest.mark.parametrize("name", [*TEXT, "qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_cached_keys_turn_back(name: str) -> None:
    model = model_of(name)
    info = model_info(model)
    modules = dict(attention_modules(model))
    assert info.project is not None
    steps: list[Any] = []
    with engine(model, lambda _, layer, step: steps.append(step)):
        prefix = Prefix(model, frozenset())
        prefix.extend(torch.arange(10, 30)[None])
        forward(model, prefix.cache, torch.arange(40, 47)[None])
    assert len(steps) == 2 * info.layers
    for number, step in enumerate(steps):
        position = torch.arange(20) if number < info.layers else torch.arange(20, 27)
        cached = step.key[:, :, -len(position) :]
        split = [info.query_heads, info.kv_heads, info.kv_heads]
        joint = info.project(step.index, step.hidden).unflatten(-1, (-1, info.head_dim))
        key = joint.transpose(1, 2).split(split, 1)[1]
        norm = getattr(modules[step.index], "k_norm", None)
        key = key if norm is None else norm(key)
        cos, sin = angles(info, step.index, position)
        torch.testing.assert_close(turn_back(cached, cos, sin), key)
        torch.testing.assert_close(turn(key, cos, sin), cached)
        assert (cached - key).abs().max() > 0.1


def test_some_channels_and_a_factor_turn_back() -> None:
    x, angle = torch.randn(2, 3, 5, 16), torch.rand(5, 4)
    cos, sin = (1.3 * part.repeat(1, 2) for part in (angle.cos(), angle.sin()))
    turned = turn(x, cos, sin)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    torch.testing.assert_close(turned[..., :8].norm(dim=-1), 1.3 * x[..., :8].norm(dim=-1))
    torch.testing.assert_close(turn_back(turned, cos, sin), x)
