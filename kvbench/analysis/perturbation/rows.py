"""Tables measured by a perturbation analysis: a row per query head, a row per layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvbench.analysis.perturbation.head_outputs import FullCacheQuery, Perturbed
from kvbench.harness.protocol import Request
from kvbench.runs.cell import Cell


class QuestionRow(NamedTuple):
    """One question in one layer.

    Attributes:
        question: The question.
        tokens: Entries visible to its query with the full cache.
        layer: Index among the full-attention layers.
        full_query: The query with the full cache.
        full_output: Output of the attention block with the full cache, `[d_model]`.
        cells: Per cell, the perturbation and the block's output in a forward pass on its cache.
    """

    question: Request
    tokens: int
    layer: int
    full_query: FullCacheQuery
    full_output: Tensor
    cells: list[tuple[Cell, Perturbed, Tensor]]


class Rows:
    """Collector of rows as arrays, one set per layer measured."""

    def __init__(self) -> None:
        self._heads: list[dict[str, Any]] = []
        self._layers: list[dict[str, Any]] = []

    def add(self, query: str, layer_ids: Sequence[int], measured: Iterable[QuestionRow]) -> None:
        """Add the output of `kvbench.analysis.perturbation.probe.Probe.context`.

        Args:
            query: Query that was measured.
            layer_ids: The model's index of each full-attention layer.
            measured: Measured values.
        """
        for question, tokens, layer_index, full_query, full_output, cells in measured:
            for cell, perturbed, cell_output in cells:
                labels = {
                    "cell": cell.cell,
                    **{column: cell.labels[column] for column in ("model", "task", "length", "moment")},
                    "query": query,
                    **{column: cell.labels[column] for column in ("policy", "budget")},
                    "sample_id": question.sample_id,
                    "question_id": question.question_id,
                    "context_id": question.context_id,
                    "layer": layer_ids[layer_index],
                    "tokens": tokens,
                }
                head_row = {column: tensor.cpu().numpy() for column, tensor in perturbed.heads.items()}
                head_row["output"] = full_query.head_output.cpu().numpy()
                self._heads.append({**labels, "group": full_query.group, **head_row})
                output_change = (full_output - cell_output.to(full_output.device)).abs().sum()
                norms = [
                    perturbed.change.abs().sum(),
                    full_query.output.abs().sum(),
                    output_change,
                    full_output.abs().sum(),
                ]
                norm_names = ("l1", "output", "l1_forward", "output_forward")
                self._layers.append(labels | dict(zip(norm_names, torch.stack(norms).tolist(), strict=True)))

    def heads(self) -> dict[str, Any]:
        """Return the columns of the table of heads."""
        if not self._heads:
            return {}
        block_sizes = [len(block["l1"]) for block in self._heads]
        head_indices = [np.arange(block_size, dtype=np.int32) for block_size in block_sizes]
        kv_head_indices = [
            head_index // layer_block["group"]
            for head_index, layer_block in zip(head_indices, self._heads, strict=True)
        ]
        columns: dict[str, Any] = {}
        for column, example in self._heads[0].items():
            if isinstance(example, np.ndarray):
                columns[column] = np.concatenate([layer_block[column] for layer_block in self._heads])
            elif column != "group":
                columns[column] = _repeated([layer_block[column] for layer_block in self._heads], block_sizes)
            if column == "layer":
                columns["head"] = np.concatenate(head_indices)
                columns["kv_head"] = np.concatenate(kv_head_indices).astype(np.int32)
        columns["entries"] = columns["entries"].astype(np.int32)
        return columns

    def layers(self) -> dict[str, Any]:
        """Return the columns of the table of layers."""
        if not self._layers:
            return {}
        return {column: [record[column] for record in self._layers] for column in self._layers[0]}


def _repeated(values: list[Any], sizes: list[int]) -> Any:
    """Repeat each block's value for its rows; text becomes categories, which save memory."""
    if not isinstance(values[0], str):
        return np.repeat(np.array(values, dtype=np.int32), sizes)
    codes, categories = pd.factorize(np.array(values, dtype=object))
    return pd.Categorical.from_codes(np.repeat(codes, sizes), categories=pd.Index(categories))
