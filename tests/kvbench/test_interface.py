"""Commands, options and documented names of the first release are all still there.

`tests/recorded/interface.json` lists those of commit 07119ff: the options of every command, and the
parameters and members of every name on the pages of docs/api.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from kvbench.cli.app import app

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests/recorded/interface.json").read_text())


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    if not (subcommands := getattr(command, "commands", None)):
        options = (option for p in command.params for option in (*p.opts, *p.secondary_opts))
        yield " ".join(path), set(options)
    for name, subcommand in (subcommands or {}).items():
        yield from commands(subcommand, (*path, name))


def resolve(dotted_name: str) -> Any:
    try:
        return importlib.import_module(dotted_name)
    except ImportError:
        parent, _, name = dotted_name.rpartition(".")
        return getattr(resolve(parent), name)


def members(public: Any) -> set[str]:
    """The parameters of a function or class, and the members of a class, as `.name`."""
    found: set[str] = set()
    if inspect.isclass(public):
        for base in public.__mro__:
            own = {**vars(base), **getattr(base, "__annotations__", {})}
            found |= {f".{name}" for name in own if not name.startswith("_")}
    if callable(public):
        with contextlib.suppress(TypeError, ValueError):  # some classes of C have no signature
            found |= set(inspect.signature(public).parameters)
    return found


def test_every_command_has_its_options() -> None:
    present = dict(commands(typer.main.get_command(app)))
    for name, options in RECORDED["commands"].items():
        assert set(options.split()) <= present[name], name


def test_every_documented_name_has_its_parameters_and_members() -> None:
    for name, recorded in RECORDED["names"].items():
        assert set(recorded.split()) <= members(resolve(name)), name


def test_documented_pages_resolve() -> None:
    targets = [
        target
        for page in (ROOT / "docs/api").glob("*.md")
        for target in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
    ]
    assert len(targets) > 15 and all(resolve(target) is not None for target in targets)
