"""Q-filters on disk: one direction for every KV head of a model.

A folder with `model.safetensors`, as the authors of Q-Filters publish theirs on the hub: the tensor
`q_filters`, `[L, H, d]`, and in the header what it was made from.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvbench.artifacts import Artifacts, MadeFor
from kvbench.errors import UserError
from kvbench.files import cannot, write_whole

WEIGHTS = "model.safetensors"
KIND = ""
"""Filters come in one kind."""


@dataclass(frozen=True)
class FilterNotes:
    """What filters were made from.

    Attributes:
        model: The model as the user named it; "" if unknown.
        revision: Commit of the hub, or digest of the local weights; "" if unknown.
        task: Tasks whose prompts were read.
        lengths: Tokens of prompt and answer; 0 for data that is not sized.
        prompts: Number of prompts.
        queries: Queries per query head.
        seed: Seed of the data and of the draw of the queries.
        kvbench: Version of kvbench that made them.
    """

    model: str = ""
    revision: str = ""
    task: str = ""
    lengths: tuple[int, ...] = ()
    prompts: int = 0
    queries: int = 0
    seed: int = 0
    kvbench: str = ""


def save_filters(folder: Path, filters: Tensor, notes: FilterNotes) -> None:
    """Write filters `[L, H, d]` completely or not at all.

    Raises:
        UserError: The file cannot be written.
    """
    header = {"format": "pt", "kvbench": json.dumps(asdict(notes))}
    content = save({"q_filters": filters.float().contiguous()}, header)
    write_whole(folder / WEIGHTS, content)


def read_filters(folder: Path) -> tuple[Tensor, FilterNotes]:
    """Read and check filters, float32 `[L, H, d]` on the CPU.

    Raises:
        UserError: The file cannot be read or holds no filters; the message says why.
    """
    path = folder / WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            found = file.get_tensor("q_filters") if "q_filters" in file.keys() else None  # noqa: SIM118
    except OSError as error:
        raise cannot("read", path, error) from None
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if found is None or found.dim() != 3:
        raise UserError(f"{path} holds no Q-filters: no tensor q_filters of 3 axes")
    if not bool(found.isfinite().all()):
        raise UserError(f"{path} holds no Q-filters: a number is not finite")
    notes: dict[str, Any] = json.loads(header.get("kvbench", "{}"))
    notes["lengths"] = tuple(notes.get("lengths", ()))
    return found.float(), FilterNotes(**notes)


def _made_for(folder: Path) -> MadeFor:
    _, notes = read_filters(folder)
    return MadeFor(notes.model, notes.revision)


FILTERS = Artifacts(
    noun="Q-filters",
    option="filters",
    shipped=Path(__file__).resolve().parent / "shipped",
    folder="profiles",
    pattern="{model}.qfilters",
    command="kvbench profile qfilters --model {model}",
    made_for=_made_for,
    files=(WEIGHTS,),
)


def find_filters(model: str, named: str | None) -> Path:
    """Find the filters of a model: the named ones, the shipped ones, or the user's own.

    Args:
        model: `ModelInfo.name` or what `--model` names: `reference`, a folder or a hub id.
        named: Folder, shipped name or hub id of filters, whose model is not compared; or None.

    Raises:
        UserError: There are none; the message names the command that makes them.
    """
    return FILTERS.find(model, (KIND,), named)


def load_filters(model: str, named: str | None, shape: tuple[int, int, int]) -> Tensor:
    """Find and read the filters of a model, float32 `[L, H, d]`; a file is read once.

    Raises:
        UserError: There are none, they are damaged, or their shape is not that of the model.
    """
    folder = find_filters(model, named)
    state = (folder / WEIGHTS).stat()
    found = _read(folder, state.st_mtime_ns, state.st_size)
    if tuple(found.shape) != shape:
        layers, heads, dim = found.shape
        raise UserError(
            f"{folder} is for {layers} layers by {heads} KV heads of {dim} channels, but model "
            f"{model} has {shape[0]} by {shape[1]} of {shape[2]}; run {FILTERS.how(model, KIND)}"
        )
    return found


def filters_fingerprint(model: str, named: str | None) -> str:
    """16 hex digits of the content of the filters of a model.

    Raises:
        UserError: There are none, or they are damaged.
    """
    folder = find_filters(model, named)
    read_filters(folder)
    return FILTERS.digest(folder)


@functools.lru_cache(maxsize=16)
def _read(folder: Path, changed: int, size: int) -> torch.Tensor:
    return read_filters(folder)[0]
