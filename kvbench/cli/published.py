"""`kvbench published`: results printed in papers. Heavy modules are imported inside the command."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli import complete
from kvbench.cli.options import Names, option, split_names
from kvbench.cli.screen import console, print_json, show
from kvbench.errors import UserError
from kvbench.runs.options import FLAG, OUTPUT
from kvbench.tables.outputs import terminal

if TYPE_CHECKING:
    from kvbench.papers.published.browse import Filter
    from kvbench.papers.published.results import Figure


def published(
    paper: Annotated[
        str | None,
        typer.Argument(
            metavar="PAPER",
            help="A paper: show its tables.",
            autocompletion=complete.papers,
            show_default=False,
        ),
    ] = None,
    table: Annotated[
        str | None,
        typer.Argument(
            metavar="TABLE",
            help="The number of one of its tables: show it as printed.",
            autocompletion=complete.paper_tables,
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        Names,
        option(
            None,
            "NAME",
            "Only these policies, comma-separated: kvbench's names, or the paper's.",
            autocompletion=complete.policies,
        ),
    ] = None,
    task: Annotated[
        Names,
        option(
            None,
            "NAME",
            "Only these tasks, comma-separated: kvbench's names (a group includes its tasks), or the paper's.",
            autocompletion=complete.tasks,
        ),
    ] = None,
    model: Annotated[
        Names,
        option(None, "NAME", "Only models whose name contains this, comma-separated: llama-3,qwen."),
    ] = None,
    check: Annotated[
        bool,
        option(
            None,
            FLAG,
            "Recompute averages and losses, and compare results printed more than once.",
            "--check",
        ),
    ] = False,
    as_csv: Annotated[bool, option(OUTPUT, FLAG, "Print one line per result, as CSV.", "--csv")] = False,
    as_json: Annotated[bool, option(OUTPUT, FLAG, "Print one object per result, as JSON.", "--json")] = False,
) -> None:
    """Browse published results: list papers, show a table, filter, check.

    Without PAPER, it lists the papers. With --policy, --task or --model it shows the tables.
    """
    from kvbench.papers.published.results import paper as find_paper
    from kvbench.papers.published.results import papers

    if as_csv + as_json + check > 1:
        raise UserError("--check, --csv and --json exclude each other; give only one")
    if check and table:
        raise UserError("--check takes no table: it compares the tables of a paper with each other")
    if check and (policy or task or model):
        raise UserError("--check takes no filter: it needs whole tables")
    selected_papers = [find_paper(paper)] if paper else list(papers().values())
    if check:
        _check([publication.name for publication in selected_papers])
        return
    printed_tables = [
        printed_table
        for publication in selected_papers
        for printed_table in ([publication.table(table)] if table else publication.tables.values())
    ]
    figure_filter = _filter(policy, task, model)
    figures = figure_filter.apply([figure for printed_table in printed_tables for figure in printed_table.figures])
    if as_csv:
        print(_csv(figures), end="")
    elif as_json:
        print_json([asdict(figure) for figure in figures])
    else:
        _show(figures, as_tables=bool(table or figure_filter), paper=paper)


def _filter(policy: Names, task: Names, model: Names) -> Filter:
    from kvbench.harness import catalogue
    from kvbench.papers.published.browse import Filter

    task_members: dict[str, tuple[str, ...]] = {}
    if task:
        for group_name, benchmark in catalogue.benchmarks()[0].items():
            task_members |= {subset_name: tuple(task_names) for subset_name, task_names in benchmark.subsets.items()}
            task_members[group_name] = (*benchmark.subsets, *benchmark.leaves)
    return Filter(split_names(policy), split_names(task), split_names(model), task_members)


def _show(figures: list[Figure], *, as_tables: bool, paper: str | None) -> None:
    from kvbench.papers.published import browse
    from kvbench.papers.published.results import papers

    if not as_tables:
        summary_table = browse.contents(papers()[paper], figures) if paper else browse.overview(figures)
        console().print(terminal(summary_table, boxed=False))
        return
    figures_by_table: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        figures_by_table.setdefault((figure.paper, figure.table), []).append(figure)
    if not figures_by_table:
        print("no result matches all of these names")
    for (paper_name, table_number), table_figures in figures_by_table.items():
        publication = papers()[paper_name]
        show(browse.as_printed(publication, publication.table(table_number), table_figures))


def _check(paper_names: list[str]) -> None:
    from kvbench.papers.published.check import check, findings_table
    from kvbench.papers.published.results import papers

    check_result = check(papers()[paper_name] for paper_name in paper_names)
    if check_result.findings:
        console().print(terminal(findings_table(check_result)))
    print(
        f"{check_result.sums} results recomputed from others, {check_result.repeats} "
        f"measurements printed in several tables: {len(check_result.findings)} contradictions"
    )


def _csv(figures: list[Figure]) -> str:
    from kvbench.papers.published.results import FIELDS

    text_buffer = io.StringIO()
    csv_writer = csv.DictWriter(text_buffer, FIELDS, lineterminator="\n")
    csv_writer.writeheader()
    csv_writer.writerows(map(asdict, figures))
    return text_buffer.getvalue()
