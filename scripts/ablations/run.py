"""Trains the variants of a recipe, evaluates them on the same questions and writes the tables."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

import kvbench
from kvbench.errors import UserError
from kvbench.files import replacing
from kvbench.progress import Reporter, duration
from kvbench.runs.grid import Grid
from kvbench.runs.runner import execute
from kvbench.training.command import GateTraining, plan, train
from kvbench.training.folder import LOG, is_finished
from scripts.ablations.contrast import contrasts, markdown
from scripts.ablations.recipe import Ablation, Recipe, Variant


def gates_folder(variant: Variant, seed: int, out: Path) -> Path:
    """The folder of a variant's gates."""
    return out / "gates" / f"{variant.folder}-seed-{seed}"


def trainings(recipe: Recipe, tables: Sequence[Ablation], out: Path) -> list[GateTraining]:
    """The trainings that some tables need, each once: all of the first seed, then of the next.

    Raises:
        UserError: A setting is unknown or out of range.
    """
    by_folder: dict[Path, GateTraining] = {}
    for seed in recipe.seeds:
        for variant in (v for table in tables for v in table.variants):
            folder = gates_folder(variant, seed, out)
            if folder not in by_folder:
                given = {**recipe.train, **variant.train, "seed": seed}
                data = variant.data or recipe.data
                by_folder[folder] = plan(recipe.model, variant.kind, data, given, out=folder)
    return list(by_folder.values())


def policies(recipe: Recipe, table: Ablation, out: Path) -> dict[str, tuple[str, int]]:
    """Variant and seed of every policy of a table, by the policy's canonical spelling."""
    return {
        str(kvbench.policy(variant.policy, gates=str(gates_folder(variant, seed, out)))): (
            variant.name,
            seed,
        )
        for variant in table.variants
        for seed in recipe.seeds
    }


def grids(recipe: Recipe, table: Ablation, out: Path) -> list[Grid]:
    """The evaluations of a table, each in a folder of its own."""
    evaluated = {"policies": list(policies(recipe, table, out)), "models": [recipe.model]}
    return [
        Grid.from_dict({**grid, **evaluated, "out": str(out / table.name / f"{number}")})
        for number, grid in enumerate(recipe.evaluate, 1)
    ]


def ablate(recipe: Recipe, tables: Sequence[Ablation], out: Path, reporter: Reporter) -> list[Path]:
    """Train and evaluate what is missing, and write the tables.

    Args:
        recipe: The recipe.
        tables: Tables of the recipe.
        out: Folder of the gates (`gates/`), the runs (`TABLE/1/`, ...) and the tables (`TABLE.md`).
        reporter: Told of the progress.

    Returns:
        The tables that were written.

    Raises:
        UserError: Something in the recipe is wrong, or `out` holds other gates or runs.
    """
    if set(str(out)) & set(",:"):
        raise UserError(f"--out {out} has a comma or a colon; use a name without them")
    needed = trainings(recipe, tables, out)
    evaluations = {table.name: grids(recipe, table, out) for table in tables}
    for number, training in enumerate(needed, 1):
        if not is_finished(training.out, training.identity()):
            reporter.message(f"training {number} of {len(needed)}: {training.out}")
            train(training, reporter)
    written = []
    for table in tables:
        runs = [execute(grid, reporter=reporter) for grid in evaluations[table.name]]
        for error in dict.fromkeys(error for run in runs for error in run.failed.values()):
            reporter.message(f"{table.name}: failed: {error}")
        cells = pd.concat([run.cells for run in runs])
        samples = pd.concat([run.samples for run in runs])
        text = markdown(table, contrasts(cells, samples, policies(recipe, table, out)))
        path = out / f"{table.name}.md"
        with replacing(path) as part:
            part.write_text(f"{text}\n{_cost(recipe, table, out)}\n", encoding="utf-8")
        written.append(path)
    return written


def describe(recipe: Recipe, tables: Sequence[Ablation], out: Path) -> list[str]:
    """A description of the work for the user."""
    needed = trainings(recipe, tables, out)
    done = sum(is_finished(training.out, training.identity()) for training in needed)
    lines = [f"{table.name}: {table.title} ({table.paper})" for table in tables]
    lines.append(f"{len(needed)} trainings, {done} of them finished:")
    lines += [f"  {t.lines()[0]}, seed {t.settings['seed']}: {t.out}" for t in needed]
    return [*lines, f"to {out}"]


def _cost(recipe: Recipe, table: Ablation, out: Path) -> str:
    """The time that the trainings of a table took, from their logs."""
    needed = trainings(recipe, [table], out)
    logs = [(training.out / LOG).read_text(encoding="utf-8").splitlines() for training in needed]
    seconds = [float(json.loads(log[-1])["seconds"]) for log in logs]
    device = needed[0].device.type
    machine = f"a machine with {os.cpu_count()} CPU cores" if device == "cpu" else device
    return (
        f"{len(seconds)} trainings on {machine}: {duration(min(seconds))} to "
        f"{duration(max(seconds))} each, {duration(sum(seconds))} in total."
    )
