"""`kvbench table`: tables for a paper. Heavy modules are imported inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli import complete
from kvbench.cli.options import (
    CHOOSE,
    BudgetFilter,
    Labels,
    LengthFilter,
    Metric,
    ModelFilter,
    MomentFilter,
    Names,
    SeedFilter,
    TaskFilter,
    option,
    split_names,
)
from kvbench.cli.screen import show
from kvbench.errors import UserError
from kvbench.files import write_whole
from kvbench.papers.layouts.value import Value
from kvbench.runs.options import FLAG, OUTPUT
from kvbench.tables.outputs import Format, format_table

if TYPE_CHECKING:
    from kvbench.papers.layouts.measures import Measures
    from kvbench.papers.layouts.slots import Layout

PAPER = "Like a published table"
FREE = "Any other table"


def table(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    layout: Annotated[
        str | None,
        option(
            PAPER,
            "NAME",
            "Rows and columns of a published table, such as criticalkv-1 (kvbench list layouts).",
            autocompletion=complete.layouts,
        ),
    ] = None,
    use: Annotated[
        list[str] | None,
        option(
            PAPER,
            "NAME=OURS",
            "Replacement for a method, dataset or budget of the paper: 40%=0.2. Can be repeated.",
        ),
    ] = None,
    reduced: Annotated[
        bool,
        option(
            PAPER,
            FLAG,
            "Omit rows and columns without results. Averages are over the remaining columns.",
            "--reduced",
        ),
    ] = False,
    with_published: Annotated[
        bool,
        option(PAPER, FLAG, "Show the paper's results below every row.", "--with-published"),
    ] = False,
    rows: Annotated[
        str | None,
        option(
            FREE,
            "NAMES",
            "Row dimensions, comma-separated: policy, budget, task, domain, group, model, "
            "moment, length, seed. Default: policy,budget, after other dimensions that vary.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        option(FREE, "NAMES", "Column dimensions. Default: task."),
    ] = None,
    value: Annotated[
        Value,
        option(
            FREE,
            "score|diff|relative|loss|kv",
            "Value to show: score, difference from the full cache, change or loss in percent of the full "
            "cache's score, or bytes held in percent of its bytes. Default: score.",
            show_default=False,
        ),
    ] = Value.SCORE,
    mean: Annotated[
        bool,
        option(FREE, FLAG, "Add the mean over tasks, and its loss against the full cache.", "--mean"),
    ] = False,
    against: Annotated[
        str,
        option(
            None,
            "NAME",
            "Mark scores that differ significantly from this policy's at the same budget; "
            "none for no marks. Default: full.",
            autocompletion=complete.policies,
            show_default=False,
        ),
    ] = "full",
    digits: Annotated[
        int | None,
        option(
            None,
            "N",
            "Decimals of all numbers of the runs. Default: those of the paper with --layout, else 1 for points.",
            min=0,
            max=9,
        ),
    ] = None,
    labels: Labels = None,
    model: ModelFilter = None,
    policy: Annotated[Names, option(CHOOSE, "NAME", "Policies. The full cache is always included.")] = None,
    budget: BudgetFilter = None,
    task: TaskFilter = None,
    moment: MomentFilter = None,
    length: LengthFilter = None,
    seed: SeedFilter = None,
    metric: Metric = None,
    form: Annotated[
        Format | None,
        option(
            OUTPUT,
            "latex|markdown|csv|html",
            "Output format. Default: a table for the terminal.",
            "--format",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            OUTPUT,
            "FILE",
            "Output file. Its suffix determines the format: .tex, .md, .csv or .html.",
        ),
    ] = None,
) -> None:
    """Make a table for a paper: in the layout of a published one, or with any rows and columns.

    The best policy at a budget is bold and the second best underlined. A superscript plus or minus marks scores that
    differ significantly from the full cache's.
    """
    from kvbench.papers.layouts.fill import fill
    from kvbench.papers.layouts.measures import load
    from kvbench.report.figure_options import parse_labels

    _check(
        layout,
        for_layout=bool(use or reduced or with_published),
        for_free_table=bool(rows or columns or mean) or value is not Value.SCORE,
    )
    selected_names = {
        dimension: split_names(flag_values)
        for dimension, flag_values in (
            ("model", model), ("policy", policy), ("budget", budget), ("task", task),
            ("moment", moment), ("length", length), ("seed", seed),
        )
    }  # fmt: skip
    form = _format(form, out)
    measures = load(runs, selected_names, metric)
    compressed_policies = [name for name in dict.fromkeys(measures.cells["policy"].astype(str)) if name != "full"]
    policy_labels = parse_labels(split_names(labels), compressed_policies)
    if layout:
        table_layout = _published(layout, measures, use or [], policy_labels, reduced, with_published)
    else:
        table_layout = _pivot(measures, rows, columns or "task", value, policy_labels, mean=mean)
    reference_policy = _reference(against, measures)
    filled_table = fill(table_layout, measures, reference_policy, digits)
    if form is None:
        show(filled_table)
        return
    rendered = format_table(filled_table, form)
    if out is None:
        print(rendered, end="")
        return
    write_whole(out, rendered.encode())
    print(f"wrote {out}")


_ENDINGS = {
    ".tex": Format.LATEX,
    ".md": Format.MARKDOWN,
    ".csv": Format.CSV,
    ".html": Format.HTML,
}


def _format(table_format: Format | None, output_path: Path | None) -> Format | None:
    if table_format is not None or output_path is None:
        return table_format
    if output_path.suffix not in _ENDINGS:
        known_endings = ", ".join(_ENDINGS)
        raise UserError(f"--out {output_path}: unknown suffix; use {known_endings}, or add --format")
    return _ENDINGS[output_path.suffix]


def _check(layout: str | None, *, for_layout: bool, for_free_table: bool) -> None:
    if layout and for_free_table:
        raise UserError("--layout excludes --rows, --columns, --value and --mean")
    if for_layout and not layout:
        raise UserError("--use, --reduced and --with-published need --layout")


def _published(
    layout_name: str,
    measures: Measures,
    substitutions: list[str],
    labels: dict[str, str],
    reduced: bool,
    with_published: bool,
) -> Layout:
    from kvbench.papers.layouts.from_papers import published_layout
    from kvbench.papers.layouts.lay_out import lay_out
    from kvbench.papers.layouts.substitutes import Substitutes

    paper_layout = published_layout(layout_name)
    substitutes = Substitutes.parse(paper_layout, substitutions)
    return lay_out(paper_layout, measures, substitutes, reduced=reduced, with_published=with_published, labels=labels)


def _pivot(
    measures: Measures,
    row_names: str | None,
    column_names: str,
    value: Value,
    labels: dict[str, str],
    *,
    mean: bool,
) -> Layout:
    from kvbench.papers.layouts.pivot import Axes, default_rows, pivot

    column_axes = tuple(split_names([column_names]))
    row_axes = tuple(split_names([row_names])) if row_names else default_rows(measures, column_axes)
    return pivot(measures, Axes(row_axes, column_axes, value, mean), labels)


def _reference(against: str, measures: Measures) -> str:
    """Return the reference policy of the significance tests; "" if the default was not run."""
    run_policies = set(measures.cells["policy"])
    return "" if against == "none" or (against == "full" and "full" not in run_policies) else against
