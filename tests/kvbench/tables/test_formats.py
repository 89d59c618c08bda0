from __future__ import annotations

from html.parser import HTMLParser

import pytest

from kvbench.papers.layouts.fill import fill
from kvbench.papers.layouts.pivot import Axes, pivot
from kvbench.tables.outputs import Format, format_table
from kvbench.tables.table import Table

from ..papers.layouts.conftest import measures_of
from ..report.conftest import make_run

HOSTILE = '<script>alert("x")</script> & "q"'


@pytest.fixture(scope="module")
def table() -> Table:
    policies = ["random", HOSTILE]
    measures = measures_of(make_run(policies, ["0.1"], model=HOSTILE, samples=30))
    return fill(pivot(measures, Axes(("policy", "budget"), ("task",))), measures, "full")


class Page(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_a_page_of_its_own_without_foreign_markup(table: Table) -> None:
    page = Page(format_table(table, Format.HTML))
    assert not page.opened
    assert page.tags <= {
        "html", "meta", "title", "style", "figure", "table", "caption", "thead", "tbody", "tr",
        "th", "td", "code", "b", "u", "sup", "p",
    }  # fmt: skip
    assert page.text.count(HOSTILE) == 3  # title, caption and row
    assert "http" not in page.text


def test_latex_names_its_packages(table: Table) -> None:
    assert format_table(table, Format.LATEX).startswith("% \\usepackage{booktabs,graphicx}\n\\begin{ta")


@pytest.mark.parametrize("form", Format)
def test_every_format_ends_with_one_line_break(table: Table, form: Format) -> None:
    text = format_table(table, form)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
