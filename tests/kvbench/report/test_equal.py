"""A report says which of its rows are one result."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from kvbench.report import render
from kvbench.report.equal import Places, labels, without_room
from kvbench.report.equal import equal_rows as places_of_equal_rows
from kvbench.report.frames import Results, prepare


def equal_rows(results: Results) -> dict[tuple[str, ...], list[str]]:
    return labelled(results, places_of_equal_rows(results))


def labelled(results: Results, found: Places) -> dict[tuple[str, ...], list[str]]:
    return {names: labels(results, places) for names, places in found.items()}


POLICIES = ["kvzap", "local", "keydiff"]


def told(run_frames, twins: list[str], differ: int = 20, **given):  # type: ignore[no-untyped-def]
    """A run in which some policies give the same wrong responses, and others their own."""
    cells, samples = run_frames(POLICIES, ("0.1", "0.4"), ["vt"], samples=20, **given)
    own = samples["policy"].where(~samples["policy"].isin(twins), "twin") + samples["budget"]
    wrong = (samples["policy"] != "full") & (samples["doc_id"] < differ)
    scores = (~wrong).astype(float)
    return cells, samples.assign(response=samples["response"].where(~wrong, own), score=scores)


def test_right_answers_that_end_differently_are_no_evidence(run_frames):  # type: ignore[no-untyped-def]
    cells, samples = told(run_frames, ["kvzap", "local"])
    assert equal_rows(prepare(cells, samples))
    assert not equal_rows(prepare(cells, samples.assign(score=1.0)))


def test_policies_that_answer_alike_and_hold_as_much_are_named(run_frames, tmp_path: Path):
    frames = told(run_frames, ["kvzap", "local"])
    found = equal_rows(prepare(*frames))
    assert found == {("kvzap", "local"): ["0.1", "0.4"]}
    text = render(*frames, tmp_path)[0].read_text()
    assert "`kvzap`, `local` are equal at 0.1, 0.4: they gave the same response" in text


def test_one_other_response_or_another_number_of_entries_tells_rows_apart(run_frames):
    cells, samples = told(run_frames, ["kvzap", "local"])
    one = (samples["policy"] == "local") & (samples["doc_id"] == 3) & (samples["budget"] == "0.1")
    for column, value in (("response", "another"), ("held_entries", 11)):
        changed = samples.assign(**{column: samples[column].where(~one, value)})
        assert equal_rows(prepare(cells, changed)) == {("kvzap", "local"): ["0.4"]}


def test_policies_that_lose_nothing_are_not_called_equal(run_frames):
    assert not equal_rows(prepare(*told(run_frames, POLICIES, differ=4)))
    assert equal_rows(prepare(*told(run_frames, POLICIES, differ=5)))
    assert not equal_rows(prepare(*told(run_frames, POLICIES, with_full=False)))
    cells, samples = told(run_frames, POLICIES)
    assert not equal_rows(prepare(cells, samples.drop(columns="response")))
    assert not equal_rows(prepare(cells))


def test_policies_are_equal_only_if_they_are_on_every_task(run_frames):
    both = told(run_frames, ["kvzap", "local"]), run_frames(POLICIES, ("0.1",), ["cwe"])
    own = both[1][1]["policy"]
    apart = both[1][0], both[1][1].assign(response=own)
    cells, samples = (pd.concat(frames) for frames in zip(both[0], apart, strict=True))
    assert equal_rows(prepare(cells, samples)) == {("kvzap", "local"): ["0.4"]}


def test_windows_that_fill_the_budget_are_named_with_the_budgets(run_frames, tmp_path: Path):
    # 984 tokens of context: 98 entries at 0.1, and 100 of 1004 after the question.
    frames = run_frames(
        ["kvzap", "locret", "lagkv", "local", "elsewhere:window=9", "duo_attention"],
        ("0.1", "0.2", "0.4"),
        moments=("context", "question", "chunked"),
        samples=10,
    )
    results = prepare(*frames)
    found = labelled(results, without_room(results))
    assert found == {
        ("kvzap",): ["0.1 (context)", "0.1 (question)"],
        ("locret",): ["0.1 (context)", "0.1 (question)"],
        # 16 sinks, then seven partitions of 128, of which the last is kept, and 72 or 92 more.
        ("lagkv",): ["0.1 (context)", "0.2 (context)", "0.1 (question)", "0.2 (question)"],
        ("duo_attention",): ["0.1 (context)", "0.2 (context)", "0.1 (question)", "0.2 (question)"],
    }
    text = render(*frames, tmp_path)[0].read_text()
    assert "Fixed-size sinks and windows fill the budget of `kvzap` at 0.1 (context)" in text
