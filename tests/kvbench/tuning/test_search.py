"""The rounds and rungs of `kvbench tune`, and its command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvbench.cli.app import call
from kvbench.progress import Silent
from kvbench.report.figure_flags import DEFAULT_FLAGS
from kvbench.report.figure_options import figure_options
from kvbench.runs.grid import Grid
from kvbench.runs.load import load_frames
from kvbench.tuning import search as searching
from kvbench.tuning import write
from kvbench.tuning.options import TuneOptions
from kvbench.tuning.search import Found, SettingScore, mean_scores, rung_samples, search
from kvbench.tuning.space import Space, search_space

pytest.importorskip("optuna")

GRID = {"models": "reference", "tasks": "niah_single_2", "budgets": "0.2", "lengths": 256, "full": False}


@pytest.mark.parametrize(("samples", "rungs"), [(27, [3, 9, 27]), (10, [2, 4, 10]), (2, [1, 2]), (1, [1])])
def test_a_rung_has_a_third_of_the_samples_of_the_next(samples: int, rungs: list[int]) -> None:
    assert rung_samples(samples) == rungs


def test_scores_are_means_over_all_cells_and_a_failed_cell_gives_none() -> None:
    cells = pd.DataFrame(
        {
            "policy": ["full", "a", "a", "b", "b", "c", "c"],
            "status": ["ok", "ok", "ok", "ok", "failed", "ok", "ok"],
            "higher_is_better": [True, True, True, True, True, False, False],
            "score": [1.0, 0.25, 0.75, 1.0, math.nan, 2.0, 4.0],
        }
    )
    assert mean_scores(cells) == {"a": 0.5, "c": -3.0}


def test_the_ranking_counts_only_scores_with_all_samples_and_prefers_named_policies() -> None:
    outcomes = (
        SettingScore("lucky", False, 1, 1, 1.0, -6.0, 1.0),
        SettingScore("tuned", False, 1, 9, 0.8, -3.0, 2.0),
        SettingScore("named", True, 1, 9, 0.8, -2.0, 2.0),
        SettingScore("close", False, 2, 9, 0.7, -5.0, 3.0),
        SettingScore("failed", False, 2, 9, math.nan, math.nan, 3.0),
    )
    for by, best_first in (
        ("score", ["named", "tuned", "close", "failed"]),
        ("kl", ["close", "tuned", "named", "failed"]),
        ("both", ["tuned", "named", "close", "failed"]),
    ):
        assert [outcome.policy for outcome in Found(outcomes, (), {}, by).ranked()] == best_first


class Scripted:
    """Runs no model: the score of a setting is a known function of it, and every rung is recorded."""

    def __init__(self, seconds: float = 60.0) -> None:
        self.seconds = seconds
        self.rungs: list[tuple[str, int, int]] = []

    def __call__(self, values: Any, policies: Any, samples: int, folder: Path, reporter: Any) -> Any:
        self.rungs.append((folder.name, len(policies), samples))
        scores = {name: 0.9 if "keydiff" in name else len(name) / 1000 for name in policies if name != "snapkv"}
        results = {name: (score, -2 * score) for name, score in scores.items()}
        return results, {"snapkv": "no memory"}, self.seconds


def small_space() -> Space:
    space = search_space("reference", {"score": ("keydiff", "window"), "merge": ("none",)})
    return Space(space.parts, tuple(policy for policy in space.named if str(policy) in ("snapkv", "h2o", "keydiff")))


def run_search(monkeypatch: pytest.MonkeyPatch, runner: Scripted, **limits: Any) -> Found:
    monkeypatch.setattr(searching, "_run_rung", runner)
    options = {"samples": 9, "round_size": 9, "trials": 18, "seconds": None, "seed": 1, **limits}
    return search(GRID, small_space(), Path("nowhere"), Silent(), **options)


def test_the_best_third_goes_on_and_named_policies_compete_among_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Scripted()
    found = run_search(monkeypatch, runner)
    assert [rung for rung, _, _ in runner.rungs] == ["1-1", "1-2", "1-3", "2-1", "2-2", "2-3"]
    assert [samples for _, _, samples in runner.rungs] == [1, 3, 9, 1, 3, 9]
    assert runner.rungs[0][1] <= 12 and runner.rungs[1][1] <= 4
    final = [outcome for outcome in found.outcomes if (outcome.round, outcome.samples) == (1, 9)]
    assert [outcome.policy for outcome in final if outcome.is_named] == ["keydiff"]
    assert [len([outcome for outcome in final if not outcome.is_named])] == [1]
    assert found.left_out == {"snapkv": "no memory"}
    assert found.ranked()[0].score == 0.9


@pytest.mark.parametrize("by", ["score", "kl", "both"])
def test_the_estimator_learns_from_the_scores(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Settings with the score keydiff win here, so later rounds must ask for more of them than the first, by chance."""
    runner = Scripted()
    found = run_search(monkeypatch, runner, trials=72, by=by)
    first, last = ([o for o in found.outcomes if o.round == n and o.samples == 1 and not o.is_named] for n in (1, 8))
    shares = [sum("keydiff" in o.policy for o in outcomes) / len(outcomes) for outcomes in (first, last)]
    assert shares[1] > shares[0] and shares[1] > 0.8


def test_no_round_begins_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Scripted(seconds=100.0)
    assert max(o.round for o in run_search(monkeypatch, runner, trials=None, seconds=899.0).outcomes) == 2
    assert max(o.round for o in run_search(monkeypatch, Scripted(100.0), trials=None, seconds=900.0).outcomes) == 3
    assert max(o.round for o in run_search(monkeypatch, Scripted(100.0), trials=None, seconds=1.0).outcomes) == 1


@pytest.mark.parametrize("by", ["score", "kl"])
def test_more_trials_complete_a_round_that_was_cut(by: str, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"samples": 3, "round_size": 3, "seconds": None, "seed": 1, "by": by}

    def outcomes(folder: str, trials: int) -> list[SettingScore]:
        found = search(GRID, small_space(), tmp_path / folder, Silent(), trials=trials, **limits)
        assert found.trials == trials
        return [outcome._replace(seconds=0.0) for outcome in found.outcomes]

    few = outcomes("continued", 1)
    more = outcomes("continued", 5)
    assert more == outcomes("at_once", 5) and {outcome.round for outcome in more} == {1, 2}
    assert outcomes("continued", 1) == few


def test_time_is_added_if_a_rung_runs_more_settings_but_not_if_it_is_read(tmp_path: Path) -> None:
    def seconds(*policies: str) -> float:
        return searching._run_rung(GRID, policies, 1, tmp_path / "rung", Silent())[2]

    first = seconds("keydiff")
    more = seconds("keydiff", "snapkv")
    assert more > first > 0 and seconds("snapkv") == more


SMALL = (
    SettingScore("keydiff", True, 1, 9, 0.5, math.nan, 1.0),
    SettingScore("keydiff:window=9", False, 2, 9, 0.6, math.nan, 2.0),
)


def test_the_legend_shows_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(write, "save", lambda figure, *_: drawn.append(figure))
    write._draw(Found(SMALL, (), {}), Path("nowhere"), figure_options(DEFAULT_FLAGS, []))
    legend, lines = drawn[0].legends[0], drawn[0].axes[0].lines
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["named policies", "settings of the search", "best so far"]
    styles = [[(line.get_linestyle(), line.get_marker()) for line in group] for group in (legend.legend_handles, lines)]
    assert styles[0] == styles[1]


def test_settings_that_repeat_others_are_counted() -> None:
    grid = Grid.from_dict({"policies": "random", "tasks": "niah_single_2", "samples": 9})
    notes = write._notes(Found(SMALL, (), {}, trials=4), grid, TuneOptions(held_out=6))
    assert notes[0].startswith("4 settings (3 repeat another or are a named policy) in 2 rounds, and 1 named policies")
    assert notes[0].endswith("then 6 held-out samples per task.")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("responses.jsonl", "", "holds a run; choose another folder"),
        ("settings.json", '{"analysis": "attention"}', "holds another analysis; choose another folder"),
        ("settings.json", "{", "holds another analysis; choose another folder"),
    ],
)
def test_a_folder_with_other_results_is_left_as_it_is(
    name: str, content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert call(["tune", "--task", "niah_single_2", "--out", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert f"--out {tmp_path} {says}" in errors and errors.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == content


def test_the_command_finds_a_setting_compares_it_on_other_samples_and_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned"
    flags = ["--task", "niah_single_2", "--length", "256", "--budget", "0.2", "--samples", "3", "--held-out", "4"]
    flags += ["--score", "window,keydiff", "--round-size", "4", "--seed", "3", "--out", str(out)]
    assert call(["tune", *flags, "--trials", "4"]) == 0
    printed = capsys.readouterr().out
    assert "settings in the search" in printed and "held-out samples" in printed and "wrote" in printed
    search_table = pd.read_parquet(out / "search.parquet")
    assert {*search_table["samples"]} == {1, 3} and search_table["is_named"].any()
    _, seen = load_frames(out / "rungs" / "1-2")
    cells, held_out = load_frames(next((out / "held_out").iterdir()))
    new_contexts = {*held_out["context_id"]} - {*seen["context_id"]}
    assert {*cells["policy"]} >= {"full"} and len(new_contexts) == 4
    assert (out / "figures" / "search.png").exists() and "![search]" in (out / "summary.md").read_text()

    begun = {path: path.stat().st_mtime_ns for path in out.rglob("responses.jsonl")}
    assert call(["tune", *flags, "--trials", "8"]) == 0
    assert {path: path.stat().st_mtime_ns for path in begun} == begun  # no response is generated again
    assert pd.read_parquet(out / "search.parquet")["round"].max() == 2
    assert call(["run", "--config", str(out / "winner.yaml"), "--samples", "2", "--out", str(tmp_path / "run")]) == 0
    assert json.loads((out / "settings.json").read_text())["analysis"] == "tune"
    assert "# The first 3 samples per task chose this policy" in (out / "winner.yaml").read_text()
    better = Grid.from_yaml(out / "winner.yaml").policies[0]
    assert f"use --policy {better}, or kvbench run" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("settings", "flags", "differing"),
    [
        ({"analysis": "tune", "by": "score", "round_size": 24}, ["--budget", "0.3", "--by", "kl"], "budgets, by"),
        ({"analysis": "tune", "by": "score", "round_size": 24}, ["--round-size", "4"], "round-size"),
        (None, ["--budget", "0.3"], "budgets"),  # it was stopped
    ],
)
def test_another_search_in_the_same_folder_is_refused_before_any_work(
    settings: Any, flags: list[str], differing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (rung := tmp_path / "rungs" / "1-1").mkdir(parents=True)
    stored = Grid.from_dict({"policies": "keydiff", "tasks": "niah_single_2", "full": False})
    (rung / "grid.yaml").write_text(json.dumps(stored.to_dict()))
    if settings is not None:
        (tmp_path / "settings.json").write_text(json.dumps(settings))
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert call(["tune", "--task", "niah_single_2", "--out", str(tmp_path), *flags]) == 2
    errors = capsys.readouterr().err
    assert f"{tmp_path} holds another search, with other {differing}; choose another --out" in errors
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


def test_a_search_by_kl_needs_no_reference_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts.jsonl"
    lines = (
        "the code of anna is lemon . " * 12,
        "tom keeps seven green stones . " * 12,
        "the bell rings twice . " * 12,
    )
    texts.write_text("".join(json.dumps({"context": line}) + "\n" for line in lines))
    out = tmp_path / "tuned"
    flags = ["--task", str(texts), "--max-new-tokens", "6", "--budget", "0.3", "--samples", "1", "--held-out", "2"]
    flags += ["--score", "keydiff", "--round-size", "3", "--trials", "3", "--by", "kl", "--out", str(out)]
    assert call(["tune", *flags]) == 0
    printed = capsys.readouterr().out
    assert "log_kl" in printed and "held-out samples" in printed
    table = pd.read_parquet(out / "search.parquet")
    cells, _ = load_frames(out / "rungs" / "1-1", metric="log_kl")
    best = table[table["log_kl"] == table["log_kl"].min()]["policy"].iloc[0]
    means = cells[cells["policy"] != "full"].groupby("policy")["score"].mean()
    assert means[best] == means.min()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--by", "luck"], "by"),
        (["--time", "soon"], "--time soon: use a number and a unit"),
        (["--model", "reference,smollm2"], "a search is for one model"),
        (["--budget", "full"], "the budget full evicts nothing"),
        (["--score", "windwo"], "did you mean window"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["tune", "--task", "niah_single_2", "--out", str(tmp_path / "out"), *flags]) == 2
    errors = capsys.readouterr().err
    assert says in errors and errors.count("\n") == 1
