"""`kvbench table`: tables for a paper. What makes them is imported inside the command."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli import complete
from kvbench.cli.options import FLAG, OUTPUT, Names
from kvbench.cli.published import split_names
from kvbench.cli.screen import console
from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.layouts.measures import Measures
    from kvbench.layouts.slots import Layout

PAPER = "Like a published table"
FREE = "Any other table"
CHOOSE = "What of the runs (with commas)"


class Value(StrEnum):
    """What the cells of a free table show."""

    SCORE = "score"
    DIFF = "diff"
    RELATIVE = "relative"
    KV = "kv"


class Format(StrEnum):
    """What a table is written as."""

    TERMINAL = "terminal"
    LATEX = "latex"
    MARKDOWN = "markdown"
    CSV = "csv"
    HTML = "html"


def table(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Rows and columns of a published table, such as criticalkv-1 (kvbench list "
            "layouts).",
            autocompletion=complete.layouts,
            rich_help_panel=PAPER,
        ),
    ] = None,
    use: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=OURS",
            help="What stands in place of a method, dataset or budget of the paper: "
            "40%=0.2. Can be repeated.",
            rich_help_panel=PAPER,
        ),
    ] = None,
    reduced: Annotated[
        bool,
        typer.Option(
            "--reduced",
            metavar=FLAG,
            help="Leave out rows and columns that the runs have nothing of. Averages are of the "
            "columns that stay.",
            rich_help_panel=PAPER,
        ),
    ] = False,
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Dimensions that name the rows, with commas: policy, budget, task, group, model, "
            "moment, length, seed. Default: policy,budget.",
            rich_help_panel=FREE,
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Dimensions that name the columns. Default: task.",
            rich_help_panel=FREE,
        ),
    ] = None,
    value: Annotated[
        Value,
        typer.Option(
            metavar="score|diff|relative|kv",
            help="What to show: scores, their difference to the full cache, their change in "
            "percent of its score, or the bytes held in percent of its bytes.",
            rich_help_panel=FREE,
        ),
    ] = Value.SCORE,
    mean: Annotated[
        bool,
        typer.Option(
            "--mean",
            metavar=FLAG,
            help="Add the mean over tasks, and its loss against the full cache.",
            rich_help_panel=FREE,
        ),
    ] = False,
    against: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Mark scores that differ significantly from those of this policy at the same "
            "budget; none for no marks.",
            autocompletion=complete.policies,
        ),
    ] = "full",
    model: Annotated[Names, typer.Option(metavar="NAME", rich_help_panel=CHOOSE)] = None,
    policy: Annotated[Names, typer.Option(metavar="NAME", rich_help_panel=CHOOSE)] = None,
    budget: Annotated[Names, typer.Option(metavar="B", rich_help_panel=CHOOSE)] = None,
    task: Annotated[
        Names,
        typer.Option(metavar="NAME", help="Also groups and subsets.", rich_help_panel=CHOOSE),
    ] = None,
    moment: Annotated[Names, typer.Option(metavar="WHEN", rich_help_panel=CHOOSE)] = None,
    length: Annotated[Names, typer.Option(metavar="N", rich_help_panel=CHOOSE)] = None,
    seed: Annotated[Names, typer.Option(metavar="N", rich_help_panel=CHOOSE)] = None,
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            metavar="latex|markdown|csv|html",
            help="What to write. Default: a table for the terminal.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = Format.TERMINAL,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write to a file instead of the screen. Its ending gives the format: .tex, .md, "
            ".csv or .html.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Make a table for a paper: like a published one, or with any rows and columns.

    The best policy at a budget is bold and the second best underlined. A raised plus or minus
    marks scores that differ significantly from the full cache's.
    """
    from kvbench.layouts.fill import fill
    from kvbench.layouts.measures import load

    _check(layout, own=bool(use or reduced), free=bool(rows or columns or mean) or value != "score")
    chosen = {
        name: split_names(given)
        for name, given in (
            ("model", model), ("policy", policy), ("budget", budget), ("task", task),
            ("moment", moment), ("length", length), ("seed", seed),
        )
    }  # fmt: skip
    form = _format(form, out)
    measures = load(runs, chosen)
    if layout:
        made = _published(layout, measures, use or [], reduced=reduced)
    else:
        made = _pivot(measures, rows or "policy,budget", columns or "task", value, mean=mean)
    reference = _reference(against, measures)
    filled = fill(made, measures, reference)
    if form is Format.TERMINAL:
        from kvbench.report.fit import fitted

        screen = console()
        for part in fitted(filled, screen):
            screen.print(part)
        return
    from kvbench.layouts import write

    text = write.written(filled, write.Format(form.value))
    if out is None:
        print(text, end="")
        return
    from kvbench.files import replacing

    with replacing(out) as aside:
        aside.write_text(text, encoding="utf-8")
    print(f"wrote {out}")


_ENDINGS = {
    ".tex": Format.LATEX,
    ".md": Format.MARKDOWN,
    ".csv": Format.CSV,
    ".html": Format.HTML,
}


def _format(form: Format, out: Path | None) -> Format:
    if form is not Format.TERMINAL or out is None:
        return form
    if out.suffix not in _ENDINGS:
        some = ", ".join(_ENDINGS)
        raise UserError(f"--out {out}: unknown ending; use {some}, or give --format")
    return _ENDINGS[out.suffix]


def _check(layout: str | None, *, own: bool, free: bool) -> None:
    if layout and free:
        raise UserError("--layout excludes --rows, --columns, --value and --mean")
    if own and not layout:
        raise UserError("--use and --reduced need --layout")


def _published(name: str, measures: Measures, use: list[str], *, reduced: bool) -> Layout:
    from kvbench.layouts.lay_out import lay_out
    from kvbench.layouts.published import published_layout
    from kvbench.layouts.substitutes import Substitutes

    one = published_layout(name)
    return lay_out(one, measures, Substitutes.parse(one, use), reduced=reduced)


def _pivot(measures: Measures, rows: str, columns: str, value: Value, *, mean: bool) -> Layout:
    from kvbench.layouts import slots
    from kvbench.layouts.pivot import Axes, pivot

    axes = Axes(
        tuple(split_names([rows])), tuple(split_names([columns])), slots.Value(value.value), mean
    )
    return pivot(measures, axes)


def _reference(against: str, measures: Measures) -> str:
    """What scores are tested against; nothing where the default was not run."""
    policies = set(measures.cells["policy"])
    return "" if against == "none" or (against == "full" and "full" not in policies) else against
