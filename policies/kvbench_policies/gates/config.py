"""What a set of gates is: its architecture, the model it is for, how it was trained; as JSON.

Equations and sizes: TRIM-KV (arXiv 2512.03324), DBTrimKV (arXiv 2605.09649), LocRet (arXiv
2410.01805).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from transformers.activations import ACT2FN

import kvbench
from kvbench.errors import UserError
from kvbench.plugin import ModelInfo

Kind = Literal["trimkv", "dbtrimkv", "locret"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FORMAT = 1
"""Version of the files; it rises when gates of an older one would be read wrongly."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "kind": KINDS,
    "gate": ("mlp", "linear"),
    "input": ("hidden", "kv", "qkv"),
    "gating": ("additive", "multiplicative"),
}
_OF_KIND: dict[str, dict[str, Any]] = {
    "trimkv": {},
    "dbtrimkv": {"tied": True, "bias": 18.0},
    "locret": {"input": "qkv", "hidden_dim": 1024, "bias": 0.0},
}
_SIZES = ("layers", "kv_heads", "query_heads", "head_dim", "d_model", "hidden_dim", "gate_dim")


@dataclass(frozen=True)
class GateConfig:
    """Architecture, model and training of a set of gates.

    Attributes:
        kind: `trimkv`: one readout per KV head; `dbtrimkv`: one readout for all layers and heads;
            `locret`: predicts a logit instead of a retention.
        layers: Full-attention layers of the model, `L`.
        kv_heads: KV heads of a layer, `H`.
        query_heads: Query heads of a layer, `H_q`.
        head_dim: `d`.
        d_model: Hidden size.
        gate: `mlp`: one hidden layer; `linear`: none.
        input: `hidden`: what enters the attention block, after its norm; `kv`: the layer's keys
            after RoPE and its values; `qkv`: its queries, keys and values before RoPE.
        hidden_dim: Width of the hidden layer.
        gate_dim: Per head, what the tied readout reads (`p`); only where `tied`.
        tied: One readout for all layers and heads.
        bias: Where the readout's bias starts; `locret` has none.
        activation: Name of the hidden layer's activation, as transformers calls it.
        gating: How the training gates its attention: `additive`, `z + (t - i) log beta`, or
            `multiplicative`, `beta^(t - i) z`.
        base_model: The model, as the user named it.
        base_revision: Commit of the hub, or digest of the local weights; "" where unknown.
        kvbench: Version that made it.
        training: Facts of the training, anything that JSON can hold.
    """

    kind: Kind
    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    d_model: int
    gate: Literal["mlp", "linear"] = "mlp"
    input: Literal["hidden", "kv", "qkv"] = "hidden"
    hidden_dim: int = 512
    gate_dim: int = 64
    tied: bool = False
    bias: float = 8.0
    activation: str = "silu"
    gating: Literal["additive", "multiplicative"] = "additive"
    base_model: str = ""
    base_revision: str = ""
    kvbench: str = kvbench.__version__
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check everything; what is wrong is said in one line."""
        for name, options in _CHOICES.items():
            if getattr(self, name) not in options:
                raise UserError(
                    f"{name}={getattr(self, name)}: {' or '.join(options)} would be right"
                )
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name}={value}: a whole number, 1 or more, would be right")
        if self.query_heads % self.kv_heads:
            raise UserError(
                f"{self.query_heads} query heads do not divide among {self.kv_heads} KV heads"
            )
        if not isinstance(self.tied, bool):
            raise UserError(f"tied={self.tied}: true or false would be right")
        if self.tied and self.kind == "locret":
            raise UserError("tied=true: the gates of locret have no readout to tie")
        number = isinstance(self.bias, int | float) and not isinstance(self.bias, bool)
        if not number or not math.isfinite(self.bias):
            raise UserError(f"bias={self.bias}: a number would be right")
        if self.activation not in ACT2FN:
            raise UserError(f"activation={self.activation}: transformers has none of that name")
        for name in ("base_model", "base_revision", "kvbench"):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"{name}={getattr(self, name)!r}: text would be right")
        if not isinstance(self.training, dict):
            raise UserError("training is no JSON object")

    @classmethod
    def of(cls, kind: Kind, model: ModelInfo, **changes: Any) -> GateConfig:
        """Give the configuration of a kind for a model, with the papers' sizes.

        Args:
            kind: `trimkv`, `dbtrimkv` or `locret`.
            model: The model's shapes.
            **changes: Any attribute; `activation` should be the model's own (`activation_of`).

        Raises:
            UserError: Something is out of its range.
        """
        if kind not in KINDS:
            raise UserError(f"kind={kind}: {' or '.join(KINDS)} would be right")
        own: dict[str, Any] = dict(_OF_KIND[kind])
        shapes = {
            "layers": model.layers,
            "kv_heads": model.kv_heads,
            "query_heads": model.query_heads,
            "head_dim": model.head_dim,
            "d_model": model.hidden_size,
        }
        return cls(kind=kind, **{**shapes, "base_model": model.name, **own, **changes})

    @property
    def is_retention(self) -> bool:
        """Whether the gates give a log beta (and not a predicted logit)."""
        return self.kind != "locret"

    @property
    def width(self) -> int:
        """Numbers that a gate reads of a token."""
        heads = {"kv": 2 * self.kv_heads, "qkv": self.query_heads + 2 * self.kv_heads}
        return heads[self.input] * self.head_dim if self.input in heads else self.d_model

    def mismatch(self, model: ModelInfo) -> str:
        """What keeps the gates from fitting a model; "" where nothing does."""
        own = (self.layers, self.kv_heads, self.query_heads, self.head_dim, self.d_model)
        other = (
            model.layers,
            model.kv_heads,
            model.query_heads,
            model.head_dim,
            model.hidden_size,
        )
        if own == other:
            return ""
        return f"of {_shape(*own)}; model {model.name} has {_shape(*other)}"

    def to_json(self) -> str:
        """The configuration as JSON text, one attribute a line."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> GateConfig:
        """Read and check JSON text.

        Raises:
            UserError: It is no configuration of gates; it says what is wrong.
        """
        try:
            content = json.loads(text)
        except ValueError:
            raise UserError("it is not JSON") from None
        if not isinstance(content, dict):
            raise UserError("a JSON object would be right")
        version = content.pop("format", None)
        if version != FORMAT:
            raise UserError(f"its format is {version!r}; this kvbench reads {FORMAT}")
        unknown = sorted(set(content) - {f.name for f in fields(cls)})
        if unknown:
            raise UserError(f"{unknown[0]} is unknown")
        missing = [n for n in ("kind", *_SIZES[:5]) if n not in content]
        if missing:
            raise UserError(f"{missing[0]} is missing")
        return cls(**content)

    @classmethod
    def read(cls, path: Path) -> GateConfig:
        """Read and check a file.

        Raises:
            UserError: It cannot be read or is no configuration of gates; it says what is wrong.
        """
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read the gates' {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UserError(f"{path} is no configuration of gates: it is not text") from None
        except UserError as error:
            raise UserError(f"{path} is no configuration of gates: {error}") from None


def activation_of(config: Any) -> str:
    """Name of the activation of a model's own MLPs, from its (text) configuration."""
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    return str(name) if name in ACT2FN else "silu"


def _shape(layers: int, kv_heads: int, query_heads: int, head_dim: int, d_model: int) -> str:
    heads = f"{kv_heads} KV and {query_heads} query heads of {head_dim}"
    return f"{layers} layers, {heads}, hidden size {d_model}"
