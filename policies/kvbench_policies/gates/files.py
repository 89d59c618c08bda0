"""Gates on disk: `gates.json` and `gates.safetensors` in a folder; where those of a model are.

Nothing is ever unpickled. The base model's weights are not among the gates'.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvbench.errors import UserError
from kvbench.plugin import ModelInfo
from kvbench.profiles.files import slug
from kvbench_policies.gates.config import GateConfig, Kind
from kvbench_policies.gates.modules import RetentionGates, build

CONFIG = "gates.json"
WEIGHTS = "gates.safetensors"
SHIPPED = Path(__file__).resolve().parent / "shipped"
"""Gates that come with kvbench: `<folder name of the model>-<kind>`."""


def save(gates: RetentionGates, folder: str | Path) -> Path:
    """Write gates into a folder, which is made where it is missing; each file at once or not.

    Args:
        gates: On any device; they are stored in float32.
        folder: Where to.

    Returns:
        The folder.

    Raises:
        UserError: It cannot be written, or a weight is not finite.
    """
    folder = Path(folder).expanduser()
    state = {k: v.detach().float().cpu().contiguous() for k, v in gates.state_dict().items()}
    bad = _not_finite(state)
    if bad:
        raise UserError(f"the gates are not saved: {bad} is not finite")
    weights, config = (folder / f".{name}.{os.getpid()}" for name in (WEIGHTS, CONFIG))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(state, weights, metadata={"format": "pt"})
        config.write_text(gates.config.to_json(), encoding="utf-8")
        weights.replace(folder / WEIGHTS)
        config.replace(folder / CONFIG)
    except (OSError, SafetensorError) as error:
        for part in (weights, config):
            with suppress(OSError):
                part.unlink()
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot write gates to {folder}: {reason}") from None
    return folder


def load(source: str | Path, model: ModelInfo | None = None) -> RetentionGates:
    """Read and check gates.

    Args:
        source: A folder, the name of gates that ship with kvbench, or a hub id
            (`organisation/name`, or `organisation/name@revision`).
        model: What they must fit, where it is given.

    Returns:
        Gates on the CPU, in float32, that take no gradient.

    Raises:
        UserError: There are none, they are damaged, or they are of another model.
    """
    folder = locate(source)
    config = GateConfig.read(folder / CONFIG)
    wrong = "" if model is None else config.mismatch(model)
    if wrong:
        raise UserError(f"the gates in {folder} are {wrong}: gates of that model would be right")
    with torch.random.fork_rng(devices=[]):
        gates = build(config)
    gates.load_state_dict(_weights(folder / WEIGHTS, gates.state_dict()))
    return gates.eval().requires_grad_(False)


def _weights(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a file, all there and of the shapes expected."""
    try:
        state: dict[str, Tensor] = load_file(path)
    except OSError as error:
        raise UserError(f"cannot read the gates {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise UserError(f"{path} is no safetensors file: {str(error).splitlines()[0]}") from None
    odd = sorted(set(state) ^ set(expected))
    if odd:
        what = "is missing" if odd[0] in expected else f"is none of what {CONFIG} describes"
        raise UserError(f"{path}: tensor {odd[0]} {what}")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{path}: tensor {name} is {list(tensor.shape)}, {CONFIG} says "
                f"{list(expected[name].shape)}"
            )
    bad = _not_finite(state)
    if bad:
        raise UserError(f"{path}: tensor {bad} is not finite")
    return {name: tensor.float() for name, tensor in state.items()}


def _not_finite(state: Mapping[str, Tensor]) -> str:
    """Name of a tensor that holds something else than numbers; "" where none does."""
    odd = (n for n, x in state.items() if not (x.is_floating_point() and bool(x.isfinite().all())))
    return next(odd, "")


# --- which folder -------------------------------------------------------------------------------


def locate(source: str | Path) -> Path:
    """The folder that holds gates: a folder, a shipped name, or one fetched from the hub.

    Raises:
        UserError: There is none.
    """
    text = str(source)
    folder = Path(text).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise UserError(f"gates={text}: no {CONFIG} in that folder")
        return folder
    if folder.is_file():
        raise UserError(f"gates={text} is a file: the folder that holds {CONFIG} would be right")
    if re.fullmatch(r"[\w.-]+", text) and (SHIPPED / text / CONFIG).is_file():
        return SHIPPED / text
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", text) and not text.startswith("."):
        return _fetched(text)
    raise UserError(f"gates={text}: no such folder")


@functools.cache
def _fetched(text: str) -> Path:
    """Files of a hub repository, in the hub's own cache."""
    from huggingface_hub import hf_hub_download

    name, _, revision = text.partition("@")
    try:
        found = [hf_hub_download(name, f, revision=revision or None) for f in (WEIGHTS, CONFIG)]
    except Exception as error:  # the hub's errors share no base class
        reason = next((s for s in str(error).splitlines() if s.strip()), type(error).__name__)
        raise UserError(
            f"gates={text}: no such folder, and the hub does not give it: {reason}"
        ) from None
    return Path(found[-1]).parent


def user_path(model: str, kind: Kind) -> Path:
    """Where `kvbench train gates` writes: in the user's cache."""
    from kvbench.files import cache_dir

    return cache_dir() / "gates" / f"{slug(model)}-{kind}"


def find(model: str, kind: Kind, gates: str | None = None) -> Path:
    """Find the gates of a model: those that are named, the shipped ones, the user's own.

    Args:
        model: `ModelInfo.name` or what `--model` names: `reference`, a folder or a hub id.
        kind: `trimkv`, `dbtrimkv` or `locret`.
        gates: What `load` takes as its source, or None.

    Returns:
        A folder that holds gates.

    Raises:
        UserError: There are none; it says which command trains them.
    """
    if gates is not None:
        return locate(gates)
    base = _folder(model)
    name = base.name if base is not None else model.rpartition("/")[2]
    shipped = SHIPPED / f"{name}-{kind}"
    if (shipped / CONFIG).is_file() and _fits(model, base, shipped):
        return shipped
    own = user_path(model, kind)
    if not (own / CONFIG).is_file():
        raise UserError(
            f"model {model} has no {kind} gates: `kvbench train gates --model {model} "
            f"--policy {kind}` trains them (gates=FOLDER names others)"
        )
    if base is not None and not _fits(model, base, own):
        raise UserError(
            f"{own} was trained for other weights of {model}: `kvbench train gates --model {model} "
            f"--policy {kind}` trains them anew"
        )
    return own


def fingerprint(model: str, kind: Kind, gates: str | None = None) -> str:
    """16 hex digits of the content of the files in the folder that `find` gives.

    Raises:
        UserError: There are none.
    """
    folder = find(model, kind, gates)
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        try:
            digest.update(hashlib.sha256((folder / name).read_bytes()).digest())
        except OSError as error:
            raise UserError(f"cannot read {folder / name}: {error.strerror}") from None
    return digest.hexdigest()[:16]


def _folder(model: str) -> Path | None:
    """The folder of a local model, resolved; None for one of the hub."""
    from kvbench import reference

    folder = reference.path() if model == "reference" else Path(model).expanduser()
    return folder.resolve() if folder.is_dir() else None


def _fits(model: str, base: Path | None, folder: Path) -> bool:
    """Whether a model is the one that gates were trained for, as far as can be told."""
    path = folder / CONFIG
    return _compared(model, base, path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _compared(model: str, base: Path | None, path: Path, changed: int) -> bool:
    from kvbench import reference
    from kvbench.engine.loading import model_digest

    config = GateConfig.read(path)
    if base is None:
        return config.base_model == model
    if path.is_relative_to(SHIPPED) and base.parent == reference.path().parent:
        return True  # weights never change under the same name
    return not config.base_revision or config.base_revision == model_digest(str(base))
