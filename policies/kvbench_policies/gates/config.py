"""The configuration of learned weights as JSON: architecture, base model and training.

Equations and sizes: TRIM-KV (arXiv 2512.03324), DBTrimKV (arXiv 2605.09649), LocRet (arXiv
2410.01805), KVzap (arXiv 2601.07891), SeerAttention-R (arXiv 2506.08889).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self, get_args

from kvbench import __version__
from kvbench.errors import UserError, quoted
from kvbench.plugin import ModelInfo

Kind = Literal["trimkv", "dbtrimkv", "locret", "kvzap", "seerattn_r"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FORMAT = 1
"""Version of the file format, raised when older files would be misread."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "kind": KINDS,
    "gate": ("mlp", "linear"),
    "input": ("hidden", "kv", "qkv"),
    "gating": ("additive", "multiplicative"),
}
_KIND_DEFAULTS: dict[str, dict[str, Any]] = {
    "trimkv": {},
    "dbtrimkv": {"tied": True, "bias": 18.0},
    "locret": {"input": "qkv", "hidden_dim": 1024, "bias": 0.0},
    "kvzap": {"bias": -4.0, "activation": "gelu"},
    "seerattn_r": {},
}
_SHAPES = ("layers", "kv_heads", "query_heads", "head_dim", "d_model")


@dataclass(frozen=True, kw_only=True)
class LearnedConfig:
    """Configuration shared by all kinds of learned weights.

    Attributes:
        kind: The policy that uses them.
        layers: Number of full-attention layers of the model, `L`.
        kv_heads: KV heads per layer, `H`.
        query_heads: Query heads per layer, `H_q`.
        head_dim: `d`.
        d_model: Hidden size.
        base_model: The model as the user named it.
        base_revision: Hub commit, or digest of local weights; "" if unknown.
        kvbench: Version of kvbench that wrote the file.
        training: Training record; any JSON values.
    """

    kind: str
    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    d_model: int
    base_model: str = ""
    base_revision: str = ""
    kvbench: str = __version__
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_sizes(*_SHAPES)
        if self.query_heads % self.kv_heads:
            raise UserError(f"{self.query_heads} query heads is not a multiple of {self.kv_heads} KV heads")
        for field_name in ("base_model", "base_revision", "kvbench"):
            if not isinstance(getattr(self, field_name), str):
                raise UserError(f"{field_name}={quoted(getattr(self, field_name))} is invalid; use text")
        if not isinstance(self.training, dict):
            raise UserError("training is not a JSON object")

    def _check_sizes(self, *field_names: str) -> None:
        for field_name in field_names:
            size = getattr(self, field_name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UserError(f"{field_name}={size} is invalid; use a whole number, 1 or more")

    def mismatch(self, model: ModelInfo) -> str:
        """Return why the weights do not fit a model, or ""."""
        gate_shapes = {field_name: getattr(self, field_name) for field_name in _SHAPES}
        model_shapes = shapes_of(model)
        if gate_shapes == model_shapes:
            return ""
        return f"for {_shape(**gate_shapes)}, but model {model.name} has {_shape(**model_shapes)}"

    def to_json(self) -> str:
        """Return the configuration as JSON, one attribute per line."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> Self:
        """Validate the output of `parse` and build the configuration.

        Raises:
            UserError: The content is not a valid configuration.
        """
        unknown_fields = sorted(set(content) - {config_field.name for config_field in fields(cls)})
        if unknown_fields:
            raise UserError(f"{unknown_fields[0]} is unknown")
        missing_fields = [field_name for field_name in ("kind", *_SHAPES) if field_name not in content]
        if missing_fields:
            raise UserError(f"{missing_fields[0]} is missing")
        return cls(**content)


@dataclass(frozen=True, kw_only=True)
class GateConfig(LearnedConfig):
    """Architecture, base model and training of a set of gates.

    Attributes:
        kind: `trimkv`: one readout per KV head; `dbtrimkv`: one readout for all layers and heads; `locret`: predicts a
            logit instead of a retention; `kvzap`: predicts the log of an attention weight; `seerattn_r`: rates blocks
            for a query.
        gate: `mlp` (one hidden layer) or `linear` (none).
        input: `hidden`: the input of the attention block, after its norm; `kv`: the layer's keys after RoPE and its
            values; `qkv`: its queries, keys and values before RoPE.
        hidden_dim: Width of the hidden layer.
        gate_dim: Inputs of the tied readout per head (`p`), used only if `tied`; for `seerattn_r`, the width of a
            block's summary per KV head, a divisor of `head_dim`.
        block: Entries per block; used only by `seerattn_r`.
        norm: Whether an RMS norm follows each of the two linear maps of `seerattn_r`.
        tied: Whether all layers and heads share one readout.
        bias: Initial value of the readout's bias; `locret` has none.
        activation: Name of the hidden layer's activation in transformers.
        gating: How training gates attention: `additive`, `z + (t - i) log beta`, or `multiplicative`, `beta^(t - i) z`.
    """

    kind: Kind
    gate: Literal["mlp", "linear"] = "mlp"
    input: Literal["hidden", "kv", "qkv"] = "hidden"
    hidden_dim: int = 512
    gate_dim: int = 64
    block: int = 64
    norm: bool = False
    tied: bool = False
    bias: float = 8.0
    activation: str = "silu"
    gating: Literal["additive", "multiplicative"] = "additive"

    def __post_init__(self) -> None:
        for field_name, choices in _CHOICES.items():
            if getattr(self, field_name) not in choices:
                raise UserError(f"unknown {field_name}={getattr(self, field_name)}; use {' or '.join(choices)}")
        super().__post_init__()
        self._check_sizes("hidden_dim", "gate_dim", "block")
        if self.is_of_blocks and (self.head_dim % self.gate_dim or self.gate_dim % 2):
            raise UserError(
                f"gate_dim={self.gate_dim} is invalid; use an even divisor of the head dim, {self.head_dim}"
            )
        for field_name in ("tied", "norm"):
            if not isinstance(getattr(self, field_name), bool):
                raise UserError(f"{field_name}={getattr(self, field_name)} is invalid; use true or false")
        if self.tied and not self.is_retention:
            raise UserError(f"tied=true is invalid: the gates of {self.kind} have no readout to tie")
        if self.kind == "kvzap" and self.input != "hidden":
            raise UserError(f"input={self.input} is invalid for kvzap; use hidden")
        is_number = isinstance(self.bias, int | float) and not isinstance(self.bias, bool)
        if not is_number or not math.isfinite(self.bias):
            raise UserError(f"bias={self.bias} is invalid; use a finite number")
        if not _is_activation(self.activation):
            raise UserError(f"transformers has no activation={self.activation}")

    @classmethod
    def of(cls, kind: Kind, model: ModelInfo, **changes: Any) -> GateConfig:
        """Return the configuration of a kind for a model, with the paper's sizes.

        Args:
            kind: One of `KINDS`.
            model: The model's shapes.
            **changes: Overrides; `activation` should be the model's (`activation_of`), except for `kvzap`, which uses
                GELU.

        Raises:
            UserError: An attribute is out of range.
        """
        if kind not in KINDS:
            raise UserError(f"unknown kind={kind}; use {' or '.join(KINDS)}")
        size_defaults = {"gate_dim": model.head_dim} if kind == "seerattn_r" else {}
        kind_defaults = {**size_defaults, **_KIND_DEFAULTS[kind]}
        attributes = {**shapes_of(model), "base_model": model.name, **kind_defaults, **changes}
        return cls(kind=kind, **attributes)

    @property
    def is_retention(self) -> bool:
        """Whether the gates predict log beta (not a logit, a log attention or a block rating)."""
        return self.kind in ("trimkv", "dbtrimkv")

    @property
    def is_of_blocks(self) -> bool:
        """Whether the gates rate blocks per query instead of tokens once."""
        return self.kind == "seerattn_r"

    @property
    def has_biases(self) -> bool:
        """Whether the layers of a gate have biases."""
        return self.kind != "locret"

    @property
    def width(self) -> int:
        """Input width of a gate per token."""
        head_counts = {"kv": 2 * self.kv_heads, "qkv": self.query_heads + 2 * self.kv_heads}
        return head_counts[self.input] * self.head_dim if self.input in head_counts else self.d_model


def shapes_of(model: ModelInfo) -> dict[str, int]:
    """Return the configuration attributes that the model determines."""
    return {
        "layers": model.layers,
        "kv_heads": model.kv_heads,
        "query_heads": model.query_heads,
        "head_dim": model.head_dim,
        "d_model": model.hidden_size,
    }


def parse(config_text: str) -> dict[str, Any]:
    """Parse the JSON text of a configuration; `from_content` validates its attributes.

    Raises:
        UserError: The text is not a JSON object of this format.
    """
    try:
        content = json.loads(config_text)
    except (ValueError, RecursionError):
        raise UserError("it is not JSON") from None
    if not isinstance(content, dict):
        raise UserError("it is not a JSON object")
    format_version = content.pop("format", None)
    if format_version != FORMAT:
        raise UserError(f"its format is {quoted(format_version)}, but this kvbench reads {FORMAT}")
    return content


def activation_of(model_config: Any) -> str:
    """Return the name of the MLP activation in a model's (text) configuration."""
    activation = getattr(model_config, "hidden_activation", None) or getattr(model_config, "hidden_act", None)
    return str(activation) if _is_activation(activation) else "silu"


def _is_activation(activation: object) -> bool:
    # Imported here because transformers takes seconds to load and `kvbench list` does not need it.
    from transformers.activations import ACT2FN

    return activation in ACT2FN


def _shape(layers: int, kv_heads: int, query_heads: int, head_dim: int, d_model: int) -> str:
    head_summary = f"{kv_heads} KV and {query_heads} query heads of {head_dim}"
    return f"{layers} layers, {head_summary}, hidden size {d_model}"
