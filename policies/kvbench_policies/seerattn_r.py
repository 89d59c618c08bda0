"""SeerAttention-R: learned gates select the blocks that each query reads.

Gao, Guo, Cao and others: SeerAttention-R: Sparse Attention Adaptation for Long Reasoning, arXiv 2506.08889, sections
2.2 and 3. The paper reads 4096 entries in blocks of 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Blocks, ModelInfo, Policy, Reader
from kvbench_policies.gates.block_gates import BlockGates
from kvbench_policies.gates.config import Kind
from kvbench_policies.gates.files import fingerprint
from kvbench_policies.gates.loaded import loaded, random_gates


@dataclass(frozen=True)
class BlockGate(Reader):
    """`q k / sqrt(d_gate)`, where `q` and `k` are linear maps of the group's queries and a block's pooled keys.

    The maps are applied before RoPE, and RoPE to their outputs: at a query's own position, and at the position of a
    block's first entry. Keys are pooled by maximum, minimum and mean. The gates are trained to predict the largest
    attention weight of every block, for a fixed block size.

    The gates are those named by `gates`, else those that ship with kvbench for the model, else the user's own, as
    written by `kvbench train gates`.

    Attributes:
        gates: Folder, shipped name or hub id of the gates; None finds the model's own.
        dense_layers: Number of first layers in which a query reads all entries.
    """

    name: ClassVar[str] = "seerattn_r"
    kind: ClassVar[Kind] = "seerattn_r"
    gates: str | None = None

    def block(self, model: ModelInfo) -> int:
        """Return the entries per block."""
        return self._held(model).block

    def summary(self, model: ModelInfo) -> int:
        """Return the size of a block's summary."""
        return self._held(model).config.gate_dim

    def rate(self, v: Blocks) -> Tensor:
        """Rate the blocks, float32 `[H, n, K]`."""
        return self._held(v.model, v.key.device, anew=v.layer == 0).rate(v)

    def _held(self, model: ModelInfo, device: torch.device | None = None, *, anew: bool = False) -> BlockGates:
        target_device = torch.device("cpu") if device is None else device
        gates = loaded(self.kind, self.gates, model, target_device, anew=anew)
        assert isinstance(gates, BlockGates)
        return gates

    def fingerprint(self, model: str) -> str:
        """Return the digest of the gates' files, part of a cell's hash.

        Raises:
            UserError: No gates were found.
        """
        return fingerprint(model, self.kind, self.gates)

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        """Return a copy that uses random gates for the model (see `kvbench.plugin.Part`)."""
        return self.replace(gates=str(random_gates(self.kind, model, folder)))


SEERATTN_R = Policy(
    name="seerattn_r",
    score=None,
    allocate=Uniform(),
    select=TopK(),
    read=BlockGate(),
    summary="holds everything; a learned gate selects the blocks that each query reads",
    paper="arXiv 2506.08889, sections 2.2 and 3",
    moments=("question",),
    cost="no eviction; per query O(H_q d d_gate + H T d_gate / block), memory O(H T d_gate / "
    "block); kvbench pools the keys again for every query, in O(H T d)",
)
