"""Where a paper contradicts itself: sums that do not add up, cells that are printed differently."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvbench.published.claims import Claim, claims
from kvbench.published.figures import Figure, Paper
from kvbench.report.table import Cell, Column, Name, Row, Table


@dataclass(frozen=True)
class Finding:
    """A printed figure that other figures of its paper contradict.

    Attributes:
        figure: The figure.
        expected: What the others give.
        why: Where that comes from.
    """

    figure: Figure
    expected: str
    why: str


@dataclass(frozen=True)
class Checked:
    """What a check of papers found.

    Attributes:
        sums: Figures that were computed again from others.
        repeats: Measurements that several tables print.
        findings: The contradictions, paper by paper.
    """

    sums: int
    repeats: int
    findings: tuple[Finding, ...]


def check(papers: Iterable[Paper]) -> Checked:
    """Compute again what the papers compute, and compare what they print twice.

    A figure contradicts others only if no numbers that round to what is printed agree.
    """
    sums = repeats = 0
    findings: list[Finding] = []
    for paper in papers:
        for table in paper.tables.values():
            found = claims(paper.name, table.number, table.figures)
            sums += len(found)
            findings += [_miscounted(claim) for claim in found if not claim.holds]
        groups = _repeated(f for table in paper.tables.values() for f in table.figures)
        repeats += len(groups)
        for first, *others in groups:
            why = f"Table {first.table} prints it so ({first.place})"
            findings += [Finding(f, first.value, why) for f in others if _differ(first, f)]
    order = list(dict.fromkeys(one.figure.paper for one in findings))
    findings.sort(key=lambda one: (order.index(one.figure.paper), int(one.figure.table)))
    return Checked(sums, repeats, tuple(findings))


def findings_table(found: Checked) -> Table:
    """The contradictions as a table."""
    heads = (
        Column("paper"),
        Column("table", align="right"),
        Column("row; column"),
        Column("printed", align="right"),
        Column("expected", align="right"),
        Column("because"),
    )
    rows = tuple(Row(_cells(one), group=one.figure.paper) for one in found.findings)
    return Table("", heads, rows)


def _cells(one: Finding) -> tuple[Cell, ...]:
    f = one.figure
    return Name(f.paper), f.table, f.place, f.value, one.expected, one.why


def _miscounted(claim: Claim) -> Finding:
    decimals = len(claim.figure.value.partition(".")[2])
    # One digit more than printed shows a figure that was cut instead of rounded.
    return Finding(claim.figure, f"{claim.computed:.{decimals + 1}f}", claim.rule)


def _repeated(figures: Iterable[Figure]) -> list[list[Figure]]:
    """Measurements that several tables of a paper print, each with its figures, one a table."""
    found: dict[tuple[str, ...], dict[str, Figure]] = {}
    for f in figures:
        method, dataset = f.policy or f.method, f.task or f.dataset
        if method:
            key = (method, dataset, f.model, f.budget, f.setting, f.metric)
            found.setdefault(key, {}).setdefault(f.table, f)
    return [list(by_table.values()) for by_table in found.values() if len(by_table) > 1]


def _differ(a: Figure, b: Figure) -> bool:
    return abs(a.number - b.number) > a.half_digit + b.half_digit + 1e-9
