"""Converts public checkpoints: gates of TRIM-KV and SeerAttention-R, and surrogates of KVzap.

    python -m kvbench_policies.gates.convert SOURCE FOLDER --model MODEL

SOURCE is a safetensors file or a folder of them. Pickled checkpoints (.bin, .pt, .pth) are refused,
because unpickling runs code; only the `attn_gate_weights.pth` of SeerAttention-R is read, as plain
tensors (see `kvbench_policies.gates.published_blocks`). The tensors of every layer are

    ...layers.<index>....retention_gate.linear1.weight   [512, d_model], optionally with a bias
    ...layers.<index>....retention_gate.linear2.weight   [H, 512], optionally with a bias
    ...layers.<index>....retention_gate.bias             [H] or [1], added to the logit

or, as NVIDIA publishes them (`nvidia/KVzap-mlp-...`, `nvidia/KVzap-linear-...`),

    layers.<index>.0.weight, layers.<index>.0.bias       [hidden, d_model], [hidden]
    layers.<index>.2.weight, layers.<index>.2.bias       [H, hidden], [H]
    layers.<index>.weight, layers.<index>.bias           [H, d_model], [H], if it is linear

Without `linear1` the gate is linear. Other tensors are ignored.
"""

from __future__ import annotations

import argparse
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvbench.engine.loading import load_config
from kvbench.engine.models import decoder_of, model_info
from kvbench.errors import UserError
from kvbench.named import model_digest
from kvbench.plugin import ModelInfo
from kvbench_policies.gates.config import GateConfig, activation_of
from kvbench_policies.gates.files import Gates, save
from kvbench_policies.gates.modules import RetentionGates
from kvbench_policies.gates.published_blocks import (
    WEIGHTS,
    convert_blocks,
    is_of_blocks,
    read_settings,
)

_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?retention_gate\.(.+)$")
_BLOCKS = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?attn_gate\.(attngate_.+)$")
_SURROGATE = re.compile(r"^layers\.(\d+)\.((?:[02]\.)?(?:weight|bias))$")
_SURROGATE_PARTS = {
    "0.weight": "linear1.weight",
    "0.bias": "linear1.bias",
    "2.weight": "linear2.weight",
    "2.bias": "linear2.bias",
    "weight": "linear2.weight",
    "bias": "linear2.bias",
}
_PARTS = ("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias", "bias")


def read_checkpoint(source: str | Path) -> dict[int, dict[str, Tensor]]:
    """Read the gates' tensors of a checkpoint, by layer and then by name, in float32.

    Args:
        source: A safetensors file, or a folder of them; or `attn_gate_weights.pth`, or its folder.

    Raises:
        UserError: It cannot be read, is a pickle, or has no such gates.
    """
    path = Path(source).expanduser()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files and (path / WEIGHTS).is_file():
        files = [path / WEIGHTS]
    if path.is_file() and path.suffix != ".safetensors" and path.name != WEIGHTS:
        raise UserError(f"{path} is not a safetensors file; pickles are not read")
    if not files or not files[0].is_file():
        raise UserError(f"{path} has no safetensors file; pickles are not read")
    tensors_by_layer: dict[int, dict[str, Tensor]] = {}
    for file in files:
        for name, tensor in _tensors(file).items():
            match = _NAME.search(name) or _BLOCKS.search(name) or _SURROGATE.search(name)
            if match:
                tensors_by_layer.setdefault(int(match[1]), {})[match[2]] = tensor.float()
    if not tensors_by_layer:
        raise UserError(
            f"{path} has no tensor of a retention_gate, an attn_gate or a surrogate of KVzap"
        )
    return dict(sorted(tensors_by_layer.items()))


def _tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name.

    Raises:
        UserError: It cannot be read, or holds something else.
    """
    try:
        if file.name == WEIGHTS:
            found = torch.load(file, map_location="cpu", weights_only=True)
            if not all(isinstance(x, Tensor) for x in dict(found).values()):
                raise UserError(f"{file} holds more than tensors")
            return dict(found)
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {file}: {str(error).splitlines()[0]}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, TypeError):
        raise UserError(f"{file} is not a file of plain tensors") from None


def convert(
    layers: Mapping[int, Mapping[str, Tensor]],
    model: ModelInfo,
    *,
    activation: str = "silu",
    base_revision: str = "",
    training: Mapping[str, Any] | None = None,
) -> RetentionGates:
    """Make gates from a checkpoint's tensors.

    Args:
        layers: Tensors by layer and name, as `read_checkpoint` gives them.
        model: The model that they belong to.
        activation: The activation of the model, which the gates of TRIM-KV share.
        base_revision: Commit or digest of the model.
        training: Facts to store with the gates.

    Raises:
        UserError: A tensor does not belong to gates of the model; the message names it.
    """
    _check_layers(layers, model)
    first = next(iter(layers.values()))
    is_surrogate = any(name.endswith("weight") and name in _SURROGATE_PARTS for name in first)
    if is_surrogate:
        layers = {
            number: {_SURROGATE_PARTS.get(name, name): tensor for name, tensor in tensors.items()}
            for number, tensors in layers.items()
        }
        first = next(iter(layers.values()))
    hidden = first["linear1.weight"].shape[0] if "linear1.weight" in first else 0
    config = GateConfig.of(
        "kvzap" if is_surrogate else "trimkv",
        model,
        gate="mlp" if hidden else "linear",
        **({"hidden_dim": int(hidden)} if hidden else {}),
        **({} if is_surrogate else {"activation": activation, "gating": "multiplicative"}),
        base_revision=base_revision,
        training=dict(training or {}),
    )
    with torch.random.fork_rng(devices=[]):
        gates = RetentionGates(config)
    state = {}
    for place, (number, tensors) in enumerate(layers.items()):
        odd = sorted(set(tensors) - set(_PARTS))
        if odd:
            raise UserError(f"layer {number}: {odd[0]} is unknown")
        for name, tensor in _merged(tensors, config, number).items():
            state[f"layers.{place}.{name}"] = tensor
    gates.load_state_dict(state)
    return gates.eval().requires_grad_(False)


def _check_layers(layers: Mapping[int, Mapping[str, Tensor]], model: ModelInfo) -> None:
    if len(layers) != model.layers:
        raise UserError(
            f"the checkpoint has gates for {len(layers)} layers, but model {model.name} has "
            f"{model.layers} with full attention"
        )


def _merged(tensors: Mapping[str, Tensor], config: GateConfig, layer: int) -> dict[str, Tensor]:
    """Tensors of one layer as kvbench stores them; the biases of the logit are added up."""
    heads, mlp = config.kv_heads, config.gate == "mlp"
    width = config.hidden_dim if mlp else config.width
    shapes: dict[str, tuple[int, ...]] = {"linear2.weight": (heads, width)}
    if mlp:
        shapes |= {"linear1.weight": (width, config.width), "linear1.bias": (width,)}
    out = {}
    for name, shape in shapes.items():
        tensor = tensors.get(name, torch.zeros(width) if name.endswith("bias") else None)
        if tensor is None:
            raise UserError(f"layer {layer}: {name} is missing")
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"layer {layer}: {name} is {list(tensor.shape)}, but this model needs {list(shape)}"
            )
        out[name] = tensor
    bias = torch.zeros(heads)
    for name in ("bias", "linear2.bias"):
        given = tensors.get(name, torch.zeros(1))
        if given.numel() not in (1, heads):
            raise UserError(
                f"layer {layer}: {name} has {given.numel()} numbers instead of 1 or {heads}"
            )
        bias = bias + given.reshape(-1)
    return {**out, "bias": bias}


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert a checkpoint; the exit code is 2 if that is not possible."""
    parser = argparse.ArgumentParser(
        prog="python -m kvbench_policies.gates.convert",
        description="Make kvbench gates from a checkpoint of TRIM-KV, KVzap or SeerAttention-R.",
    )
    parser.add_argument("source", help="the file of the weights, or its folder")
    parser.add_argument("folder", help="folder for gates.json and gates.safetensors")
    parser.add_argument("--model", required=True, help="reference, a local folder or a hub id")
    options = parser.parse_args(arguments)
    try:
        gates = convert_for(options.source, options.model)
        print(save(gates, options.folder))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def convert_for(source: str, model: str) -> Gates:
    """Make gates from a checkpoint for a named model, without loading the model's weights.

    Raises:
        UserError: The checkpoint or the model cannot be read, or they do not fit.
    """
    config = load_config(model)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    layers, info = read_checkpoint(source), model_info(empty)
    facts: dict[str, Any] = {
        "base_revision": model_digest(model) or str(getattr(config, "_commit_hash", None) or ""),
        "training": {"converted_from": Path(source).name},
    }
    if is_of_blocks(layers):
        _check_layers(layers, info)
        return convert_blocks(layers, info, read_settings(source), **facts)
    return convert(layers, info, activation=activation_of(decoder_of(empty).config), **facts)


if __name__ == "__main__":
    sys.exit(main())
