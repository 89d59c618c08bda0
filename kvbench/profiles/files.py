"""Head profile files: content, validation, and the lookup of a model's profile."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kvbench.artifacts import Artifacts, MadeFor
from kvbench.errors import UserError, quoted
from kvbench.files import State, state_of

Kind = Literal["ablation", "reason", "copy"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of profiles that `kvbench profile heads` measures, in order of preference."""

CAUSES = "causes"
"""Kind of the profiles that `kvbench analyze causes` writes: policies read them where `profile` names them."""

_DIGITS = 9
"""Decimals of a stored profile, which is renormalised when read."""


@dataclass(frozen=True)
class HeadProfile:
    """How much each KV head contributes to a model's retrieval.

    Attributes:
        model: The model as the user named it.
        revision: Hub commit, or digest of local weights; "" if unknown.
        kind: `ablation`, `reason`, `copy` or `causes`.
        layers: Full-attention layers, `L`.
        kv_heads: KV heads per layer, `H`.
        query_heads: Query heads per layer.
        scores: `[L][H]`, 0 or more, summed over the group's query heads; they sum to 1.
        task: Task of the needles.
        lengths: Tokens of prompt and answer; 0 for data of natural length.
        samples: Maximum samples per task and length; of kind `causes`, all samples together.
        seed: Seed of the data.
        answered: Fraction of the samples that the model answered correctly.
        loss_top: Loss in nats per token without the heads that hold half of the profile; None if not measured.
        loss_others: The same without as many other heads.
        kvbench: Version of kvbench that wrote the file.
    """

    model: str
    revision: str
    kind: str
    layers: int
    kv_heads: int
    query_heads: int
    scores: tuple[tuple[float, ...], ...]
    task: str = ""
    lengths: tuple[int, ...] = ()
    samples: int = 0
    seed: int = 0
    answered: float | None = None
    loss_top: float | None = None
    loss_others: float | None = None
    kvbench: str = ""

    def save(self, path: Path) -> None:
        """Write the profile atomically.

        Raises:
            UserError: The file cannot be written.
        """
        content = asdict(self)
        content["scores"] = [[round(score, _DIGITS) for score in layer_scores] for layer_scores in self.scores]
        field_lines = [
            f"  {json.dumps(field_name)}: {_to_json(field_value)}" for field_name, field_value in content.items()
        ]
        temporary_path = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary_path.write_text("{\n" + ",\n".join(field_lines) + "\n}\n", encoding="utf-8")
            temporary_path.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary_path.unlink()
            raise UserError(f"cannot write {path}: {error.strerror}") from None


def _to_json(content: Any) -> str:
    """Format a value as JSON, a table with one line per row."""
    if isinstance(content, list):
        return "[\n" + ",\n".join(f"    {json.dumps(table_row)}" for table_row in content) + "\n  ]"
    return json.dumps(content)


def read(path: Path) -> HeadProfile:
    """Read and validate a profile.

    Raises:
        UserError: The file cannot be read or is not a valid profile.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the head profile {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not a head profile: it is not JSON") from None
    problem = _find_problem(content)
    if problem:
        raise UserError(f"{path} is not a head profile: {problem}")
    score_sum = math.fsum(score for row in content["scores"] for score in row)
    return HeadProfile(
        model=str(content.get("model", "")),
        revision=str(content.get("revision", "")),
        kind=content["kind"],
        layers=content["layers"],
        kv_heads=content["kv_heads"],
        query_heads=content["query_heads"],
        scores=tuple(tuple(score / score_sum for score in row) for row in content["scores"]),
        task=str(content.get("task", "")),
        lengths=tuple(content.get("lengths") or ()),
        samples=content.get("samples", 0),
        seed=content.get("seed", 0),
        answered=content.get("answered"),
        loss_top=content.get("loss_top"),
        loss_others=content.get("loss_others"),
        kvbench=str(content.get("kvbench", "")),
    )


def _find_problem(content: Any) -> str:
    """Return why a JSON value is not a profile, or ""."""
    if not isinstance(content, Mapping):
        return "it is not a JSON object"
    if content.get("kind") not in (*KINDS, CAUSES):
        return f"its kind is {quoted(content.get('kind'))} instead of {' or '.join((*KINDS, CAUSES))}"
    for field_name in ("layers", "kv_heads", "query_heads"):
        field_value = content.get(field_name)
        if not isinstance(field_value, int) or isinstance(field_value, bool) or field_value < 1:
            return f"{field_name} is {quoted(field_value)} instead of a whole number, 1 or more"
    layers, kv_heads, query_heads = (content[shape_name] for shape_name in ("layers", "kv_heads", "query_heads"))
    if query_heads % kv_heads:
        return f"{query_heads} query heads is not a multiple of {kv_heads} KV heads"
    scores = content.get("scores")
    score_rows = scores if isinstance(scores, list) else []
    if len(score_rows) != layers or any(
        not isinstance(score_row, list) or len(score_row) != kv_heads for score_row in score_rows
    ):
        return f"its scores are not a table of {layers} layers by {kv_heads} KV heads"
    lengths = content.get("lengths", [])
    if not isinstance(lengths, list) or any(not isinstance(entry, int) for entry in lengths):
        return f"lengths is {quoted(lengths)} instead of a list of whole numbers"
    flat_scores = [entry for row in score_rows for entry in row]
    if any(not isinstance(entry, int | float) or isinstance(entry, bool) for entry in flat_scores):
        return "a score is not a number"
    if any(not math.isfinite(entry) or entry < 0 for entry in flat_scores):
        return "a score is below 0 or not finite"
    score_sum = math.fsum(flat_scores)
    if abs(score_sum - 1) > 1e-3:
        return f"its scores sum to {score_sum:.6g} instead of 1"
    return ""


def _made_for(path: Path) -> MadeFor:
    profile = read(path)
    return MadeFor(profile.model, profile.revision)


PROFILES = Artifacts(
    noun="head profile",
    option="profile",
    shipped=Path(__file__).resolve().parent / "shipped",
    folder="profiles",
    pattern="{model}.{kind}.json",
    command="kvbench profile heads --model {model} --kind {kind}",
    made_for=_made_for,
)


def find(model: str, kind: str | None, profile: str | None = None) -> Path:
    """Find the profile of a model: the file named, the shipped one, or the user's own.

    Args:
        model: `ModelInfo.name` or what `--model` names: `reference`, a folder or a hub id.
        kind: One of `KINDS`; None uses the first that exists.
        profile: Path of a profile, whose kind and model are not checked; or None.

    Raises:
        UserError: No profile was found; the message names the command that creates it.
    """
    return PROFILES.find(model, _kinds(kind), profile)


def load(model: str, kind: str | None, profile: str | None, layers: int, kv_heads: int) -> HeadProfile:
    """Find, read and validate the profile of a model; an unchanged file is read once.

    Args:
        model: As in `find`.
        kind: As in `find`.
        profile: As in `find`.
        layers: Full-attention layers of the model.
        kv_heads: KV heads per layer.

    Raises:
        UserError: The profile is missing, damaged or made for another model.
    """
    path = find(model, kind, profile)
    loaded = _read(path, state_of(path))
    if (loaded.layers, loaded.kv_heads) != (layers, kv_heads):
        raise UserError(
            f"{path} is for {loaded.layers} layers by {loaded.kv_heads} KV heads, but model "
            f"{model} has {layers} by {kv_heads}; run {PROFILES.how(model, _kinds(kind)[0])}"
        )
    return loaded


def fingerprint(model: str, kind: str | None, profile: str | None) -> str:
    """Return a 16-digit hex digest of the file that `find` returns.

    Raises:
        UserError: No profile was found, or it is not valid.
    """
    path = find(model, kind, profile)
    read(path)
    return PROFILES.digest(path)


def _kinds(kind: str | None) -> Sequence[str]:
    return KINDS if kind is None else (kind,)


@functools.lru_cache(maxsize=16)
def _read(path: Path, state: State) -> HeadProfile:
    return read(path)
