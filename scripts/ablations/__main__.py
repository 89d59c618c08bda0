"""Train variants of gates and compare them on the same questions: a table per ablation.

    python -m scripts.ablations [TABLE ...] [--recipe FILE.yaml] [--out DIR] [--dry-run]

The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvbench.cli.screen import INTERRUPTED, OK, complain
from kvbench.errors import UserError
from kvbench.progress import reporter
from scripts.ablations.recipe import PAPERS, read
from scripts.ablations.run import ablate, describe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for wrong input and 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.ablations",
        description="Train variants of gates and compare them on the same questions: a table per "
        "ablation. The same command continues after an interruption.",
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="default: all of the recipe")
    parser.add_argument(
        "--recipe",
        type=Path,
        default=PAPERS,
        metavar="FILE.yaml",
        help="what to train, evaluate and compare; default: the ablations in the papers of TRIM-KV "
        "and DBTrimKV, on the reference model",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/ablations"),
        metavar="DIR",
        help="folder of gates, runs and tables; default: results/ablations",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be done")
    options = parser.parse_args(arguments)
    progress = reporter(Console(stderr=True))
    try:
        recipe = read(options.recipe)
        tables = recipe.pick(options.tables)
        if options.dry_run:
            print("\n".join(describe(recipe, tables, options.out)))
            return OK
        for path in ablate(recipe, tables, options.out, progress):
            print(path.read_text(encoding="utf-8"))
            print(f"wrote {path}", file=sys.stderr)
        return OK
    except UserError as error:
        progress.stop()
        return complain(str(error))
    except KeyboardInterrupt:
        progress.stop()
        complain(f"stopped; the same command continues with what {options.out} holds")
        return INTERRUPTED
    finally:
        progress.stop()


if __name__ == "__main__":
    sys.exit(main())
