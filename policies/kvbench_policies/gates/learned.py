"""What policies with learned gates have in common, and the need that the engine observes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.plugin import ModelInfo, Need, PerToken, Score, View
from kvbench_policies.gates.config import GateConfig, Kind
from kvbench_policies.gates.files import (
    CONFIG,
    WEIGHTS,
    AnyGates,
    find,
    fingerprint,
    load,
    make,
    save,
)
from kvbench_policies.gates.modules import RetentionGates

_BLOCK = 4096
"""Number of tokens, over all sequences, that pass a gate at once; its input is in float32."""


@dataclass(frozen=True)
class GateOutput(PerToken):
    """The gates' number for every token, computed when it enters the cache: float32 `[B, H, n]`.

    For retention gates it is `log beta`, 0 or less; for retaining heads the predicted logit.

    Attributes:
        kind: Kind of gates to look for.
        gates: Folder, shipped name or hub id of the gates, or None for the model's own.
    """

    kind: Kind
    gates: str | None = None

    def measure(
        self, layer: int, hidden: Tensor, key: Tensor, value: Tensor, model: ModelInfo
    ) -> Tensor:
        """Apply the layer's gate to new tokens, block by block.

        Raises:
            UserError: The model has no such gates, or they do not fit the model.
        """
        gates = held_gates(self.kind, self.gates, model, hidden.device, anew=layer == 0)
        assert isinstance(gates, RetentionGates)
        size = max(1, _BLOCK // hidden.shape[0])
        outputs = []
        for first in range(0, hidden.shape[1], size):
            block = slice(first, first + size)
            x, qkv = hidden[:, block], None
            if gates.config.input == "qkv":
                if model.project is None:
                    raise UserError(f"cannot read the projections of model {model.name}")
                qkv = model.project(layer, x)
            outputs.append(gates.score(layer, x, key[:, :, block], value[:, :, block], qkv))
        return torch.cat(outputs, -1)


_loaded: dict[tuple[Kind, str | None, str, torch.device], tuple[object, AnyGates]] = {}


def held_gates(
    kind: Kind, named: str | None, model: ModelInfo, device: torch.device, *, anew: bool
) -> AnyGates:
    """The gates of a model, in memory.

    Args:
        kind: Kind of gates to look for.
        named: Folder, shipped name or hub id of the gates, or None for the model's own.
        model: The model.
        device: Where they compute.
        anew: Whether to read them again if their files have changed.

    Raises:
        UserError: The model has no such gates, or they do not fit the model.
    """
    key = (kind, named, model.name, device)
    held = _loaded.get(key)
    if held is not None and not anew and not held[1].config.mismatch(model):
        return held[1]
    folder = find(model.name, kind, named)
    state = tuple(
        (folder / n).stat().st_mtime_ns for n in (CONFIG, WEIGHTS) if (folder / n).exists()
    )
    changed = (folder, state)
    if held is None or held[0] != changed or held[1].config.mismatch(model):
        held = (changed, _load(folder, kind, model).to(device))
        _loaded[key] = held
    return held[1]


def _load(folder: Path, kind: Kind, model: ModelInfo) -> AnyGates:
    """Load the gates of a folder; of different kinds only retention gates mix."""
    gates = load(folder, model)
    retention = ("trimkv", "dbtrimkv")
    if gates.config.kind not in (retention if kind in retention else (kind,)):
        wanted = " or ".join(retention) if kind in retention else kind
        raise UserError(
            f"the gates in {folder} are for {gates.config.kind}; name gates for {wanted}"
        )
    return gates


@dataclass(frozen=True)
class Learned(Score):
    """A score that reads learned gates.

    The gates are those that `gates` names, otherwise those that ship with kvbench for the model,
    otherwise the user's own, where `kvbench train gates` writes them.

    Attributes:
        gates: Folder, shipped name or hub id of gates, which are used as they are, or none.
    """

    kind: ClassVar[Kind] = "trimkv"
    gates: str | None = None

    @property
    def needs(self) -> frozenset[Need]:
        """The gates' number for every token."""
        return frozenset({self._need})

    @property
    def _need(self) -> GateOutput:
        return GateOutput(self.kind, self.gates)

    def learned(self, v: View) -> Tensor:
        """The gates' numbers for the entries, float32 `[B, H, n]`."""
        return v.obs[self._need]

    def fingerprint(self, model: str) -> str:
        """Digest of the gates' files; it joins the hash of a cell.

        Raises:
            UserError: There are none.
        """
        return fingerprint(model, self.kind, self.gates)

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        """Give a copy that reads random gates that fit a model (see `kvbench.plugin.Part`)."""
        return self.replace(gates=str(random_gates(self.kind, model, folder)))


def random_gates(kind: Kind, model: ModelInfo, folder: Path) -> Path:
    """Write random gates that tell tokens apart, the same at every call.

    Args:
        kind: Kind of the gates.
        model: The model that they must fit.
        folder: Folder in which they get a folder of their own, named after kind and shapes.
    """
    shapes = (model.layers, model.kv_heads, model.query_heads, model.head_dim, model.hidden_size)
    path = folder / "-".join(map(str, (kind, *shapes)))
    if not (path / CONFIG).is_file():
        config = GateConfig.of(kind, model, hidden_dim=16, bias=0.0, block=4, base_model="")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            gates = make(config)
            for weight in gates.parameters():
                if weight.dim() > 1:
                    weight.mul_(4.0)
        save(gates, path)
    return path
