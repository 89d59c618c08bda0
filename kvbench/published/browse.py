"""Choosing figures, and showing them as tables: those of a paper, or lists of what there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvbench.errors import unknown
from kvbench.published.figures import Figure, Paper, PublishedTable, papers
from kvbench.report.table import Cell, Column, Name, Row, Table


@dataclass(frozen=True)
class Filter:
    """Which figures to keep. An empty collection keeps all.

    Attributes:
        policies: Policies of kvbench, or methods as a paper calls them.
        tasks: Tasks, subsets or groups of kvbench, or datasets as a paper calls them.
        models: Parts of the names of models.
        members: What each group and subset consists of: its name stands for these, too.
    """

    policies: Collection[str] = ()
    tasks: Collection[str] = ()
    models: Collection[str] = ()
    members: Mapping[str, Collection[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.policies or self.tasks or self.models)

    def apply(self, figures: Sequence[Figure]) -> list[Figure]:
        """The figures that pass.

        Raises:
            UserError: A name fits none of the figures; the nearest names are given.
        """
        tasks = {name: {name, *self.members.get(name, ())} for name in self.tasks}
        all_models = {f.model for f in figures if f.model}
        models = {
            name: {model for model in all_models if name.lower() in model.lower()}
            for name in self.models
        }
        kept = list(figures)
        for kind, wanted, names_of in (
            ("policy", {name: {name} for name in self.policies}, _methods),
            ("task", tasks, _datasets),
            ("model", models, lambda f: (f.model,)),
        ):
            # Our names come last, so that they are suggested where a paper's differ only in case.
            known = {name.lower(): name for f in figures for name in names_of(f) if name}
            for name, names in wanted.items():
                if not known.keys() & _lower(names):
                    raise unknown(kind, name, known.values())
            allowed = _lower(name for names in wanted.values() for name in names)
            kept = [f for f in kept if not wanted or allowed & _lower(names_of(f))]
        return kept


def overview(figures: Iterable[Figure]) -> Table:
    """A row per paper: how many tables and figures there are."""
    held: dict[str, list[Figure]] = {}
    for f in figures:
        held.setdefault(f.paper, []).append(f)
    rows = [
        Row((Name(name), str(len({f.table for f in own})), str(len(own)), _about(papers()[name])))
        for name, own in held.items()
    ]
    heads = (Column("name"), _right("tables"), _right("figures"), Column("paper"))
    return Table("", heads, tuple(rows))


def contents(paper: Paper, figures: Iterable[Figure]) -> Table:
    """A row per table of a paper: its number, how many figures it has, what it shows."""
    counts = Counter(f.table for f in figures)
    rows = [
        Row((number, str(counts[number]), table.where, table.title))
        for number, table in paper.tables.items()
        if number in counts
    ]
    heads = (_right("table"), _right("figures"), Column("section"), Column("what it shows"))
    return Table(_about(paper), heads, tuple(rows))


def as_printed(paper: Paper, table: PublishedTable, figures: Sequence[Figure]) -> Table:
    """A table with its rows and columns as the paper prints them.

    Args:
        paper: The paper.
        table: The table.
        figures: The figures to show, in the order of the table; rows and columns without any are
            left out.
    """
    columns = list(dict.fromkeys((f.group, f.column) for f in figures))
    cells: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
    for f in figures:
        row = cells.setdefault((f.part, f.row), {})
        row.setdefault((f.group, f.column), []).append(f.value)
    parts = any(part for part, _ in cells)
    heads = [Column("")] * parts + [Column("")]
    heads += [Column(title, group=group, align="right") for group, title in columns]
    rows = []
    before = None
    for (part, label), values in cells.items():
        lead: list[Cell] = [part if part != before else ""] if parts else []
        before = part
        # A cell that holds two numbers, such as a score and a time.
        printed = [" / ".join(values[c]) if c in values else None for c in columns]
        rows.append(Row((*lead, label, *printed), group=part))
    title = f"{paper.name}, Table {table.number} ({table.where}): {table.title}"
    return Table(title, tuple(heads), tuple(rows), (table.note,) if table.note else ())


def _about(paper: Paper) -> str:
    return f"{paper.title} (arXiv {paper.arxiv})"


def _right(title: str) -> Column:
    return Column(title, align="right")


def _methods(f: Figure) -> tuple[str, ...]:
    """What a method may be called; a policy with parameters also goes by its name alone."""
    return f.method, f.policy.partition(":")[0], f.policy


def _datasets(f: Figure) -> tuple[str, ...]:
    return f.dataset, f.task


def _lower(names: Iterable[str]) -> set[str]:
    return {name.lower() for name in names}
