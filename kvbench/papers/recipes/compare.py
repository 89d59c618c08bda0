"""Comparison of a recipe's settings with those that its paper prints or states."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvbench.budget import Budget
from kvbench.harness import catalogue
from kvbench.moments import Timing
from kvbench.papers.layouts.from_papers import task_weights
from kvbench.papers.published.beside import MOMENTS
from kvbench.papers.published.results import SCORES, Figure, papers, published_spelling
from kvbench.papers.recipes.reading import Recipe
from kvbench.runs.options import flag_of
from kvbench.spelling import policy

NOT_STATED = "not stated"
SAME, DIFFERS = "same", "differs"
_ANSWERS = (*SCORES, "judge")


@dataclass(frozen=True)
class ComparedSetting:
    """A setting of a recipe beside the paper's.

    Attributes:
        name: Flag of the setting, such as "model".
        of_paper: The paper's values, in its words; empty if it gives none.
        of_recipe: The recipe's values, as on the command line; empty if it leaves the setting to its default.
        verdict: `same`, `differs`, or `not stated` if the paper gives none.
    """

    name: str
    of_paper: tuple[str, ...]
    of_recipe: tuple[str, ...]
    verdict: str


_BENCH_BUDGET = "prompt"
"""The budget that only `kvbench bench` takes: as many tokens as the prompt has."""


def compared_settings(compared: Recipe) -> list[ComparedSetting]:
    """Return the settings of the full experiment beside the paper's.

    Models, policies, budgets, tasks and moments of a table are read from the published results; further settings from
    `Recipe.states`. What a paper gives only in a plot is not stated.
    """
    ours = {flag_of(name): _listed(value) for name, value in compared.full.items()}
    figures = _figures(compared)
    stated = {flag_of(name): _listed(value) for name, value in compared.states.items()}
    return [
        ComparedSetting(name, *_compared(name, figures, stated, ours.get(name, ())))
        for name in dict.fromkeys((*ours, *stated))
    ]


def _compared(
    name: str, figures: Sequence[Figure], stated: dict[str, tuple[str, ...]], ours: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return the paper's values, ours, and the verdict."""
    if name in stated:
        return stated[name], ours, SAME if set(stated[name]) == set(ours) else DIFFERS
    printed, theirs, mine = _printed(name, figures, ours)
    if not printed:
        return (), ours, NOT_STATED
    return printed, ours, SAME if theirs == mine else DIFFERS


def _printed(name: str, figures: Sequence[Figure], ours: tuple[str, ...]) -> tuple[tuple[str, ...], set[str], set[str]]:
    """Return what a table prints of a setting in the paper's words, and both sides in one spelling."""
    compressed = [figure for figure in figures if figure.policy != "full"]
    if name == "model":
        printed = _distinct(figure.model for figure in figures)
        return printed, {_bare(model) for model in printed}, {_bare(model) for model in ours}
    if name == "policy":
        printed = _distinct(figure.method for figure in compressed)
        theirs = {figure.policy or figure.method for figure in compressed}
        return printed, theirs, {published_spelling(str(policy(spelling))) for spelling in ours}
    if name == "budget":
        printed = _distinct(figure.budget for figure in compressed)
        theirs = {figure.kept for figure in compressed if figure.kept}
        return printed, theirs, {b if b == _BENCH_BUDGET else str(Budget.parse(b)) for b in ours}
    if name == "task" and any(figure.metric in _ANSWERS for figure in figures):
        printed = _distinct(figure.dataset for figure in figures)
        theirs = {source.task for figure in figures for source, _ in task_weights(figure, ())}
        return printed, theirs, {task for spec in ours for task, _ in catalogue.resolve_task(spec)}
    if name == "moment":
        settings = _distinct(figure.setting for figure in compressed)
        printed = tuple(setting for setting in settings if setting in MOMENTS)
        return printed, {MOMENTS[setting] for setting in printed}, {Timing.parse(moment).moment for moment in ours}
    return (), set(), set()


def _figures(compared: Recipe) -> list[Figure]:
    kind, _, number = compared.item.partition(" ")
    table = papers()[compared.paper].tables.get(number) if kind == "table" else None
    rows = () if table is None else table.figures
    answers = [figure for figure in rows if figure.metric in _ANSWERS]
    return [figure for figure in answers or rows if not figure.method.endswith("*")]


def _listed(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, texts)))


def _bare(model_name: str) -> str:
    """Return a model's name without owner, punctuation and what names of the hub add, in lower case."""
    bare = re.sub(r"[^a-z0-9]", "", model_name.rstrip("/").rpartition("/")[2].lower())
    return re.sub(r"^meta|hf$|2507$", "", bare)
