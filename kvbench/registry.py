"""Plugin discovery: entry points of installed packages, and objects in a user's own file."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import Any

from kvbench.errors import UserError, message_of, nearest, quoted, shorten_words, unknown
from kvbench.files import digest_of

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
"""Commands that list names."""


@functools.cache
def _entries(entry_group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return entry points by name; several for a name that packages register differently."""
    entries_by_name: dict[str, dict[str, EntryPoint]] = {}
    for entry_point in entry_points(group=entry_group):
        entries_by_name.setdefault(entry_point.name, {}).setdefault(entry_point.value, entry_point)
    return {entry_name: tuple(entries_by_name[entry_name].values()) for entry_name in sorted(entries_by_name)}


def names(entry_group: str) -> list[str]:
    """Return the names that installed packages register, sorted.

    Args:
        entry_group: `POLICIES`, `PARTS`, `TASKS`, `TRAINERS` or `MODELS`.
    """
    return list(_entries(entry_group))


def get(entry_group: str, entry_name: str) -> Any:
    """Load the object registered under a name.

    Args:
        entry_group: `POLICIES`, `PARTS`, `TASKS`, `TRAINERS` or `MODELS`.
        entry_name: A registered name.

    Raises:
        UserError: The name is unknown, two packages register it, or its package cannot be imported.
    """
    return _load(_entry(entry_group, entry_name))


def origin(entry_group: str, entry_name: str) -> str:
    """Return the package that registers a name, such as `package==1.0`.

    The code of a package that is installed with `pip install -e` can change under the same version, so the digest of
    the file follows; see `file_digest`. kvbench itself raises the versions of its parts instead.

    Raises:
        UserError: The name is unknown, or two packages register it.
    """
    entry_point = _entry(entry_group, entry_name)
    file_path = _editable_file(entry_point)
    return _package(entry_point) + (f" {file_digest(file_path)}" if file_path else "")


def _editable_file(entry_point: EntryPoint) -> str:
    """Return the file of an entry point whose package is installed with `pip install -e`; "" for any other."""
    package = entry_point.dist
    if package is None or package.name == "kvbench":
        return ""
    if not json.loads(package.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"):
        return ""
    spec = importlib.util.find_spec(entry_point.module)
    return spec.origin or "" if spec else ""


def _entry(entry_group: str, entry_name: str) -> EntryPoint:
    entries_by_name = _entries(entry_group)
    if entry_name not in entries_by_name:
        raise unknown(_KIND[entry_group], entry_name, entries_by_name, _LISTED_BY.get(entry_group, ""))
    first_entry, *other_entries = entries_by_name[entry_name]
    if other_entries:
        package_names = ", ".join(_package(entry_point) for entry_point in (first_entry, *other_entries))
        raise UserError(f"{_KIND[entry_group]} {entry_name!r} is registered by two packages: {package_names}")
    return first_entry


def _package(entry_point: EntryPoint) -> str:
    return _release(entry_point.dist) if entry_point.dist else entry_point.value


@functools.cache
def _release(package: Distribution) -> str:
    # Cached, because each of the two properties parses all metadata of the package.
    return f"{package.name}=={package.version}"


def _load(entry_point: EntryPoint) -> Any:
    try:
        return entry_point.load()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        plugin_kind = _KIND.get(entry_point.group, "plugin")
        raise UserError(
            f"{plugin_kind} {entry_point.name!r} of package {_package(entry_point)} cannot be loaded: {_line(error)}"
        ) from error


def _line(error: BaseException) -> str:
    """Describe an error in one line."""
    return shorten_words(f"{type(error).__name__}: {message_of(error)}".splitlines()[0])


# --- a user's own file ----------------------------------------------------------------------------


def split_file(spec: str) -> tuple[Path, str] | None:
    """Split `./my_policy.py:MyPolicy` into path and object name (may be empty), ignoring parameters of a policy.

    Returns None if `spec` is a registered name.
    """
    path_stem, file_suffix, remainder = spec.partition(".py")
    if not file_suffix or (remainder and not remainder.startswith(":")):
        return None
    return Path(path_stem + file_suffix), remainder[1:].partition(":")[0]


def file_digest(spec: str) -> str:
    """Return a digest of the file named in a spelling, 16 hex digits.

    It covers the modules that the file imports, directly or not, from its own folder, and all modules of imported
    packages in that folder, but no other modules and no data files.

    Raises:
        UserError: A file cannot be read.
    """
    path_and_name = split_file(spec)
    file_path = path_and_name[0] if path_and_name else Path(spec)
    file_hash = hashlib.sha256(_read(file_path))
    file_path = file_path.resolve()
    for module_path in sorted(_modules_beside(file_path)):  # without modules, this is the digest of the file
        relative_name = module_path.relative_to(file_path.parent).as_posix()
        file_hash.update(f"|{relative_name}|{hashlib.sha256(_read(module_path)).hexdigest()}".encode())
    return file_hash.hexdigest()[:16]


def _modules_beside(file_path: Path) -> set[Path]:
    """Return the modules that a file imports from its own folder, directly or not."""
    folder, module_paths, pending_paths = file_path.parent, set[Path](), [file_path]
    while pending_paths:
        for imported_name in _imported(_read(pending_paths.pop())):
            top_package, *submodules = imported_name.split(".")
            if top_package in _recorded_packages():
                continue
            if (folder / top_package / "__init__.py").is_file():
                candidates = set((folder / top_package).rglob("*.py"))
            else:
                depths = range(len(submodules) + 1)
                candidates = {folder.joinpath(top_package, *submodules[:depth]).with_suffix(".py") for depth in depths}
            new_modules = (
                {module_path for module_path in candidates if module_path.is_file()} - module_paths - {file_path}
            )
            module_paths |= new_modules
            pending_paths += new_modules
    return module_paths


def _imported(source: bytes) -> set[str]:
    """Return the names in a module's import statements, such as `helper` or `package.module`."""
    try:
        syntax_nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):  # reported when the module is executed
        return set()
    imported_names = {alias.name for node in syntax_nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in syntax_nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported_names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return imported_names


@functools.cache
def _recorded_packages() -> frozenset[str]:
    """Return packages whose versions a cell records; they are not part of a user's file, even next to it."""
    all_entries = (entry for group in _KIND for homonyms in _entries(group).values() for entry in homonyms)
    return frozenset({"kvbench", *(entry.module.partition(".")[0] for entry in all_entries)})


@functools.cache
def code_state() -> str:
    """Return a digest of what is registered and of the size and time of every module of the packages that register it.

    It changes whenever a plugin is installed, removed or edited, and nothing is imported to compute it.
    """
    registered = [
        [group, entry_point.name, entry_point.value, _package(entry_point)]
        for group in _KIND
        for homonyms in _entries(group).values()
        for entry_point in homonyms
    ]
    module_states: list[list[Any]] = []
    for package_name in sorted(_recorded_packages()):
        package_spec = importlib.util.find_spec(package_name)
        if package_spec is None:  # reported when the plugin is loaded
            continue
        roots = package_spec.submodule_search_locations or [package_spec.origin or ""]
        for module_path in sorted(path for root in roots for path in _modules_below(Path(root))):
            module_status = module_path.stat()
            module_states.append([str(module_path), module_status.st_size, module_status.st_mtime_ns])
    return digest_of([registered, module_states])


def _modules_below(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
    for folder, _, file_names in os.walk(root):
        yield from (Path(folder, file_name) for file_name in file_names if file_name.endswith(".py"))


def _read(file_path: Path) -> bytes:
    try:
        return file_path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {file_path}: {error.strerror}") from None
    except ValueError as error:  # a path with a NUL byte
        raise UserError(f"cannot read {file_path}: {error}") from None


def load_file(spec: str) -> Any:
    """Load an object from a Python file, such as `./my_policy.py:MyPolicy`.

    A file is executed once per process and content.

    Raises:
        UserError: There is no such file or object, or executing the file fails.
    """
    path_and_name = split_file(spec)
    if path_and_name is None or not path_and_name[1]:
        raise UserError(f"{quoted(spec)} does not name an object in a file; write ./my_policy.py:MyPolicy")
    file_path, object_name = path_and_name
    module = _run_file(file_path.resolve(), str(file_path), file_digest(spec))
    if not hasattr(module, object_name):
        public_names = [attribute for attribute in vars(module) if not attribute.startswith("_")]
        raise UserError(f"{file_path} has no {quoted(object_name)}{nearest(object_name, public_names)}")
    return getattr(module, object_name)


@functools.cache
def _run_file(file_path: Path, path_label: str, source_digest: str) -> Any:
    module_name = f"kvbench_file_{file_path.stem}_{source_digest}"
    module_spec = importlib.util.spec_from_file_location(module_name, file_path)
    assert module_spec is not None
    assert module_spec.loader is not None
    _forget_compiled(file_path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and pickle look up a class's module there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        stack_frames = traceback.extract_tb(error.__traceback__)
        line_number = next(
            (stack_frame.lineno for stack_frame in reversed(stack_frames) if stack_frame.filename == str(file_path)),
            None,
        )
        if isinstance(error, SyntaxError):
            line_number, reason = error.lineno, f"SyntaxError: {error.msg}"
        else:
            reason = _line(error)
        location = f"{path_label}:{line_number}" if line_number else path_label
        raise UserError(f"{location} cannot be executed: {reason}") from error
    return module


def _forget_compiled(file_path: Path) -> None:
    """Force the next import of a file and its local modules to use their current content.

    Python imports a module once per process, and trusts a compiled file if size and modification time of the source
    match.
    """
    module_paths = _modules_beside(file_path)
    top_packages = {module.relative_to(file_path.parent).parts[0].removesuffix(".py") for module in module_paths}
    for module_name in [module_name for module_name in sys.modules if module_name.partition(".")[0] in top_packages]:
        # A package without __init__.py has no file, but it holds its submodules.
        module = sys.modules[module_name]
        locations = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
        if any(location and Path(location).resolve().is_relative_to(file_path.parent) for location in locations):
            del sys.modules[module_name]
    for source_path in (file_path, *module_paths):
        with contextlib.suppress(OSError):  # the folder may be read-only
            Path(importlib.util.cache_from_source(str(source_path))).unlink()
