"""What policies with learned gates have in common, and the need that the engine observes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.plugin import ModelInfo, Need, PerToken, Score, View
from kvbench_policies.gates.config import Kind
from kvbench_policies.gates.files import fingerprint
from kvbench_policies.gates.loaded import loaded, random_gates
from kvbench_policies.gates.modules import RetentionGates

_BLOCK = 4096
"""Number of tokens, over all sequences, that pass a gate at once; its input is in float32."""


@dataclass(frozen=True)
class GateOutput(PerToken):
    """The gates' number for every token, computed when it enters the cache: float32 `[B, H, n]`.

    For retention gates it is `log beta`, 0 or less; for retaining heads the predicted logit; for
    the surrogates of KVzap the predicted log of an attention.

    Attributes:
        kind: Kind of gates to look for.
        gates: Folder, shipped name or hub id of the gates, or None for the model's own.
    """

    kind: Kind
    gates: str | None = None

    def measure(self, layer: int, hidden: Tensor, key: Tensor, value: Tensor, model: ModelInfo) -> Tensor:
        """Apply the layer's gate to new tokens, block by block.

        Raises:
            UserError: The model has no such gates, or they do not fit the model.
        """
        gates = loaded(self.kind, self.gates, model, hidden.device, anew=layer == 0)
        assert isinstance(gates, RetentionGates)
        block_size = max(1, _BLOCK // hidden.shape[0])
        outputs = []
        for block_start in range(0, hidden.shape[1], block_size):
            block_slice = slice(block_start, block_start + block_size)
            block_hidden, projections = hidden[:, block_slice], None
            if gates.config.input == "qkv":
                if model.project is None:
                    raise UserError(f"cannot read the projections of model {model.name}")
                projections = model.project(layer, block_hidden)
            outputs.append(
                gates.score(
                    layer,
                    block_hidden,
                    key[:, :, block_slice],
                    value[:, :, block_slice],
                    projections,
                )
            )
        return torch.cat(outputs, -1)


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

    def learned(self, view: View) -> Tensor:
        """The gates' numbers for the entries, float32 `[B, H, n]`."""
        return view.obs[self._need]

    def fingerprint(self, model: str) -> str:
        """Digest of the gates' files; part of a cell's hash.

        Raises:
            UserError: There are none.
        """
        return fingerprint(model, self.kind, self.gates)

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        """Give a copy that reads random gates that fit a model (see `kvbench.plugin.Part`)."""
        return self.replace(gates=str(random_gates(self.kind, model, folder)))
