"""Run the miniatures of recipes: `python -m scripts.recipes [NAME ...]`, all of them by default.

Each miniature runs in this process as its command line would. The exit status is 1 if one fails.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from kvbench.cli.app import call
from kvbench.cli.screen import OK
from kvbench.papers.recipes import Recipe, recipe, recipes
from kvbench.papers.recipes.recipe import RUN


def arguments(one: Recipe, model: str, out: Path) -> list[str]:
    """What follows `kvbench` on the command line of a miniature."""
    if one.by != RUN:
        return [*shlex.split(one.command([model]))[1:], "--out", str(out)]
    given = ["run", "--recipe", one.name, "--model", model, "--out", str(out)]
    return [*given, "--fresh", "--quiet"]


def main(argv: list[str]) -> int:
    """Run the miniatures that there are for a small model, and say how long each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="reference", choices=("reference", "smollm2"))
    parser.add_argument("--out", type=Path, default=Path("results/recipes"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all recipes")
    args = parser.parse_args(argv)
    failed = []
    for one in [recipe(name) for name in args.names] or recipes().values():
        model = args.model
        if model not in one.miniatures:
            if model != "reference":
                continue
            (model,) = one.miniatures  # a recipe about images has one small model
        began = time.monotonic()
        status = call(arguments(one, model, args.out / model / one.name))
        print(f"{one.name}: {time.monotonic() - began:.0f} s", flush=True)
        if status != OK:
            failed.append(one.name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
