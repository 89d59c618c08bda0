"""`kvbench run`. Heavy modules are imported inside the command."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli import complete
from kvbench.cli.options import AsJson, Quiet, given_values, grid_options, option, split_names
from kvbench.cli.screen import FAILED, complain, console, print_json, progress, rows_of, say, show, stopping
from kvbench.errors import UserError
from kvbench.progress import Reporter, Silent
from kvbench.runs.options import FLAG, OUTPUT, WHAT
from kvbench.runs.values import DEFAULT_TEMPLATE

if TYPE_CHECKING:
    from kvbench.runs.grid import Grid
    from kvbench.runs.runner import Run

EXAMPLES = """Examples:

kvbench run --policy criticalkv --budget 0.2 --task ruler

kvbench run --policy snapkv,keydiff --budget 0.1,0.2 --task vt,cwe

kvbench run --policy snapkv --model smollm2 --task arc_easy
"""
"""Last lines of `kvbench run --help`: the main command, a grid, and a task of lm-eval."""


def with_default_values(arguments: Sequence[str]) -> list[str]:
    """Give `--apply-chat-template` its default value where it has none, because Typer has no optional values."""
    completed: list[str] = []
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        completed.append(argument)
        if argument == "--apply-chat-template" and (not following or following.startswith("-")):
            completed.append(DEFAULT_TEMPLATE)
    return completed


@grid_options()
def run(
    config: Annotated[
        Path | None,
        option(WHAT, "FILE", "Read options from a YAML file. Flags take precedence."),
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
    fresh: Annotated[bool, option(OUTPUT, FLAG, "Discard an earlier run in the folder.", "--fresh")] = False,
    extend: Annotated[
        bool,
        option(
            OUTPUT,
            FLAG,
            "Add policies, budgets, models, tasks, moments or lengths to the run in --out and "
            "keep its responses. Omitted options come from its grid.yaml.",
            "--extend",
        ),
    ] = False,
    dry_run: Annotated[
        bool, option(OUTPUT, FLAG, "Show cells, samples and an estimate without running.", "--dry-run")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    **grid_values: Any,
) -> None:
    """Run and score every combination of policy, budget, model and task.

    Comma-separated options take several values: --budget 0.1,0.2.

    The same command resumes an interrupted run.
    """
    if as_json and dry_run:
        raise UserError("--json and --dry-run exclude each other; give only one")
    if config and recipe:
        raise UserError("--config and --recipe exclude each other; give only one")
    if extend and (config or recipe or fresh):
        conflicting_flag = "--config" if config else "--recipe" if recipe else "--fresh"
        raise UserError(f"--extend and {conflicting_flag} exclude each other; give only one")
    if quiet:
        warnings.simplefilter("ignore")
    flag_values = given_values(grid_values)
    reporter = Silent() if quiet else progress()
    with stopping(reporter):
        from_file = config or recipe
        model_names = split_names(flag_values.get("model"))
        reporter.busy("loading" if from_file else f"loading model {', '.join(model_names or ['reference'])}")
        # With --json, nothing else may appear on stdout, not even output of a user's policy.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            grid = _extended(flag_values) if extend else _grid(config, recipe, flag_values)
            finished_run = _execute(grid, reporter, fresh=fresh, extend=extend, dry_run=dry_run)
    if finished_run is None:
        if recipe:
            _show_differences(recipe, model_names)
        return
    if as_json:
        print_json(_as_json(finished_run, grid.path))
    else:
        _show(finished_run, grid.path, quiet=quiet)
        if recipe and not quiet:
            _show_recipe(recipe, model_names, grid.path)
    failed_cells = finished_run.cells[finished_run.cells["status"] != "ok"]
    if len(failed_cells):
        complain(f"{len(failed_cells)} of {len(finished_run.cells)} cells failed: {failed_cells.iloc[0]['error']}")
        raise typer.Exit(FAILED)


def _grid(config: Path | None, recipe: str | None, flag_values: dict[str, Any]) -> Grid:
    """Return the grid of the given flags, which override a file or a recipe."""
    from kvbench.runs.grid import Grid

    if recipe:
        from kvbench.papers.recipes import recipe as named

        return named(recipe).grid(split_names(flag_values.get("model")), flag_values)
    return Grid.from_yaml(config, flag_values) if config else Grid.from_dict(flag_values)


def _extended(flag_values: dict[str, Any]) -> Grid:
    """Return the grid of the run in a folder, extended by the given lists."""
    from kvbench.runs.file_names import GRID
    from kvbench.runs.grid import Grid

    if (run_folder := flag_values.get("out")) is None:
        raise UserError("--extend needs the run's folder; add --out DIR")
    grid_path = Path(run_folder) / GRID
    if not grid_path.exists():
        raise UserError(f"{run_folder} holds no run to extend: {GRID} is missing; leave out --extend")
    return Grid.extending(grid_path, flag_values)


def _execute(grid: Grid, reporter: Reporter, *, fresh: bool, extend: bool, dry_run: bool) -> Run | None:
    """Run a grid, or describe it and return None for a dry run."""
    from kvbench.runs.runner import describe, execute

    if dry_run:
        plan_lines = describe(grid, reporter.message, fresh=fresh, reporter=reporter)
        reporter.stop()
        for plan_line in plan_lines:
            say(plan_line)
        return None
    resume_note = f"completed responses are kept in {grid.path}; the same command (without --fresh) resumes from there"
    with stopping(reporter, resume_note):
        return execute(grid, reporter=reporter, fresh=fresh, extend=extend)


def _show(finished_run: Run, run_folder: Path, *, quiet: bool) -> None:
    """Print a run's table and files, or only its folder if `quiet`."""
    if quiet:
        print(run_folder)
        return
    from kvbench.report.groups import group_table
    from kvbench.report.sorted_samples import COLUMNS
    from kvbench.report.terminal import run_table
    from kvbench.runs.load import load_frames, load_groups

    console().print(run_table(finished_run.cells, load_frames(finished_run.path, COLUMNS, coded=True)[1]))
    if (groups := group_table(load_groups(finished_run.path))) is not None:
        show(groups)
    file_names = [
        file_path.name
        for file_path in sorted(finished_run.path.iterdir())
        if file_path.is_file() and file_path.name[0] != "."
    ]
    say(f"wrote {run_folder}: {', '.join(file_names)}")
    print(f"figures: kvbench report {run_folder}")


def _show_recipe(recipe_name: str, model_names: list[str], run_folder: Path) -> None:
    """Print the table command for a recipe's run, and its differences from the paper."""
    from kvbench.papers.recipes import recipe

    layout = recipe(recipe_name).layout_for(model_names)
    print(f"table: kvbench table {run_folder} {layout}".rstrip())
    _show_differences(recipe_name, model_names)


def _show_differences(recipe_name: str, model_names: list[str]) -> None:
    """Print the differences between a recipe's run on these models and the paper."""
    from kvbench.papers.recipes import recipe

    paper_recipe = recipe(recipe_name)
    if paper_recipe.is_miniature(model_names):
        say(f"a miniature of {paper_recipe.source}: its scores say nothing about the paper's")
        return
    say(f"differs from {paper_recipe.source}:")
    for difference in paper_recipe.differs:
        say(f"  - {difference}")


def _as_json(finished_run: Run, run_folder: Path) -> dict[str, Any]:
    """Return the results as JSON values, with the folder as given."""
    return {
        "path": str(run_folder),
        "cells": rows_of(finished_run.cells),
        "failed": dict(finished_run.failed),
        "left_out": dict(finished_run.left_out),
    }
