"""Query summaries measured once per model: Q-filters, and mean and covariance.

A summary is a folder with `model.safetensors`, in the format that the methods' authors publish on the hub, with
provenance in its header.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvbench.artifacts import Artifacts, MadeFor
from kvbench.errors import UserError
from kvbench.files import State, cannot, state_of, write_whole

WEIGHTS = "model.safetensors"
KIND = ""
"""Query summaries have only one kind."""

Tensors: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class SummaryNotes:
    """Provenance of a summary.

    Attributes:
        model: The model as the user named it; "" if unknown.
        revision: Hub commit, or digest of local weights; "" if unknown.
        task: Tasks of the prompts.
        lengths: Tokens of prompt and answer; 0 for data of natural length.
        prompts: Number of prompts.
        queries: Queries per query head.
        seed: Seed of the data and of the sampled queries.
        kvbench: Version of kvbench that wrote the file.
    """

    model: str = ""
    revision: str = ""
    task: str = ""
    lengths: tuple[int, ...] = ()
    prompts: int = 0
    queries: int = 0
    seed: int = 0
    kvbench: str = ""


@dataclass(frozen=True)
class QuerySummary:
    """Type of query summary.

    Attributes:
        noun: Name in messages.
        option: Policy parameter that names a summary.
        name: Name in the command `kvbench profile NAME` and in the folder suffix `.NAME`.
        axes: Number of axes per tensor name.
    """

    noun: str
    option: str
    name: str
    axes: Mapping[str, int] = field(hash=False)

    @functools.cached_property
    def artifacts(self) -> Artifacts:
        """Search locations."""
        return Artifacts(
            noun=self.noun,
            option=self.option,
            shipped=Path(__file__).resolve().parent / "shipped",
            folder="profiles",
            pattern=f"{{model}}.{self.name}",
            command=f"kvbench profile {self.name} --model {{model}}",
            made_for=self._made_for,
            files=(WEIGHTS,),
        )

    def save(self, folder: Path, tensors: Tensors, notes: SummaryNotes) -> None:
        """Write a summary atomically.

        Raises:
            UserError: The file cannot be written.
        """
        metadata = {"format": "pt", "kvbench": json.dumps(asdict(notes))}
        serialised = save({tensor_name: tensors[tensor_name].contiguous() for tensor_name in self.axes}, metadata)
        write_whole(folder / WEIGHTS, serialised)

    def read(self, folder: Path) -> tuple[Tensors, SummaryNotes]:
        """Read and validate a summary: float32 on the CPU.

        Raises:
            UserError: The file cannot be read or holds no valid summary.
        """
        path = folder / WEIGHTS
        try:
            with safe_open(path, "pt") as handle:
                metadata = handle.metadata() or {}
                stored_names = set(handle.keys()) & set(self.axes)
                tensors = {tensor_name: handle.get_tensor(tensor_name).float() for tensor_name in stored_names}
        except OSError as error:
            raise cannot("read", path, error) from None
        except SafetensorError as error:
            raise UserError(f"{path} is damaged: {error}") from None
        for tensor_name, axis_count in self.axes.items():
            if tensor_name not in tensors or tensors[tensor_name].dim() != axis_count:
                raise UserError(f"{path} holds no {self.noun}: no tensor {tensor_name} of {axis_count} axes")
            if not bool(tensors[tensor_name].isfinite().all()):
                raise UserError(f"{path} holds no {self.noun}: a number is not finite")
        try:
            notes: dict[str, Any] = json.loads(metadata.get("kvbench", "{}"))
            notes["lengths"] = tuple(notes.get("lengths", ()))
            return tensors, SummaryNotes(**notes)
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{path} holds no {self.noun}: its notes cannot be read") from None

    def _made_for(self, folder: Path) -> MadeFor:
        _, notes = self.read(folder)
        return MadeFor(notes.model, notes.revision)

    def find(self, model: str, named: str | None) -> Path:
        """Find the summary of a model: the one named, the shipped one, or the user's own.

        Args:
            model: `ModelInfo.name` or what `--model` names: `reference`, a folder or a hub id.
            named: Folder, shipped name or hub id, whose model is not checked; or None.

        Raises:
            UserError: No summary was found; the message names the command that creates it.
        """
        return self.artifacts.find(model, (KIND,), named)

    def load(self, model: str, named: str | None, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        """Find and read the summary of a model, float32; a file is read once.

        Raises:
            UserError: The summary is missing, damaged, or has another model's shapes.
        """
        folder = self.find(model, named)
        tensors = _read(self, folder, state_of(folder / WEIGHTS))
        for tensor_name, shape in shapes.items():
            if tuple(tensors[tensor_name].shape) != shape:
                stored_shape, model_shape = (
                    f"{dimensions[0]} layers by {dimensions[1]} heads of {dimensions[2]} channels"
                    for dimensions in (tensors[tensor_name].shape, shape)
                )
                raise UserError(
                    f"{folder} is for {stored_shape}, but model {model} has {model_shape}; run "
                    f"{self.artifacts.how(model, KIND)}"
                )
        return tensors

    def fingerprint(self, model: str, named: str | None) -> str:
        """Return a 16-digit hex digest of a model's summary.

        Raises:
            UserError: The summary is missing or damaged.
        """
        folder = self.find(model, named)
        self.read(folder)
        return self.artifacts.digest(folder)


FILTERS = QuerySummary("Q-filters", "filters", "qfilters", {"q_filters": 3})
"""`q_filters`, `[L, H, d]`: one direction per KV head (arXiv 2503.02812)."""

STATISTICS = QuerySummary("query statistics", "statistics", "queries", {"query_mean": 3, "query_cov": 4})
"""Queries before RoPE: `query_mean`, `[L, H_q, d]`, and `query_cov`, `[L, H_q, d, d]`.

The names are those of kvpress, which computes them for ExpectedAttention (arXiv 2510.00636).
"""


@functools.lru_cache(maxsize=16)
def _read(summary: QuerySummary, folder: Path, state: State) -> Tensors:
    return summary.read(folder)[0]
