"""Convert public checkpoints: gates of TRIM-KV and SeerAttention-R, heads of LocRet, and surrogates of KVzap.

    python -m kvbench_policies.gates.convert SOURCE FOLDER --model MODEL

SOURCE is a safetensors file or a folder of them. Pickled checkpoints (.bin, .pt, .pth) are refused, because unpickling
runs code; the exceptions are SeerAttention-R's `attn_gate_weights.pth` (see `kvbench_policies.gates.published_blocks`)
and LocRet's `.bin` files, which torch reads as plain tensors without running code. The tensors of every layer are

    ...layers.<index>....retention_gate.linear1.weight   [512, d_model], optionally with a bias
    ...layers.<index>....retention_gate.linear2.weight   [H, 512], optionally with a bias
    ...layers.<index>....retention_gate.bias             [H] or [1], added to the logit

or, as NVIDIA publishes them (`nvidia/KVzap-mlp-...`, `nvidia/KVzap-linear-...`),

    layers.<index>.0.weight, layers.<index>.0.bias       [hidden, d_model], [hidden]
    layers.<index>.2.weight, layers.<index>.2.bias       [H, hidden], [H]
    layers.<index>.weight, layers.<index>.bias           [H, d_model], [H], if it is linear

or, as LocRet publishes its retaining heads (`hyx21/Locret-...`),

    ...layers.<index>.self_attn.fc1.weight               [1024, (H_q + 2 H) d], from queries, keys and values
    ...layers.<index>.self_attn.fc2.weight               [H, 1024]

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
from kvbench_policies.gates.config import GateConfig, Kind, activation_of
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
_RETAINING = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.(fc[12]\.weight)$")
_RETAINING_PARTS = {"fc1.weight": "linear1.weight", "fc2.weight": "linear2.weight"}
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
    """Read the gates' tensors of a checkpoint in float32, by layer and then by name.

    Args:
        source: A safetensors file, `attn_gate_weights.pth` or a `.bin` file of LocRet, or the folder of one of them.

    Raises:
        UserError: The checkpoint cannot be read, is a pickle, or has no gates.
    """
    checkpoint = Path(source).expanduser()
    weight_files = sorted(checkpoint.glob("*.safetensors")) if checkpoint.is_dir() else [checkpoint]
    if not weight_files and (checkpoint / WEIGHTS).is_file():
        weight_files = [checkpoint / WEIGHTS]
    if not weight_files and checkpoint.is_dir():
        weight_files = sorted(checkpoint.glob("*.bin"))
    if checkpoint.is_file() and checkpoint.suffix not in (".safetensors", ".bin") and checkpoint.name != WEIGHTS:
        raise UserError(f"{checkpoint} is not a safetensors file; pickles are not supported")
    if not weight_files or not weight_files[0].is_file():
        raise UserError(f"{checkpoint} has no safetensors file; pickles are not supported")
    tensors_by_layer: dict[int, dict[str, Tensor]] = {}
    for weight_file in weight_files:
        for tensor_name, tensor in _tensors(weight_file).items():
            patterns = (_RETAINING,) if weight_file.suffix == ".bin" else (_NAME, _BLOCKS, _SURROGATE, _RETAINING)
            name_match = next(filter(None, (pattern.search(tensor_name) for pattern in patterns)), None)
            if name_match:
                tensors_by_layer.setdefault(int(name_match[1]), {})[name_match[2]] = tensor.float()
    if not tensors_by_layer and weight_files[0].suffix == ".bin":
        raise UserError(f"{weight_files[0]} has no retaining heads of LocRet, and no other pickles are supported")
    if not tensors_by_layer:
        raise UserError(
            f"{checkpoint} has no tensors of a retention_gate, an attn_gate, a retaining head or a KVzap surrogate"
        )
    return dict(sorted(tensors_by_layer.items()))


def _tensors(weight_file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name.

    Raises:
        UserError: The file cannot be read or holds other objects.
    """
    try:
        if weight_file.name == WEIGHTS or weight_file.suffix == ".bin":
            state_dict = torch.load(weight_file, map_location="cpu", weights_only=True)
            if not all(isinstance(tensor, Tensor) for tensor in dict(state_dict).values()):
                raise UserError(f"{weight_file} holds more than tensors")
            return dict(state_dict)
        with safe_open(weight_file, framework="pt") as tensor_file:
            return {key: tensor_file.get_tensor(key) for key in tensor_file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {weight_file}: {str(error).splitlines()[0]}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, TypeError):
        raise UserError(f"{weight_file} is not a file of plain tensors") from None


def convert(
    layers: Mapping[int, Mapping[str, Tensor]],
    model: ModelInfo,
    *,
    activation: str = "silu",
    base_revision: str = "",
    training: Mapping[str, Any] | None = None,
) -> RetentionGates:
    """Build gates from a checkpoint's tensors.

    Args:
        layers: Output of `read_checkpoint`.
        model: The model the gates belong to.
        activation: The model's activation, which the gates of TRIM-KV and LocRet share.
        base_revision: Commit or digest of the model.
        training: Training record to store with the gates.

    Raises:
        UserError: A tensor does not fit gates of the model; the message names it.
    """
    _check_layers(layers, model)
    first_layer = next(iter(layers.values()))
    is_surrogate = any(
        tensor_name.endswith("weight") and tensor_name in _SURROGATE_PARTS for tensor_name in first_layer
    )
    is_retaining = bool(set(_RETAINING_PARTS) & set(first_layer))
    if is_surrogate or is_retaining:
        part_names = _RETAINING_PARTS if is_retaining else _SURROGATE_PARTS
        layers = {
            layer_number: {
                part_names.get(tensor_name, tensor_name): tensor for tensor_name, tensor in layer_tensors.items()
            }
            for layer_number, layer_tensors in layers.items()
        }
        first_layer = next(iter(layers.values()))
    hidden_dim = first_layer["linear1.weight"].shape[0] if "linear1.weight" in first_layer else 0
    kind: Kind = "locret" if is_retaining else "kvzap" if is_surrogate else "trimkv"
    gating = {"gating": "multiplicative"} if kind == "trimkv" else {}
    config = GateConfig.of(
        kind,
        model,
        gate="mlp" if hidden_dim else "linear",
        **({"hidden_dim": int(hidden_dim)} if hidden_dim else {}),
        **({} if kind == "kvzap" else {"activation": activation}),
        **gating,
        base_revision=base_revision,
        training=dict(training or {}),
    )
    with torch.random.fork_rng(devices=[]):
        gates = RetentionGates(config)
    state_dict = {}
    for layer_index, (layer_number, layer_tensors) in enumerate(layers.items()):
        unknown_names = sorted(set(layer_tensors) - set(_PARTS))
        if unknown_names:
            raise UserError(f"layer {layer_number}: {unknown_names[0]} is unknown")
        for tensor_name, tensor in _merged(layer_tensors, config, layer_number).items():
            state_dict[f"layers.{layer_index}.{tensor_name}"] = tensor
    gates.load_state_dict(state_dict)
    return gates.eval().requires_grad_(False)


def _check_layers(layer_tensors: Mapping[int, Mapping[str, Tensor]], model: ModelInfo) -> None:
    if len(layer_tensors) != model.layers:
        raise UserError(
            f"the checkpoint has gates for {len(layer_tensors)} layers, but model {model.name} has "
            f"{model.layers} with full attention"
        )


def _merged(layer_tensors: Mapping[str, Tensor], config: GateConfig, layer_number: int) -> dict[str, Tensor]:
    """Return one layer's tensors as kvbench stores them, with the logit's biases summed."""
    head_count, has_mlp = config.kv_heads, config.gate == "mlp"
    readout_width = config.hidden_dim if has_mlp else config.width
    expected_shapes: dict[str, tuple[int, ...]] = {"linear2.weight": (head_count, readout_width)}
    if has_mlp:
        expected_shapes["linear1.weight"] = (readout_width, config.width)
    if has_mlp and config.has_biases:
        expected_shapes["linear1.bias"] = (readout_width,)
    merged = {}
    for tensor_name, expected_shape in expected_shapes.items():
        tensor = layer_tensors.get(tensor_name, torch.zeros(readout_width) if tensor_name.endswith("bias") else None)
        if tensor is None:
            raise UserError(f"layer {layer_number}: {tensor_name} is missing")
        if tuple(tensor.shape) != expected_shape:
            raise UserError(
                f"layer {layer_number}: {tensor_name} is {list(tensor.shape)}, "
                f"but this model needs {list(expected_shape)}"
            )
        merged[tensor_name] = tensor
    if not config.has_biases:
        return merged
    bias = torch.zeros(head_count)
    for tensor_name in ("bias", "linear2.bias"):
        partial_bias = layer_tensors.get(tensor_name, torch.zeros(1))
        if partial_bias.numel() not in (1, head_count):
            raise UserError(
                f"layer {layer_number}: {tensor_name} has {partial_bias.numel()} numbers instead of 1 or {head_count}"
            )
        bias = bias + partial_bias.reshape(-1)
    return {**merged, "bias": bias}


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert a checkpoint; return exit code 2 on errors."""
    parser = argparse.ArgumentParser(
        prog="python -m kvbench_policies.gates.convert",
        description="Convert a checkpoint of TRIM-KV, LocRet, KVzap or SeerAttention-R to kvbench gates.",
    )
    parser.add_argument("source", help="weights file, or its folder")
    parser.add_argument("folder", help="output folder for gates.json and gates.safetensors")
    parser.add_argument("--model", required=True, help="reference, a local folder or a hub id")
    parsed = parser.parse_args(arguments)
    try:
        gates = convert_for(parsed.source, parsed.model)
        print(save(gates, parsed.folder))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def convert_for(source: str, model: str) -> Gates:
    """Build gates from a checkpoint for a named model, without loading the model's weights.

    Raises:
        UserError: The checkpoint or the model cannot be read, or they do not match.
    """
    config = load_config(model)
    with torch.device("meta"):
        meta_model = AutoModelForCausalLM.from_config(config)
    layer_tensors, model_shapes = read_checkpoint(source), model_info(meta_model)
    provenance: dict[str, Any] = {
        "base_revision": model_digest(model) or str(getattr(config, "_commit_hash", None) or ""),
        "training": {"converted_from": Path(source).name},
    }
    if is_of_blocks(layer_tensors):
        _check_layers(layer_tensors, model_shapes)
        return convert_blocks(layer_tensors, model_shapes, read_settings(source), **provenance)
    return convert(
        layer_tensors,
        model_shapes,
        activation=activation_of(decoder_of(meta_model).config),
        **provenance,
    )


if __name__ == "__main__":
    sys.exit(main())
