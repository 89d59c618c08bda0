"""The two measured tables of a perturbation analysis: a row per query head, a row per layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvbench.analysis.perturbation.measure import Perturbed, Seen
from kvbench.harness.protocol import Request
from kvbench.runs.cell import Cell


class Measured(NamedTuple):
    """One question in one layer.

    Attributes:
        question: The question.
        tokens: Entries that its query sees with the full cache.
        layer: The layer's index among the full-attention layers.
        seen: What the query sees there.
        full: The attention block's output with the full cache, `[d_model]`.
        cells: For every cell, what it perturbs and the block's output in a forward on its cache.
    """

    question: Request
    tokens: int
    layer: int
    seen: Seen
    full: Tensor
    cells: list[tuple[Cell, Perturbed, Tensor]]


class Rows:
    """Collects rows as arrays, one set of arrays for each layer measured."""

    def __init__(self) -> None:
        self._heads: list[dict[str, Any]] = []
        self._layers: list[dict[str, Any]] = []

    def add(self, query: str, layer_ids: Sequence[int], measured: Iterable[Measured]) -> None:
        """Add what `kvbench.analysis.perturbation.probe.Probe.context` yields.

        Args:
            query: Which query was measured.
            layer_ids: The model's own index of each full-attention layer.
            measured: The numbers.
        """
        for question, tokens, layer, seen, full, cells in measured:
            for cell, found, forwarded in cells:
                where = {
                    "cell": cell.cell,
                    **{name: cell.labels[name] for name in ("model", "task", "length", "moment")},
                    "query": query,
                    **{name: cell.labels[name] for name in ("policy", "budget")},
                    "sample_id": question.sample_id,
                    "question_id": question.question_id,
                    "context_id": question.context_id,
                    "layer": layer_ids[layer],
                    "tokens": tokens,
                }
                numbers = {name: x.cpu().numpy() for name, x in found.heads.items()}
                numbers["output"] = seen.head_output.cpu().numpy()
                self._heads.append({**where, "group": seen.group, **numbers})
                moved = (full - forwarded.to(full.device)).abs().sum()
                norms = [found.change.abs().sum(), seen.output.abs().sum(), moved, full.abs().sum()]
                names = ("l1", "output", "l1_forward", "output_forward")
                self._layers.append(
                    where | dict(zip(names, torch.stack(norms).tolist(), strict=True))
                )

    def heads(self) -> dict[str, Any]:
        """The columns of the table of heads."""
        if not self._heads:
            return {}
        sizes = [len(block["l1"]) for block in self._heads]
        head = [np.arange(n, dtype=np.int32) for n in sizes]
        kv_head = [h // b["group"] for h, b in zip(head, self._heads, strict=True)]
        columns: dict[str, Any] = {}
        for name, example in self._heads[0].items():
            if isinstance(example, np.ndarray):
                columns[name] = np.concatenate([b[name] for b in self._heads])
            elif name != "group":
                columns[name] = _repeated([b[name] for b in self._heads], sizes)
            if name == "layer":
                columns["head"] = np.concatenate(head)
                columns["kv_head"] = np.concatenate(kv_head).astype(np.int32)
        columns["entries"] = columns["entries"].astype(np.int32)
        return columns

    def layers(self) -> dict[str, Any]:
        """The columns of the table of layers."""
        if not self._layers:
            return {}
        return {name: [row[name] for row in self._layers] for name in self._layers[0]}


def _repeated(values: list[Any], sizes: list[int]) -> Any:
    """Repeat each block's value for its rows; text becomes categories, which save memory."""
    if not isinstance(values[0], str):
        return np.repeat(np.array(values, dtype=np.int32), sizes)
    codes, names = pd.factorize(np.array(values, dtype=object))
    return pd.Categorical.from_codes(np.repeat(codes, sizes), categories=pd.Index(names))
