"""`kvbench published`: the figures of papers. What reads them is imported inside the command."""

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
from kvbench.report.outputs import terminal
from kvbench.runs.options import FLAG, OUTPUT

if TYPE_CHECKING:
    from kvbench.published.browse import Filter
    from kvbench.published.figures import Figure


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
            "Only these policies, with commas: kvbench's names, or the paper's.",
            autocompletion=complete.policies,
        ),
    ] = None,
    task: Annotated[
        Names,
        option(
            None,
            "NAME",
            "Only these tasks, with commas: kvbench's names (a group stands for its tasks, "
            "too), or the paper's.",
            autocompletion=complete.tasks,
        ),
    ] = None,
    model: Annotated[
        Names,
        option(None, "NAME", "Only models with this in their name, with commas: llama-3,qwen."),
    ] = None,
    check: Annotated[
        bool,
        option(
            None,
            FLAG,
            "Compute averages and losses again, and compare what is printed twice.",
            "--check",
        ),
    ] = False,
    as_csv: Annotated[
        bool, option(OUTPUT, FLAG, "Print a line per figure, as CSV.", "--csv")
    ] = False,
    as_json: Annotated[
        bool, option(OUTPUT, FLAG, "Print an object per figure, as JSON.", "--json")
    ] = False,
) -> None:
    """Browse the figures that papers print: list them, show a table, filter, check.

    Without PAPER it lists the papers. With --policy, --task or --model it shows the tables.
    """
    from kvbench.published.figures import paper as find_paper
    from kvbench.published.figures import papers

    if as_csv + as_json + check > 1:
        raise UserError("--check, --csv and --json exclude each other; give only one")
    if check and table:
        raise UserError("--check takes no table: it compares those of a paper with each other")
    if check and (policy or task or model):
        raise UserError("--check takes no filter: it needs whole tables")
    chosen = [find_paper(paper)] if paper else list(papers().values())
    if check:
        _check([one.name for one in chosen])
        return
    tables = [t for one in chosen for t in ([one.table(table)] if table else one.tables.values())]
    wanted = _filter(policy, task, model)
    figures = wanted.apply([f for t in tables for f in t.figures])
    if as_csv:
        print(_csv(figures), end="")
    elif as_json:
        print_json([asdict(f) for f in figures])
    else:
        _show(figures, whole=bool(table or wanted), paper=paper)


def _filter(policy: Names, task: Names, model: Names) -> Filter:
    from kvbench.harness import catalogue
    from kvbench.published.browse import Filter

    members: dict[str, tuple[str, ...]] = {}
    if task:
        for name, group in catalogue.benchmarks()[0].items():
            members |= {sub: tuple(leaves) for sub, leaves in group.subsets.items()}
            members[name] = (*group.subsets, *group.leaves)
    return Filter(split_names(policy), split_names(task), split_names(model), members)


def _show(figures: list[Figure], *, whole: bool, paper: str | None) -> None:
    from kvbench.published import browse
    from kvbench.published.figures import papers

    if not whole:
        found = browse.contents(papers()[paper], figures) if paper else browse.overview(figures)
        console().print(terminal(found, boxed=False))
        return
    by_table: dict[tuple[str, str], list[Figure]] = {}
    for f in figures:
        by_table.setdefault((f.paper, f.table), []).append(f)
    if not by_table:
        print("no figure fits all of these names together")
    for (name, number), own in by_table.items():
        one = papers()[name]
        show(browse.as_printed(one, one.table(number), own))


def _check(names: list[str]) -> None:
    from kvbench.published.check import check, findings_table
    from kvbench.published.figures import papers

    found = check(papers()[name] for name in names)
    if found.findings:
        console().print(terminal(findings_table(found)))
    print(
        f"{found.sums} figures computed again from others, {found.repeats} measurements printed "
        f"in several tables: {len(found.findings)} contradictions"
    )


def _csv(figures: list[Figure]) -> str:
    from kvbench.published.figures import FIELDS

    out = io.StringIO()
    writer = csv.DictWriter(out, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, figures))
    return out.getvalue()
