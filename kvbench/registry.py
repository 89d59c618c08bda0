"""Finds plugins: entry points of installed packages, and objects in a user's own file."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import sys
import traceback
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import Any

from kvbench.errors import UserError, message_of, nearest, quoted, shorten_words, unknown

POLICIES = "kvbench.policies"
PARTS = "kvbench.parts"
TASKS = "kvbench.tasks"
TRAINERS = "kvbench.trainers"
MODELS = "kvbench.models"

_KIND = {
    POLICIES: "policy",
    PARTS: "part",
    TASKS: "task",
    TRAINERS: "trainer",
    MODELS: "model",
}
_LISTED_BY = {POLICIES: "kvbench list policies"}
"""The commands that list names."""


@functools.cache
def _entries(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Entry points by name; a name has several only if packages disagree."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, {}).setdefault(entry.value, entry)
    return {name: tuple(found[name].values()) for name in sorted(found)}


def names(group: str) -> list[str]:
    """List the names that installed packages register, sorted.

    Args:
        group: `POLICIES`, `PARTS`, `TASKS`, `TRAINERS` or `MODELS`.
    """
    return list(_entries(group))


def get(group: str, name: str) -> Any:
    """Load the object that a name is registered for.

    Args:
        group: `POLICIES`, `PARTS`, `TASKS`, `TRAINERS` or `MODELS`.
        name: A registered name.

    Raises:
        UserError: The name is unknown, two packages register it, or its package cannot be imported.
    """
    return _load(_entry(group, name))


def origin(group: str, name: str) -> str:
    """Return the package that registers a name, such as `package==1.0`.

    Raises:
        UserError: The name is unknown, or two packages register it.
    """
    return _package(_entry(group, name))


def _entry(group: str, name: str) -> EntryPoint:
    known = _entries(group)
    if name not in known:
        raise unknown(_KIND[group], name, known, _LISTED_BY.get(group, ""))
    first, *others = known[name]
    if others:
        packages = ", ".join(_package(entry) for entry in (first, *others))
        raise UserError(f"{_KIND[group]} {name!r} is registered by two packages: {packages}")
    return first


def _package(entry: EntryPoint) -> str:
    return _release(entry.dist) if entry.dist else entry.value


@functools.cache
def _release(package: Distribution) -> str:
    # Each of the two properties parses the package's whole metadata.
    return f"{package.name}=={package.version}"


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        kind = _KIND.get(entry.group, "plugin")
        raise UserError(
            f"{kind} {entry.name!r} of package {_package(entry)} cannot be loaded: {_line(error)}"
        ) from error


def _line(error: BaseException) -> str:
    """Describe an error in one line."""
    return shorten_words(f"{type(error).__name__}: {message_of(error)}".splitlines()[0])


# --- a user's own file ----------------------------------------------------------------------------


def split_file(spec: str) -> tuple[Path, str] | None:
    """Split `./my_policy.py:MyPolicy` into file and object.

    Args:
        spec: The spelling; parameters of a policy can follow.

    Returns:
        Path and name (empty if none is given), or None if `spec` is a registered name.
    """
    path, mark, rest = spec.partition(".py")
    if not mark or (rest and not rest.startswith(":")):
        return None
    return Path(path + mark), rest[1:].partition(":")[0]


def file_digest(spec: str) -> str:
    """Return 16 hex digits of the content of the file that a spelling names.

    The modules that the file imports from its own folder count, and the modules that these import.
    Of a package there, every module counts. Modules elsewhere and data files do not.

    Raises:
        UserError: A file cannot be read.
    """
    file = split_file(spec)
    path = file[0] if file else Path(spec)
    digest = hashlib.sha256(_read(path))
    path = path.resolve()
    for module in sorted(_modules_beside(path)):  # none leaves the digest of the file alone
        name = module.relative_to(path.parent).as_posix()
        digest.update(f"|{name}|{hashlib.sha256(_read(module)).hexdigest()}".encode())
    return digest.hexdigest()[:16]


def _modules_beside(path: Path) -> set[Path]:
    """The modules in the folder of a file that it imports, at any depth."""
    folder, found, waiting = path.parent, set[Path](), [path]
    while waiting:
        for name in _imported(_read(waiting.pop())):
            top, *rest = name.split(".")
            if top in _recorded_packages():
                continue
            if (folder / top / "__init__.py").is_file():
                modules = set((folder / top).rglob("*.py"))
            else:
                depths = range(len(rest) + 1)
                modules = {folder.joinpath(top, *rest[:n]).with_suffix(".py") for n in depths}
            new = {module for module in modules if module.is_file()} - found - {path}
            found |= new
            waiting += new
    return found


def _imported(source: bytes) -> set[str]:
    """What a module's import statements name, such as `helper` or `package.module`."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):  # executing it says what is wrong
        return set()
    names = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def _recorded_packages() -> frozenset[str]:
    """Packages whose versions a cell records: they are not a file's own, even beside it."""
    entries = (entry for group in _KIND for named in _entries(group).values() for entry in named)
    return frozenset({"kvbench", *(entry.module.partition(".")[0] for entry in entries)})


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # a path with a NUL byte
        raise UserError(f"cannot read {path}: {error}") from None


def load_file(spec: str) -> Any:
    """Load an object from a Python file.

    A file is executed once per process and content.

    Args:
        spec: `./my_policy.py:MyPolicy`.

    Raises:
        UserError: There is no such file or object, or executing the file fails.
    """
    file = split_file(spec)
    if file is None or not file[1]:
        raise UserError(
            f"{quoted(spec)} does not name an object in a file; write ./my_policy.py:MyPolicy"
        )
    path, name = file
    module = _run_file(path.resolve(), str(path), file_digest(spec))
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise UserError(f"{path} has no {quoted(name)}{nearest(name, public)}")
    return getattr(module, name)


@functools.cache
def _run_file(path: Path, shown: str, digest: str) -> Any:
    name = f"kvbench_file_{path.stem}_{digest}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    _forget_compiled(path)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if f.filename == str(path)), None)
        if isinstance(error, SyntaxError):
            line, text = error.lineno, f"SyntaxError: {error.msg}"
        else:
            text = _line(error)
        where = f"{shown}:{line}" if line else shown
        raise UserError(f"{where} cannot be executed: {text}") from error
    return module


def _forget_compiled(path: Path) -> None:
    """Make the next import of a file and of the modules beside it read what is in them now.

    Python imports a module once per process, and takes a compiled one for current if size and
    modification time are the source's.
    """
    beside = _modules_beside(path)
    tops = {module.relative_to(path.parent).parts[0].removesuffix(".py") for module in beside}
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        # A package without __init__.py has no file, but it holds its submodules.
        module = sys.modules[name]
        places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
        if any(place and Path(place).resolve().is_relative_to(path.parent) for place in places):
            del sys.modules[name]
    for source in (path, *beside):
        with contextlib.suppress(OSError):  # a folder that is read-only
            Path(importlib.util.cache_from_source(str(source))).unlink()
