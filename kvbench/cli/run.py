"""`kvbench run`. What is heavy is imported inside the command."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli import complete
from kvbench.cli.options import AsJson, Quiet, given_values, grid_options, option, split_names
from kvbench.cli.screen import FAILED, complain, console, print_json, progress, rows_of, stopping
from kvbench.errors import UserError
from kvbench.progress import Reporter, Silent
from kvbench.runs.options import FLAG, OUTPUT, WHAT

if TYPE_CHECKING:
    from kvbench.runs.grid import Grid
    from kvbench.runs.runner import Run


@grid_options()
def run(
    config: Annotated[
        Path | None,
        option(WHAT, "FILE", "Read the options from a YAML file. Flags take precedence."),
    ] = None,
    recipe: Annotated[
        str | None,
        option(
            WHAT,
            "NAME",
            "Run a table or figure of a paper, such as criticalkv-table1 (kvbench list recipes): "
            "in full, for a GPU; with --model reference, smollm2 or reference-vl its miniature. "
            "Other flags take precedence.",
            autocompletion=complete.recipes,
        ),
    ] = None,
    attn: Annotated[str | None, typer.Option(metavar="A", hidden=True)] = None,
    fresh: Annotated[
        bool, option(OUTPUT, FLAG, "Discard an earlier run in the folder.", "--fresh")
    ] = False,
    extend: Annotated[
        bool,
        option(
            OUTPUT,
            FLAG,
            "Add policies, budgets, models, tasks, moments or lengths to the run in --out, and "
            "keep its responses. Its grid.yaml gives the options that are left out.",
            "--extend",
        ),
    ] = False,
    dry_run: Annotated[
        bool, option(OUTPUT, FLAG, "Show cells, samples and an estimate; run nothing.", "--dry-run")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **grid_values: Any,
) -> None:
    """Run every combination of policy, budget, model and task, and score it.

    Options that say "with commas" take several values: --budget 0.1,0.2.

    The same command continues a run after an interruption.
    """
    if as_json and dry_run:
        raise UserError("--json and --dry-run exclude each other; give only one")
    if config and recipe:
        raise UserError("--config and --recipe exclude each other; give only one")
    if extend and (config or recipe or fresh):
        other = "--config" if config else "--recipe" if recipe else "--fresh"
        raise UserError(f"--extend and {other} exclude each other; give only one")
    if quiet:
        warnings.simplefilter("ignore")
    given = given_values(grid_values)
    told = Silent() if quiet else progress()
    with stopping(told):
        of_file = config or recipe
        models = split_names(given.get("model"))
        told.busy("loading" if of_file else f"loading model {', '.join(models or ['reference'])}")
        # With --json nothing else may appear on stdout, not even what a user's policy prints.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            grid = _extended(given) if extend else _grid(config, recipe, given)
            done = _execute(grid, told, fresh=fresh, extend=extend, dry_run=dry_run)
    if done is None:
        if recipe:
            _show_differences(recipe, models)
        return
    if as_json:
        print_json(_as_json(done, grid.path))
    else:
        _show(done, grid.path, quiet=quiet)
        if recipe and not quiet:
            _show_recipe(recipe, models, grid.path)
    failed = done.cells[done.cells["status"] != "ok"]
    if len(failed):
        complain(f"{len(failed)} of {len(done.cells)} cells failed: {failed.iloc[0]['error']}")
        raise typer.Exit(FAILED)


def _grid(config: Path | None, recipe: str | None, given: dict[str, Any]) -> Grid:
    """The grid of the flags that were given, over that of a file or a recipe."""
    from kvbench.runs.grid import Grid

    if recipe:
        from kvbench.recipes import recipe as named

        return named(recipe).grid(split_names(given.get("model")), given)
    return Grid.from_yaml(config, given) if config else Grid.from_dict(given)


def _extended(given: dict[str, Any]) -> Grid:
    """The grid of the run in a folder, with the lists that were given added to its own."""
    from kvbench.runs.grid import Grid
    from kvbench.runs.store import GRID

    if (out := given.get("out")) is None:
        raise UserError("--extend needs the folder of the run; add --out DIR")
    file = Path(out) / GRID
    if not file.exists():
        raise UserError(f"{out} holds no run to extend: {GRID} is missing; leave out --extend")
    return Grid.extending(file, given)


def _execute(grid: Grid, told: Reporter, *, fresh: bool, extend: bool, dry_run: bool) -> Run | None:
    """Run a grid, or describe it and return None."""
    from kvbench.runs.runner import describe, execute

    if dry_run:
        lines = describe(grid, told.message, fresh=fresh, reporter=told)
        told.stop()
        for line in lines:
            print(line)
        return None
    kept = (
        f"completed responses are kept in {grid.path}, and the same command (without --fresh) "
        "continues from there"
    )
    with stopping(told, kept):
        return execute(grid, reporter=told, fresh=fresh, extend=extend)


def _show(done: Run, folder: Path, *, quiet: bool) -> None:
    """Print the table of a run and where its files are; only the folder, as given, if quiet."""
    if quiet:
        print(folder)
        return
    from kvbench.report.samples import COLUMNS
    from kvbench.report.terminal import run_table
    from kvbench.runs.load import load_frames

    console().print(run_table(done.cells, load_frames(done.path, COLUMNS, coded=True)[1]))
    names = [p.name for p in sorted(done.path.iterdir()) if p.is_file() and p.name[0] != "."]
    print(f"wrote {folder}: {', '.join(names)}")
    print(f"figures: kvbench report {folder}")


def _show_recipe(name: str, models: list[str], folder: Path) -> None:
    """Print how to lay a recipe's run out, and what differs from the paper."""
    from kvbench.recipes import recipe

    layout = recipe(name).layout_for(models)
    print(f"table: kvbench table {folder} {layout}".rstrip())
    _show_differences(name, models)


def _show_differences(name: str, models: list[str]) -> None:
    """Print what differs from the paper in a recipe's run on these models."""
    from kvbench.recipes import recipe

    one = recipe(name)
    if one.is_miniature(models):
        print(f"a miniature of {one.source}: its scores say nothing about the paper's")
        return
    print(f"differs from {one.source}:")
    for sentence in one.differs:
        print(f"  - {sentence}")


def _as_json(done: Run, folder: Path) -> dict[str, Any]:
    """The results for programs, with the folder as it was given."""
    return {
        "path": str(folder),
        "cells": rows_of(done.cells),
        "failed": dict(done.failed),
        "left_out": dict(done.left_out),
    }
