"""The list of runs in a real browser: search, filters, order, download, links, themes and a phone."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.progress import Silent
from kvbench.viewer.runs_page import write_runs_page

from ..leaderboard.conftest import save_run
from ..report.conftest import make_run
from ..report.page.browser import Browser, installed
from ..report.page.conftest import HOSTILE
from ..report.page.test_browser import choose, click

pytestmark = pytest.mark.skipif(installed() is None, reason="no Chromium is installed")

_NAMES = "[...document.querySelectorAll('#runs .run-name')].map(cell => cell.firstChild.textContent)"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, of which one is unfinished and one hostile."""
    root = tmp_path_factory.mktemp("results")
    for name, policies, model in (
        ("first run", ["snapkv"], "reference"),
        (HOSTILE[1].replace("/", ":"), ["h2o"], "smollm2"),
    ):
        frames = make_run(policies, ("0.2",), ["vt"], samples=4, model=model)
        save_run(root / name, frames, models=[model], policies=[*policies, *HOSTILE])
    (root / "begun").mkdir()
    (root / "begun" / "grid.yaml").write_text("policies: [keydiff]\nmodels: [smollm2]\ntasks: [cwe]\n")
    return write_runs_page(root, Silent())[0]


@pytest.fixture
def browser(page: Path) -> Iterator[Browser]:
    with Browser() as browser:
        browser.open(page)
        assert browser.run("document.documentElement.dataset.ready") == "true"
        yield browser
        assert browser.run("typeof globalThis.hacked") == "undefined"
        assert browser.problems == []
        assert browser.requests == []


def test_search_and_filters_choose_runs_and_the_address_keeps_them(browser: Browser, page: Path) -> None:
    assert len(browser.run(_NAMES)) == 3
    for text, expected in (
        ("KEYDIFF cwe", ["begun"]),
        ("first snapkv", ["first run"]),
        ("first h2o", []),
        ("stopped", ["begun"]),
    ):
        choose(browser, "search", text, "input")
        assert browser.run(_NAMES) == expected
    choose(browser, "search", "", "input")
    choose(browser, "select-model", "smollm2", "input")
    assert len(browser.run(_NAMES)) == 2
    choose(browser, "select-status", "stopped", "input")
    assert browser.run(_NAMES) == ["begun"]
    fragment = browser.run("location.hash.slice(1)")
    with Browser() as other:
        other.open(page, fragment)
        assert other.run(_NAMES) == ["begun"]
        choose(other, "since", "2999-01-01", "input")
        assert other.run(_NAMES) == []


def test_titles_sort_and_the_list_can_be_downloaded(browser: Browser, tmp_path: Path) -> None:
    click(browser, "#runs th button", "run")
    names = browser.run(_NAMES)
    assert names == sorted(names)
    click(browser, "#runs th button", "run")
    assert browser.run(_NAMES) == names[::-1]
    text = browser.download("document.getElementById('download').click()", tmp_path)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["path"].lstrip("'") for row in rows] == names[::-1]
    assert "cells.parquet is missing" in next(row["problem"] for row in rows if row["path"] == "begun")


def test_a_run_opens(browser: Browser) -> None:
    addresses = browser.run("[...document.querySelectorAll('#runs a')].map(link => link.href)")
    assert len(addresses) == 2
    for address in addresses:
        with Browser() as other:
            other.open_address(address)
            assert other.run("document.documentElement.dataset.ready") == "true"
            assert other.run("document.title") == "KV-cache eviction: report"
            assert other.problems == []


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_follows_the_system_until_the_button_is_pressed(page: Path, dark: bool) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    with Browser(dark=dark) as browser:
        browser.open(page)
        assert (browser.run(colour) == "rgb(20, 23, 26)") == dark
        browser.run("document.getElementById('theme').click()")
        assert (browser.run(colour) == "rgb(20, 23, 26)") != dark


def test_a_phone_need_not_scroll_sideways(page: Path) -> None:
    with Browser(400, 844) as browser:
        browser.open(page)
        assert browser.run("document.documentElement.scrollWidth") == 400
        boxes = browser.run(
            "[...document.querySelectorAll('#runs td')].map(cell => cell.getBoundingClientRect().right)"
        )
        assert max(boxes) <= 400
        assert browser.problems == []
