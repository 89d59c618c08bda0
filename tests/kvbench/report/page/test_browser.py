"""The page in a real browser: nothing of a hostile run is run, and the controls do their work."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.report.choosing import Aim

from ..conftest import make_run, reading_few
from .browser import Browser, installed
from .conftest import HOSTILE, data_of, page_of

pytestmark = pytest.mark.skipif(installed() is None, reason="no Chromium is installed")

_ROWS = "[...document.querySelectorAll('#cells tbody tr')]"
_CHARTS = "document.querySelectorAll('#charts svg')"
_COLUMN = f"{_ROWS}.map(row => row.cells[%d].textContent)"


_PAIRS = (
    "[...document.querySelectorAll('#pair-table tbody tr')]"
    ".map(row => [...row.cells].slice(-9).map(cell => cell.textContent))"
)


def number(text: str) -> float:
    """A number as the page writes it, whose minus sign is not that of Python."""
    return float(text.replace("−", "-"))


def click(browser: Browser, selector: str, text: str) -> None:
    found = f"[...document.querySelectorAll({selector!r})]"
    browser.run(f"{found}.find(e => e.textContent === {text!r}).click()")


def choose(browser: Browser, name: str, value: str, event: str = "change") -> None:
    browser.run(
        f"{{const box = document.getElementById({name!r}); box.value = {value!r};"
        f"box.dispatchEvent(new Event({event!r}))}}"
    )


def size_of(text: str) -> float:
    number, unit, *_ = text.split()
    return float(number) * 1024 ** ("B", "KiB", "MiB", "GiB").index(unit)


@pytest.fixture(scope="module")
def open_page(hostile_page: Path) -> Iterator[Browser]:
    with Browser() as browser:
        browser.open(hostile_page)
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    frames = make_run(
        ["snapkv", "criticalkv", "random"], ("0.1", "0.4"), samples=12, depths=(0, 50, 100),
        moments=("context", "question"),
    )  # fmt: skip
    return page_of(frames, tmp_path_factory.mktemp("page"), Aim.of(5, 16, 32768))


@pytest.fixture
def browser(page: Path) -> Iterator[Browser]:
    with Browser() as browser:
        browser.open(page)
        yield browser
        assert browser.problems == []
        assert browser.requests == []


# --- a hostile run --------------------------------------------------------------------------------


def test_nothing_of_a_hostile_run_is_run_or_loaded(open_page: Browser) -> None:
    assert open_page.run("document.documentElement.dataset.ready") == "true"
    for kind in ("all", "differ", "worse"):
        choose(open_page, "which", kind)
    for _ in range(len(HOSTILE) * 2):  # through the questions of a task
        open_page.run("document.querySelector('.step button:nth-child(2)').click()")
    choose(open_page, "select-task", open_page.run("ALL"))
    choose(open_page, "which", "all")
    assert open_page.run("typeof globalThis.hacked") == "undefined"
    assert open_page.problems == []
    assert open_page.requests == []


def test_a_hostile_run_adds_no_element_that_could_do_something(open_page: Browser) -> None:
    assert open_page.run("document.querySelectorAll('script').length") == 4
    bad = "img, iframe, link, object, embed, base, main script, main style:not(svg style)"
    assert open_page.run(f"document.querySelectorAll('{bad}').length") == 0
    on = "[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())"
    assert open_page.run(f"{on}.filter(name => name.startsWith('on'))") == []


def test_hostile_responses_are_shown_as_they_are(open_page: Browser) -> None:
    choose(open_page, "containing", "onerror", "input")
    text = open_page.run("document.getElementById('answer').textContent")
    assert HOSTILE[1] in text
    choose(open_page, "containing", "gnp.exe", "input")
    text = open_page.run("document.getElementById('answer').textContent")
    assert r"\x1b[2J" in text
    assert r"\u202e" in text
    assert not set("\x1b\u202e\u2066") & set(text)
    choose(open_page, "containing", "", "input")


# --- controls -------------------------------------------------------------------------------------


def test_filters_change_the_table_and_the_charts(browser: Browser) -> None:
    browser.until(f"{_CHARTS}.length", 2)  # moments
    assert len(browser.run(_ROWS + ".map(() => 1)")) == 1 + 2 * 3 * 2
    click(browser, "#policies .chip", "choose several")
    click(browser, "#policies .chip", "random")
    click(browser, "#budgets .chip", "0.1")
    choose(browser, "select-moment", "question")
    browser.until(f"{_CHARTS}.length", 1)
    assert browser.run(_COLUMN % 1) == ["full", "snapkv", "criticalkv"]
    click(browser, "#budgets .chip", "all budgets")
    assert len(browser.run(_COLUMN % 1)) == 5
    choose(browser, "select-task", browser.run("ALL"))
    assert browser.run("document.querySelectorAll('#charts figure').length") == 3  # mean, vt, cwe


def test_a_click_shows_a_policy_alone_and_a_second_one_all(browser: Browser) -> None:
    browser.until(f"{_CHARTS}.length", 2)
    click(browser, "#policies .chip", "snapkv")
    assert set(browser.run(_COLUMN % 1)) == {"full", "snapkv"}
    pressed = "[...document.querySelectorAll('#policies [aria-pressed=true]')].map(chip => chip.textContent)"
    assert browser.run(pressed) == ["snapkv"]
    click(browser, "#policies .chip", "random")
    assert set(browser.run(_COLUMN % 1)) == {"full", "random"}
    browser.run(
        "[...document.querySelectorAll('.chip')].find(chip => chip.textContent === 'snapkv')"
        ".dispatchEvent(new MouseEvent('click', {ctrlKey: true, bubbles: true}))"
    )
    assert set(browser.run(_COLUMN % 1)) == {"full", "random", "snapkv"}
    click(browser, "#policies .chip", "random")
    click(browser, "#policies .chip", "random")
    assert set(browser.run(_COLUMN % 1)) == {"full", "random", "snapkv", "criticalkv"}


def test_only_chosen_policies_and_those_on_the_front_have_colours(tmp_path: Path) -> None:
    policies = [f"p{index}" for index in range(9)] + ["criticalkv", "random"]
    with Browser() as browser:
        browser.open(page_of(make_run(policies, ("0.1", "0.4"), ["vt"], samples=40), tmp_path))
        browser.until(f"{_CHARTS}.length", 1)
        dots = (
            "Object.fromEntries([...document.querySelectorAll('#charts [aria-label=dot]')]"
            ".map(dot => [dot.getAttribute('aria-description'), dot.querySelector('[fill]').getAttribute('fill')]))"
        )
        colours = browser.run(dots)
        assert len(colours) == len(policies) and colours["criticalkv"] != "var(--grey)"
        assert sum(colour == "var(--grey)" for colour in colours.values()) >= 8
        click(browser, "#policies .chip", "p0")
        browser.until(f"{_CHARTS}.length", 1)
        alone = browser.run(dots)
        assert alone["p0"] not in ("var(--grey)", alone["criticalkv"])
        assert alone["random"] == "var(--grey)"
        assert browser.problems == []


def test_hovering_over_a_policy_lifts_its_line(browser: Browser) -> None:
    browser.until(f"{_CHARTS}.length", 2)
    at = browser.run(
        "{const box = [...document.querySelectorAll('.chip')].find(chip => chip.textContent === 'random')"
        ".getBoundingClientRect(); scrollTo({top: scrollY + box.y - 300, behavior: 'instant'});"
        "const now = [...document.querySelectorAll('.chip')].find(chip => chip.textContent === 'random')"
        ".getBoundingClientRect(); [now.x + now.width / 2, now.y + now.height / 2]}"
    )
    browser.move(*at)
    line = "getComputedStyle(document.querySelector('#charts [aria-label=line][aria-description=%s] > g')).%s"
    browser.until(line % ("random", "strokeWidth"), "3px")  # the page redraws after the event
    assert (
        float(browser.run(line % ("snapkv", "opacity"))) < 0.5 == float(browser.run(line % ("random", "opacity"))) / 2
    )
    browser.move(5, 5)
    assert browser.run(line % ("snapkv", "opacity")) == "1"


def test_the_table_can_be_downloaded_as_the_filters_show_it(browser: Browser, tmp_path: Path) -> None:
    click(browser, "#policies .chip", "snapkv")
    click(browser, "#cells th button", "score")
    text = browser.download("document.getElementById('download').click()", tmp_path)
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["policy"] for row in rows] == browser.run(_COLUMN % 1)
    assert [float(row["score"]) for row in rows] == sorted(float(row["score"]) for row in rows)
    assert {row["task"] for row in rows} == {"mean of 2 tasks"} and all(0 <= float(row["share"]) <= 1 for row in rows)


def test_a_download_of_hostile_names_holds_no_formula(open_page: Browser, tmp_path: Path) -> None:
    rows = "[{name: '=1+1', text: 'a,\"b\"\\n', score: -0.5, none: null}]"
    text = open_page.run(f"csvText(['name', 'text', 'score', 'none'], {rows})")
    assert list(csv.reader(io.StringIO(text))) == [["name", "text", "score", "none"], ["'=1+1", 'a,"b"\n', "-0.5", ""]]
    whole = open_page.download("document.getElementById('download').click()", tmp_path)
    assert any(row["policy"].endswith(HOSTILE[1]) for row in csv.DictReader(io.StringIO(whole)))
    assert open_page.problems == []


def test_the_address_keeps_what_was_chosen(page: Path, browser: Browser) -> None:
    for chip in ("snapkv", "0.4"):
        click(browser, ".chip", chip)
    choose(browser, "select-moment", "question")
    choose(browser, "within", "2", "input")
    choose(browser, "containing", "x", "input")
    click(browser, "#cells th button", "score")
    click(browser, "#cells th button", "score")
    browser.run("document.querySelector('.step button:nth-child(2)').click()")
    shown = "[...document.querySelectorAll('main')].map(main => main.innerText).join() + location.hash"
    fragment = browser.run("location.hash.slice(1)")
    with Browser() as other:
        other.open(page, fragment)
        assert other.run(shown) == browser.run(shown)
        click(other, "nav a", "Table")
        assert other.run("location.hash.slice(1)") == fragment
        assert other.problems == []


@pytest.mark.parametrize(
    "fragment", ["table", "policy=none&sort=99.up&task=x&moment=y&question=1e9", "sort=x&within=%00&which=%3Cb%3E"]
)
def test_an_address_that_the_page_does_not_know_does_no_harm(page: Path, fragment: str) -> None:
    with Browser() as browser:
        browser.open(page, fragment)
        assert browser.run("document.documentElement.dataset.ready") == "true"
        assert browser.run("document.getElementById('select-task').value") != "x"
        assert browser.problems == []


def test_the_page_can_be_printed(browser: Browser) -> None:
    assert browser.pdf().startswith(b"%PDF")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert "policies" not in browser.run("document.getElementById('shown').textContent")
    click(browser, "#policies .chip", "snapkv")
    assert browser.run("document.getElementById('shown').textContent").endswith("policies: snapkv")
    assert browser.run("document.getElementById('legend').textContent").startswith("snapkv")


def test_print_on_a_narrow_page_is_not_laid_out_as_a_phone(browser: Browser) -> None:
    """Sheets of paper are narrower than the width below which a window counts as a phone's."""
    browser.emulate(600, media="print")
    # In one call, because a figure that is drawn between two calls moves what follows.
    tops = browser.run("[...document.querySelectorAll('main > section')].map(x => x.getBoundingClientRect().top)")
    assert tops == sorted(tops)
    assert browser.run("getComputedStyle(document.getElementById('legend')).display") == "flex"
    assert browser.run("getComputedStyle(document.getElementById('policies')).display") == "none"
    assert browser.run("document.querySelector('#cells th').innerText") == "moment"


def test_the_device_and_the_command_are_on_the_page(hostile_page: Path, open_page: Browser) -> None:
    facts = open_page.run("document.getElementById('facts').textContent")
    assert "Devicecpu (float32)" in facts
    commands = "[...document.querySelectorAll('#commands pre')].map(pre => pre.textContent)"
    assert open_page.run(commands) == data_of(hostile_page)["commands"]
    assert HOSTILE[0] in open_page.run(commands)


def test_policies_are_compared_with_the_chosen_one(browser: Browser, page: Path, tmp_path: Path) -> None:
    (panel, _) = (each for each in data_of(page)["pairs"])
    expected = {tuple(test[:3]): test[3:] for test in panel["tests"]}
    choose(browser, "select-moment", "context")
    choose(browser, "against", "criticalkv")
    rows = {tuple(row[:2]): row[2:] for row in browser.run(_PAIRS)}
    assert set(rows) == {(budget, policy) for budget in ("0.1", "0.4") for policy in ("snapkv", "random")}
    for (budget, policy), (score, base, difference, interval, p, contexts, result) in rows.items():
        is_first = (budget, "criticalkv", policy) in expected
        pair = ("criticalkv", policy) if is_first else (policy, "criticalkv")
        diff, low, high, p_first, p_second, count = expected[budget, *pair]
        assert number(difference) == pytest.approx(100 * (diff if is_first else -diff), abs=0.051)
        assert number(score) - number(base) == pytest.approx(number(difference), abs=0.11)
        ends = [100 * end for end in ((low, high) if is_first else (-high, -low))]
        assert [number(end) for end in interval.strip("[]").split(",")] == pytest.approx(ends, abs=0.051)
        assert float(p.replace("< 0.001", "0")) == pytest.approx(p_first if is_first else p_second, rel=0.06, abs=0.001)
        assert contexts == str(count)
        decided = number(p.replace("< ", "")) < 0.05 and ends[0] * ends[1] > 0
        assert result == ("decided" if decided else "undecided")
    assert {row[-1] for row in rows.values()} == {"decided", "undecided"}
    text = browser.download("document.getElementById('download-pairs').click()", tmp_path)
    downloaded = list(csv.DictReader(text.splitlines()))
    assert [(row["budget"], row["policy"]) for row in downloaded] == list(rows)
    assert {row["base"] for row in downloaded} == {"criticalkv"}
    click(browser, "#policies .chip", "random")
    click(browser, "#pair-table th button", "budget")
    click(browser, "#pair-table th button", "budget")
    assert [row[:2] for row in browser.run(_PAIRS)] == [["0.4", "random"], ["0.1", "random"]]
    assert "against=criticalkv" in browser.run("location.hash")


def test_a_page_without_pairs_has_no_such_section(tmp_path: Path) -> None:
    with Browser() as browser:
        browser.open(page_of(make_run(["snapkv"], ("0.1",), ["vt"], samples=4), tmp_path))
        assert browser.run("document.getElementById('pairs').hidden && document.getElementById('to-pairs').hidden")
        assert browser.problems == []


def test_informed_policies_are_marked(tmp_path: Path) -> None:
    frames = make_run(["snapkv", "oracle"], ("0.1",), ["vt"], samples=8, depths=(0, 50))
    with Browser() as browser:
        browser.open(page_of(frames, tmp_path))
        for place in ("#policies", "#legend", "#cells", "#pair-table", "#against", "#maps"):
            text = browser.run(f"document.querySelector({place!r}).textContent")
            assert text.count("oracle") == text.count("oracle (informed)") > 0, place
        click(browser, "#policies .chip", "oracle (informed)")
        assert browser.run(_COLUMN % 0) == ["full", "oracle (informed)"]
        assert browser.problems == []


def test_titles_sort_and_say_so(browser: Browser) -> None:
    head = "#cells th button"
    click(browser, head, "score")
    up = [float(text) for text in browser.run(_COLUMN % 5)]
    assert up == sorted(up)
    click(browser, head, "score")
    assert [float(text) for text in browser.run(_COLUMN % 5)] == sorted(up, reverse=True)
    assert browser.run("document.querySelector('th[aria-sort]').textContent") == "score"


def test_choices_follow_their_inputs(browser: Browser) -> None:
    saved = "document.querySelector('#choices .saved b').textContent"
    before = browser.run(saved)
    choose(browser, "batch", "32", "input")
    after = browser.run(saved)
    assert before.endswith("saved")
    assert size_of(after) == pytest.approx(2 * size_of(before), rel=0.01)
    choose(browser, "within", "0.5", "input")
    words = "[...document.querySelectorAll('.choice p')].map(p => p.textContent).join()"
    assert "0.5 points" in browser.run(words)


def test_hovering_shows_the_cell(browser: Browser) -> None:
    browser.until(f"{_CHARTS}.length", 2)
    at = browser.run(
        "{const dot = document.querySelector('#charts svg [aria-label=dot] path');"
        "dot.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const box = dot.getBoundingClientRect(); [box.x + box.width / 2, box.y + box.height / 2]}"
    )
    browser.move(*at)
    tip = browser.run("document.querySelector('#charts [aria-label=tip]').textContent")
    for part in ("at 0.1", "score", "to full", "KV held", "samples"):
        assert part in tip


def test_what_differs_from_full_is_marked(browser: Browser) -> None:
    parts = browser.run("difference('the code is 42 now', 'the code is 17 now')")
    words = [(kind, "".join(words)) for kind, words in parts]
    assert words == [("same", "the code is "), ("del", "42"), ("ins", "17"), ("same", " now")]
    assert browser.run("difference('a b c', 'x y z')") is None
    choose(browser, "which", "worse")
    badge = "document.querySelector('#answer .badge.bad').textContent"
    assert browser.run(badge) == "score 0.0"


def test_a_jump_to_a_section_ends_below_the_filters(browser: Browser) -> None:
    browser.run("document.getElementById('table').scrollIntoView({behavior: 'instant'})")
    top = browser.run("document.querySelector('#table h2').getBoundingClientRect().top")
    assert top > browser.run("document.getElementById('filters').getBoundingClientRect().bottom")


def test_needles_have_a_map_per_policy(browser: Browser) -> None:
    browser.run("document.getElementById('needles').scrollIntoView({behavior: 'instant'})")
    titles = "[...document.querySelectorAll('#maps figcaption')].map(e => e.textContent)"
    assert len(browser.run(titles)) == 1 + 3 * 2
    assert "mean of 2 tasks" in browser.run("document.querySelector('#maps h3').textContent")


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_follows_the_system_until_told_otherwise(page: Path, dark: bool) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    with Browser(dark=dark) as browser:
        browser.open(page)
        before = browser.run(colour)
        assert (before == "rgb(20, 23, 26)") == dark
        browser.run("document.getElementById('theme').click()")
        assert (browser.run(colour) == "rgb(20, 23, 26)") != dark


def test_a_phone_need_not_scroll_sideways(page: Path) -> None:
    with Browser(400, 844) as browser:
        browser.open(page)
        browser.run("document.getElementById('charts').scrollIntoView({behavior: 'instant'})")
        browser.until(f"{_CHARTS}.length > 0")
        assert browser.run("document.documentElement.scrollWidth") == 400
        top = "document.getElementById(%r).getBoundingClientRect().top"
        sections = browser.run("[...document.querySelectorAll('main > section')].map(section => section.id)")
        assert min(sections, key=lambda name: browser.run(top % name)) == "scores"
        assert browser.run("document.getElementById('charts').getBoundingClientRect().top + scrollY") < 200
        assert browser.run(f"{_CHARTS}[0].getBoundingClientRect().width") < 400


def test_the_front_can_be_drawn_over_bytes_read_and_tokens(browser: Browser, tmp_path: Path) -> None:
    options = "[...document.getElementById('select-memory').options].map(option => option.value)"
    assert browser.run(options) == ["held", "tokens"]
    cells, samples = make_run(["snapkv", "criticalkv"], ("0.1", "0.4"), samples=12)
    with Browser() as other:
        frames = (reading_few(cells, "criticalkv"), samples)
        other.open(page_of(frames, tmp_path, Aim.of(5, 1, 1)))
        title = "document.getElementById('charts-title').textContent"
        assert other.run(title) == "Score against KV cache held"
        choose(other, "select-memory", "read")
        assert other.run(title) == "Score against KV cache read per step"
        other.run("dispatchEvent(new Event('beforeprint'))")  # draws what is below the window
        labels = "[...document.querySelectorAll('#charts svg text')].map(e => e.textContent)"
        assert any("KV cache read per step, % of full" in text for text in other.run(labels))
        assert other.run(options) == ["held", "read", "tokens", "read_tokens"]
        choose(other, "select-memory", "tokens")
        assert other.run(title) == "Score against tokens held"
        other.run("dispatchEvent(new Event('beforeprint'))")
        assert any("tokens held, per KV head" in text for text in other.run(labels))
        assert {"100", "200"} <= set(other.run(labels))
        heads = "[...document.querySelectorAll('#cells th')].map(e => e.textContent)"
        assert "KV read" in other.run(heads)
