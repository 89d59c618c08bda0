"""A comparison as Markdown, JUnit XML and JSON; names of users and models are never markup."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from kvbench.regression.compare import Outcome, compare
from kvbench.regression.show import as_json, complaint, junit, markdown_page, sentences, tables, verdict
from kvbench.tables.outputs import plain_text

from .conftest import one_cell, rescored, usual, without

EVIL = './a.py:<b>&"]]>|\x1b[31m\x00'


def mixed() -> tuple:
    """A baseline and a run with a cell of every kind."""
    before = usual(failed=[("keydiff", "0.4", "cwe")])
    after = rescored(usual(), [0.0] * 40)
    after = rescored(after, [0.0] * 3, budget="0.4")
    return before, without(after, policy="keydiff", budget="0.2", task="cwe")


def test_every_cell_is_a_test_case_of_junit() -> None:
    found = compare(*mixed())
    suite = ElementTree.fromstring(junit(found, "a < b")).find("testsuite")
    assert suite is not None and suite.get("name") == "a < b"
    cases = suite.findall("testcase")
    assert len(cases) == int(suite.get("tests", "")) == len(found.cells) == 10
    for tag, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert len(suite.findall(f"testcase/{tag}")) == int(suite.get(attribute, "")) == 1
    assert len({(case.get("classname"), case.get("name")) for case in cases}) == 10
    failed = next(case for case in cases if case.find("failure") is not None)
    assert failed.get("classname") == "reference.vt"
    assert failed.get("name") == "snapkv at 0.2, context, 1024 tokens, seed 0"
    failure = failed.find("failure")
    assert failure is not None and failure.text == "allowed: a drop of 1 point"
    assert "corrected p" in failure.get("message", "")


def test_names_are_escaped_in_xml_and_markdown() -> None:
    def named(frames: tuple) -> tuple:
        cells, samples = frames
        return cells.assign(policy=cells["policy"].replace("snapkv", EVIL)), samples

    before, after = one_cell([1.0] * 20), one_cell([0.0] * 20)
    found = compare(named(before), named(after))
    xml = junit(found, EVIL)
    assert b"\x1b" not in xml and b"\x00" not in xml
    case = ElementTree.fromstring(xml).find("testsuite/testcase")
    assert case is not None and case.get("name", "").startswith('./a.py:<b>&"]]>|\\x1b[31m\\x00 at')
    text = markdown_page(found, "base|line", EVIL)
    assert "<b>" not in text and "\x1b" not in text
    row = next(line for line in text.splitlines() if line.startswith("| failed"))
    head = next(line for line in text.splitlines() if line.startswith("| result"))
    assert row.count("|") == head.count("|")


def test_the_page_says_what_failed_and_hides_what_is_unchanged() -> None:
    text = markdown_page(compare(*mixed()), "old", "new")
    assert text.startswith("## kvbench: regression in 1 cell\n\n`new` vs `old`.\n")
    first, _, folded = text.partition("<details>")
    assert first.count("| `vt` | `snapkv` | `0.2` |") == 1 and "| unchanged |" not in first
    assert folded.count("| unchanged |") == 6


def test_sentences_say_what_was_not_compared_and_what_can_go_unseen() -> None:
    found = compare(*mixed())
    text = "\n".join(map(plain_text, sentences(found)))
    assert "Compared 8 of 10 cells" in text
    assert "Not compared (1 cell): keydiff at 0.2 on cwe: not in the run" in text
    assert "Nothing to compare with (1 cell): keydiff at 0.4 on cwe: the baseline has no" in text
    assert "can remain undetected with so few samples" in text
    few = compare(one_cell([1.0] * 4), one_cell([1.0] * 4))
    text = "\n".join(map(plain_text, sentences(few)))
    assert "For 1 cell, a pass is uninformative: too few contexts can get worse" in text


def test_fewer_samples_than_the_baseline_has_are_pointed_out() -> None:
    first = plain_text(next(iter(sentences(compare(usual(40), usual(30))))))
    assert "on 300 responses of the baseline's 400: 10 unchanged" in first


def test_the_verdict_and_the_line_for_stderr() -> None:
    assert verdict(compare(usual(), usual())) == "no regression shown"
    assert complaint(compare(*mixed())).startswith("regression in 1 cell, first vt, snapkv at 0.2: 85.0 -> 0.0")
    missing = compare(usual(), without(usual(), policy="snapkv"))
    assert complaint(missing) == ("not everything could be compared, first vt, snapkv at 0.2: not in the run")


def test_scales_and_directions_have_tables_of_their_own() -> None:
    before, after = one_cell([200.0] * 20, higher=False), one_cell([150.0] * 20, higher=False)
    (table,) = tables(compare(before, after))
    assert plain_text(table.title) == "reference, lower is better"
    assert "percent of the baseline" in plain_text(list(sentences(compare(before, after)))[-1])


def test_json_has_a_record_per_cell_and_no_nan() -> None:
    found = compare(*mixed())
    record = json.loads(json.dumps(as_json(found, 1), allow_nan=False))
    assert (record["exit_code"], record["verdict"]) == (1, "regression in 1 cell")
    outcomes = [cell["outcome"] for cell in record["cells"]]
    assert sorted(set(outcomes)) == sorted(
        o.value
        for o in (Outcome.FAILED, Outcome.UNPROVEN, Outcome.NOT_COMPARED, Outcome.NO_BASELINE,
                  Outcome.SAME)
    )  # fmt: skip
    lost = record["cells"][outcomes.index("failed")]
    assert lost["run"] == 0.0 and lost["change"] == pytest.approx(-lost["baseline"])
    assert record["cells"][outcomes.index("not compared")]["change"] is None


def test_informed_policies_are_marked() -> None:
    before = usual(policies=("snapkv", "oracle"))
    found = compare(before, rescored(before, [0.0] * 40, policy="oracle"))
    (table,) = tables(found)
    assert plain_text(table.rows[0].cells[2]) == "oracle (informed)"
    assert "first vt, oracle (informed) at 0.2: " in complaint(found)
    missing = compare(before, without(before, policy="oracle"))
    assert "oracle (informed) at 0.2 on vt" in "\n".join(map(plain_text, sentences(missing)))


def test_kl_rises_and_has_neither_points_nor_correct_answers() -> None:
    before, after = (
        (cells.assign(metric="kl"), samples)
        for cells, samples in (one_cell([s] * 20, higher=False) for s in (0.1, 0.2))
    )
    found = compare(before, after)
    (table,) = tables(found)
    assert plain_text(table.title) == "reference, KL, nats, lower is better"
    assert plain_text(table.columns[-1].title) == "minimum detectable rise"
    text = "\n".join(map(plain_text, sentences(found)))
    assert "1 rose significantly and by more than allowed" in text
    assert "if its score rises by more than 1 percent of the baseline's" in text
    assert b"allowed: a rise of 0.001" in junit(found, "a")
    few = [(cells, samples[samples["doc_id"] < 3]) for cells, samples in (before, after)]
    text += "\n".join(map(plain_text, sentences(compare(*few))))
    assert "for any rise to be significant. Use more samples." in text
    assert not any(word in text for word in ("point", "drop", "correct ", "kvbench power"))
