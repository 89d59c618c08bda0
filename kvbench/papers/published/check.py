"""Contradictions within papers: wrong sums, and cells that differ between tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvbench.papers.published.claims import Claim, claims
from kvbench.papers.published.results import Figure, Paper
from kvbench.tables.table import Column, Name, Table, TableCell, TableRow


@dataclass(frozen=True)
class Finding:
    """A published result that contradicts others of the same paper.

    Attributes:
        figure: The result.
        expected: Value expected from the others.
        why: Source of the expected value.
    """

    figure: Figure
    expected: str
    why: str


@dataclass(frozen=True)
class PublishedCheck:
    """Outcome of checking papers.

    Attributes:
        sums: Number of results recomputed from others.
        repeats: Number of measurements in several tables.
        findings: The contradictions, paper by paper.
    """

    sums: int
    repeats: int
    findings: tuple[Finding, ...]


def check(papers: Iterable[Paper]) -> PublishedCheck:
    """Recompute derived results, and compare results that appear in several tables.

    A result contradicts others only if no numbers that round to the printed ones agree.
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
    return PublishedCheck(sum_count, repeat_count, tuple(findings))


def findings_table(check_result: PublishedCheck) -> Table:
    """Return the contradictions as a table."""
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


def _cells(finding: Finding) -> tuple[TableCell, ...]:
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
    # One more digit than printed reveals values that were truncated instead of rounded.
    return Finding(claim.figure, f"{claim.computed:.{decimals + 1}f}", claim.rule)


def _repeated(figures: Iterable[Figure]) -> list[list[Figure]]:
    """Return measurements in several tables of a paper, each with one result per table."""
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
