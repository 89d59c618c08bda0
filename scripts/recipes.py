"""Run the miniatures of recipes and check their tables: `python -m scripts.recipes [NAME ...]`, all by default.

Each miniature runs in this process as its command line would. Its table must have every policy and no empty place. The
exit status is 1 if one fails.
"""

from __future__ import annotations

import argparse
import csv
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import kvbench
from kvbench.cli.app import call
from kvbench.cli.screen import OK
from kvbench.papers.layouts.pivot import DIMENSIONS
from kvbench.papers.recipes import Recipe, recipe, recipes
from kvbench.papers.recipes.reading import RUN
from kvbench.runs.options import flag_of
from kvbench.spelling import policy
from kvbench.tables.text import counted

_DISTINCT = ("d2o-table11",)
"""Recipes that compare values of one parameter, which acts only if all answers and the rows of the table differ.

Two rows can have the same mean by chance, so the answers are compared, and at least two rows have to differ."""


def arguments(one: Recipe, model: str, out: Path) -> list[str]:
    """What follows `kvbench` on the command line of a miniature."""
    if one.by != RUN:
        return [*shlex.split(one.command([model]))[1:], "--out", str(out)]
    given = ["run", "--recipe", one.name, "--model", model, "--out", str(out)]
    return [*given, "--fresh", "--quiet"]


def gaps(one: Recipe, model: str, out: Path) -> Iterator[str]:
    """Yield what the table of a finished miniature lacks, or the summary of one that is no run."""
    if one.by != RUN:
        summary = (out / "summary.md").read_text(encoding="utf-8")
        settings = {flag_of(name): value for name, value in one.settings([model]).items()}
        for spelling in settings.get("policy", ()):
            if str(policy(spelling)) not in summary:
                yield f"summary.md lacks {spelling}"
        if one.item.startswith("figure") and not any((out / "figures").iterdir()):
            yield "there is no figure"
        return
    layout = shlex.split(one.layout_for([model]))
    table = out / "table.csv"
    if call(["table", str(out), *layout, "--against", "none", "--out", str(table)]) != OK:
        yield "its layout does not fit"
        return
    with table.open(encoding="utf-8", newline="") as file:
        titles, *rows = csv.reader(file)
    policies = [str(each) for each in one.grid([model]).built_policies if str(each) != "full"]
    if "--layout" in layout:  # the names are the paper's
        missing = [counted(len(policies) + 1 - len(rows), "row")] * (len(rows) <= len(policies))
    else:
        shown = {part for cells in (titles, *rows) for cell in cells for part in re.split("[:,] ", cell)}
        missing = [name for name in policies if name not in shown]
    if missing:
        yield f"its table lacks {', '.join(missing)}"
    numbers = [
        [cell for title, cell in zip(titles, row, strict=True) if title not in ("", *DIMENSIONS)] for row in rows
    ]
    if empty := sum(not number for row in numbers for number in row):
        yield f"its table has {empty} empty places"
    if one.name in _DISTINCT:
        _, samples = kvbench.load(out, columns=["policy", "task", "sample_id", "response"])
        samples = samples[samples["policy"] != "full"].sort_values(["task", "sample_id"])
        answers = samples.groupby("policy", sort=False)["response"].apply(tuple)
        if (
            len(set(answers)) < len(policies) or len({tuple(row) for row in numbers}) < 3
        ):  # the full cache is a row, too
            yield "its rows are equal"


def main(argv: list[str]) -> int:
    """Run the miniatures that there are for a small model, and say what each lacks and how long it took."""
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
        began, cpu_began = time.monotonic(), time.process_time()
        out = args.out / model / one.name
        status = call(arguments(one, model, out))
        lacks = list(gaps(one, model, out)) if status == OK else ["it failed"]
        seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began
        print(f"{one.name}: {seconds:.0f} s, {cpu_seconds:.0f} s of CPU", flush=True)
        for lack in lacks:
            print(f"{one.name}: {lack}", flush=True)
        if lacks:
            failed.append(one.name)
    print(f"all: {time.process_time():.0f} s of CPU")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
