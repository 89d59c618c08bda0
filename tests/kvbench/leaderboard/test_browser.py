"""The leaderboard in a real browser: controls, details, themes and a phone."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.leaderboard.entries import leaderboard_data
from kvbench.leaderboard.publication import publish
from kvbench.leaderboard.site import write_site

from ..report.conftest import make_run
from ..report.page.browser import Browser, installed
from ..report.page.test_browser import choose, click
from .conftest import save_run, with_scores
from .test_site import hostile_site  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(installed() is None, reason="no Chromium is installed")

_ROWS = "[...document.querySelectorAll('#cells tbody tr')]"
_HEADS = "[...document.querySelectorAll('#cells th')].map(e => e.textContent)"
_FIGURES = "document.querySelectorAll('#charts figure').length"
_ALL = "\0all"


def column(browser: Browser, title: str) -> list[str]:
    """The texts of a column."""
    index = browser.run(_HEADS).index(title)
    return list(browser.run(f"{_ROWS}.map(row => row.cells[{index}].textContent)"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, two moments, and two runs of one model that disagree on one cell."""
    folder = tmp_path_factory.mktemp("site")
    frames = make_run(["snapkv", "criticalkv"], ("0.1", "0.4"), moments=("context", "question"), samples=12)
    other_model = make_run(["snapkv"], ("0.1",), model="smollm2", samples=12)
    disagreeing = with_scores(frames, 0.0, policy="criticalkv", budget="0.4", task="vt", moment="context")
    runs = {"one": frames, "two": disagreeing, "smollm2": other_model}
    publications = [publish(save_run(folder / name, run), folder / "board") for name, run in runs.items()]
    return write_site(leaderboard_data(publications), folder / "site")


@pytest.fixture
def browser(site: Path) -> Iterator[Browser]:
    with Browser() as browser:
        browser.open(site)
        assert browser.run("document.documentElement.dataset.ready") == "true"
        yield browser
        assert browser.problems == []
        assert browser.requests == []


def test_filters_change_the_entries_and_the_fronts(browser: Browser) -> None:
    assert len(browser.run(f"{_ROWS}.map(() => 1)")) == 2 * (1 + 2 * 2 * 2) + 2
    assert browser.run(_FIGURES) == 3
    choose(browser, "select-model", "reference")
    choose(browser, "select-moment", "question")
    click(browser, "#budgets .chip", "0.4")
    assert set(column(browser, "policy")) == {"full", "snapkv", "criticalkv"}
    assert set(column(browser, "budget")) == {"full", "0.4"}
    assert browser.run(_FIGURES) == 1
    choose(browser, "containing", "CRITICAL", "input")
    assert column(browser, "policy") == ["full", "full", "criticalkv", "criticalkv"]
    assert browser.run("document.querySelectorAll('#policies [aria-pressed=true]').length") == 1
    choose(browser, "containing", "nothing", "input")
    assert set(column(browser, "policy")) == {"full"}
    choose(browser, "containing", "", "input")
    choose(browser, "select-task", _ALL)
    assert {"vt", "cwe", "ruler: mean of 2 tasks"} == set(column(browser, "task"))


def test_a_click_chooses_a_policy_alone_and_a_second_click_all(browser: Browser) -> None:
    for expected in ({"full", "snapkv"}, {"full", "snapkv", "criticalkv"}):
        click(browser, "#policies .chip", "snapkv")
        assert set(column(browser, "policy")) == expected
    click(browser, "#policies .chip", "choose several")
    click(browser, "#policies .chip", "snapkv")
    assert set(column(browser, "policy")) == {"full", "criticalkv"}


def test_the_entries_can_be_downloaded_as_the_filters_show_them(browser: Browser, tmp_path: Path) -> None:
    choose(browser, "select-model", "smollm2")
    text = browser.download("document.getElementById('download').click()", tmp_path)
    rows = [*csv.DictReader(io.StringIO(text))]
    assert [row["policy"] for row in rows] == ["full", "snapkv"]
    assert rows[1]["digest"] in browser.run("data.publications.map(run => run.digest)")
    assert rows[1]["command"].startswith("kvbench run --policy snapkv ") and rows[1]["held_front"] == "true"


def test_titles_sort_and_say_so(browser: Browser) -> None:
    click(browser, "#cells th button", "score")
    ascending = [float(text) for text in column(browser, "score")]
    assert ascending == sorted(ascending)
    click(browser, "#cells th button", "score")
    assert [float(text) for text in column(browser, "score")] == sorted(ascending, reverse=True)
    assert browser.run("document.querySelector('th[aria-sort]').textContent") == "score"
    click(browser, "#cells th button", "policy")
    assert column(browser, "policy") == sorted(column(browser, "policy"))


def test_the_front_is_starred(browser: Browser) -> None:
    choose(browser, "select-model", "smollm2")
    assert column(browser, "front") == ["", "★"]


def test_an_entry_shows_its_digest_versions_command_and_disagreement(browser: Browser) -> None:
    assert browser.run("document.getElementById('entry').hidden")
    bad = "document.querySelector('#cells .badge.bad')"
    assert browser.run(f"{bad}.textContent") == "disagrees"
    browser.run(f"{bad}.closest('tr').querySelector('button.digest').click()")
    text = browser.run("document.getElementById('detail').textContent")
    digests = browser.run("data.publications.map(run => run.digest)")
    assert any(digest in text for digest in digests)
    for part in ("criticalkv at 0.4", "kvbench run --policy criticalkv", "torch", "2.13.0", "the questions of both"):
        assert part in text
    assert not browser.run("document.getElementById('entry').hidden")


def test_every_published_run_is_listed_with_its_command(browser: Browser) -> None:
    text = browser.run("document.getElementById('publications').textContent")
    for digest in browser.run("data.publications.map(run => run.digest)"):
        assert digest in text
    assert text.count("kvbench run ") == 3
    assert "say nothing about real models" in text


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_follows_the_system_until_the_button_is_pressed(site: Path, dark: bool) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    with Browser(dark=dark) as browser:
        browser.open(site)
        assert (browser.run(colour) == "rgb(20, 23, 26)") == dark
        browser.run("document.getElementById('theme').click()")
        assert (browser.run(colour) == "rgb(20, 23, 26)") != dark


def test_a_phone_shows_entries_first_and_need_not_scroll_sideways(site: Path) -> None:
    with Browser(400, 850) as browser:
        browser.open(site)
        top = "document.getElementById(%r).getBoundingClientRect().top"
        assert browser.run(top % "table") < browser.run(top % "filters")
        browser.run("document.querySelector('#cells .badge.bad').closest('tr').querySelector('button.digest').click()")
        assert browser.run("document.documentElement.scrollWidth") == 400
        assert browser.problems == []


def test_nothing_of_a_hostile_run_is_run_or_loaded(hostile_site: Path) -> None:  # noqa: F811
    with Browser() as browser:
        browser.open(hostile_site)
        assert browser.run("document.documentElement.dataset.ready") == "true"
        choose(browser, "select-task", _ALL)
        browser.run("document.querySelectorAll('details').forEach(e => { e.open = true; })")
        browser.run("document.querySelectorAll('button').forEach(e => e.click())")
        browser.run("document.querySelector('#cells .badge.bad')?.closest('tr').querySelector('button.digest').click()")
        assert "disagrees" in browser.run("document.getElementById('cells').textContent")
        assert browser.run("typeof globalThis.hacked") == "undefined"
        assert browser.run("document.querySelectorAll('script').length") == 4
        bad = "img, iframe, link, object, embed, base, main script, main style:not(svg style)"
        assert browser.run(f"document.querySelectorAll('{bad}').length") == 0
        assert browser.problems == []
        assert browser.requests == []
