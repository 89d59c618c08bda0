"""Where a paper contradicts itself: sums that do not add up, cells that are printed differently."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvbench.papers.published.claims import Claim, claims
from kvbench.papers.published.results import Figure, Paper
from kvbench.tables.table import Cell, Column, Name, Table, TableRow


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
    sum_count = repeat_count = 0
    findings: list[Finding] = []
    for paper in papers:
        for table in paper.tables.values():
            table_claims = claims(paper.name, table.number, table.figures)
            sum_count += len(table_claims)
            findings += [_miscounted(claim) for claim in table_claims if not claim.holds]
        repeated_groups = _repeated(figure for table in paper.tables.values() for figure in table.figures)
        repeat_count += len(repeated_groups)
        for first_figure, *other_figures in repeated_groups:
            explanation = f"Table {first_figure.table} prints it so ({first_figure.place})"
            findings += [
                Finding(figure, first_figure.value, explanation)
                for figure in other_figures
                if _differ(first_figure, figure)
            ]
    paper_order = list(dict.fromkeys(finding.figure.paper for finding in findings))
    findings.sort(key=lambda finding: (paper_order.index(finding.figure.paper), int(finding.figure.table)))
    return Checked(sum_count, repeat_count, tuple(findings))


def findings_table(check_result: Checked) -> Table:
    """The contradictions as a table."""
    head_columns = (
        Column("paper"),
        Column("table", align="right"),
        Column("row; column"),
        Column("printed", align="right"),
        Column("expected", align="right"),
        Column("because"),
    )
    table_rows = tuple(TableRow(_cells(finding), group=finding.figure.paper) for finding in check_result.findings)
    return Table("", head_columns, table_rows)


def _cells(finding: Finding) -> tuple[Cell, ...]:
    figure = finding.figure
    return (
        Name(figure.paper),
        figure.table,
        figure.place,
        figure.value,
        finding.expected,
        finding.why,
    )


def _miscounted(claim: Claim) -> Finding:
    decimals = len(claim.figure.value.partition(".")[2])
    # One digit more than printed shows a figure that was cut instead of rounded.
    return Finding(claim.figure, f"{claim.computed:.{decimals + 1}f}", claim.rule)


def _repeated(figures: Iterable[Figure]) -> list[list[Figure]]:
    """Measurements that several tables of a paper print, each with its figures, one a table."""
    figures_by_key: dict[tuple[str, ...], dict[str, Figure]] = {}
    for figure in figures:
        method, dataset = figure.policy or figure.method, figure.task or figure.dataset
        if method:
            measure_key = (
                method,
                dataset,
                figure.model,
                figure.budget,
                figure.setting,
                figure.metric,
            )
            figures_by_key.setdefault(measure_key, {}).setdefault(figure.table, figure)
    return [list(figure_by_table.values()) for figure_by_table in figures_by_key.values() if len(figure_by_table) > 1]


def _differ(first_figure: Figure, second_figure: Figure) -> bool:
    return abs(first_figure.number - second_figure.number) > first_figure.half_digit + second_figure.half_digit + 1e-9
