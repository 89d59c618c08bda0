"""Output formats of tables: terminal, Markdown, LaTeX, HTML and CSV.

Every text is escaped for its format, so that nothing that a user, a model or a file wrote can become markup. The best
number of a group of rows is bold, the second best underlined.
"""

from __future__ import annotations

import csv as csv_module
import html as html_module
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import takewhile
from typing import TypeAlias

from rich.box import HEAVY_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from kvbench.tables.numbers import BETTER, DASH, MINUS, WORSE, interval, number
from kvbench.tables.table import (
    Column,
    Compared,
    Graded,
    Interval,
    Lines,
    Name,
    Phrase,
    Table,
    TableCell,
    TableRow,
)
from kvbench.tables.text import code, md, plain, tex

_NAME_WIDTH = 40
"""Maximum width of a name in a terminal; longer ones are folded."""
_ONE_COLUMN = 8
"""Maximum number of columns of a LaTeX table that fits one column of the page."""
_TITLE_WIDTH = 11
"""Maximum width of a column title in a terminal; longer ones are broken."""


def _raised(sign: str) -> str:
    """Return a sign as a superscript character."""
    return BETTER if sign == "+" else WORSE


@dataclass(frozen=True)
class _Markup:
    """Markup of an output format.

    Attributes:
        text: Escapes text.
        name: Escapes a name and sets it in a code font.
        newline: Separator of lines within a cell.
        number: Escapes text from `kvbench.tables.numbers`.
        marks: Formats of the best and the second best number.
        superscript: Formats a superscript sign.
        text_after: Escapes text that does not start a line, if different from `text`.
    """

    text: Callable[[str], str]
    name: Callable[[str], str]
    newline: str
    number: Callable[[str], str] = str
    marks: tuple[str, str] = ("{}", "{}")
    superscript: Callable[[str], str] = _raised
    text_after: Callable[[str], str] | None = None

    def phrase(self, phrase: Phrase) -> str:
        """Return a phrase as markup."""
        match phrase:
            case str():
                return self.text(phrase)
            case Name():
                return self.name(phrase.text)
            case Lines():
                return self.newline.join(map(self.phrase, phrase.lines))
            case _:
                first_part, *later_parts = _joined(phrase) or [""]
                return self.phrase(first_part) + "".join(map(self._after_text, later_parts))

    def _after_text(self, phrase: Phrase) -> str:
        """Return a phrase that follows another one on the same line as markup."""
        if isinstance(phrase, str) and self.text_after is not None:
            return self.text_after(phrase)
        return self.phrase(phrase)

    def cell(self, cell: TableCell, column: Column, rank: int = 0) -> str:
        """Return a cell as markup; `rank` is 1 for the best number and 2 for the second best."""
        match cell:
            case None:
                return self.number(DASH)
            case Compared():
                gap_text = _spaced(cell.gap, column, signed=True)
                number_text = f"{number(cell.score, column.kind)} {gap_text}".rstrip()
            case Interval():
                number_text = _spaced(cell, column, signed=column.signed)
            case Graded():
                number_text, rank = cell.text, cell.rank
            case int() | float():
                number_text = number(cell, column.kind, signed=column.signed)
            case _:
                return self.phrase(cell)
        marked_text = self.number(number_text)
        marked_text = self.marks[rank - 1].format(marked_text) if rank else marked_text
        if isinstance(cell, Graded) and cell.better:
            marked_text += self.superscript("+" if cell.better > 0 else MINUS)
        return marked_text


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
    # Zero width keeps the digits of a column aligned.
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
"""Convert a phrase to text for a terminal."""
markdown_text = _MARKDOWN.phrase
"""Convert a phrase to Markdown."""
latex_text = _LATEX.phrase
"""Convert a phrase to LaTeX."""
html_text = _HTML.phrase
"""Convert a phrase to HTML."""


def terminal(table: Table, *, boxed: bool = True) -> RichTable:
    """Return a table for `rich.print`.

    Args:
        table: The table.
        boxed: Whether to draw lines and fold long names. Otherwise names are never folded, so that they can be copied.
    """
    rich_table = RichTable(
        title=Text(_PLAIN.phrase(table.title), "bold") if table.title else None,
        title_justify="left",
        header_style="bold",
        box=HEAVY_HEAD if boxed else None,
        pad_edge=boxed,
        caption=Text("\n".join(map(_PLAIN.phrase, table.notes))) if table.notes else None,
        caption_justify="left",
        min_width=_widest_word([_PLAIN.phrase(phrase) for phrase in (table.title, *table.notes)]),
    )
    for column_index, column in enumerate(table.columns):
        column_title = _titled(column, _PLAIN)
        column_cells = [table_row.cells[column_index] for table_row in table.rows]
        can_fold = not column.right
        rich_table.add_column(
            Text(_broken(column_title) if boxed else column_title),
            justify="right" if column.right else "left",
            overflow="fold" if can_fold else "ellipsis",
            no_wrap=not can_fold or (not boxed and column_index == 0),
            max_width=_NAME_WIDTH if boxed and can_fold else None,
            min_width=_least_width(column_title, column_cells, boxed=boxed) if can_fold else None,
        )
    ranks = table.ranks()
    for row_index, table_row in enumerate(table.rows):
        rich_table.add_row(
            *(
                # Appended, so that the style does not extend to the padding.
                Text(no_wrap=column.cut or None, overflow="ellipsis" if column.cut else None).append(
                    "" if table.repeats(row_index, column_index) else _PLAIN.cell(cell, column),
                    _style(cell, column, ranks.get((row_index, column_index), 0)),
                )
                for column_index, (cell, column) in enumerate(zip(table_row.cells, table.columns, strict=True))
            ),
            end_section=_ends_group(table, row_index),
        )
    return rich_table


def markdown(table: Table, *, level: int = 0) -> str:
    """Return a table in GitHub's Markdown.

    Args:
        table: The table.
        level: Heading level of the title; 0 makes it a paragraph.
    """
    title_text = _MARKDOWN.phrase(table.title)
    table_lines = [_piped(_titled(column, _MARKDOWN) for column in table.columns)]
    table_lines.append(_piped("--:" if column.right else "---" for column in table.columns))
    table_lines += [_piped(row_texts) for row_texts in _written(table, _MARKDOWN)]
    blocks = [f"{'#' * level} {title_text}".lstrip()] * bool(title_text) + ["\n".join(table_lines)]
    return "\n\n".join([*blocks, *(_MARKDOWN.phrase(note) for note in table.notes)])


def latex(table: Table, *, fit: bool = False) -> str:
    """Return a table in LaTeX, which needs the package `booktabs`.

    Args:
        table: The table.
        fit: Whether to shrink a table that is wider than the line (which needs the package `graphicx`) and to set the
            notes as a block. A table with many columns then also spans the columns of the page, with broken titles.
    """
    body_lines = []
    for row_index, row_texts in enumerate(_written(table, _LATEX)):
        body_lines.append(" & ".join(row_texts) + r" \\")
        body_lines += [r"\midrule"] * _ends_group(table, row_index)
    is_wide = fit and len(table.columns) > _ONE_COLUMN
    environment = "table*" if is_wide else "table"
    column_titles = [_stacked(head) if is_wide else _LATEX.phrase(head.title) for head in table.columns]
    note_texts = [_LATEX.phrase(note) for note in table.notes]
    latex_lines = [
        rf"\begin{{{environment}}}",
        r"\centering",
        *[rf"\caption{{{_LATEX.phrase(table.title)}}}"] * bool(table.title),
        *[r"\smallskip"] * (fit and bool(table.title)),
        *[r"\setlength{\tabcolsep}{4pt}"] * is_wide,
        *[r"\sbox0{%"] * fit,
        rf"\begin{{tabular}}{{{''.join('r' if head.right else 'l' for head in table.columns)}}}",
        r"\toprule",
        *_latex_groups(table),
        " & ".join(column_titles) + r" \\",
        r"\midrule",
        *body_lines,
        r"\bottomrule",
        r"\end{tabular}" + "}%" * fit,
        *_LATEX_FIT * fit,
        *(
            _latex_block(note_texts)
            if fit
            else [rf"\par\smallskip{{\footnotesize {note_text}}}" for note_text in note_texts]
        ),
        rf"\end{{{environment}}}",
    ]
    return "\n".join(latex_lines) + "\n"


def html(table: Table) -> str:
    """Return a table as an HTML element; text columns have the class `text`."""
    html_lines = ["<table>"]
    if table.title:
        html_lines.append(f"<caption>{_HTML.phrase(table.title)}</caption>")
    html_lines.append("<thead>")
    if any(column.group for column in table.columns):
        head_cells = (
            f'<th colspan="{column_count}">{_HTML.phrase(group)}</th>' for group, column_count in table.column_groups
        )
        html_lines.append(f"<tr>{''.join(head_cells)}</tr>")
    html_lines.append(
        _html_row(
            "th",
            [_HTML.phrase(titled_column.title) for titled_column in table.columns],
            table.columns,
        )
    )
    html_lines += ["</thead>", "<tbody>"]
    for row_index, row_texts in enumerate(_written(table, _HTML)):
        html_lines.append(_html_row("td", row_texts, table.columns))
        html_lines += ["</tbody>", "<tbody>"] * _ends_group(table, row_index)
    html_lines += ["</tbody>", "</table>"]
    html_lines += [f'<p class="note">{_HTML.phrase(note)}</p>' for note in table.notes]
    return "\n".join(html_lines) + "\n"


def csv(table: Table) -> str:
    """Return a table as comma-separated values for programs, without title and notes.

    Numbers are not rounded or rescaled: scores and shares are from 0 to 1. An interval takes three columns. Text that a
    spreadsheet would evaluate as a formula gets a leading apostrophe.
    """
    buffer = io.StringIO()
    writer = csv_module.writer(buffer, lineterminator="\n")
    column_blocks = [
        csv_columns(
            _titled(column, _CSV),
            [table_row.cells[column_index] for table_row in table.rows],
            _CSV.phrase,
        )
        for column_index, column in enumerate(table.columns)
    ]
    writer.writerow([column_title for column_titles, _ in column_blocks for column_title in column_titles])
    for row_index in range(len(table.rows)):
        writer.writerow([cell_value for _, row_values in column_blocks for cell_value in row_values[row_index]])
    return buffer.getvalue()


def _joined(phrases: Iterable[Phrase]) -> list[Phrase]:
    """Flatten a phrase and merge adjacent strings.

    Escaping needs merged strings: "1" and "." together begin a list.
    """
    flat_phrases: list[Phrase] = []
    for phrase in phrases:
        for piece in _joined(phrase) if isinstance(phrase, tuple) else [phrase]:
            if isinstance(piece, str) and flat_phrases and isinstance(flat_phrases[-1], str):
                flat_phrases[-1] += piece
            elif piece != "":
                flat_phrases.append(piece)
    return flat_phrases


def _written(table: Table, markup: _Markup) -> list[list[str]]:
    ranks = table.ranks()
    return [
        [
            ""
            if table.repeats(row_index, column_index)
            else markup.cell(cell, column, ranks.get((row_index, column_index), 0))
            for column_index, (cell, column) in enumerate(zip(table_row.cells, table.columns, strict=True))
        ]
        for row_index, table_row in enumerate(table.rows)
    ]


def _spaced(cell: Interval, column: Column, *, signed: bool) -> str:
    """Format a mean with its interval, such as `5.0 [0.2, 50.2]`, or alone if there is none."""
    mean_text = number(cell.mean, column.kind, signed=signed)
    interval_text = interval(cell.lo, cell.hi, column.kind, signed=signed)
    return mean_text if interval_text == DASH else f"{mean_text} {interval_text}"


def _titled(column: Column, markup: _Markup) -> str:
    """Return the title of a column, prefixed with its group, for outputs with one header row."""
    group_prefix = markup.phrase(column.group) + ": " if column.group else ""
    return group_prefix + markup.phrase(column.title)


def _ends_group(table: Table, row_index: int) -> bool:
    """Return whether the row is the last of its group and another group follows."""
    return row_index + 1 < len(table.rows) and table.rows[row_index].group != table.rows[row_index + 1].group


# --- terminal -------------------------------------------------------------------------------------


def _names(cell: TableCell) -> list[str]:
    match cell:
        case Name():
            return [cell.text]
        case Lines():
            return [cell_name for cell_line in cell.lines for cell_name in _names(cell_line)]
        case tuple():
            return [cell_name for fragment in cell for cell_name in _names(fragment)]
        case _:
            return []


def _widest_word(texts: Iterable[str]) -> int:
    """Return the width of the widest word of several texts."""
    return max((cell_len(word) for text in texts for word in text.split()), default=0)


def _least_width(column_title: str, cells: Sequence[TableCell], *, boxed: bool) -> int:
    """Return the least width of a text column at which no word is broken; see `terminal` for long names."""
    name_width = max((cell_len(name) for cell in cells for name in _names(cell)), default=0)
    texts = [column_title, *(_PLAIN.phrase(cell) for cell in cells if isinstance(cell, str | Name | Lines | tuple))]
    word_width = min(_widest_word(texts), _NAME_WIDTH)
    return word_width if boxed else max(word_width, name_width)


def _broken(column_title: str) -> str:
    """Break the title of a narrow column at spaces and underscores."""
    title_lines = [""]
    for fragment in column_title.replace("_", "_\0").replace(" ", " \0").split("\0"):
        if title_lines[-1] and len(title_lines[-1]) + len(fragment.rstrip()) > _TITLE_WIDTH:
            title_lines.append("")
        title_lines[-1] += fragment
    return "\n".join(title_line.rstrip() for title_line in title_lines)


def _style(cell: TableCell, column: Column, rank: int) -> Style:
    rank = cell.rank if isinstance(cell, Graded) else rank
    lacks_number = column.right and isinstance(cell, str) and bool(cell)
    colour = "red" if column.is_worse(cell) or (lacks_number and column.kind != "text") else None
    return Style(color=colour, bold=rank == 1 or None, underline=rank == 2 or None)


# --- Markdown, LaTeX, HTML ------------------------------------------------------------------------


def _piped(cell_texts: Iterable[str]) -> str:
    return f"| {' | '.join(cell_texts)} |"


def _stacked(column: Column) -> str:
    """Return the title of a narrow column in LaTeX, broken as in a terminal."""
    first_part, *later_parts = _joined([column.title]) or [""]
    match first_part:
        case str(text):
            write_text = _LATEX.text
        case Name(text):
            write_text = _LATEX.name
        case _:
            return _LATEX.phrase(column.title)
    title_lines = [write_text(title_line) for title_line in _broken(plain(text)).split("\n")]
    stacked_title = r" \\ ".join(title_lines) + _LATEX.phrase(tuple(later_parts))
    alignment = "r" if column.right else "l"
    return rf"\shortstack[{alignment}]{{{stacked_title}}}" if len(title_lines) > 1 else stacked_title


_LATEX_FIT = [
    r"\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi",
]


def _latex_block(note_texts: list[str]) -> list[str]:
    """Return notes as one paragraph of full line width."""
    if not note_texts:
        return []
    block_start = r"\par\smallskip\begin{minipage}{\linewidth}\footnotesize\raggedright"
    return [block_start, *note_texts, r"\end{minipage}"]


def _latex_groups(table: Table) -> list[str]:
    if not any(column.group for column in table.columns):
        return []
    group_heads, group_rules, first_column = [], [], 1
    for group, column_count in table.column_groups:
        if group:
            group_heads.append(rf"\multicolumn{{{column_count}}}{{c}}{{{_LATEX.phrase(group)}}}")
            group_rules.append(rf"\cmidrule(lr){{{first_column}-{first_column + column_count - 1}}}")
        else:
            group_heads.append(" & " * (column_count - 1))
        first_column += column_count
    return [" & ".join(group_heads) + r" \\", "".join(group_rules)]


def _html_row(tag: str, cell_texts: Iterable[str], columns: Iterable[Column]) -> str:
    class_attributes = ("" if column.right else ' class="text"' for column in columns)
    cell_elements = (
        f"<{tag}{class_attribute}>{cell_text}</{tag}>"
        for cell_text, class_attribute in zip(cell_texts, class_attributes, strict=True)
    )
    return f"<tr>{''.join(cell_elements)}</tr>"


Values: TypeAlias = "list[float | str]"


def csv_columns(
    column_title: str, column_cells: Sequence[TableCell], write_phrase: Callable[[Phrase], str]
) -> tuple[list[str], list[Values]]:
    """Convert a column to one to four CSV columns, with separate columns for intervals and p-values.

    Args:
        column_title: Title of the column.
        column_cells: Cells of the column.
        write_phrase: Converts a phrase to text.

    Returns:
        The titles of the CSV columns, and the values of each cell. Text that a spreadsheet would evaluate as a formula
        gets a leading apostrophe.
    """
    bound_suffixes = ("_lo", "_hi")
    if any(isinstance(cell, Compared) for cell in column_cells):
        suffixes: tuple[str, ...] = (
            "",
            "_diff",
            *(f"_diff{bound_suffix}" for bound_suffix in bound_suffixes),
        )
    elif any(isinstance(cell, Interval) for cell in column_cells):
        suffixes = ("", *bound_suffixes)
    elif any(isinstance(cell, Graded) and not math.isnan(cell.p) for cell in column_cells):
        suffixes = ("", "_p")
    else:
        suffixes = ("",)
    column_titles = [_formula_safe(column_title) + suffix for suffix in suffixes]
    return column_titles, [_values(cell, len(suffixes), write_phrase) for cell in column_cells]


def _values(cell: TableCell, column_count: int, write_phrase: Callable[[Phrase], str]) -> Values:
    match cell:
        case Compared():
            numbers = [cell.score, cell.gap.mean, cell.gap.lo, cell.gap.hi]
        case Interval():
            numbers = [cell.mean, cell.lo, cell.hi]
        case Graded():
            numbers = [cell.value, cell.p][:column_count]
        case int() | float():
            numbers = [cell]
        case None:
            numbers = []
        case _:
            return [_formula_safe(write_phrase(cell)), *[""] * (column_count - 1)]
    cell_values: Values = ["" if math.isnan(number) else number for number in numbers]
    return cell_values + [""] * (column_count - len(cell_values))


def _formula_safe(cell_text: str) -> str:
    return f"'{cell_text}" if cell_text.startswith(("=", "+", "-", "@")) else cell_text


def fitted(table: Table, console: Console) -> Iterator[RichTable]:
    """Yield the table for `rich.print`, in as few parts as the width of the console allows.

    Every part begins with the row labels: the columns before the first right-aligned one.
    """
    lead_count = len(list(takewhile(lambda column: not column.right, table.columns)))
    column_blocks: list[list[int]] = []
    if lead_count == len(table.columns):
        yield terminal(table)
    for column_index in range(lead_count, len(table.columns)):
        if not column_blocks or not _fits(
            _select_columns(table, lead_count, [*column_blocks[-1], column_index]), console
        ):
            column_blocks.append([])
        column_blocks[-1].append(column_index)
    for block_index, column_indices in enumerate(column_blocks):
        table_block = _select_columns(table, lead_count, column_indices)
        if len(column_blocks) > 1:
            table_block = replace(
                table_block,
                title=(table_block.title, f" ({block_index + 1} of {len(column_blocks)})"),
            )
        yield terminal(table_block if block_index + 1 == len(column_blocks) else replace(table_block, notes=()))


def _select_columns(table: Table, lead_count: int, column_indices: list[int]) -> Table:
    kept_indices = [*range(lead_count), *column_indices]
    kept_columns: tuple[Column, ...] = tuple(table.columns[column_index] for column_index in kept_indices)
    kept_rows = tuple(
        TableRow(tuple(table_row.cells[column_index] for column_index in kept_indices), table_row.group)
        for table_row in table.rows
    )
    return replace(table, columns=kept_columns, rows=kept_rows)


def _fits(table: Table, console: Console) -> bool:
    bare_table = terminal(replace(table, title="", notes=()))
    unlimited = console.options.update(width=9999)
    return console.measure(bare_table, options=unlimited).maximum <= console.width


LATEX_PACKAGES = "% \\usepackage{booktabs,graphicx}\n"
"""First line of LaTeX output, which names the required packages."""

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem; }}
figure {{ margin: 0; overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
caption {{ caption-side: top; font-weight: 600; padding-bottom: .6rem; text-align: left; }}
thead, tbody {{ border-bottom: 1px solid; }}
thead {{ border-top: 2px solid; }}
tbody:last-of-type {{ border-bottom-width: 2px; }}
th, td {{ padding: .15rem .5rem; text-align: right; white-space: nowrap; }}
th {{ vertical-align: bottom; white-space: normal; }}
th[colspan] {{ text-align: center; }}
.text {{ text-align: left; }}
sup {{ display: inline-block; line-height: 0; width: 0; }}
.note {{ font-size: .85rem; margin: .4rem 0; max-width: 60rem; }}
</style>
<figure>
{table}</figure>
</html>
"""


class Format(StrEnum):
    """File format of a table."""

    LATEX = "latex"
    MARKDOWN = "markdown"
    CSV = "csv"
    HTML = "html"


def format_table(table: Table, output_format: Format) -> str:
    """Return a table in a file format, with a trailing line break.

    LaTeX output is a float whose first line names the required packages; HTML output is a complete page.
    """
    match output_format:
        case Format.LATEX:
            return LATEX_PACKAGES + latex(table, fit=True)
        case Format.MARKDOWN:
            return markdown(table) + "\n"
        case Format.CSV:
            return csv(table)
        case Format.HTML:
            return _PAGE.format(title=_title(table), table=html(table))


def _title(table: Table) -> str:
    """Return the title without markup."""
    return html_text(table.title).replace("<code>", "").replace("</code>", "")
