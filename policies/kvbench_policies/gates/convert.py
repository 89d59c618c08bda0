"""Reads the checkpoints of the public TRIM-KV repository: gates alone, or a model that holds them.

    python -m kvbench_policies.gates.convert SOURCE FOLDER --model MODEL

SOURCE is a safetensors file or a folder of them. A checkpoint that is only there as a pickle (.bin,
.pt, .pth) is refused: to unpickle is to run what is in it. Its tensors are, for every layer,

    ...layers.<index>....retention_gate.linear1.weight   [512, d_model], with a bias or without
    ...layers.<index>....retention_gate.linear2.weight   [H, 512], with a bias or without
    ...layers.<index>....retention_gate.bias             [H] or one for all, added to the logit

Without `linear1` the gate is linear. All other tensors are passed over unread.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvbench.errors import UserError
from kvbench.plugin import ModelInfo
from kvbench_policies.gates.config import GateConfig
from kvbench_policies.gates.files import save
from kvbench_policies.gates.modules import RetentionGates, build

_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?retention_gate\.(.+)$")
_PARTS = ("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias", "bias")


def read_checkpoint(source: str | Path) -> dict[int, dict[str, Tensor]]:
    """Read the gates' tensors of a checkpoint, by layer and then by name, in float32.

    Args:
        source: A safetensors file, or a folder of them.

    Raises:
        UserError: It cannot be read, is a pickle, or holds no such gates.
    """
    path = Path(source).expanduser()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if path.is_file() and path.suffix != ".safetensors":
        raise UserError(f"{path}: only safetensors are read, as nothing is unpickled")
    if not files or not files[0].is_file():
        raise UserError(f"{path}: no safetensors there (nothing else is read: no pickles)")
    found: dict[int, dict[str, Tensor]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    if match := _NAME.search(name):
                        found.setdefault(int(match[1]), {})[match[2]] = tensors.get_tensor(
                            name
                        ).float()
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
    if not found:
        raise UserError(f"{path}: no tensor of a retention_gate in it")
    return dict(sorted(found.items()))


def convert(
    layers: Mapping[int, Mapping[str, Tensor]],
    model: ModelInfo,
    *,
    activation: str = "silu",
    base_revision: str = "",
    training: Mapping[str, Any] | None = None,
) -> RetentionGates:
    """Make gates of a checkpoint's tensors.

    Args:
        layers: As `read_checkpoint` gives them.
        model: The model that they are for.
        activation: The model's own, which is that of the gates.
        base_revision: Commit or digest of the model.
        training: Facts to keep beside the gates.

    Raises:
        UserError: The tensors are not those of gates of the model; it says which.
    """
    if len(layers) != model.layers:
        raise UserError(
            f"the checkpoint has gates for {len(layers)} layers, model {model.name} has "
            f"{model.layers} with full attention"
        )
    first = next(iter(layers.values()))
    hidden = first["linear1.weight"].shape[0] if "linear1.weight" in first else 0
    config = GateConfig.of(
        "trimkv",
        model,
        gate="mlp" if hidden else "linear",
        **({"hidden_dim": int(hidden)} if hidden else {}),
        activation=activation,
        gating="multiplicative",
        base_revision=base_revision,
        training=dict(training or {}),
    )
    with torch.random.fork_rng(devices=[]):
        gates = build(config)
    state = {}
    for place, (number, tensors) in enumerate(layers.items()):
        odd = sorted(set(tensors) - set(_PARTS))
        if odd:
            raise UserError(f"layer {number}: retention_gate.{odd[0]} is unknown")
        for name, tensor in _merged(tensors, config, number).items():
            state[f"layers.{place}.{name}"] = tensor
    gates.load_state_dict(state)
    return gates.eval().requires_grad_(False)


def _merged(tensors: Mapping[str, Tensor], config: GateConfig, layer: int) -> dict[str, Tensor]:
    """Tensors of one layer as kvbench holds them: the biases of the logit become one."""
    heads, mlp = config.kv_heads, config.gate == "mlp"
    width = config.hidden_dim if mlp else config.width
    shapes: dict[str, tuple[int, ...]] = {"linear2.weight": (heads, width)}
    if mlp:
        shapes |= {"linear1.weight": (width, config.width), "linear1.bias": (width,)}
    out = {}
    for name, shape in shapes.items():
        tensor = tensors.get(name, torch.zeros(width) if name.endswith("bias") else None)
        if tensor is None:
            raise UserError(f"layer {layer}: retention_gate.{name} is missing")
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"layer {layer}: retention_gate.{name} is {list(tensor.shape)}; for this model "
                f"it should be {list(shape)}"
            )
        out[name] = tensor
    bias = torch.zeros(heads)
    for name in ("bias", "linear2.bias"):
        given = tensors.get(name, torch.zeros(1))
        if given.numel() not in (1, heads):
            raise UserError(
                f"layer {layer}: retention_gate.{name} has {given.numel()} numbers; 1 or {heads} "
                "would be right"
            )
        bias = bias + given.reshape(-1)
    return {**out, "bias": bias}


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert a checkpoint; the exit status is 2 where that is not possible."""
    parser = argparse.ArgumentParser(
        prog="python -m kvbench_policies.gates.convert",
        description="Make kvbench's gates of a TRIM-KV checkpoint (safetensors).",
    )
    parser.add_argument("source", help="a safetensors file, or a folder of them")
    parser.add_argument("folder", help="where gates.json and gates.safetensors are written")
    parser.add_argument("--model", required=True, help="the model: a folder, a hub id, reference")
    options = parser.parse_args(arguments)
    try:
        gates = convert_for(options.source, options.model)
        print(save(gates, options.folder))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def convert_for(source: str, model: str) -> RetentionGates:
    """Make gates of a checkpoint for the model of a name, whose weights are not loaded.

    Raises:
        UserError: The checkpoint or the model cannot be read, or they do not fit.
    """
    from kvbench.engine.loading import load_config, model_digest
    from kvbench.engine.models import decoder_of, model_info
    from kvbench_policies.gates.config import activation_of

    config = load_config(model)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    revision = model_digest(model) or str(getattr(config, "_commit_hash", None) or "")
    return convert(
        read_checkpoint(source),
        model_info(empty),
        activation=activation_of(decoder_of(empty).config),
        base_revision=revision,
        training={"converted_from": Path(source).name},
    )


if __name__ == "__main__":
    sys.exit(main())
