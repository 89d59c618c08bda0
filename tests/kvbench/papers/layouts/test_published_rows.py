"""Published results below the rows of a run, against the data files read by themselves."""

from __future__ import annotations

import csv
from importlib import resources
from typing import Any

import pytest

from kvbench.papers.layouts.fill import fill
from kvbench.papers.layouts.from_papers import published_layout
from kvbench.papers.layouts.lay_out import lay_out
from kvbench.papers.layouts.slots import PUBLISHED_ROW
from kvbench.papers.layouts.substitutes import Substitutes
from kvbench.tables.outputs import plain_text
from kvbench.tables.table import Graded, Table

from ...report.conftest import Frames
from .conftest import layout_run, measures_of, together
from .test_lay_out import FILLABLE


def laid_out(name: str, frames: Frames, *use: str, digits: int | None = None, **options: Any) -> Table:
    one = published_layout(name)
    measures = measures_of(frames)
    layout = lay_out(one, measures, Substitutes.parse(one, use), with_published=True, **options)
    return fill(layout, measures, digits=digits)


def printed(name: str, model: str) -> dict[tuple[str, str, str], set[str]]:
    """The values of a table for a model as the file has them, by row, heading of columns and column."""
    paper, number = name.split("-")
    values: dict[tuple[str, str, str], set[str]] = {}
    text = (resources.files("kvbench_published") / f"{paper}.csv").read_text(encoding="utf-8")
    for line in csv.DictReader(text.splitlines()):
        if line["table"] == number and line["model"] == model and not line["method"].endswith("*"):
            values.setdefault((line["row"], line["group"], line["column"]), set()).add(line["value"])
    return values


def texts(table: Table) -> list[tuple[str, str, str, str, str]]:
    """Row, heading of columns, column, the run's number and the published one, as a reader sees them."""
    lead = sum(not column.right for column in table.columns)
    pairs = zip(table.rows[::2], table.rows[1::2], strict=True)
    shown = []
    for own, theirs in pairs:
        assert theirs.cells[lead - 1] == PUBLISHED_ROW and own.group == theirs.group
        for column, mine, other in zip(table.columns[lead:], own.cells[lead:], theirs.cells[lead:], strict=True):
            if isinstance(other, Graded):
                assert not other.rank and not other.better
                mine_text = mine.text.rstrip("%") if isinstance(mine, Graded) else "–"
                row = plain_text(own.cells[lead - 1])  # type: ignore[arg-type]
                title = plain_text(column.title).removesuffix(" ↓")
                shown.append((row, column.group, title, mine_text, other.text.rstrip("%").replace("−", "-")))
    return shown


@pytest.mark.parametrize(
    ("model", "source"),
    [
        ("tiny_llama", "Llama-3.1-8B-Instruct"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-Instruct-v0.3"),
    ],
)
def test_table_1_of_criticalkv_stands_below_the_run(model: str, source: str) -> None:
    table = laid_out("criticalkv-1", layout_run("criticalkv-1", model))
    values = {
        (row.replace("ours", "CriticalKV"), group, column.removesuffix(" ↓")): value
        for (row, group, column), value in printed("criticalkv-1", source).items()
    }
    shown = texts(table)
    assert len(shown) == len(values) == 7 * 15
    for row, group, column, mine, other in shown:
        assert {other} == values[row, group, column], (row, column)
        # As many decimals as the paper: two for scores, one for losses.
        assert len(mine.partition(".")[2]) == len(other.partition(".")[2]) == 2 - column.startswith("loss")
    (note,) = (text for text in map(plain_text, table.notes) if text.startswith("published: "))
    assert f"results for {source}" in note
    assert ("another model" in note) == (model == "tiny_llama")


@pytest.mark.parametrize("name", FILLABLE)
def test_every_published_number_is_that_of_the_file(name: str) -> None:
    """Numbers of all layouts, with their digits: what is shown is in the file, and all of it is shown."""
    figures = published_layout(name).figures
    on_file = [value for values in printed(name, figures[0].model).values() for value in values]
    shown = [other.lstrip("+") for *_, other in texts(laid_out(name, layout_run(name)))]
    assert shown
    assert {float(value) for value in shown} == {float(value) for value in on_file}
    assert set(shown) == {value.lstrip("+") for value in on_file}


def test_a_mean_of_fewer_columns_is_computed_from_the_papers_columns() -> None:
    cells, rows = layout_run("criticalkv-1")
    kept = ["vt", "cwe"]
    cells, rows = cells[cells["task"].isin(kept)], rows[rows["task"].isin(kept)]
    table = laid_out("criticalkv-1", (cells, rows), reduced=True)
    values = printed("criticalkv-1", "Llama-3.1-8B-Instruct")
    by_cell = {(row, column): other for row, _, column, _, other in texts(table)}
    means = {}
    for row, method in (("Full Cache", "Full Cache"), ("SnapKV", "SnapKV"), ("AdaKV w/ CriticalKV", "AdaKV w/ ours")):
        (vt,), (cwe,) = values[method, "", "VT"], values[method, "", "CWE"]
        means[row] = (float(vt) + float(cwe)) / 2
        assert float(by_cell[row, "Avg. Score"]) == pytest.approx(means[row], abs=0.0051)
        loss = 100 * (1 - means[row] / means["Full Cache"])
        assert float(by_cell[row, "loss"]) == pytest.approx(loss, abs=0.051)
    note = "averages over fewer columns are computed from its columns"
    assert any(note in plain_text(text) for text in table.notes)
    whole = laid_out("criticalkv-1", layout_run("criticalkv-1"), reduced=True)
    assert not any(note in plain_text(text) for text in whole.notes)


def test_digits_are_those_asked_for_and_the_paper_keeps_its_own() -> None:
    shown = texts(laid_out("criticalkv-1", layout_run("criticalkv-1"), digits=3))
    assert {len(mine.partition(".")[2]) for *_, mine, _ in shown} == {3}
    assert {len(other.partition(".")[2]) for *_, other in shown} == {1, 2}


def test_two_models_have_the_results_of_their_own() -> None:
    first, second = (layout_run("criticalkv-1", model) for model in ("tiny_llama", "Qwen/Qwen2.5-32B"))
    table = laid_out("criticalkv-1", together(first, second))
    full = [row.cells for row in table.rows if row.cells[1] in ("Full Cache", PUBLISHED_ROW)]
    cwe = [cells[2].text for cells in full if cells[1] == PUBLISHED_ROW and isinstance(cells[2], Graded)]
    for source in ("Llama-3.1-8B-Instruct", "Qwen2.5-32B"):
        assert printed("criticalkv-1", source)["Full Cache", "", "CWE"] <= set(cwe)
    assert sum(plain_text(note).startswith("published: ") for note in table.notes) == 2
