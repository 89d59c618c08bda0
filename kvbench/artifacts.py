"""Files that are made for one model and read by policies: learned gates and head profiles.

An `Artifacts` describes one sort of them. It finds the files of a model, reports problems in one
line, and computes the digest that becomes part of a cell's hash. The order of search is:

1. what the user names (a path, or the name of a shipped artifact);
2. what ships with the package, for the model's own name and weights;
3. what the user has made, in the user's cache.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import UserError
from kvbench.files import State, cache_dir, state_of
from kvbench.named import local_model, model_digest


@dataclass(frozen=True)
class MadeFor:
    """The model that an artifact says it was made for.

    Attributes:
        model: The model as the user named it; "" if unknown.
        revision: Commit of the hub, or digest of the local weights; "" if unknown.
    """

    model: str = ""
    revision: str = ""


@dataclass(frozen=True)
class Artifacts:
    """One sort of files made for models: a file, or a folder of files, per model and kind.

    Attributes:
        noun: What one of them is called in messages, for example "head profile".
        option: The parameter of a policy by which the user names one.
        shipped: Folder of those that ship with the package.
        folder: Name of their folder in the user's cache.
        pattern: Name of a model's file or folder, with the fields `{model}` and `{kind}`.
        command: Command that makes one, with the fields `{model}` and `{kind}`.
        made_for: Reads from an artifact what it was made for.
        files: Files that make up an artifact which is a folder, the one that describes it first;
            empty for an artifact that is itself a file. Folders can also be fetched from the hub.
    """

    noun: str
    option: str
    shipped: Path
    folder: str
    pattern: str
    command: str
    made_for: Callable[[Path], MadeFor]
    files: tuple[str, ...] = ()

    def find(self, model: str, kinds: Sequence[str], named: str | None = None) -> Path:
        """Find the artifact of a model: the named one, a shipped one, or the user's own.

        Args:
            model: `ModelInfo.name` or what `--model` names: `reference`, a folder or a hub id.
            kinds: Kinds to look for, the preferred one first; "" if there is only one.
            named: What the user names, or None; it is not compared with the model.

        Raises:
            UserError: There is none, or the user's own was made for other weights; the message
                names the command that makes it.
        """
        if named is not None:
            return self.locate(named)
        for kind in kinds:
            if (path := self.shipped_path(model, kind)) is not None:
                return path
        for kind in kinds:
            path = self.user_path(model, kind)
            if not self._exists(path):
                continue
            if local_model(model) is not None and not self._fits(model, path):
                raise UserError(
                    f"{path} was made for other weights of {model}; run {self.how(model, kind)} "
                    "again"
                )
            return path
        kind = f"{kinds[0]} " if len(kinds) == 1 and kinds[0] else ""
        raise UserError(
            f"model {model} has no {kind}{self.noun}; run {self.how(model, kinds[0])}, or set "
            f"{self.option}= to a {'folder' if self.files else 'file'}"
        )

    def locate(self, named: str) -> Path:
        """Find what the user names: a path, a shipped artifact or, for folders, a hub id.

        Raises:
            UserError: There is no such artifact.
        """
        path = Path(named).expanduser()
        if self._exists(path):
            return path
        if self.files and path.is_dir():
            raise UserError(f"{self.option}={named}: no {self.files[0]} in that folder")
        if self.files and path.is_file():
            raise UserError(
                f"{self.option}={named} is a file; name the folder that holds {self.files[0]}"
            )
        if re.fullmatch(r"[\w.-]+", named) and self._exists(self.shipped / named):
            return self.shipped / named
        hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", named) and not named.startswith(".")
        if self.files and hub_id:
            return _fetched(self.option, named, self.files)
        raise UserError(f"{self.option}={named}: no such {'folder' if self.files else 'file'}")

    def shipped_path(self, model: str, kind: str) -> Path | None:
        """The artifact that ships with the package for a model, or None."""
        path = self.shipped / self.pattern.format(model=shipped_name(model), kind=kind)
        return path if self._exists(path) and self._fits(model, path) else None

    def user_path(self, model: str, kind: str) -> Path:
        """Where the user's own artifact of a model is kept: in the user's cache."""
        name = self.pattern.format(model=slug(model), kind=kind)
        return cache_dir() / self.folder / name

    def digest(self, path: Path) -> str:
        """16 hex digits of the content of an artifact.

        Raises:
            UserError: A file cannot be read.
        """
        contents = []
        for file in [path / name for name in self.files] or [path]:
            try:
                contents.append(file.read_bytes())
            except OSError as error:
                raise UserError(f"cannot read {file}: {error.strerror}") from None
        if not self.files:
            return hashlib.sha256(contents[0]).hexdigest()[:16]
        whole = hashlib.sha256()
        for content in contents:
            whole.update(hashlib.sha256(content).digest())
        return whole.hexdigest()[:16]

    def how(self, model: str, kind: str) -> str:
        """The command that makes an artifact of a model, in backquotes."""
        return f"`{self.command.format(model=model, kind=kind)}`"

    def _exists(self, path: Path) -> bool:
        return (path / self.files[0] if self.files else path).is_file()

    def _fits(self, model: str, path: Path) -> bool:
        """Whether an artifact was made for a model, as far as can be told."""
        main = path / self.files[0] if self.files else path
        return _compared(self, model, path, state_of(main))


def shipped_name(model: str) -> str:
    """The model's part in the name of an artifact that ships: folder, GGUF file or hub name."""
    local = local_model(model)
    return model.rpartition("/")[2] if local is None else _base_name(local)


def slug(model: str) -> str:
    """File name for a model: its hub id, or the name and a hash of its folder or GGUF file."""
    local = local_model(model)
    name = model if local is None else _base_name(local)
    text = re.sub(r"[^A-Za-z0-9._]+", "--", name).strip("-") or "model"
    if local is None:
        return text
    return f"{text}-{hashlib.sha256(str(local.resolve()).encode()).hexdigest()[:8]}"


def _base_name(local: Path) -> str:
    """The name of a model's folder, or of its GGUF file without the suffix."""
    path = local.resolve()
    return path.stem if path.is_file() else path.name


@functools.lru_cache(maxsize=64)
def _compared(artifacts: Artifacts, model: str, path: Path, state: State) -> bool:
    """Compare once for each state of the artifact, since its description has to be read."""
    made_for, local = artifacts.made_for(path), local_model(model)
    if local is None:
        return made_for.model == model
    return not made_for.revision or made_for.revision == model_digest(str(local))


@functools.cache
def _fetched(option: str, named: str, files: tuple[str, ...]) -> Path:
    """Files of a hub repository, in the hub's own cache."""
    from huggingface_hub import hf_hub_download  # imports slowly, and few users need it

    name, _, revision = named.partition("@")
    try:
        paths = [hf_hub_download(name, file, revision=revision or None) for file in files]
    except Exception as error:  # the hub's errors share no base class
        reason = next((s for s in str(error).splitlines() if s.strip()), type(error).__name__)
        raise UserError(
            f"{option}={named}: no such folder, and the hub does not give it: {reason}"
        ) from None
    return Path(paths[0]).parent
