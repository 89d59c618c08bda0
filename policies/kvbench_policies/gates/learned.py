"""Base score of policies with learned gates, and the observation it requires."""

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
"""Tokens per gate call, over all sequences; limits the float32 copy of the input."""


@dataclass(frozen=True)
class GateOutput(PerToken):
    """Gate output per token, computed when the token enters the cache: float32 `[B, H, n]`.

    For retention gates this is `log beta`, 0 or less; for retaining heads the predicted logit; for KVzap's surrogates
    the predicted log of an attention weight.

    Attributes:
        kind: Kind of gates.
        gates: Folder, shipped name or hub id of the gates, or None for the model's own.
    """

    kind: Kind
    gates: str | None = None

    def measure(self, layer: int, hidden: Tensor, key: Tensor, value: Tensor, model: ModelInfo) -> Tensor:
        """Apply the layer's gate to new tokens, one block at a time.

        Raises:
            UserError: No gates were found, or they do not fit the model.
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
    """Score from learned gates.

    The gates are those named by `gates`, else those that ship with kvbench for the model, else the user's own, as
    written by `kvbench train gates`.

    Attributes:
        gates: Folder, shipped name or hub id of the gates; None finds the model's own.
    """

    kind: ClassVar[Kind] = "trimkv"
    gates: str | None = None

    @property
    def needs(self) -> frozenset[Need]:
        """Gate output per token."""
        return frozenset({self._need})

    @property
    def _need(self) -> GateOutput:
        return GateOutput(self.kind, self.gates)

    def learned(self, view: View) -> Tensor:
        """Return the gate output per entry, float32 `[B, H, n]`."""
        return view.obs[self._need]

    def fingerprint(self, model: str) -> str:
        """Return the digest of the gates' files, part of a cell's hash.

        Raises:
            UserError: No gates were found.
        """
        return fingerprint(model, self.kind, self.gates)

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        """Return a copy that uses random gates for the model (see `kvbench.plugin.Part`)."""
        return self.replace(gates=str(random_gates(self.kind, model, folder)))
