"""The file of a leaderboard, whatever the published runs hold; no browser is needed."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import pytest

from kvbench.errors import UserError
from kvbench.leaderboard.entries import leaderboard_data
from kvbench.leaderboard.site import write_site

from ..report.conftest import Frames, make_run
from ..report.page.conftest import HOSTILE
from .conftest import Publish, with_scores

_SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script>", re.DOTALL)


def hostile_frames() -> Frames:
    """A run whose names all try to get out of the page; snapkv at 0.1 scores nothing."""
    frames = make_run(
        ["snapkv", "keydiff"], ("0.1", "0.4"), samples=8, failed=[("keydiff", "0.4", "cwe")], error=HOSTILE[0]
    )
    cells, samples = with_scores(frames, 0.0, policy="snapkv", budget="0.1")
    names = {"snapkv": f"./x.py:{HOSTILE[1]}", "vt": HOSTILE[0]}
    for frame in (cells, samples):
        frame["policy"] = frame["policy"].replace(names)
        frame["task"] = frame["task"].replace(names)
    hostile = {"model": f"m{HOSTILE[0]}", "metric": HOSTILE[2], "device": HOSTILE[4], "dtype": HOSTILE[5]}
    return cells.assign(**hostile, versions=json.dumps({HOSTILE[0]: HOSTILE[2], "policy": HOSTILE[3]})), samples


@pytest.fixture
def hostile_site(published: Publish, tmp_path: Path) -> Path:
    """The leaderboard of two such runs, which disagree."""
    cells, samples = hostile_frames()
    other = samples.assign(score=samples["score"].where(samples["budget"] != "0.1", 1.0))
    settings = {
        "policies": [HOSTILE[1]],
        "tasks": [HOSTILE[0]],
        "system_instruction": HOSTILE[6],
        "revision": HOSTILE[2],
    }
    runs = [published("a", (cells, samples), **settings), published("b", (cells, other), **settings)]
    return write_site(leaderboard_data(runs), tmp_path / "site")


def tags(page: Path) -> list[str]:
    outside = _SCRIPT.sub("<script></script>", page.read_text())
    return [tag for tag in re.findall(r"<[/!a-z][^>]*>", outside) if "Content-Security-Policy" not in tag]


def test_hostile_texts_add_no_element(hostile_site: Path, published: Publish, tmp_path: Path) -> None:
    plain = write_site(leaderboard_data([published("plain")]), tmp_path / "plain")
    assert tags(hostile_site) == tags(plain)
    text = hostile_site.read_text()
    assert not set("\x1b\x07\u202e\u2066\u2028\x00") & set(text)
    assert "globalThis.hacked" in text  # as data
    data = json.loads(next(body for head, body in _SCRIPT.findall(text) if "json" in head))
    assert any("disagrees" in row["marks"] for row in data["rows"])


def test_our_script_makes_no_markup_of_text() -> None:
    script = (resources.files("kvbench.leaderboard") / "leaderboard.js").read_text()
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|fetch\(|href"
    assert not re.search(ways, script)


def test_the_same_runs_give_the_same_page(published: Publish, tmp_path: Path) -> None:
    publication = published()
    one, two = (write_site(leaderboard_data([publication]), tmp_path / name).read_bytes() for name in "ab")
    assert one == two


def test_a_site_that_cannot_be_written_is_one_line(tmp_path: Path, published: Publish) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_site(leaderboard_data([published()]), tmp_path / "file")
