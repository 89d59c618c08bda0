"""What the file of a page is, whatever the run holds; no browser is needed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.report.frames import prepare
from kvbench.report.page import answers
from kvbench.report.page.html import embedded
from kvbench.report.sorted_samples import natural_key

from ..conftest import Frames, make_run
from .conftest import HOSTILE, SCRIPT, data_of, page_of

_TEXT = st.text() | st.sampled_from(HOSTILE)


@given(st.recursive(_TEXT, lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner)))
def test_embedded_data_has_nothing_that_markup_is_made_of(value: object) -> None:
    text = embedded(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value


def test_a_number_that_json_lacks_is_an_error_of_ours() -> None:
    with pytest.raises(ValueError, match="JSON"):
        embedded([float("nan")])


def test_hostile_texts_add_no_element(hostile_page: Path, tmp_path: Path) -> None:
    """The page has the tags that the page of a harmless run has, and no other."""
    plain = page_of(make_run(samples=4), tmp_path)

    def tags(page: Path) -> list[str]:
        outside = SCRIPT.sub("<script></script>", page.read_text())
        return re.findall(r"<[/!a-z][^>]*>", outside)

    def policy_less(page: Path) -> list[str]:
        return [tag for tag in tags(page) if "Content-Security-Policy" not in tag]

    assert policy_less(hostile_page) == policy_less(plain)
    text = hostile_page.read_text()
    assert not set("\x1b\x07\u202e\u2066\u2028\x00") & set(text)
    assert "globalThis.hacked" in text  # as data


def test_only_the_scripts_of_the_page_may_run_and_nothing_may_load(hostile_page: Path) -> None:
    text = hostile_page.read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    digests = {
        f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"
        for head, body in SCRIPT.findall(text)
        if not head
    }
    assert len(digests) == 3
    assert set(rules["script-src"].split()) == digests
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert set(rules) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}


@pytest.mark.parametrize("name", ["dom", "state", "charts", "scores", "pairs", "answers", "address", "report"])
def test_our_scripts_make_no_markup_of_text(name: str) -> None:
    script = (resources.files("kvbench.report.page") / f"{name}.js").read_text()
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function"
    assert not re.search(ways, script)
    assert "</script" not in script
    assert "fetch(" not in script


def test_the_same_frames_give_the_same_page(tmp_path: Path) -> None:
    one, two = (page_of(make_run(samples=6), tmp_path / n).read_bytes() for n in "ab")
    assert one == two


def test_the_page_has_every_score_and_every_response(hostile: Frames, hostile_page: Path) -> None:
    cells, samples = hostile
    data = data_of(hostile_page)
    assert all("".join(q["prompt"]).endswith(" why?") for q in data["answers"]["questions"])
    means = [row for row in data["rows"] if not row["task"]]
    assert {(row["moment"], row["tasks"]) for row in means} == {("context", 2), ("question", 2)}
    told = {row["cell"]: row for row in data["rows"] if row["task"]}
    assert set(told) == set(cells["cell"])
    for _, cell in cells[cells["status"] == "ok"].iterrows():
        assert told[cell["cell"]]["score"] == pytest.approx(cell["score"], rel=1e-5)
        assert told[cell["cell"]]["diff_lo"] == pytest.approx(cell["diff_lo"], rel=1e-5)
    assert {row["error"] for row in told.values()} == {"", HOSTILE[0]}
    said = [answer for question in data["answers"]["questions"] for answer in question["answers"]]
    assert len(said) == len(samples)
    assert data["answers"]["total"] == len(data["answers"]["questions"])


def test_too_many_responses_leave_the_first_questions_of_every_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, samples = make_run(["snapkv"], ("0.2",), samples=30)
    samples["response"] = [str(i) * 4000 for i in range(len(samples))]
    monkeypatch.setattr(answers, "MOST", 100_000)
    page = page_of((cells, samples), tmp_path)
    found = data_of(page)["answers"]
    assert found["total"] == 60
    places = [(q["task"], q["doc_id"]) for q in found["questions"]]
    assert 4 <= len(places) < 12
    for task in ("vt", "cwe"):
        docs = sorted(doc for name, doc in places if name == task)
        assert len(docs) >= len(places) // 2
    assert all(len(text) < answers.LONGEST + 100 for text in found["texts"])
    assert sum(map(len, found["texts"])) <= 100_000


def test_only_responses_that_can_be_in_the_page_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells, samples = make_run(["snapkv"], ("0.2",), samples=30)
    asked: list[str] = []

    def read(sample_ids: Sequence[str]) -> pd.DataFrame:
        asked.extend(sample_ids)
        return samples[samples["sample_id"].isin(sample_ids)]

    whole = answers.answers(prepare(cells, samples), read)
    assert len(asked) == samples["sample_id"].nunique() == 60
    asked.clear()
    monkeypatch.setattr(answers, "MOST", 1000)  # 12 questions with two responses, were they empty
    found = answers.answers(prepare(cells, samples), read)
    assert len(asked) == 13 and found["total"] == 60
    assert 2 < len(found["questions"]) < 12
    known = {(q["task"], q["sample_id"]): len(q["answers"]) for q in whole["questions"]}
    assert all(len(q["answers"]) == known[q["task"], q["sample_id"]] for q in found["questions"])
    for task in ("vt", "cwe"):
        first = [q["sample_id"] for q in found["questions"] if q["task"] == task]
        assert first == sorted((name for of, name in known if of == task), key=natural_key)[: len(first)]


def test_samples_are_in_natural_order(tmp_path: Path) -> None:
    page = page_of(make_run(["snapkv"], ("0.2",), ["vt"], samples=12, depths=(0, 50)), tmp_path)
    names = [question["sample_id"] for question in data_of(page)["answers"]["questions"]]
    assert names == [f"vt-1024-0-{index}-d{50 * (index % 2):03d}" for index in range(12)]


def test_the_reference_is_marked_in_the_prompt(tmp_path: Path) -> None:
    cells, samples = make_run(["snapkv"], ("0.2",), ["vt"], samples=3)
    samples["prompt_end"] = "…the \x1b number is 42.…\n…What is it?"
    samples["target"] = [["42"]] * len(samples)
    question, *_ = data_of(page_of((cells, samples), tmp_path))["answers"]["questions"]
    assert question["prompt"] == ["…the \\x1b number is ", "42", ".…\n…What is it?"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "report").write_text("")
    with pytest.raises(UserError, match="is a file, not a folder"):
        page_of(make_run(["snapkv"], ("0.2",), ["vt"], samples=3), tmp_path / "report")
