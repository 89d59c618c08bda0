"""Gates of SeerAttention-R as its authors publish them, as gates of kvbench.

A checkpoint (`SeerAttention/SeerAttention-Decode-Qwen3-4B-AttnGates` and others) is
`attn_gate_weights.pth`, which is read without running any code in it, and `config.json`:

    ...layers.<index>....attn_gate.attngate_linear_q.weight   [H, G, d, d_gate], or [H, d, d_gate]
    ...layers.<index>....attn_gate.attngate_linear_k.weight   [H, 3 d, d_gate]
    ...layers.<index>....attn_gate.attngate_qnorm.weight      [d_gate], with seerattn_use_qk_norm
    ...layers.<index>....attn_gate.attngate_knorm.weight      [d_gate]

A map of queries without `G` sees the mean of the group's queries. What the authors' code does
otherwise: a block that fills up while an answer is decoded is turned by the position of its last
entry; here, as in their prefill and training, every block is turned by that of its first.
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
"""The file of the tensors."""

_QUERY, _KEY = "attngate_linear_q.weight", "attngate_linear_k.weight"
_NORMS = {"attngate_qnorm.weight": "query_norm", "attngate_knorm.weight": "key_norm"}
_POOLING = "Kmaxminavg"


def is_of_blocks(layers: Mapping[int, Mapping[str, Tensor]]) -> bool:
    """Whether the tensors of a checkpoint, by layer and name, are those of SeerAttention-R."""
    return any(name.startswith("attngate_") for tensors in layers.values() for name in tensors)


def read_settings(source: str | Path) -> dict[str, Any]:
    """Read what `config.json` says of the gates of a checkpoint.

    Args:
        source: The file of the tensors, or its folder.

    Raises:
        UserError: It cannot be read, or describes gates that kvbench does not have.
    """
    path = Path(source).expanduser()
    path = (path if path.is_dir() else path.parent) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; it says how many tokens a block has"
        ) from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON") from None
    if not isinstance(found, dict) or "seerattn_gate_block_size" not in found:
        raise UserError(f"{path} has no seerattn_gate_block_size; it is not SeerAttention's")
    pooling = found.get("seerattn_k_seq_pooling_type", _POOLING)
    if pooling != _POOLING:
        raise UserError(f"{path}: keys are pooled by {pooling}; kvbench reads {_POOLING} only")
    if not found.get("seerattn_use_rope", True):
        raise UserError(f"{path}: gates without RoPE (seerattn_use_rope=false) are not supported")
    return found


def convert_blocks(
    layers: Mapping[int, Mapping[str, Tensor]],
    model: ModelInfo,
    settings: Mapping[str, Any],
    *,
    base_revision: str = "",
    training: Mapping[str, Any] | None = None,
) -> BlockGates:
    """Make gates from a checkpoint's tensors.

    Args:
        layers: Tensors by layer and name, one per full-attention layer of the model.
        model: The model that they belong to.
        settings: What `read_settings` returns.
        base_revision: Commit or digest of the model.
        training: Facts to store with the gates.

    Raises:
        UserError: A tensor does not belong to gates of the model; the message names it.
    """
    first = next(iter(layers.values()))
    if _KEY not in first:
        raise UserError(f"layer {next(iter(layers))}: {_KEY} is missing")
    config = GateConfig.of(
        "seerattn_r",
        model,
        gate_dim=int(first[_KEY].shape[-1]),
        block=settings["seerattn_gate_block_size"],
        norm=any(name in first for name in _NORMS),
        base_revision=base_revision,
        training=dict(training or {}),
    )
    with torch.random.fork_rng(devices=[]):
        gates = BlockGates(config)
    state = {}
    for place, (number, tensors) in enumerate(layers.items()):
        for name, tensor in _renamed(tensors, config, number).items():
            state[f"layers.{place}.{name}"] = tensor
    gates.load_state_dict(state)
    return gates.eval().requires_grad_(False)


def _renamed(tensors: Mapping[str, Tensor], config: GateConfig, layer: int) -> dict[str, Tensor]:
    """Tensors of one layer as kvbench stores them."""
    heads, dim, width = config.kv_heads, config.head_dim, config.gate_dim
    group = config.query_heads // heads
    shapes = {_QUERY: [heads, group, dim, width], _KEY: [heads, 3 * dim, width]}
    shapes |= {name: [width] for name in _NORMS} if config.norm else {}
    odd = sorted(set(tensors) - set(shapes))
    if odd:
        raise UserError(f"layer {layer}: {odd[0]} is unknown")
    of_mean = [heads, dim, width]
    for name, shape in shapes.items():
        if name not in tensors:
            raise UserError(f"layer {layer}: {name} is missing")
        found = list(tensors[name].shape)
        if found != shape and not (name == _QUERY and found == of_mean):
            raise UserError(f"layer {layer}: {name} is {found}, but this model needs {shape}")
    query = tensors[_QUERY]
    if query.dim() == 3:  # of the mean: a share of it for every query of the group
        query = (query / group)[:, None].expand(shapes[_QUERY])
    norms = {own: tensors[name] for name, own in _NORMS.items() if config.norm}
    return {"query": query.flatten(1, 2), "key": tensors[_KEY], **norms}
