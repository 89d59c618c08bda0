"""Head profiles on disk: what is in one, where the one of a model is, whether it fits."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kvbench.errors import UserError

Kind = Literal["reason", "copy"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SHIPPED = Path(__file__).resolve().parent / "shipped"
"""Profiles that come with kvbench: `<folder name of the model>.<kind>.json`."""

_DIGITS = 9
"""A profile is stored to so many decimals; they are renormalised when it is read."""


@dataclass(frozen=True)
class HeadProfile:
    """How much of a model's retrieval every KV head does.

    Attributes:
        model: As the user named it.
        revision: Commit of the hub, or digest of the local weights; "" where unknown.
        kind: `reason` or `copy`.
        layers: Full-attention layers, `L`.
        kv_heads: KV heads of a layer, `H`.
        query_heads: Query heads of a layer.
        scores: `[L][H]`, 0 or more, summed over the group's query heads; together they are 1.
        task: Where the needles are from.
        lengths: Tokens of prompt and answer; 0 for data that is not sized.
        samples: Per task and length, at most.
        seed: Of the data.
        answered: Share of the samples that the model answered rightly.
        kvbench: Version that made it.
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
    kvbench: str = ""

    def save(self, path: Path) -> None:
        """Write the profile, at once or not at all.

        Raises:
            UserError: The file cannot be written.
        """
        content = asdict(self)
        content["scores"] = [[round(x, _DIGITS) for x in row] for row in self.scores]
        fields = [f"  {json.dumps(key)}: {_spelled(value)}" for key, value in content.items()]
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise UserError(f"cannot write {path}: {error.strerror}") from None


def _spelled(value: Any) -> str:
    """A value as JSON; a table has a line for every row."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"
    return json.dumps(value)


def read(path: Path) -> HeadProfile:
    """Read and check a profile.

    Raises:
        UserError: The file cannot be read or is no profile; it says what is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the head profile {path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path} is no head profile: it is not JSON") from None
    wrong = _wrong(content)
    if wrong:
        raise UserError(f"{path} is no head profile: {wrong}")
    total = math.fsum(x for row in content["scores"] for x in row)
    return HeadProfile(
        model=str(content.get("model", "")),
        revision=str(content.get("revision", "")),
        kind=content["kind"],
        layers=content["layers"],
        kv_heads=content["kv_heads"],
        query_heads=content["query_heads"],
        scores=tuple(tuple(x / total for x in row) for row in content["scores"]),
        task=str(content.get("task", "")),
        lengths=tuple(content.get("lengths") or ()),
        samples=content.get("samples", 0),
        seed=content.get("seed", 0),
        answered=content.get("answered"),
        kvbench=str(content.get("kvbench", "")),
    )


def _wrong(content: Any) -> str:
    """What keeps a JSON value from being a profile; "" where nothing does."""
    if not isinstance(content, Mapping):
        return "a JSON object would be right"
    if content.get("kind") not in KINDS:
        return f"its kind is {content.get('kind')!r}; {' or '.join(KINDS)} would be right"
    for key in ("layers", "kv_heads", "query_heads"):
        value = content.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return f"{key} is {value!r}; a whole number, 1 or more, would be right"
    layers, heads, query_heads = (content[k] for k in ("layers", "kv_heads", "query_heads"))
    if query_heads % heads:
        return f"{query_heads} query heads do not divide among {heads} KV heads"
    scores = content.get("scores")
    rows = scores if isinstance(scores, list) else []
    if len(rows) != layers or any(not isinstance(r, list) or len(r) != heads for r in rows):
        return f"its scores are not a table of {layers} layers by {heads} KV heads"
    lengths = content.get("lengths", [])
    if not isinstance(lengths, list) or any(not isinstance(x, int) for x in lengths):
        return f"lengths is {lengths!r}; a list of whole numbers would be right"
    flat = [x for row in rows for x in row]
    if any(not isinstance(x, int | float) or isinstance(x, bool) for x in flat):
        return "a score is no number"
    if any(not math.isfinite(x) or x < 0 for x in flat):
        return "a score is below 0 or not finite"
    total = math.fsum(flat)
    if abs(total - 1) > 1e-3:
        return f"its scores sum to {total:.6g}; 1 would be right"
    return ""


# --- which file ---------------------------------------------------------------------------------


def slug(model: str) -> str:
    """The name of a model's files: of its hub id, or of its folder and where that lies."""
    folder = _folder(model)
    name = model if folder is None else folder.name
    text = re.sub(r"[^A-Za-z0-9._]+", "--", name).strip("-") or "model"
    if folder is None:
        return text
    return f"{text}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def user_path(model: str, kind: str) -> Path:
    """Where `kvbench profile heads` writes: in the user's cache."""
    from kvbench.files import cache_dir

    return cache_dir() / "profiles" / f"{slug(model)}.{kind}.json"


def shipped_path(model: str, kind: str) -> Path | None:
    """The profile that comes with kvbench, if the model is one that comes with it."""
    folder = _folder(model)
    if folder is None:
        return None
    path = SHIPPED / f"{folder.name}.{kind}.json"
    return path if path.is_file() and _fits(folder, path) else None


def find(model: str, kind: str, profile: str | None = None) -> Path:
    """Find the profile of a model: the file that is named, the shipped one, the user's own.

    Args:
        model: `ModelInfo.name` or what `--model` names: `reference`, a folder or a hub id.
        kind: `reason` or `copy`; a file that is named is taken as it is.
        profile: Path of a profile, or None.

    Raises:
        UserError: There is none; it says which command makes it.
    """
    if profile is not None:
        path = Path(profile).expanduser()
        if not path.is_file():
            raise UserError(f"profile={profile}: no such file")
        return path
    shipped = shipped_path(model, kind)
    if shipped is not None:
        return shipped
    path = user_path(model, kind)
    if not path.is_file():
        raise UserError(
            f"model {model} has no {kind} head profile: {_command(model, kind)} it "
            "(profile=FILE names another)"
        )
    return path


def load(model: str, kind: str, profile: str | None, layers: int, kv_heads: int) -> HeadProfile:
    """Find, read and check the profile of a model; a file that has not changed is read once.

    Args:
        model: As in `find`.
        kind: As in `find`.
        profile: As in `find`.
        layers: Full-attention layers of the model.
        kv_heads: KV heads of a layer.

    Raises:
        UserError: There is none, it is damaged, or it was made for another model.
    """
    path = find(model, kind, profile)
    state = path.stat()
    found = _read(path, state.st_mtime_ns, state.st_size)
    if (found.layers, found.kv_heads) != (layers, kv_heads):
        raise UserError(
            f"{path} is of {found.layers} layers by {found.kv_heads} KV heads, model {model} has "
            f"{layers} by {kv_heads}: {_command(model, kind)} its own"
        )
    folder = _folder(model)
    if profile is None and folder is not None and not _fits(folder, path):
        raise UserError(f"{path} is of other weights of {model}: {_command(model, kind)} it anew")
    return found


def fingerprint(model: str, kind: str, profile: str | None) -> str:
    """16 hex digits of the content of the file that `find` gives.

    Raises:
        UserError: There is none, or it is no profile.
    """
    path = find(model, kind, profile)
    read(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _command(model: str, kind: str) -> str:
    option = "" if kind == KINDS[0] else f" --kind {kind}"
    return f"`kvbench profile heads --model {model}{option}` makes"


def _folder(model: str) -> Path | None:
    """The folder of a local model, resolved; None for one of the hub."""
    from kvbench import reference

    folder = reference.path() if model == "reference" else Path(model).expanduser()
    return folder.resolve() if folder.is_dir() else None


def _fits(folder: Path, path: Path) -> bool:
    """Whether a local model has the weights that a profile was measured on."""
    return _compared(folder, path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _compared(folder: Path, path: Path, changed: int) -> bool:
    from kvbench import reference
    from kvbench.engine.loading import model_digest

    if path.parent == SHIPPED and folder.parent == reference.path().parent:
        return True  # weights never change under the same name
    revision = read(path).revision
    return not revision or revision == model_digest(str(folder))


@functools.lru_cache(maxsize=16)
def _read(path: Path, changed: int, size: int) -> HeadProfile:
    return read(path)
