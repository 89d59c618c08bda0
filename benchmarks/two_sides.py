"""Comparisons with a package that lives in an environment of its own; the sides exchange files."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Cases = list[dict[str, Any]]


@dataclass(frozen=True)
class Other:
    """The other side.

    Attributes:
        name: Names its environment: the flag is `--NAME-python`.
        modules: What must be importable there.
        packages: What to install there, as for pip.
    """

    name: str
    modules: str
    packages: str


KVPRESS = Other("kvpress", "kvpress", "'torch==2.13.0' 'kvpress==0.5.5'")


def both_sides(
    module: str,
    about: str,
    other: Other,
    prepare: Callable[[Path], Cases],
    other_side: Callable[[Path], None],
    compare: Callable[[Path], int],
) -> int:
    """Run the other side in its environment, and then compare; a script's `main`.

    Args:
        module: The script, as `python -m` names it.
        about: What it does, for `--help`.
        other: The other side.
        prepare: Makes in a folder what both sides need; gives what `cases.json` then holds.
        other_side: Writes what the other side does to the folder. It must not import kvbench.
        compare: Prints the comparison; gives the exit status.
    """
    flag = f"--{other.name}-python"
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(flag, dest="python", help=f"python of an environment with {other.name}")
    parser.add_argument("--other-side", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.other_side:
        other_side(arguments.other_side)
        return 0
    python = environment(module, other, arguments.python)
    if python is None:
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps(prepare(folder)))
        command = [python, "-m", module, "--other-side", name]
        if subprocess.run(command, check=False, cwd=Path(__file__).parents[1]).returncode:
            return 2
        return compare(folder)


def environment(module: str, other: Other, given: str | None) -> str | None:
    """The python of the other side's environment; None, with how to make one, if there is none.

    Args:
        module: The script, as `python -m` names it.
        other: The other side.
        given: What the user gave.
    """
    python = shutil.which(given or "")
    asked = [python, "-c", f"import {other.modules}"]
    if python is None or subprocess.run(asked, check=False, capture_output=True).returncode:
        print(
            f"{other.name} needs an environment of its own:\n"
            f"  python3 -m venv .venv-{other.name}\n"
            f"  .venv-{other.name}/bin/pip install {other.packages}\n"
            f"  python -m {module} --{other.name}-python .venv-{other.name}/bin/python"
        )
        return None
    return python


def cases_of(folder: Path) -> Cases:
    """What `prepare` gave."""
    made: Cases = json.loads((folder / "cases.json").read_text())
    return made
