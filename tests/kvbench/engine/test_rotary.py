"""Keys turned back by `ModelInfo.rotary` are those that the model had before RoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from benchmarks.family_models import FAMILIES as FAMILY_MODELS
from benchmarks.family_models import Family
from kvbench.engine.driver import engine, forward
from kvbench.engine.models import attention_modules, cache_inputs, decoder_of, full_layer_ids, model_info
from kvbench.engine.prefix import Prefix
from kvbench.errors import UserError
from kvbench.view import ModelInfo
from kvbench.view.rope import angles, turn, turn_back

from . import test_vision
from .conftest import FAMILIES, build

BY_NAME = {family.name: family for family in FAMILY_MODELS}
ROPE_IN_FULL_LAYERS = {"layer_types": ["full_attention"] * 3, "no_rope_layers": [1, 1, 1]}
UNDONE = {
    "llama": True,
    "gpt_oss": True,  # cosines of half the width
    "nanochat": True,  # backwards
    "qwen3_next": True,  # of some channels, after a recurrent layer
    "cohere2": False,  # no positions in full-attention layers, as in the next two
    "exaone4": False,
    "llama4_text": False,
    "beam": False,  # the same, and queries are scaled by position
}
"""Families whose keys can be turned back, and whether they are turned at all."""
REFUSED = ("cohere", "glm4", "ernie4_5", "helium", "gptj", "codegen")
"""Families that pair neighbouring channels."""

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


def family_of(name: str) -> Family:
    if name not in BY_NAME or not BY_NAME[name].exists:
        pytest.skip(f"this transformers has no {name}")
    return BY_NAME[name]


@torch.no_grad()
def change_over_tokens(model: Any, info: ModelInfo) -> tuple[float, float]:
    """How much keys of equal hidden states differ in the cache, and how much after `turn_back`, in any layer."""

    def repeat(module: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        hidden = arguments[0] if arguments else keywords["hidden_states"]
        hidden = hidden[:, :1].expand_as(hidden)
        return ((hidden, *arguments[1:]), keywords) if arguments else ((), {**keywords, "hidden_states": hidden})

    handles = [module.register_forward_pre_hook(repeat, with_kwargs=True) for _, module in attention_modules(model)]
    decoder = decoder_of(model)
    cache = DynamicCache(config=decoder.config)
    decoder(input_ids=torch.arange(40, 60)[None], **cache_inputs(decoder, cache))
    for handle in handles:
        handle.remove()
    turned, undone = 0.0, 0.0
    for index, layer_id in enumerate(full_layer_ids(model)):
        key = cache.layers[layer_id].keys
        assert key is not None and key.abs().max() > 0.1
        turned = max(turned, float((key - key[:, :, :1]).abs().max()))
        key = turn_back(key, *angles(info, index, torch.arange(20)))
        undone = max(undone, float((key - key[:, :, :1]).abs().max()))
    return turned, undone


@pytest.mark.parametrize("name", UNDONE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_of_equal_hidden_states_turn_back_to_equal_keys(name: str, dtype: torch.dtype) -> None:
    model = family_of(name).build().to(dtype)
    turned, undone = change_over_tokens(model, model_info(model))
    assert (turned > 0.5) == UNDONE[name]
    assert undone < (1e-4 if dtype == torch.float32 else 0.1)


def test_only_some_layers_may_have_positions() -> None:
    model = replace(family_of("smollm3"), settings={"no_rope_layers": [1, 0, 1]}).build()
    info = model_info(model)
    turned, undone = change_over_tokens(model, info)
    assert turned > 0.5 and undone < 1e-4
    sines = [angles(info, layer, torch.arange(9))[1].abs().max() > 0 for layer in range(3)]
    assert sines == [True, False, True]


def assert_refused(model: Any) -> None:
    info = model_info(model)
    for layer in range(info.layers):
        with pytest.raises(UserError, match=f"{type(model).__name__} rotates keys in a way that kvbench cannot undo"):
            angles(info, layer, torch.arange(3))


@pytest.mark.parametrize("name", REFUSED)
def test_neighbouring_pairs_are_refused(name: str) -> None:
    assert_refused(family_of(name).build())


def test_complex_angles_are_refused() -> None:
    family = family_of("llama4_text")
    assert_refused(replace(family, settings={**family.settings, **ROPE_IN_FULL_LAYERS}).build())


@pytest.mark.parametrize(
    ("name", "rope", "changes"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, {"max_position_embeddings": 24}),
        (
            "phi3",
            {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
            {"original_max_position_embeddings": 24},
        ),
    ],
)
def test_texts_whose_length_changes_the_angles_are_refused(
    name: str, rope: dict[str, Any], changes: dict[str, int]
) -> None:
    family = family_of(name)
    rope = {**rope, "rope_theta": 1e4}
    model = replace(family, settings={**family.settings, **changes, "rope_parameters": rope}).build()
    info = model_info(model)
    turned, undone = change_over_tokens(model, info)
    assert turned > 0.5 and undone < 1e-4
    assert angles(info, 0, torch.arange(24))[0].shape == (24, 16)
    with pytest.raises(UserError, match="rotates all keys otherwise once a text has more than 24 tokens"):
        angles(info, 0, torch.arange(25))


def test_weights_between_rope_and_the_cache_are_refused() -> None:
    model = family_of("hunyuan_v1_dense").build()
    for _, module in attention_modules(model):
        module.key_layernorm.weight.copy_(torch.linspace(0.5, 2.0, 16))  # type: ignore[union-attr, operator]
    assert_refused(model)


def test_what_cannot_be_seen_is_refused() -> None:
    model = family_of("llama").build()
    for _, module in attention_modules(model):
        module.k_proj.weight.zero_()  # type: ignore[union-attr, operator]
    assert_refused(model)


def hooks_of(model: Any) -> list[list[Any]]:
    return [
        list(hooks.values())
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
    ]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_5_text", "qwen2_5_vl"])
@torch.no_grad()
def test_rope_can_be_read_first_inside_a_forward(name: str) -> None:
    model = test_vision.build(name).model if name == "qwen2_5_vl" else family_of(name).build()
    token_ids = torch.arange(10, 40)[None]
    logits: list[torch.Tensor] = []
    sines: list[torch.Tensor] = []
    info = model_info(model)

    def read(_: Any, layer: Any, step: Any) -> None:
        hooks = hooks_of(model)
        sines.append(angles(info, step.index, torch.arange(9))[1])
        assert hooks_of(model) == hooks

    for watch in (None, read):
        with engine(model, watch):
            foreign = [module.register_forward_hook(lambda *_: None) for module in model.modules()]
            prefix = Prefix(model, frozenset())
            logits += [prefix.extend(token_ids[:, :20]), prefix.extend(token_ids[:, 20:])]
        for handle in foreign:
            handle.remove()
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], logits[3])
    assert len(sines) == 2 * info.layers
    assert all(torch.equal(sine, sines[0]) for sine in sines)
    assert not any(hooks_of(model))


def test_a_model_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_of("llama").build()
    runs: list[int] = []
    stock = type(decoder_of(model)).forward
    monkeypatch.setattr(type(decoder_of(model)), "forward", lambda *a, **k: runs.append(1) or stock(*a, **k))
    for _ in range(2):
        info = model_info(model)
        assert len(runs) <= 1
        for layer in range(info.layers):
            angles(info, layer, torch.arange(3))
    assert len(runs) == 1


def test_some_channels_and_a_factor_turn_back() -> None:
    x, angle = torch.randn(2, 3, 5, 16), torch.rand(5, 4)
    cos, sin = (1.3 * part.repeat(1, 2) for part in (angle.cos(), angle.sin()))
    turned = turn(x, cos, sin)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    torch.testing.assert_close(turned[..., :8].norm(dim=-1), 1.3 * x[..., :8].norm(dim=-1))
    torch.testing.assert_close(turn_back(turned, cos, sin), x)
