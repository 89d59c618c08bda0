"""A Qwen3 model as a Llama model with two more layers, which compute almost the same at first."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.successor.language import VALUE, sequence

_DOUBLED = (0, 1)
"""Layers behind which a new one comes."""
_ROWS = 8
_LENGTH = 512


def deepened(model: Any) -> LlamaForCausalLM:
    """Replace the norms of queries and keys by their mean scale, and add layers.

    The mean is over sequences of prose. New layers add nothing at first: their last matrices are 0.
    """
    scales = _scales(model)
    old = model.config
    layers = old.num_hidden_layers + len(_DOUBLED)
    config = LlamaConfig(
        num_hidden_layers=layers,
        max_position_embeddings=old.max_position_embeddings,
        rope_parameters=dict(old.rope_parameters),
        **{
            name: getattr(old, name)
            for name in (
                *("vocab_size", "hidden_size", "intermediate_size", "head_dim"),
                *("num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
                *("initializer_range", "rms_norm_eps"),
                *("pad_token_id", "bos_token_id", "eos_token_id"),
            )
        },
    )
    new = LlamaForCausalLM(config)
    new.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    new.model.norm.load_state_dict(model.model.norm.state_dict())
    targets = iter(new.model.layers)
    for n, layer in enumerate(model.model.layers):
        weights = dict(layer.state_dict())
        for kind in "qk":
            gain = weights.pop(f"self_attn.{kind}_norm.weight")
            scale = (scales[n, kind][:, None] * gain).reshape(-1, 1)
            weights[f"self_attn.{kind}_proj.weight"] = weights[f"self_attn.{kind}_proj.weight"] * scale
        next(targets).load_state_dict(weights)
        if n in _DOUBLED:
            extra = next(targets)
            nn.init.zeros_(extra.self_attn.o_proj.weight)
            nn.init.zeros_(extra.mlp.down_proj.weight)
    return new


@torch.no_grad()
def _scales(model: Any) -> dict[tuple[int, str], Tensor]:
    """Mean reciprocal root mean square of queries and keys by (layer, "q" or "k"), `[heads]`."""
    found: dict[tuple[int, str], Tensor] = {}
    hooks = []

    def note(place: tuple[int, str]) -> Any:
        def hook(module: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
            found[place] = given[0].pow(2).mean(-1).rsqrt().mean((0, 1))

        return hook

    for n, layer in enumerate(model.model.layers):
        for kind in "qk":
            norm = getattr(layer.self_attn, f"{kind}_norm")
            hooks.append(norm.register_forward_hook(note((n, kind))))
    rows = [sequence(np.random.default_rng(n), "prose", _LENGTH, VALUE, 96) for n in range(_ROWS)]
    model(torch.tensor([ids for ids, _ in rows]))
    for handle in hooks:
        handle.remove()
    return found
