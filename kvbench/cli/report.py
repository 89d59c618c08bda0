"""`kvbench report`. Heavy modules are imported inside the command."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.cli import complete
from kvbench.cli.options import Metric, Names, declared_options, option, split_names, split_options
from kvbench.cli.screen import console, print_json, progress, rows_of, say, show, stopping
from kvbench.errors import UserError
from kvbench.progress import Silent
from kvbench.report.figure_flags import FigureFlags
from kvbench.runs.options import FLAG


@declared_options(FigureFlags, anchor="x_axis")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    metric: Metric = None,
    against: Annotated[
        Names,
        option(
            None,
            "NAME",
            "Also compare every policy with this one at the same budget, question by question. Comma-separated.",
            autocompletion=complete.policies,
        ),
    ] = None,
    with_published: Annotated[
        bool,
        option(
            None,
            FLAG,
            "Also compare the scores with published results for the same policy, task and budget (kvbench published), "
            "in the layout of the paper's table if there is one.",
            "--with-published",
        ),
    ] = False,
    within: Annotated[
        float | None,
        option(
            None,
            "POINTS",
            "Name the cheapest policy and budget within this many points of the full cache. Default: 1.",
            min=0,
        ),
    ] = None,
    batch: Annotated[int | None, option(None, "N", "Show the memory saved at this batch size.", min=1)] = None,
    context: Annotated[
        int | None,
        option(
            None,
            "TOKENS",
            "Show the memory saved at this context length. Default: the run's.",
            min=1,
        ),
    ] = None,
    html: Annotated[
        bool,
        option(None, FLAG, "Also write report.html, an interactive page.", "--html"),
    ] = False,
    policies: Annotated[
        Names,
        option(
            "Figures",
            "NAMES",
            "Draw only these policies and the full cache, in this order. Comma-separated. Tables have all policies.",
            autocompletion=complete.policies,
        ),
    ] = None,
    x_axis: Annotated[
        str | None,
        option(
            "Figures",
            "AXIS",
            "x axis: budget (percent of the full cache), bytes, or tokens (per KV head). Default: percent, with bytes "
            "along the top.",
            "--x",
        ),
    ] = None,
    losses: Annotated[
        bool, option("Figures", FLAG, "Also draw bars of the loss against the full cache.", "--losses")
    ] = False,
    out: Annotated[Path | None, option(None, "DIR", "Output folder. Default: report/ in the first run.")] = None,
    quiet: Annotated[bool, option(None, FLAG, "Print only errors and the path of the summary.", "--quiet")] = False,
    as_json: Annotated[bool, option(None, FLAG, "Print cells, means and comparisons as JSON.", "--json")] = False,
    **figure_values: Any,
) -> None:
    """Show the tables of runs; write Pareto fronts and a summary."""
    from kvbench.report import against as pairs
    from kvbench.report import choosing
    from kvbench.report.figure_options import figure_options
    from kvbench.report.frames import prepare
    from kvbench.report.groups import group_table
    from kvbench.report.headroom import headroom
    from kvbench.report.rendering import write_report
    from kvbench.report.sorted_samples import COLUMNS, Samples
    from kvbench.report.terminal import RunTable
    from kvbench.runs.folders import stored_command
    from kvbench.runs.load import load_frames, load_groups, responses_of
    from kvbench.tables.text import slug

    if metric and with_published:
        raise UserError("--with-published compares the metric of each task; leave out --metric")
    figure_flags = FigureFlags.of(split_options(figure_values, FigureFlags)[0])
    if quiet:
        warnings.simplefilter("ignore")
    reporter = Silent() if quiet else progress()
    with stopping(reporter):
        reporter.busy(f"reading {', '.join(map(str, runs))}")
        cells, samples = load_frames(runs, COLUMNS, coded=True, metric=metric)
        grouped_samples = Samples(samples)
        results = prepare(cells, grouped_samples)
    figures = figure_options(figure_flags, results.policies, split_names(policies), x_axis)
    figures.check(results)
    base_policies = [
        policy_name for comma_list in against or [] for policy_name in comma_list.split(",") if policy_name
    ]
    comparisons = [
        (base_policy, pairs.differences(results.cells, grouped_samples, base_policy)) for base_policy in base_policies
    ]
    prints_tables = not quiet and not as_json
    aim = choosing.Aim.of(within, batch, context)
    if prints_tables:
        console().print(RunTable(results))
        if (groups := group_table(load_groups(runs))) is not None:
            show(groups)
        if any(limit_value is not None for limit_value in (within, batch, context)):
            console().print(choosing.render_choices(results, aim))
    report_folder = out or runs[0] / "report" / (slug(metric) if metric else "")
    with stopping(reporter):
        reporter.busy("drawing figures")
        written_paths = write_report(results, report_folder, aim, figures, reporter)
        if losses:
            from kvbench.report.losses import draw_losses

            written_paths += draw_losses(results, report_folder / "figures", figures)
        if html:
            from kvbench.regression.pairwise import policy_pairs
            from kvbench.report.page import write_page

            reporter.busy("writing report.html")
            page_path = write_page(
                results,
                responses_of(runs, metric),
                report_folder,
                aim,
                commands=list(map(stored_command, runs)),
                reporter=reporter,
                pairs=policy_pairs(results),
            )
            written_paths.append(page_path)
    uncompared_note = pairs.left_out(cells)
    for base_policy, differences in comparisons:
        if prints_tables:
            for difference_table in pairs.tables(differences, base_policy):
                show(difference_table)
            if uncompared_note:
                say(uncompared_note)
        comparison_path = report_folder / f"against-{slug(base_policy)}.md"
        written_paths.append(pairs.write(differences, base_policy, comparison_path, uncompared_note))
    extra_json: dict[str, Any] = {}
    if with_published:
        from kvbench.papers.layouts.fill import published_tables
        from kvbench.papers.layouts.from_papers import published_layouts
        from kvbench.papers.published import beside

        matched_pairs = beside.pairs(cells)
        unmatched_note = "" if matched_pairs else beside.unmatched(cells)
        if prints_tables and matched_pairs:
            show(beside.beside_table(matched_pairs))
        elif prints_tables:
            say(unmatched_note)
        matched_layouts = dict.fromkeys(f"{pair.figure.paper}-{pair.figure.table}" for pair in matched_pairs)
        laid_out = published_tables(runs, [name for name in matched_layouts if name in published_layouts()])
        for published_table in laid_out.values() if prints_tables else ():
            show(published_table)
        written_paths += beside.write(matched_pairs, unmatched_note, report_folder, laid_out)
        extra_json["published"] = beside.as_records(matched_pairs)
    if as_json:
        print_json(
            {
                "files": [str(written_path) for written_path in written_paths],
                "cells": rows_of(cells),
                "means": rows_of(results.overall),
                "against": {base_policy: rows_of(differences) for base_policy, differences in comparisons},
                "cheapest": choosing.as_records(results, aim),
                "headroom": rows_of(headroom(results)),
            }
            | extra_json
        )
    for written_path in [] if as_json else written_paths[: 1 if quiet else None]:
        print(written_path if quiet else f"wrote {written_path}")
