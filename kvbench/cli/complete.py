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
    groups, _ = catalogue.benchmarks()
    parts = (name for group in groups.values() for name in (*group.subsets, *group.leaves))
    return _listed(incomplete, [*groups, *parts])


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
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def trainers(incomplete: str) -> list[str]:
    """Policies whose gates can be trained."""
    return [name for name in registry.names(registry.TRAINERS) if name.startswith(incomplete)]


def papers(incomplete: str) -> list[str]:
    """Papers whose figures can be shown."""
    from kvbench.published.figures import papers

    return [name for name in papers() if name.startswith(incomplete)]


def paper_tables(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Numbers of the tables of the paper on the command line, with what they show."""
    from kvbench.published.figures import papers

    paper = papers().get(ctx.params.get("paper") or "")
    tables = paper.tables.values() if paper else ()
    return [(t.number, t.title) for t in tables if t.number.startswith(incomplete)]


def layouts(incomplete: str) -> list[str]:
    """Layouts of published tables."""
    from kvbench.layouts.published import published_layouts

    return [name for name in published_layouts() if name.startswith(incomplete)]


def recipes(incomplete: str) -> list[tuple[str, str]]:
    """Recipes, with what they show."""
    from kvbench.recipes import recipes

    return [(name, one.title) for name, one in recipes().items() if name.startswith(incomplete)]


def _listed(incomplete: str, names: Iterable[str]) -> list[str]:
    """Complete the last name of a list with commas; the names before it are not offered again."""
    before, comma, last = incomplete.rpartition(",")
    used = set(before.split(","))
    known = dict.fromkeys(name for name in names if name.startswith(last) and name not in used)
    return [before + comma + name for name in known]
