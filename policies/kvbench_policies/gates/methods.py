"""Training methods of the gates and convolutions of learned policies, for `kvbench train gates`.

Settings follow the papers where they give them: Bui, Sharma, Lamba, Mishra, Ying: Cache What Lasts, arXiv 2512.03324
(TRIM-KV); Bui, Nguyen, Cohan, Ying: Make Each Token Count, arXiv 2605.09649 (DBTrimKV); Jégou, Jeblick: KVzap, arXiv
2601.07891; Gao, Guo, Cao and others: SeerAttention-R, arXiv 2506.08889. The number of steps and, for LocRet (arXiv
2410.01805), the optimizer's settings are kvbench's own. Those of LoCoCo (arXiv 2406.05317) are from the authors' code,
whose batches are 128 chunks on each of 8 GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from kvbench.plugin import ModelInfo
from kvbench.training.method import Method
from kvbench_policies.gates import files
from kvbench_policies.gates.config import GateConfig, Kind, activation_of
from kvbench_policies.gates.convolutions import ConvolutionConfig, MergeConvolutions
from kvbench_policies.kernels.capacity_loss.op import capacity_loss
from kvbench_policies.kernels.retention_attention.op import retention_attention
from kvbench_policies.lococo import compress, merged_into

_CONFIGURED = ("gate", "input", "tied", "bias", "hidden_dim", "gate_dim", "block", "gating")


def _build(kind: Kind) -> Any:
    def make(model_info: ModelInfo, model_config: Any, settings: Mapping[str, Any]) -> files.Gates:
        attributes = {setting: settings[setting] for setting in _CONFIGURED if settings.get(setting) is not None}
        if kind != "kvzap":  # KVzap uses GELU regardless of the model
            attributes["activation"] = activation_of(model_config)
        return files.build(GateConfig.of(kind, model_info, **attributes))

    return make


def _build_convolutions(model_info: ModelInfo, model_config: Any, settings: Mapping[str, Any]) -> MergeConvolutions:
    attributes = {setting: settings[setting] for setting in ("kernel_size", "keep_rate", "mix")}
    slot_count = merged_into(settings["capacity"], settings["keep_rate"])
    return MergeConvolutions(ConvolutionConfig.of(model_info, slots=slot_count, **attributes))


def _save(gates: nn.Module, folder: Path, facts: Mapping[str, Any], half: bool) -> None:
    assert isinstance(gates, files.Gates)
    gates.config = dataclasses.replace(  # type: ignore[assignment]
        gates.config,
        base_model=facts["base_model"],
        base_revision=facts["base_revision"],
        training=dict(facts["training"]),
    )
    files.save(gates, folder, half=half)


def _output_path(kind: str) -> Callable[[str], Path]:
    return lambda model_name: files.GATES.user_path(model_name, kind)


def _method(kind: Kind, defaults: Mapping[str, Any], **kwargs: Any) -> Method:
    return Method(
        name=kind,
        defaults=defaults,
        build=_build(kind),
        save=_save,
        place=_output_path(kind),
        **kwargs,
    )


_TOKEN_GATE_DEFAULTS = {"gate": "mlp", "tied": False, "gating": "additive", "gate_dim": 64}


TRIMKV = _method(
    "trimkv",
    {
        **_TOKEN_GATE_DEFAULTS,
        "lr": 2e-4,
        "schedule": "linear",
        "weight_decay": 0.01,
        "capacity": 512,
        "length": 16384,
        "bias": 8.0,
        "hidden_dim": 512,
        "input": "hidden",
    },
    objective="distil",
    scope="head",
    attention=retention_attention,
    capacity=capacity_loss,
)

DBTRIMKV = _method(
    "dbtrimkv",
    {
        **_TOKEN_GATE_DEFAULTS,
        "lr": 2e-4,
        "schedule": "cosine",
        "weight_decay": 1e-6,
        "capacity": 64,
        "length": 32768,
        "bias": 18.0,
        "hidden_dim": 512,
        "input": "hidden",
        "tied": True,
    },
    objective="distil",
    scope="global",
    attention=retention_attention,
    capacity=capacity_loss,
)

LOCRET = _method(
    "locret",
    {
        **_TOKEN_GATE_DEFAULTS,
        "lr": 2e-4,
        "schedule": "linear",
        "weight_decay": 0.01,
        "capacity": 1,
        "length": 10240,
        "bias": 0.0,
        "hidden_dim": 1024,
        "input": "qkv",
    },
    objective="regress",
    scope="head",
)

KVZAP = _method(
    "kvzap",
    {
        "lr": 5e-3,
        "schedule": "cosine",
        "weight_decay": 0.01,
        "capacity": 1,
        "length": 1250,
        "accumulate": 1,
        "bias": -4.0,
        **_TOKEN_GATE_DEFAULTS,
        "hidden_dim": 512,
        "input": "hidden",
        "passes": 15,
    },
    objective="replay",
    scope="head",
)

LOCOCO = Method(
    name="lococo",
    objective="compress",
    scope="head",
    defaults={
        "lr": 5e-2,
        "schedule": "linear",
        "weight_decay": 0.0,
        "capacity": 512,
        "chunk": 512,
        "length": 4096,
        "kernel_size": 21,
        "keep_rate": 0.5,
        "mix": 0.5,
        "kl": False,
        "with_capacity": False,
    },
    build=_build_convolutions,
    save=_save,
    place=_output_path("lococo"),
    compress=compress,
)

SEERATTN_R = _method(
    "seerattn_r",
    {
        "lr": 1e-3,
        "schedule": "cosine",
        "weight_decay": 0.0,
        "warmup": 20,
        "length": 32768,
        "block": 64,
        "gate_dim": None,  # the model's head dim
    },
    objective="match",
    scope="head",
)
