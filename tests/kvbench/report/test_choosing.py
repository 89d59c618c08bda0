"""The cheapest setting within some points, what it saves, and what the run cannot tell."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from kvbench.cli import call
from kvbench.report import choosing
from kvbench.report.choosing import PLAIN, Aim, PanelMemory, Serving, sentence
from kvbench.report.frames import prepare
from kvbench.report.panel import Panel, panels
from kvbench.report.verdict import cheapest
from kvbench.runs.store import RunStore

from .conftest import FULL_BYTES, Frames, make_run


def frame(*rows: tuple[str, str, float, float, float, float]) -> pd.DataFrame:
    """Settings as `(policy, budget, bytes, diff, lo, hi)` beside a full cache of 100 bytes."""
    columns = ["policy", "budget", "kv_bytes_live", "diff", "diff_lo", "diff_hi"]
    made = pd.DataFrame([("full", "full", 100.0, 0.0, 0.0, 0.0), *rows], columns=columns)
    made = made.assign(kv_bytes_full=100.0, share=made["kv_bytes_live"] / 100, score=0.5)
    return made.assign(
        full_score=0.5, samples=20, status="ok", discriminative=True, informed=False, metric="m", higher_is_better=True
    )


SURE = ("a", "0.4", 40.0, -0.004, -0.015, 0.01)
WIDE = ("b", "0.2", 20.0, -0.01, -0.08, 0.03)
FAR = ("c", "0.1", 10.0, -0.06, -0.09, -0.03)


def said(within: float, *rows: tuple[str, str, float, float, float, float]) -> str:
    aim = Aim.of(within, None, None)
    return sentence(cheapest(frame(*rows), unit_scaled=True, within=aim.within), aim, PLAIN)


def test_an_interval_within_is_certain() -> None:
    text = said(2, SURE)
    assert text.startswith("a at 0.4 (40.0% of the bytes; −0.4 [−1.5, +1.0] points from full).")
    assert text.endswith("The whole interval is within 2 points.")


def test_a_wider_interval_says_what_the_samples_can_show_and_what_is_certain() -> None:
    text = said(2, SURE, WIDE)
    assert text.startswith("b at 0.2")
    assert "Not certain: the interval includes losses of more than 2 points" in text
    assert "20 samples can detect only drops of more than 7.0 points" in text  # 8 below, from 1
    assert text.endswith("The cheapest whose whole interval is within: a at 0.4 (40.0%).")


def test_none_within_is_certain_only_if_no_interval_reaches_it() -> None:
    assert said(2, FAR).endswith("points from full) comes closest.")
    assert "Not certain" not in said(2, FAR)
    assert "its interval includes losses within 4 points" in said(4, FAR)
    assert said(6, FAR).startswith("c at 0.1")
    assert said(5, FAR, WIDE, SURE).startswith("b at 0.2")


@pytest.mark.parametrize(("within", "words"), [(1, "1 point"), (2, "2 points"), (0.5, "0.5 points")])
def test_points_in_words(within: float, words: str) -> None:
    assert Aim.of(within, None, None).points == words


# --- memory ---------------------------------------------------------------------------------------


def panel_of(cells: pd.DataFrame, samples: pd.DataFrame | None) -> tuple[Panel, PanelMemory]:
    results = prepare(cells, samples)
    (panel,) = panels(results)
    return panel, PanelMemory.of(panel, results.samples)


def test_bytes_of_a_token_are_those_that_the_run_measured() -> None:
    cells, samples = make_run(["snapkv"], ("0.2",), ["vt"], samples=6, lengths=(1024,))
    panel, memory = panel_of(cells, samples)
    assert memory.token_bytes == pytest.approx(FULL_BYTES / (1024 - 40))
    assert memory.context == 1024 - 40
    row = panel.cells[panel.cells["policy"] == "snapkv"].iloc[0]
    told = memory.of_setting(row, Serving(16, 32768))
    assert told.full == pytest.approx(16 * 32768 * FULL_BYTES / 984)
    assert told.held == pytest.approx(0.204 * told.full)
    assert told.saved == told.full - told.held
    own = memory.of_setting(row, Serving())
    assert own.full == pytest.approx(FULL_BYTES)


def test_a_budget_of_tokens_holds_the_same_at_any_context() -> None:
    cells, samples = make_run(["snapkv"], ("0.2",), ["vt"], samples=6)
    panel, memory = panel_of(cells, samples)
    row = panel.cells[panel.cells["policy"] == "snapkv"].iloc[0].copy()
    row["budget"] = "512"
    assert memory.of_setting(row, Serving(4, 100_000)).held == 4 * row["kv_bytes_live"]
    short = memory.of_setting(row, Serving(1, 10))
    assert short.held == short.full


@pytest.mark.parametrize("moment", ["question", "decode"])
def test_moments_that_count_more_than_the_context_tell_nothing(moment: str) -> None:
    cells, samples = make_run(["snapkv"], ("0.2",), ["vt"], samples=6, moments=(moment,))
    assert panel_of(cells, samples)[1].token_bytes > 0  # by the full cache
    _, memory = panel_of(cells[cells["policy"] != "full"], samples)
    assert math.isnan(memory.token_bytes)
    assert math.isnan(panel_of(cells, None)[1].token_bytes)


def test_a_longer_context_than_the_run_has_is_remarked() -> None:
    cells, samples = make_run(["snapkv"], ("0.2",), ["vt"], samples=6)
    panel, memory = panel_of(cells, samples)
    assert "does not show what a policy loses at 32768" in memory.note(panel, Serving(1, 32768))
    assert "does not say" not in memory.note(panel, Serving(1, 512))
    assert "does not say" not in memory.note(panel, Serving())


# --- where it is shown ----------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    frames: Frames = make_run(["snapkv", "criticalkv"], ("0.2", "0.4"), samples=20)
    with RunStore(tmp_path) as store:
        store.write(*frames)
    return tmp_path


def test_the_report_says_it_in_the_terminal_the_summary_and_json(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    asked = ["report", str(run), "--within", "25", "--batch", "16", "--context", "32768"]
    assert call(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("Cheapest policy within 25 points of the full cache")
    assert lines[at + 1] == "reference · ruler"
    assert lines[at + 2].startswith("  Mean of 2 tasks: criticalkv at 0.2 (20.4% of the bytes;")
    assert " At batch 16 and 32768 tokens it holds " in lines[at + 2]
    summary = (run / "report" / "summary.md").read_text()
    assert "## Cheapest policy within 25 points of the full cache" in summary
    assert " At batch 16 and 32768 tokens it holds " in summary
    assert call([*asked, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["cheapest"][0]
    assert (first["policy"], first["budget"], first["task"]) == ("criticalkv", "0.2", "")
    assert first["memory_held"] == pytest.approx(first["share"] * first["memory_full"])


def test_without_the_flags_the_terminal_keeps_to_tables(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["report", str(run)]) == 0
    assert "Cheapest policy" not in capsys.readouterr().out
    summary = (run / "report" / "summary.md").read_text()
    assert "## Cheapest policy within 1 point of the full cache" in summary
    assert "At batch" not in summary


@pytest.mark.parametrize("flag", [("--within", "-1"), ("--batch", "0"), ("--context", "0")])
def test_flags_out_of_range_are_refused(run: Path, flag: tuple[str, str]) -> None:
    assert call(["report", str(run), *flag]) == 2


def test_shown_names_every_moment() -> None:
    made = prepare(*make_run(["snapkv"], ("0.2",), samples=8, moments=("context", "question")))
    text = choosing.render_choices(made, Aim.of(2, None, None)).plain
    assert "ruler, context" in text
    assert "ruler, question" in text
