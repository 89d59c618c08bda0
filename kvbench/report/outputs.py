"""The outputs of a table: terminal, Markdown, LaTeX, HTML and CSV.

Every text goes through the escape of its output, so nothing that a user, a model or a file wrote
can become markup. The best number of a group of rows is bold, the second best underlined.
"""

from __future__ import annotations

import csv as csv_module
import html as html_module
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from rich.box import HEAVY_HEAD
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from kvbench.report.csv_columns import csv_columns
from kvbench.report.numbers import BETTER, DASH, MINUS, WORSE, interval, number
from kvbench.report.table import (
    Cell,
    Column,
    Compared,
    Graded,
    Interval,
    Lines,
    Name,
    Phrase,
    Table,
)
from kvbench.report.text import code, md, plain, tex

_NAME_WIDTH = 40
"""A terminal folds a longer name."""
_ONE_COLUMN = 8
"""A LaTeX table of more columns may span the columns of the page."""
_TITLE_WIDTH = 11
"""A terminal breaks a longer column title."""


def _raised(sign: str) -> str:
    """A sign above the line, as a character of its own."""
    return BETTER if sign == "+" else WORSE


@dataclass(frozen=True)
class _Markup:
    """How an output writes the parts of a text.

    Attributes:
        text: Escapes text.
        name: Escapes a name and sets it in a code font.
        newline: Separates lines within a cell.
        number: Escapes what `kvbench.report.numbers` has written.
        marks: Format of the best and of the second best number.
        superscript: Writes what stands above a number.
        text_after: Escapes text that does not start a line, if that differs from `text`.
    """

    text: Callable[[str], str]
    name: Callable[[str], str]
    newline: str
    number: Callable[[str], str] = str
    marks: tuple[str, str] = ("{}", "{}")
    superscript: Callable[[str], str] = _raised
    text_after: Callable[[str], str] | None = None

    def phrase(self, phrase: Phrase) -> str:
        """Write a text."""
        match phrase:
            case str():
                return self.text(phrase)
            case Name():
                return self.name(phrase.text)
            case Lines():
                return self.newline.join(map(self.phrase, phrase.lines))
            case _:
                first, *others = _joined(phrase) or [""]
                return self.phrase(first) + "".join(map(self._after_text, others))

    def _after_text(self, phrase: Phrase) -> str:
        """Write the part of a text that follows another part on the same line."""
        if isinstance(phrase, str) and self.text_after is not None:
            return self.text_after(phrase)
        return self.phrase(phrase)

    def cell(self, cell: Cell, column: Column, rank: int = 0) -> str:
        """Write a cell; `rank` is 1 for the best number and 2 for the second best."""
        match cell:
            case None:
                return self.number(DASH)
            case Compared():
                gap = _spaced(cell.gap, column, signed=True)
                text = f"{number(cell.score, column.kind)} {gap}".rstrip()
            case Interval():
                text = _spaced(cell, column, signed=column.signed)
            case Graded():
                text, rank = cell.text, cell.rank
            case int() | float():
                text = number(cell, column.kind, signed=column.signed)
            case _:
                return self.phrase(cell)
        written = self.number(text)
        written = self.marks[rank - 1].format(written) if rank else written
        if isinstance(cell, Graded) and cell.better:
            written += self.superscript("+" if cell.better > 0 else MINUS)
        return written


_PLAIN = _Markup(plain, plain, "\n")
_CSV = _Markup(plain, plain, "; ")
_MARKDOWN = _Markup(
    md,
    code,
    "<br>",
    marks=("**{}**", "<ins>{}</ins>"),
    text_after=partial(md, start=False),
)
_LATEX = _Markup(
    tex,
    lambda name: rf"\texttt{{{tex(name)}}}",
    "; ",
    tex,
    marks=(r"\textbf{{{}}}", r"\underline{{{}}}"),
    # Without width, so that the digits below each other stay aligned.
    superscript=lambda sign: rf"\rlap{{{tex(_raised(sign))}}}",
)
_HTML = _Markup(
    lambda text: html_module.escape(plain(text)),
    lambda name: f"<code>{html_module.escape(plain(name))}</code>",
    "<br>",
    marks=("<b>{}</b>", "<u>{}</u>"),
    superscript=lambda sign: f"<sup>{sign}</sup>",
)
plain_text = _PLAIN.phrase
"""Writes a phrase for a terminal."""
markdown_text = _MARKDOWN.phrase
"""Writes a phrase in Markdown."""
html_text = _HTML.phrase
"""Writes a phrase in HTML."""


def terminal(table: Table, *, boxed: bool = True) -> RichTable:
    """Make a table for `rich.print`.

    Args:
        table: The table.
        boxed: Whether it has lines and folds long names. Without, names stay whole: they are there
            to be copied.
    """
    out = RichTable(
        title=Text(_PLAIN.phrase(table.title), "bold") if table.title else None,
        title_justify="left",
        header_style="bold",
        box=HEAVY_HEAD if boxed else None,
        pad_edge=boxed,
        caption=Text("\n".join(map(_PLAIN.phrase, table.notes))) if table.notes else None,
        caption_justify="left",
    )
    for j, column in enumerate(table.columns):
        title = _titled(column, _PLAIN)
        names = [len(name) for row in table.rows for name in _names(row.cells[j])]
        folds = not column.right
        out.add_column(
            Text(_broken(title) if boxed else title),
            justify="right" if column.right else "left",
            overflow="fold",
            no_wrap=not folds or (not boxed and j == 0),
            max_width=_NAME_WIDTH if boxed and folds else None,
            min_width=max(names, default=None) if not boxed else None,
        )
    ranks = table.ranks()
    for i, row in enumerate(table.rows):
        out.add_row(
            *(
                # Appended, so that the style does not reach the space beside the text.
                Text().append(
                    "" if table.repeats(i, j) else _PLAIN.cell(cell, column),
                    _style(cell, column, ranks.get((i, j), 0)),
                )
                for j, (cell, column) in enumerate(zip(row.cells, table.columns, strict=True))
            ),
            end_section=_ends_group(table, i),
        )
    return out


def markdown(table: Table, *, level: int = 0) -> str:
    """Write a table in GitHub's Markdown.

    Args:
        table: The table.
        level: Level of the title as a heading; 0 makes it a paragraph.
    """
    title = _MARKDOWN.phrase(table.title)
    lines = [_piped(_titled(column, _MARKDOWN) for column in table.columns)]
    lines.append(_piped("--:" if column.right else "---" for column in table.columns))
    lines += [_piped(cells) for cells in _written(table, _MARKDOWN)]
    blocks = [f"{'#' * level} {title}".lstrip()] * bool(title) + ["\n".join(lines)]
    return "\n\n".join([*blocks, *(_MARKDOWN.phrase(note) for note in table.notes)])


def latex(table: Table, *, fit: bool = False) -> str:
    """Write a table in LaTeX; it needs the package `booktabs`.

    Args:
        table: The table.
        fit: Whether to shrink the table where it is wider than the line (which needs the package
            `graphicx`), and to set the notes as a block. A table of many columns then also spans
            the columns of the page, and its titles are broken.
    """
    body = []
    for i, cells in enumerate(_written(table, _LATEX)):
        body.append(" & ".join(cells) + r" \\")
        body += [r"\midrule"] * _ends_group(table, i)
    wide = fit and len(table.columns) > _ONE_COLUMN
    environment = "table*" if wide else "table"
    titles = [_stacked(c) if wide else _LATEX.phrase(c.title) for c in table.columns]
    notes = [_LATEX.phrase(note) for note in table.notes]
    lines = [
        rf"\begin{{{environment}}}",
        r"\centering",
        *[rf"\caption{{{_LATEX.phrase(table.title)}}}"] * bool(table.title),
        *[r"\smallskip"] * (fit and bool(table.title)),
        *[r"\setlength{\tabcolsep}{4pt}"] * wide,
        *[r"\sbox0{%"] * fit,
        rf"\begin{{tabular}}{{{''.join('r' if c.right else 'l' for c in table.columns)}}}",
        r"\toprule",
        *_latex_groups(table),
        " & ".join(titles) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}" + "}%" * fit,
        *_LATEX_FIT * fit,
        *(_latex_block(notes) if fit else [rf"\par\smallskip{{\footnotesize {n}}}" for n in notes]),
        rf"\end{{{environment}}}",
    ]
    return "\n".join(lines) + "\n"


def html(table: Table) -> str:
    """Write a table as an HTML element; columns of text have the class `text`."""
    lines = ["<table>"]
    if table.title:
        lines.append(f"<caption>{_HTML.phrase(table.title)}</caption>")
    lines.append("<thead>")
    if any(column.group for column in table.columns):
        heads = (
            f'<th colspan="{count}">{_HTML.phrase(group)}</th>'
            for group, count in table.column_groups
        )
        lines.append(f"<tr>{''.join(heads)}</tr>")
    lines.append(_html_row("th", [_HTML.phrase(c.title) for c in table.columns], table.columns))
    lines += ["</thead>", "<tbody>"]
    for i, cells in enumerate(_written(table, _HTML)):
        lines.append(_html_row("td", cells, table.columns))
        lines += ["</tbody>", "<tbody>"] * _ends_group(table, i)
    lines += ["</tbody>", "</table>"]
    lines += [f'<p class="note">{_HTML.phrase(note)}</p>' for note in table.notes]
    return "\n".join(lines) + "\n"


def csv(table: Table) -> str:
    """Write a table as comma-separated values for programs.

    Numbers are not rounded and stand as in the run's own tables: scores and shares from 0 to 1.
    An interval takes three columns. Text that a spreadsheet would run as a formula begins with an
    apostrophe. Title and notes are left out.
    """
    out = io.StringIO()
    writer = csv_module.writer(out, lineterminator="\n")
    blocks = [
        csv_columns(_titled(column, _CSV), [row.cells[j] for row in table.rows], _CSV.phrase)
        for j, column in enumerate(table.columns)
    ]
    writer.writerow([title for titles, _ in blocks for title in titles])
    for i in range(len(table.rows)):
        writer.writerow([value for _, rows in blocks for value in rows[i]])
    return out.getvalue()


def _joined(parts: Iterable[Phrase]) -> list[Phrase]:
    """The parts of a text without nesting, neighbouring strings as one.

    An escape has to see neighbours at once: "1" and "." begin a list together.
    """
    out: list[Phrase] = []
    for part in parts:
        for piece in _joined(part) if isinstance(part, tuple) else [part]:
            if isinstance(piece, str) and out and isinstance(out[-1], str):
                out[-1] += piece
            elif piece != "":
                out.append(piece)
    return out


def _written(table: Table, markup: _Markup) -> list[list[str]]:
    ranks = table.ranks()
    return [
        [
            "" if table.repeats(i, j) else markup.cell(cell, column, ranks.get((i, j), 0))
            for j, (cell, column) in enumerate(zip(row.cells, table.columns, strict=True))
        ]
        for i, row in enumerate(table.rows)
    ]


def _spaced(cell: Interval, column: Column, *, signed: bool) -> str:
    """A mean with its interval, such as `5.0 [0.2, 50.2]`; the mean alone without one."""
    mean = number(cell.mean, column.kind, signed=signed)
    ends = interval(cell.lo, cell.hi, column.kind, signed=signed)
    return mean if ends == DASH else f"{mean} {ends}"


def _titled(column: Column, markup: _Markup) -> str:
    """A column's title, after that of its group, where an output has one line of titles."""
    group = markup.phrase(column.group) + ": " if column.group else ""
    return group + markup.phrase(column.title)


def _ends_group(table: Table, i: int) -> bool:
    """Whether the row is the last of its group and others follow."""
    return i + 1 < len(table.rows) and table.rows[i].group != table.rows[i + 1].group


# --- terminal -------------------------------------------------------------------------------------


def _names(cell: Cell) -> list[str]:
    match cell:
        case Name():
            return [cell.text]
        case Lines():
            return [name for line in cell.lines for name in _names(line)]
        case tuple():
            return [name for part in cell for name in _names(part)]
        case _:
            return []


def _broken(title: str) -> str:
    """A title over a narrow column, broken at spaces and underscores."""
    lines = [""]
    for part in title.replace("_", "_\0").replace(" ", " \0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > _TITLE_WIDTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _style(cell: Cell, column: Column, rank: int) -> Style:
    rank = cell.rank if isinstance(cell, Graded) else rank
    no_number = column.right and isinstance(cell, str) and bool(cell)
    red = "red" if column.is_worse(cell) or (no_number and column.kind != "text") else None
    return Style(color=red, bold=rank == 1 or None, underline=rank == 2 or None)


# --- Markdown, LaTeX, HTML ------------------------------------------------------------------------


def _piped(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"


def _stacked(column: Column) -> str:
    """A title over a narrow column, broken as in a terminal."""
    first, *rest = _joined([column.title]) or [""]
    match first:
        case str(text):
            write = _LATEX.text
        case Name(text):
            write = _LATEX.name
        case _:
            return _LATEX.phrase(column.title)
    lines = [write(line) for line in _broken(plain(text)).split("\n")]
    stack = r" \\ ".join(lines) + _LATEX.phrase(tuple(rest))
    side = "r" if column.right else "l"
    return rf"\shortstack[{side}]{{{stack}}}" if len(lines) > 1 else stack


_LATEX_FIT = [
    r"\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi",
]


def _latex_block(notes: list[str]) -> list[str]:
    """Notes below a table, in one paragraph as wide as the line."""
    if not notes:
        return []
    head = r"\par\smallskip\begin{minipage}{\linewidth}\footnotesize\raggedright"
    return [head, *notes, r"\end{minipage}"]


def _latex_groups(table: Table) -> list[str]:
    if not any(column.group for column in table.columns):
        return []
    heads, rules, first = [], [], 1
    for group, count in table.column_groups:
        if group:
            heads.append(rf"\multicolumn{{{count}}}{{c}}{{{_LATEX.phrase(group)}}}")
            rules.append(rf"\cmidrule(lr){{{first}-{first + count - 1}}}")
        else:
            heads.append(" & " * (count - 1))
        first += count
    return [" & ".join(heads) + r" \\", "".join(rules)]


def _html_row(tag: str, cells: Iterable[str], columns: Iterable[Column]) -> str:
    kinds = ("" if column.right else ' class="text"' for column in columns)
    row = (f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
    return f"<tr>{''.join(row)}</tr>"
