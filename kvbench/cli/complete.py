"""Shell completion. Names come from the installed packages, without importing torch."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from kvbench import registry
from kvbench.cli.listing import KINDS
from kvbench.harness import catalogue
from kvbench.moments import MOMENTS


def policies(incomplete: str) -> list[str]:
    """Complete policies after the last comma."""
    return _listed(incomplete, ["all", *registry.names(registry.POLICIES)])


def tasks(incomplete: str) -> list[str]:
    """Complete task groups, subsets and tasks after the last comma, also those of lm-eval."""
    return _listed(incomplete, catalogue.all_names())


def models(incomplete: str) -> list[str]:
    """Complete named models after the last comma."""
    return _listed(incomplete, registry.names(registry.MODELS))


def budgets(incomplete: str) -> list[str]:
    """Complete common budgets after the last comma."""
    return _listed(incomplete, ["0.1", "0.2", "0.4", "64", "128", "512", "full"])


def moments(incomplete: str) -> list[str]:
    """Complete moments after the last comma."""
    return _listed(incomplete, MOMENTS)


def lists(incomplete: str) -> list[str]:
    """Complete the kinds of `kvbench list`."""
    return [list_kind for list_kind in KINDS if list_kind.startswith(incomplete)]


def trainers(incomplete: str) -> list[str]:
    """Complete policies with trainable gates."""
    return [trainer_name for trainer_name in registry.names(registry.TRAINERS) if trainer_name.startswith(incomplete)]


def papers(incomplete: str) -> list[str]:
    """Complete papers with published results."""
    from kvbench.papers.published.results import papers

    return [paper_name for paper_name in papers() if paper_name.startswith(incomplete)]


def paper_tables(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete table numbers of the paper on the command line, with their captions."""
    from kvbench.papers.published.results import papers

    publication = papers().get(ctx.params.get("paper") or "")
    printed_tables = publication.tables.values() if publication else ()
    return [
        (printed_table.number, printed_table.title)
        for printed_table in printed_tables
        if printed_table.number.startswith(incomplete)
    ]


def layouts(incomplete: str) -> list[str]:
    """Complete layouts of published tables."""
    from kvbench.papers.layouts.from_papers import published_layouts

    return [layout_name for layout_name in published_layouts() if layout_name.startswith(incomplete)]


def recipes(incomplete: str) -> list[tuple[str, str]]:
    """Complete recipes, with their titles."""
    from kvbench.papers.recipes import recipes

    return [
        (recipe_name, paper_recipe.title)
        for recipe_name, paper_recipe in recipes().items()
        if recipe_name.startswith(incomplete)
    ]


def _listed(incomplete: str, candidates: Iterable[str]) -> list[str]:
    """Complete the last name of a comma-separated list, excluding the names before it."""
    earlier_names, separator, partial_name = incomplete.rpartition(",")
    used_names = set(earlier_names.split(","))
    matches = dict.fromkeys(
        candidate for candidate in candidates if candidate.startswith(partial_name) and candidate not in used_names
    )
    return [earlier_names + separator + candidate for candidate in matches]
