"""What an analysis says: tables for the terminal, and a summary in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from kvbench.analysis.compare import SCOPE, Row, budget_order, by_budget, names, scopes
from kvbench.report.text import (
    DASH,
    MINUS,
    REFERENCE_NOTE,
    code,
    interval,
    md,
    number,
    plain,
    short,
    tokens,
)

if TYPE_CHECKING:
    from rich.table import Table

Grid = tuple[str, list[str], list[list[str]]]
"""A table: title, head, lines. The text is plain: each output escapes it in its own way."""

_MOST_FAILED = 12

READING = (
    "l1: L1 distance between a query head's output, after its slice of the output projection, with "
    "the full cache and with what the policy keeps, for the same query; mean over heads, layers "
    "and questions. Brackets: 95%, bootstrapped over contexts; none below 5 contexts.",
    "Assumption 3.4 (A3.4): stage 1 collects more than half of the query's attention; best "
    "possible: the same with the entries of most attention, as many as stage 1 has. Bounds: mean "
    "bound over mean l1 where the assumption holds. Violations: l1 above bound 1 (any row) / 2 / 3 "
    "(rows where the assumption holds).",
    "Heads won: share of heads with the smaller mean l1; queries won: share of (question, head) "
    "pairs; ties count half. Change: of the mean l1.",
)


def perturbation_tables(
    cells: pd.DataFrame, pairs: pd.DataFrame, shown: Sequence[tuple[str, str]]
) -> Iterator[Grid]:
    """The tables of a perturbation analysis, three for each model, task, length and moment.

    Args:
        cells, pairs: What `compare` makes.
        shown: The pairs to show.
    """
    first = ["policy", "budget", "mean l1", "95%", "of output", "mass kept"]
    second = ["policy", "budget", "A3.4 holds", "95%", "best possible"]
    second += ["bound 1", "bound 2", "bound 3", "violations"]
    for where, part in scopes(cells):
        rows = by_budget(part)
        yield f"{_title(where)}: output perturbation", first, [_size(row) for row in rows]
        lines = [_bounds(row) for row in rows]
        yield f"{_title(where)}: Assumption 3.4 and bounds", second, lines
        here = by_budget(_within(pairs, where))
        lines = [_pair(row) for row in here if (row["policy"], row["against"]) in shown]
        if lines:
            columns = ["budget", "policy", "against", "heads won", "queries won", "change of l1"]
            yield f"{_title(where)}: who perturbs less", columns, lines


def allocation_tables(table: pd.DataFrame) -> Iterator[Grid]:
    """The table of an allocation analysis for each model, task, length and moment."""
    for where, part in scopes(table):
        layers = list(dict.fromkeys(part["layer"]))
        wide = len(layers) <= 12
        head = ["policy", "budget", "mean", "least head", "most head"]
        head += [f"layer {i}" for i in layers] if wide else ["least layer", "most layer"]
        lines = []
        for policy in names(part, "policy"):
            for budget in sorted(names(part, "budget"), key=budget_order):
                here = part[(part["policy"] == policy) & (part["budget"] == budget)]
                if not len(here):
                    continue
                entries = here["entries"]
                line = [policy, budget, *(_count(x) for x in (entries.mean(), entries.min()))]
                line.append(_count(entries.max()))
                own = here.groupby("layer", observed=True)["entries"].mean()
                found = own[layers] if wide else pd.Series([own.min(), own.max()])
                lines.append([*line, *(_count(x) for x in found)])
        yield f"{_title(where)}: entries per layer and KV head, mean over contexts", head, lines


def rich_table(grid: Grid) -> Table:
    """A table for the terminal."""
    from rich.table import Table
    from rich.text import Text

    title, head, lines = grid
    table = Table(title=Text(plain(title)), title_justify="left", title_style="bold")
    names_of = ("policy", "against")
    for name in head:
        left = name in names_of
        table.add_column(
            Text(name), justify="left" if left else "right", overflow="fold", no_wrap=not left
        )
    for line in lines:
        table.add_row(*(Text(plain(x)) for x in line))
    return table


def markdown(
    heading: str,
    command: str,
    grids: Sequence[Grid],
    notes: Sequence[str],
    figures: Sequence[Path],
    root: Path,
) -> str:
    """Write a summary.

    Args:
        heading: Its title.
        command: The command that made it.
        grids: Tables.
        notes: Lines below them.
        figures: Files to show; of PNG and SVG the PNG.
        root: The folder that links start from.
    """
    out = [f"# {md(heading)}", "", f"Made by `{plain(command).replace('`', '')}`.", ""]
    for title, head, lines in grids:
        out += [f"## {md(title)}", "", f"| {' | '.join(md(h) for h in head)} |"]
        out += [f"|{'|'.join(' --- ' if h in ('policy', 'against') else ' ---: ' for h in head)}|"]
        for line in lines:
            shown = [
                code(x) if h in ("policy", "against") else md(x)
                for h, x in zip(head, line, strict=True)
            ]
            out.append(f"| {' | '.join(shown)} |")
        out.append("")
    out += [f"- {md(note)}" for note in notes]
    out += ["", *(_picture(f, root) for f in figures if f.suffix == ".png")]
    return "\n".join(out).rstrip() + "\n"


def notes(frame: pd.DataFrame, failed: Mapping[str, str], reading: Sequence[str] = ()) -> list[str]:
    """What a reader must know.

    Args:
        frame: A table with the column `model`.
        failed: Why cells failed, by cell id.
        reading: How to read the tables.
    """
    found = [*reading]
    if len(frame) and (frame["model"] == "reference").any():
        found.append(REFERENCE_NOTE.replace("`", ""))
    lost = [f"cell {cell} failed: {short(why, 200)}" for cell, why in failed.items()]
    return [
        *found,
        *lost[:_MOST_FAILED],
        *[f"{len(lost)} cells failed"] * (len(lost) > _MOST_FAILED),
    ]


def _picture(path: Path, root: Path) -> str:
    return f"![{md(path.stem)}]({path.relative_to(root).as_posix()})"


def _title(where: Row) -> str:
    parts = [short(where["model"]), short(where["task"]), tokens(where["length"])]
    return " · ".join([*parts, f"moment {where['moment']}"])


def _within(frame: pd.DataFrame, where: Row) -> pd.DataFrame:
    for column in SCOPE:
        if len(frame):
            frame = frame[frame[column] == where[column]]
    return frame


def _size(row: Row) -> list[str]:
    shown = [row["policy"], row["budget"], number(row["l1"], unit=False), _between(row, "l1")]
    return [*shown, _percent(row["relative"]), _percent(row["mass"])]


def _bounds(row: Row) -> list[str]:
    between = DASH
    if math.isfinite(row["assumption"]):
        between = interval(row["assumption_lo"], row["assumption_hi"], unit=True)
    return [
        row["policy"],
        row["budget"],
        _percent(row["assumption"]),
        between,
        _percent(row["assumption_top"]),
        *(_times(row[f"tightness{i}"]) for i in (1, 2, 3)),
        " / ".join(str(row[f"violations{i}"]) for i in (1, 2, 3)),
    ]


def _pair(row: Row) -> list[str]:
    shown = [row["budget"], row["policy"], row["against"]]
    for name in ("heads_won", "queries_won", "change"):
        signed = name == "change"
        bounds = interval(row[f"{name}_lo"], row[f"{name}_hi"], unit=True, signed=signed)
        if not math.isfinite(row[f"{name}_lo"]):
            bounds = ""
        shown.append(f"{number(row[name], unit=True, signed=signed)}% {bounds}".rstrip())
    return shown


def _between(row: Row, name: str) -> str:
    if not math.isfinite(row[f"{name}_lo"]):
        return DASH
    return interval(row[f"{name}_lo"], row[f"{name}_hi"], unit=False)


def _percent(share: float) -> str:
    return DASH if math.isnan(share) else f"{100 * share:.1f}%"


def _times(value: float) -> str:
    return DASH if math.isnan(value) else f"{value:.2f}×"


def _count(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0").replace("-", MINUS)
