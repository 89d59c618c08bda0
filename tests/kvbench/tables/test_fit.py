from __future__ import annotations

import io

from rich.console import Console

from kvbench.tables.outputs import fitted
from kvbench.tables.table import Column, Table, TableRow

WIDE = Table(
    "wide",
    (Column("name"), *(Column(f"column {i}", align="right") for i in range(12))),
    (TableRow(("first", *(f"{i}.00" for i in range(12)))),),
    ("a note",),
)


def printed(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    for part in fitted(WIDE, console):
        console.print(part)
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def test_a_table_that_fits_stays_whole() -> None:
    text = printed(300)
    assert text.count("first") == 1
    assert " of " not in text


def test_a_wide_table_is_split_and_loses_nothing() -> None:
    text = printed(60)
    assert text.count("first") == text.count(" of ") > 1
    for i in range(12):
        assert text.count(f" {i}.00 ") == 1
    assert max(map(len, text.splitlines())) <= 60
    assert text.count("a note") == 1
