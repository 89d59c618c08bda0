"""A run says why policies that go by the last queries are low before the question, and only then."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from kvbench.report import render
from kvbench.report.frames import prepare
from kvbench.report.last_queries import low_before_question
from kvbench.report.terminal import run_table

Frames = tuple[pd.DataFrame, pd.DataFrame]
BOTH = ("context", "question")


def scored(
    frames: tuple[pd.DataFrame, pd.DataFrame], scores: dict[str, float], moment: str = "context"
) -> pd.DataFrame:
    """The cells of a run in which some policies have other scores at a moment."""
    cells = frames[0].copy()
    for policy, score in scores.items():
        rows = (cells["policy"] == policy) & (cells["moment"] == moment)
        difference = score - cells.loc[rows, "full_score"]
        for column, value in (("score", score), ("diff", difference), ("diff_lo", difference - 0.05)):
            cells.loc[rows, column] = value
        cells.loc[rows, "diff_hi"] = difference + 0.05
    return cells


@pytest.fixture(scope="module")
def frames(run_frames):  # type: ignore[no-untyped-def]
    return run_frames(["criticalkv", "snapkv", "keydiff", "random"], ("0.2",), moments=BOTH, samples=20)


LOW = {"criticalkv": 0.1, "snapkv": 0.2, "keydiff": 0.4, "random": 0.1}


def test_low_policies_are_named_with_what_they_have_after_the_question_and_what_does_better(frames) -> None:  # type: ignore[no-untyped-def]
    cells = scored(frames, LOW)
    cells = scored((cells, frames[1]), {"criticalkv": 0.75, "snapkv": 0.8}, "question")
    found = low_before_question(prepare(cells))
    assert found.policies == ["criticalkv", "snapkv"]  # random is low too, but does not go by queries
    assert found.after == pytest.approx({"criticalkv": 0.75, "snapkv": 0.8})
    assert found.better == "keydiff"
    informed = cells.assign(informed=cells["informed"] | (cells["policy"] == "keydiff"))
    assert low_before_question(prepare(informed)).better is None, "no advice that needs the answer"


def test_nothing_is_said_of_policies_that_do_well_or_were_run_after_the_question(frames) -> None:  # type: ignore[no-untyped-def]
    half = frames[0]["full_score"].mean() / 2
    assert low_before_question(prepare(scored(frames, {"criticalkv": half - 0.02}))).policies == ["criticalkv"]
    assert not low_before_question(prepare(scored(frames, {"criticalkv": half + 0.02}))).policies
    only_after = scored(frames, LOW)
    only_after = only_after[only_after["moment"] != "context"]
    assert not low_before_question(prepare(only_after)).policies


def test_noise_and_tasks_at_chance_are_no_reason(frames) -> None:  # type: ignore[no-untyped-def]
    cells = scored(frames, LOW)
    assert not low_before_question(prepare(cells.assign(diff_hi=0.01))).policies
    assert not low_before_question(prepare(cells.assign(discriminative=False))).policies
    assert not low_before_question(prepare(cells.assign(status="error"))).policies


def test_an_unknown_policy_is_passed_over(frames) -> None:  # type: ignore[no-untyped-def]
    cells = scored(frames, LOW).replace({"policy": {"snapkv": "uninstalled"}})
    assert low_before_question(prepare(cells)).policies == ["criticalkv"]


def test_the_reason_is_a_line_of_the_terminal_and_of_the_summary(frames, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    cells = scored(frames, LOW)
    alone = cells[cells["policy"].isin(["full", "criticalkv"]) & (cells["moment"] != "question")]
    console = Console(width=1000)
    with console.capture() as capture:
        console.print(run_table(alone))
    reason = "Before the question, criticalkv is low because it keeps what the prompt's last tokens attend to"
    (line,) = [line for line in capture.get().splitlines() if reason in line]
    assert "Try --moment context,question." in line and "Best before it" not in line
    with console.capture() as capture:
        console.print(run_table(cells))
    (line,) = [line for line in capture.get().splitlines() if "criticalkv, snapkv are low because they keep" in line]
    assert "After it: criticalkv " in line and "Best before it is keydiff" in line and "--moment" not in line
    summary = render(cells, frames[1], tmp_path)[0].read_text()
    assert "Before the question, `criticalkv`, `snapkv` are low because they keep" in summary
