"""What the shell offers after Tab. Names are read from the installed packages, without torch."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from kvbench import registry
from kvbench.cli.listing import KINDS
from kvbench.harness import catalogue
from kvbench.moments import MOMENTS


def policies(incomplete: str) -> list[str]:
    """Policies, after the last comma."""
    return _listed(incomplete, ["all", *registry.names(registry.POLICIES)])


def tasks(incomplete: str) -> list[str]:
    """Groups of tasks, their subsets and tasks, after the last comma."""
    benchmarks, _ = catalogue.benchmarks()
    task_names = (
        task_name for benchmark in benchmarks.values() for task_name in (*benchmark.subsets, *benchmark.leaves)
    )
    return _listed(incomplete, [*benchmarks, *task_names])


def models(incomplete: str) -> list[str]:
    """Models that have a name, after the last comma."""
    return _listed(incomplete, registry.names(registry.MODELS))


def budgets(incomplete: str) -> list[str]:
    """Budgets to start from, after the last comma."""
    return _listed(incomplete, ["0.1", "0.2", "0.4", "64", "128", "512", "full"])


def moments(incomplete: str) -> list[str]:
    """Moments, after the last comma."""
    return _listed(incomplete, MOMENTS)


def lists(incomplete: str) -> list[str]:
    """What `kvbench list` can list."""
    return [list_kind for list_kind in KINDS if list_kind.startswith(incomplete)]


def trainers(incomplete: str) -> list[str]:
    """Policies whose gates can be trained."""
    return [trainer_name for trainer_name in registry.names(registry.TRAINERS) if trainer_name.startswith(incomplete)]


def papers(incomplete: str) -> list[str]:
    """Papers whose figures can be shown."""
    from kvbench.papers.published.results import papers

    return [paper_name for paper_name in papers() if paper_name.startswith(incomplete)]


def paper_tables(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Numbers of the tables of the paper on the command line, with what they show."""
    from kvbench.papers.published.results import papers

    publication = papers().get(ctx.params.get("paper") or "")
    printed_tables = publication.tables.values() if publication else ()
    return [
        (printed_table.number, printed_table.title)
        for printed_table in printed_tables
        if printed_table.number.startswith(incomplete)
    ]


def layouts(incomplete: str) -> list[str]:
    """Layouts of published tables."""
    from kvbench.papers.layouts.from_papers import published_layouts

    return [layout_name for layout_name in published_layouts() if layout_name.startswith(incomplete)]


def recipes(incomplete: str) -> list[tuple[str, str]]:
    """Recipes, with what they show."""
    from kvbench.papers.recipes import recipes

    return [
        (recipe_name, paper_recipe.title)
        for recipe_name, paper_recipe in recipes().items()
        if recipe_name.startswith(incomplete)
    ]


def _listed(incomplete: str, candidates: Iterable[str]) -> list[str]:
    """Complete the last name of a list with commas; the names before it are not offered again."""
    earlier_names, separator, partial_name = incomplete.rpartition(",")
    used_names = set(earlier_names.split(","))
    matches = dict.fromkeys(
        candidate for candidate in candidates if candidate.startswith(partial_name) and candidate not in used_names
    )
    return [earlier_names + separator + candidate for candidate in matches]
