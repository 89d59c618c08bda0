"""Trains the variants of a recipe, evaluates them on the same questions and writes the tables."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

import kvbench
from kvbench.errors import UserError
from kvbench.progress import Reporter, duration
from kvbench.runs.grid import Grid
from kvbench.runs.runner import execute
from kvbench.training.ablations.contrast import contrasts, markdown
from kvbench.training.ablations.recipe import Ablation, Recipe, Variant
from kvbench.training.command import Plan, plan, train
from kvbench.training.folder import finished

GATES = "gates"
_LOG = "training.jsonl"


def place(variant: Variant, seed: int, out: Path) -> Path:
    """The folder of a variant's gates."""
    return out / GATES / f"{variant.folder}-seed-{seed}"


def planned(recipe: Recipe, variant: Variant, seed: int, out: Path) -> Plan:
    """The training of a variant.

    Raises:
        UserError: One of its settings is unknown or out of range.
    """
    given = {**recipe.train, **variant.train, "seed": seed}
    folder = place(variant, seed, out)
    return plan(recipe.model, variant.kind, recipe.data, given, out=folder)


def trainings(recipe: Recipe, tables: Sequence[Ablation], out: Path) -> list[Plan]:
    """What must be trained for some tables, each once: all of the first seed, then the next."""
    found: dict[Path, Plan] = {}
    for seed in recipe.seeds:
        for variant in (v for table in tables for v in table.variants):
            if place(variant, seed, out) not in found:
                found[place(variant, seed, out)] = planned(recipe, variant, seed, out)
    return list(found.values())


def policies(recipe: Recipe, table: Ablation, out: Path) -> dict[str, tuple[str, int]]:
    """Variant and seed of every policy of a table, by the policy's canonical spelling."""
    found = {}
    for variant in table.variants:
        for seed in recipe.seeds:
            gates = str(place(variant, seed, out))
            found[str(kvbench.policy(variant.policy, gates=gates))] = (variant.name, seed)
    return found


def grids(recipe: Recipe, table: Ablation, out: Path) -> list[Grid]:
    """The evaluations of a table, each in a folder of its own."""
    own = {"policies": list(policies(recipe, table, out)), "models": [recipe.model]}
    return [
        Grid.from_dict({**grid, **own, "out": str(out / table.name / f"{number}")})
        for number, grid in enumerate(recipe.evaluate, 1)
    ]


def ablate(recipe: Recipe, tables: Sequence[Ablation], out: Path, reporter: Reporter) -> list[Path]:
    """Train what is not trained yet, evaluate what is not evaluated yet, write the tables.

    Args:
        recipe: What to do.
        tables: Which of its tables.
        out: Folder of the gates (`gates/`), the runs (`TABLE/1/`, ...) and the tables (`TABLE.md`).
        reporter: Told how far it is.

    Returns:
        The tables that were written.

    Raises:
        UserError: Something in the recipe is wrong, or `out` holds other gates or runs.
    """
    if set(str(out)) & set(",:"):
        raise UserError(f"--out {out}: a name without commas and colons would be right")
    todo = trainings(recipe, tables, out)
    evaluations = {table.name: grids(recipe, table, out) for table in tables}
    for number, one in enumerate(todo, 1):
        if not finished(one):
            reporter.message(f"training {number} of {len(todo)}: {one.out}")
            train(one, reporter)
    written = []
    for table in tables:
        runs = [execute(grid, reporter=reporter) for grid in evaluations[table.name]]
        failed = [error for run in runs for error in run.failed.values()]
        for error in dict.fromkeys(failed):
            reporter.message(f"{table.name}: failed: {error}")
        cells = pd.concat([run.cells for run in runs])
        samples = pd.concat([run.samples for run in runs])
        text = markdown(table, contrasts(cells, samples, policies(recipe, table, out)))
        path = out / f"{table.name}.md"
        path.write_text(f"{text}\n{_cost(recipe, table, out)}\n", encoding="utf-8")
        written.append(path)
    return written


def describe(recipe: Recipe, tables: Sequence[Ablation], out: Path) -> list[str]:
    """What would be done, for the user."""
    todo = trainings(recipe, tables, out)
    made = [one for one in todo if finished(one)]
    lines = [f"{table.name}: {table.title} ({table.paper})" for table in tables]
    lines.append(f"{len(todo)} trainings, {len(made)} of them there already:")
    lines += [f"  {one.lines()[0]}, seed {one.settings['seed']}: {one.out}" for one in todo]
    return [*lines, f"into {out}"]


def _cost(recipe: Recipe, table: Ablation, out: Path) -> str:
    """What the trainings of a table took, from their logs."""
    plans = trainings(recipe, [table], out)
    logs = [(one.out / _LOG).read_text(encoding="utf-8").splitlines() for one in plans]
    found = [float(json.loads(log[-1])["seconds"]) for log in logs]
    device = plans[0].device.type
    machine = f"a machine of {os.cpu_count()} CPU cores" if device == "cpu" else device
    return (
        f"{len(found)} trainings on {machine}: {duration(min(found))} to {duration(max(found))} "
        f"each, {duration(sum(found))} in all."
    )
