"""One table in five outputs: what they say, and that nothing in a table can be markup."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from kvbench.tables import outputs
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.table import (
    Column,
    Compared,
    Graded,
    Interval,
    Lines,
    Name,
    Phrase,
    Table,
    TableRow,
)
from kvbench.tables.text import plain

SMALL = Table(
    ("Scores of ", Name("my_task")),
    (
        Column("policy"),
        Column("mean", NumberFormat.POINTS, better="higher"),
        Column("gap", NumberFormat.POINTS, group="to full", better="higher", signed=True),
        Column("held", NumberFormat.PERCENT, group="to full"),
        Column((Name("a_b"), " (2)"), NumberFormat.POINTS),
    ),
    (
        TableRow((Name("full"), 0.9, None, 1.0, None)),
        TableRow(
            (
                Name("x_y"),
                Interval(0.5, 0.4, 0.6),
                Interval(-0.4, -0.5, -0.3),
                0.125,
                Compared(0.25, Interval(-0.5, -0.6, -0.4)),
            ),
            "0.2",
        ),
        TableRow((Name("z"), Interval(0.6), Interval(0.1, -0.1, 0.3), 0.125, "failed"), "0.2"),
        TableRow((Lines(("one", "two")), 0.3, 0.0, 0.5, 0.1), "0.4"),
    ),
    ("A note.",),
)


def shown(table: Table, width: int = 120, *, boxed: bool = True, colour: bool = False) -> str:
    console = Console(
        width=width,
        file=io.StringIO(),
        force_terminal=colour,
        color_system="standard" if colour else None,
    )
    console.print(outputs.terminal(table, boxed=boxed))
    return console.file.getvalue()


def test_markdown() -> None:
    assert outputs.markdown(SMALL, level=2).splitlines() == [
        "## Scores of `my_task`",
        "",
        "| policy | mean | to full: gap | to full: held | `a_b` (2) |",
        "| --- | --: | --: | --: | --: |",
        "| `full` | 90.0 | – | 100% | – |",
        "| `x_y` | <ins>50.0 [40.0, 60.0]</ins> | −40.0 [−50.0, −30.0] | 12.5% | 25.0 −50.0 [−60.0, −40.0] |",
        "| `z` | **60.0** | +10.0 [−10.0, +30.0] | 12.5% | failed |",
        "| one<br>two | 30.0 | 0.0 | 50.0% | 10.0 |",
        "",
        "A note.",
    ]
    assert outputs.markdown(SMALL).startswith("Scores of `my_task`\n\n|")


@pytest.mark.parametrize(
    ("phrase", "written"),
    [
        (("score", " ↓"), "score ↓"),
        ((Name("vt"), " ↓", ("", "°")), "`vt` ↓°"),
        (("", ("1", ". x")), "1&#46; x"),
        ((Name("- a"), "- b"), "&#45; a- b"),
        ("45.0, 55.0", "45.0, 55.0"),
        ("50 at 64", "50 at 64"),
        ("-5", "-5"),
        ("--", "&#45;-"),
        ("12) x", "12&#41; x"),
        ("    x", "&#32;   x"),
    ],
)
def test_only_the_start_of_a_line_can_begin_a_list(phrase: Phrase, written: str) -> None:
    assert outputs.markdown_text(phrase) == written


def test_latex() -> None:
    assert outputs.latex(SMALL).splitlines() == [
        r"\begin{table}",
        r"\centering",
        r"\caption{Scores of \texttt{my\_task}}",
        r"\begin{tabular}{lrrrr}",
        r"\toprule",
        r" &  & \multicolumn{2}{c}{to full} &  \\",
        r"\cmidrule(lr){3-4}",
        r"policy & mean & gap & held & \texttt{a\_b} (2) \\",
        r"\midrule",
        r"\texttt{full} & 90.0 & \textendash{} & 100\% & \textendash{} \\",
        r"\midrule",
        r"\texttt{x\_y} & \underline{50.0 {[}40.0, 60.0]} & $-$40.0 {[}$-$50.0, $-$30.0] & 12.5\% "
        r"& 25.0 $-$50.0 {[}$-$60.0, $-$40.0] \\",
        r"\texttt{z} & \textbf{60.0} & +10.0 {[}$-$10.0, +30.0] & 12.5\% & failed \\",
        r"\midrule",
        r"one; two & 30.0 & 0.0 & 50.0\% & 10.0 \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\par\smallskip{\footnotesize A note.}",
        r"\end{table}",
    ]


GRADED = Table(
    "",
    (Column("part", merged=True), Column("n", align="right")),
    (
        TableRow(("a", Graded(0.5, NumberFormat.POINTS, rank=1, better=1, p=0.01)), "x"),
        TableRow(("a", Graded(0.4, NumberFormat.PERCENT, signed=True, rank=2, better=-1, p=0.04)), "x"),
        TableRow(("a", Graded(math.nan, NumberFormat.POINTS)), "y"),
    ),
)


def test_a_number_carries_its_own_format_rank_and_mark() -> None:
    assert outputs.markdown(GRADED).splitlines()[2:] == [
        "| a | **50.0**⁺ |",
        "|  | <ins>+40.0%</ins>⁻ |",
        "|  | – |",
    ]
    assert outputs.latex(GRADED).splitlines()[6:9] == [
        r"a & \textbf{50.0}\rlap{$^{+}$} \\",
        r" & \underline{+40.0\%}\rlap{$^{-}$} \\",
        r"\midrule",
    ]
    assert "<b>50.0</b><sup>+</sup>" in outputs.html(GRADED)
    assert "\x1b[1m50.0⁺" in shown(GRADED, colour=True)
    assert list(csv.reader(io.StringIO(outputs.csv(GRADED)))) == [
        ["part", "n", "n_p"], ["a", "0.5", "0.01"], ["a", "0.4", "0.04"], ["a", "", ""],
    ]  # fmt: skip


def test_a_fitted_latex_table_shrinks_to_the_line_and_sets_notes_as_a_block() -> None:
    text = outputs.latex(SMALL, fit=True)
    assert r"\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}" in text
    assert r"\begin{minipage}{\linewidth}" in text
    assert text.startswith(r"\begin{table}")
    wide = Table("", tuple(map(Column, "abcdefghi")), (TableRow(tuple("abcdefghi")),))
    assert outputs.latex(wide, fit=True).startswith(r"\begin{table*}")
    long = (Column("NIAH Multikey1", align="right"), Column((Name("niah_multikey_1"), " ↓")))
    text = outputs.latex(replace(wide, columns=(*wide.columns[2:], *long)), fit=True)
    assert r"\shortstack[r]{NIAH \\ Multikey1}" in text
    assert r"\shortstack[l]{\texttt{niah\_} \\ \texttt{multikey\_1} $\downarrow$}" in text


def test_html() -> None:
    page = outputs.html(SMALL)
    assert "<caption>Scores of <code>my_task</code></caption>" in page
    assert '<tr><th colspan="2"></th><th colspan="2">to full</th><th colspan="1"></th></tr>' in page
    assert page.count("<tbody>") == page.count("</tbody>") == 3
    assert '<td class="text"><code>x_y</code></td><td><u>50.0 [40.0, 60.0]</u></td>' in page
    assert "<td><b>60.0</b></td>" in page
    assert '<p class="note">A note.</p>' in page


def test_csv_has_numbers_for_programs() -> None:
    head, *rows = csv.reader(io.StringIO(outputs.csv(SMALL)))
    assert head == [
        "policy", "mean", "mean_lo", "mean_hi",
        "to full: gap", "to full: gap_lo", "to full: gap_hi", "to full: held",
        "a_b (2)", "a_b (2)_diff", "a_b (2)_diff_lo", "a_b (2)_diff_hi",
    ]  # fmt: skip
    assert rows[0] == ["full", "0.9", "", "", "", "", "", "1.0", "", "", "", ""]
    assert rows[1][1:] == ("0.5 0.4 0.6 -0.4 -0.5 -0.3 0.125 0.25 -0.5 -0.6 -0.4".split())
    assert rows[2][8:] == ["failed", "", "", ""]
    assert rows[3][0] == "one; two"


def test_terminal() -> None:
    text = shown(SMALL)
    for part in ("Scores of my_task", "gap", "−40.0 [−50.0, −30.0]", "A note."):
        assert part in text
    marked = shown(SMALL, colour=True)
    assert "\x1b[1m60.0\x1b[0m" in marked
    assert "\x1b[4m50.0 [40.0, 60.0]\x1b[0m" in marked
    assert "\x1b[31m−40.0 [−50.0, −30.0]\x1b[0m" in marked, "a loss beyond doubt is red"
    assert "\x1b[31mfailed\x1b[0m" in marked
    assert "\x1b[31m+10.0" not in marked


def test_a_terminal_folds_names_in_boxes_and_keeps_them_whole_in_listings() -> None:
    name = "name" * 20
    table = Table("", (Column("policy"), Column("about")), (TableRow((Name(name), "x " * 60)),))
    assert name not in shown(table)
    assert max(map(len, shown(table, 70).splitlines())) <= 70
    assert name in shown(table, boxed=False)


# --- nothing in a table is markup -----------------------------------------------------------------

anything = st.text(
    st.one_of(st.sampled_from("`*_[]()<>|\\\"'#+-=@!~&$%^{};:.1 \n\t\x1b\u202eé"), st.characters()),
    max_size=12,
)
nasty = example("[x](http://x.yz) <b>&amp;|`` \\ $x$ www.x.yz")


def everywhere(text: str) -> Table:
    """A table that shows a text, as text and as a name, wherever a table can."""
    column = Column((text, Name(text)), group=text)
    return Table((text, Name(text)), (column, Column("n", NumberFormat.COUNT)), (
        TableRow((text, 1)), TableRow((Name(text), 2)), TableRow(((Name(text), text), 3)),
    ), (text,))  # fmt: skip


class Cells(HTMLParser):
    """What a browser shows in each cell of a table, and the elements of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self._open = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag in ("td", "th"):
            self._open = True
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.cells[-1] += data


@nasty
@given(anything)
def test_html_shows_any_text_as_it_is(text: str) -> None:
    page = Cells(outputs.html(everywhere(text)))
    assert page.tags <= {"table", "caption", "thead", "tbody", "tr", "th", "td", "code", "p"}
    want = plain(text)
    groups = [want, ""] if text else []
    assert page.cells == [*groups, want * 2, "n", want, "1", want, "2", want * 2, "3"]


@nasty
@given(anything)
def test_markdown_shows_any_text_as_it_is(text: str) -> None:
    written = outputs.markdown(everywhere(text), level=2)
    page = Cells(MarkdownIt("commonmark").enable("table").render(written))
    assert page.tags <= {"h2", "table", "thead", "tbody", "tr", "th", "td", "code", "p"}
    want = " ".join(plain(text).split(" "))
    groups = f"{want}: " if text else ""
    cells = [groups + want * 2, "n", want, "1", want, "2", want * 2, "3"]
    # A table cell of Markdown loses the spaces at its ends, a code span some of those within.
    assert [c.replace(" ", "") for c in page.cells] == [c.replace(" ", "") for c in cells]


_TEX = {
    r"\textbackslash{}": "\\", r"\textasciicircum{}": "^", r"\textasciitilde{}": "~",
    r"\textless{}": "<", r"\textgreater{}": ">", r"\textbar{}": "|", r"\textasciigrave{}": "`",
    r"\textendash{}": "–", r"\ldots{}": "…", "{[}": "[", "{*}": "*", "-{}-": "--",
    **{f"\\{c}": c for c in "{}$&#_%"},
}  # fmt: skip


LETTERS = {
    *map(chr, range(128)),
    *"ßæœøåłÆŒØÅŁ‘’“”–…",
    *"ÀÁÂÃÄÇÈÉÊËÌÍÎÏÑÒÓÔÕÖÙÚÛÜÝàáâãäçèéêëìíîïñòóôõöùúûüýÿ",
    *"ĆćĈĉČčĎďĚěĜĝĢģĤĥĨĩĴĵĶķĹĺĻļĽľŃńŅņŇňŔŕŖŗŘřŚśŜŝŞşŠšŢţŤťŨũŴŵŶŷŸŹźŽž",
}
"""What LaTeX shows without a package, whatever the font's encoding."""


def untex(text: str) -> str:
    """What LaTeX shows of an escaped text; fails where a special character stands bare."""
    out = ""
    while text:
        for command, char in _TEX.items():
            if text.startswith(command):
                out, text = out + char, text[len(command) :]
                break
        else:
            assert text[0] not in "\\{}$&#_%^~<>|`[*", text
            out, text = out + text[0], text[1:]
    return out


def spelled(text: str) -> str:
    """A text without the letters that LaTeX has in no font."""
    return "".join(c if c in LETTERS else c.encode("unicode_escape").decode() for c in text)


@nasty
@given(anything.filter(lambda text: not re.search("[−×∞°·★↓⁺⁻Δαβθ]", text)))
def test_latex_shows_any_text_as_it_is(text: str) -> None:
    table = Table("", (Column("a"), Column("b")), (TableRow((text, Name(text))),))
    (row,) = outputs.latex(table).splitlines()[6:-3]
    one, two = re.fullmatch(r"(.*) & \\texttt\{(.*)\} \\\\", row).groups()
    assert untex(one) == untex(two) == spelled(plain(text))
    assert not row.startswith(("[", "*"))


@example("=1+1")
@example("-2+3+cmd|' /C calc'!A0")
@nasty
@given(anything)
def test_csv_holds_any_text_and_no_formula(text: str) -> None:
    table = Table("", (Column(text), Column("n")), (TableRow((text, Name(text))),))
    head, row = csv.reader(io.StringIO(outputs.csv(table)))
    for value in (head[0], *row):
        assert value in (plain(text), f"'{plain(text)}")
        assert not value.startswith(("=", "+", "-", "@"))


@nasty
@given(anything)
def test_a_terminal_shows_any_text_as_it_is(text: str) -> None:
    table = Table("", (Column("a"), Column("b")), (TableRow((text, Name("end"))),))
    out = shown(table, 200)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", out)
    rows = re.findall(r"^│ (.*?) +│ (?:end)? *│$", out, re.MULTILINE)
    assert "".join("".join(rows).split()) == "".join(plain(text).split()), "but where it folds"
