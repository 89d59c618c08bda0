"""Required sample sizes as tables, sentences and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from kvbench.regression.power import MOST, Goal, PowerPlan, SampleNeed
from kvbench.regression.show import place_columns, points
from kvbench.tables.numbers import NumberFormat, number, score_kind
from kvbench.tables.table import Column, Name, Phrase, Table, TableCell, beside
from kvbench.tables.text import counted


def tables(needs: Sequence[SampleNeed], goal: Goal) -> list[Table]:
    """Return the required sample sizes, a table per model and scale of scores."""
    needs_by_table: dict[tuple[str, bool], list[SampleNeed]] = {}
    for need in needs:
        needs_by_table.setdefault((need.place.model, need.unit), []).append(need)
    return [
        _table(model_name, unit_scaled, table_needs, goal)
        for (model_name, unit_scaled), table_needs in needs_by_table.items()
    ]


def sentences(needs: Sequence[SampleNeed], goal: Goal) -> Iterator[Phrase]:
    """Yield explanations of the tables."""
    competing = [need for need in needs if not need.place.informed]
    worst = max(competing, key=lambda need: need.needed_samples, default=None)
    if worst is None:
        yield "No number of samples is advised: all policies are informed, so that none competes."
    elif worst.needed < MOST:
        yield (
            f"To detect a drop of {points(goal.drop)} in every cell, use ",
            Name(f"--samples {worst.needed_samples}"),
            f" ({worst.place.task}, {worst.place.policy} at {worst.place.budget} needs the most).",
        )
    yield (
        f"A drop is detected if it is significant in {100 * goal.power:g}% of comparisons at alpha {goal.alpha:g}, "
        f"corrected for {counted(goal.cells, 'cell')}. sd is the standard deviation of a context's paired difference; "
        "the design effect is the factor by which questions that share a context raise the variance."
    )


def plan_sentence(plan: PowerPlan, goal: Goal) -> Phrase:
    """Return the required sample size in a sentence."""
    effect = f", design effect {plan.design_effect:g}" * (plan.questions > 1)
    question_text = f" with {plan.questions} questions each" * (plan.questions > 1)
    return (
        f"{counted(plan.contexts, 'context')}{question_text} detect a drop of {points(goal.drop)} in "
        f"{100 * goal.power:g}% of comparisons (alpha {goal.alpha:g}, corrected for "
        f"{counted(goal.cells, 'cell')}; {100 * plan.discordance:g}% of answers differ{effect})."
    )


def plan_json(plan: PowerPlan, goal: Goal) -> dict[str, Any]:
    """Return the required sample size as JSON-serialisable data."""
    return asdict(goal) | asdict(plan)


def needs_json(needs: Sequence[SampleNeed], goal: Goal) -> dict[str, Any]:
    """Return the required sample sizes as JSON-serialisable data; numbers that are not finite become null."""
    return asdict(goal) | {
        "needed_cells": [
            asdict(need.place)
            | {
                "contexts": need.contexts,
                "samples": need.samples,
                "sd": need.sd,
                "design_effect": _finite(need.design_effect),
                "needed_contexts": need.needed if need.needed < MOST else None,
                "needed_samples": need.needed_samples if need.needed < MOST else None,
                "seen_drop": _finite(need.seen),
            }
            for need in needs
        ]
    }


def _table(model_name: str, unit_scaled: bool, needs: list[SampleNeed], goal: Goal) -> Table:
    number_kind = score_kind(unit_scaled=unit_scaled)
    drop_cells: list[TableCell] = [need.seen if math.isfinite(need.seen) else "none" for need in needs]
    context_cells: list[TableCell] = [
        cell_need.needed if cell_need.needed < MOST else "too many" for cell_need in needs
    ]
    sample_cells: list[TableCell] = [
        cell_need.needed_samples if cell_need.needed < MOST else "too many" for cell_need in needs
    ]
    effect_cells: list[TableCell] = [_finite(need.design_effect) for need in needs]
    table_columns: list[tuple[Column, Sequence[TableCell]]] = [
        *place_columns([need.place for need in needs], [need.place for need in needs]),
        (Column("contexts", NumberFormat.COUNT), [need.contexts for need in needs]),
        (Column("minimum detectable drop", number_kind), drop_cells),
        (Column("sd", number_kind), [need.sd for need in needs]),
        (Column("design effect", NumberFormat.TIMES), effect_cells),
        (Column("contexts needed", NumberFormat.COUNT), context_cells),
        (Column("samples needed", NumberFormat.COUNT), sample_cells),
    ]
    drop_text = points(goal.drop) if unit_scaled else f"{number(goal.drop, NumberFormat.NUMBER)}%"
    return beside((Name(model_name), f": to detect a drop of {drop_text}"), table_columns)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
