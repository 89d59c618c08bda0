"""Import of SeerAttention-R's published gates.

A checkpoint (`SeerAttention/SeerAttention-Decode-Qwen3-4B-AttnGates` and others) consists of `attn_gate_weights.pth`,
which is read without running any code in it, and `config.json`:

    ...layers.<index>....attn_gate.attngate_linear_q.weight   [H, G, d, d_gate], or [H, d, d_gate]
    ...layers.<index>....attn_gate.attngate_linear_k.weight   [H, 3 d, d_gate]
    ...layers.<index>....attn_gate.attngate_qnorm.weight      [d_gate], with seerattn_use_qk_norm
    ...layers.<index>....attn_gate.attngate_knorm.weight      [d_gate]

A query map without `G` is applied to the mean of the group's queries. One difference from the authors' code: they
rotate a block that fills up during decoding by the position of its last entry; here, as in their prefill and training,
every block is rotated by the position of its first entry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.plugin import ModelInfo
from kvbench_policies.gates.block_gates import BlockGates
from kvbench_policies.gates.config import GateConfig

WEIGHTS = "attn_gate_weights.pth"
"""File name of the tensors."""

_QUERY, _KEY = "attngate_linear_q.weight", "attngate_linear_k.weight"
_NORMS = {"attngate_qnorm.weight": "query_norm", "attngate_knorm.weight": "key_norm"}
_POOLING = "Kmaxminavg"


def is_of_blocks(layers: Mapping[int, Mapping[str, Tensor]]) -> bool:
    """Return whether a checkpoint's tensors (by layer and name) are those of SeerAttention-R."""
    return any(tensor_name.startswith("attngate_") for tensors in layers.values() for tensor_name in tensors)


def read_settings(source: str | Path) -> dict[str, Any]:
    """Read the gate settings in a checkpoint's `config.json`.

    Args:
        source: The tensors' file, or its folder.

    Raises:
        UserError: The file cannot be read, or the gates are not supported.
    """
    config_path = Path(source).expanduser()
    config_path = (config_path if config_path.is_dir() else config_path.parent) / "config.json"
    try:
        settings = json.loads(config_path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {config_path}: {error.strerror}; it defines the block size") from None
    except (ValueError, RecursionError):
        raise UserError(f"{config_path} is not JSON") from None
    if not isinstance(settings, dict) or "seerattn_gate_block_size" not in settings:
        raise UserError(f"{config_path} has no seerattn_gate_block_size, so it is not a SeerAttention config")
    pooling = settings.get("seerattn_k_seq_pooling_type", _POOLING)
    if pooling != _POOLING:
        raise UserError(f"{config_path}: key pooling {pooling} is not supported; use gates with {_POOLING}")
    if not settings.get("seerattn_use_rope", True):
        raise UserError(f"{config_path}: gates without RoPE (seerattn_use_rope=false) are not supported")
    return settings


def convert_blocks(
    layers: Mapping[int, Mapping[str, Tensor]],
    model: ModelInfo,
    settings: Mapping[str, Any],
    *,
    base_revision: str = "",
    training: Mapping[str, Any] | None = None,
) -> BlockGates:
    """Build gates from a checkpoint's tensors.

    Args:
        layers: Tensors by layer and name, for every full-attention layer of the model.
        model: The model the gates belong to.
        settings: Output of `read_settings`.
        base_revision: Commit or digest of the model.
        training: Training record to store with the gates.

    Raises:
        UserError: A tensor does not fit gates of the model; the message names it.
    """
    first_layer = next(iter(layers.values()))
    if _KEY not in first_layer:
        raise UserError(f"layer {next(iter(layers))}: {_KEY} is missing")
    config = GateConfig.of(
        "seerattn_r",
        model,
        gate_dim=int(first_layer[_KEY].shape[-1]),
        block=settings["seerattn_gate_block_size"],
        norm=any(tensor_name in first_layer for tensor_name in _NORMS),
        base_revision=base_revision,
        training=dict(training or {}),
    )
    with torch.random.fork_rng(devices=[]):
        gates = BlockGates(config)
    state_dict = {}
    for layer_index, (layer_number, layer_tensors) in enumerate(layers.items()):
        for tensor_name, tensor in _renamed(layer_tensors, config, layer_number).items():
            state_dict[f"layers.{layer_index}.{tensor_name}"] = tensor
    gates.load_state_dict(state_dict)
    return gates.eval().requires_grad_(False)


def _renamed(layer_tensors: Mapping[str, Tensor], config: GateConfig, layer_number: int) -> dict[str, Tensor]:
    """Return one layer's tensors as kvbench stores them."""
    head_count, head_dim, gate_dim = config.kv_heads, config.head_dim, config.gate_dim
    group_size = config.query_heads // head_count
    expected_shapes = {
        _QUERY: [head_count, group_size, head_dim, gate_dim],
        _KEY: [head_count, 3 * head_dim, gate_dim],
    }
    expected_shapes |= {tensor_name: [gate_dim] for tensor_name in _NORMS} if config.norm else {}
    unknown_names = sorted(set(layer_tensors) - set(expected_shapes))
    if unknown_names:
        raise UserError(f"layer {layer_number}: {unknown_names[0]} is unknown")
    mean_shape = [head_count, head_dim, gate_dim]
    for tensor_name, expected_shape in expected_shapes.items():
        if tensor_name not in layer_tensors:
            raise UserError(f"layer {layer_number}: {tensor_name} is missing")
        actual_shape = list(layer_tensors[tensor_name].shape)
        if actual_shape != expected_shape and not (tensor_name == _QUERY and actual_shape == mean_shape):
            raise UserError(
                f"layer {layer_number}: {tensor_name} is {actual_shape}, but this model needs {expected_shape}"
            )
    query_weight = layer_tensors[_QUERY]
    if query_weight.dim() == 3:  # applied to the group's mean query: split the weight evenly over the group
        query_weight = (query_weight / group_size)[:, None].expand(expected_shapes[_QUERY])
    norm_weights = {
        parameter_name: layer_tensors[tensor_name] for tensor_name, parameter_name in _NORMS.items() if config.norm
    }
    return {"query": query_weight.flatten(1, 2), "key": layer_tensors[_KEY], **norm_weights}
