"""The rows of a leaderboard: models, questions, fronts, marks and commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import UserError
from kvbench.leaderboard import entries
from kvbench.leaderboard.entries import leaderboard_data
from kvbench.report.front import front

from ..report.conftest import Frames, make_run, reading_few, unaveraged
from .conftest import Publish, with_scores


def rows_of(data: dict[str, Any], **setting: Any) -> list[dict[str, Any]]:
    return [row for row in data["rows"] if all(row[name] == value for name, value in setting.items())]


def test_every_cell_and_every_mean_of_a_run_is_a_row(published: Publish) -> None:
    data = leaderboard_data([published()])
    assert len(data["rows"]) == 3 * (1 + 2 * 3)  # the mean and two tasks, full and six settings
    assert {row["questions"] for row in data["rows"]} == {"12 samples"}
    assert all(row["metric"] == "string_match" for row in data["rows"])
    assert data["rows"][0]["policy"] == "full"
    json.dumps(data, allow_nan=False)


def test_rows_of_different_questions_are_in_different_panels(published: Publish) -> None:
    frames = make_run(samples=12)
    other_data = (frames[0].assign(data_hash="cd" * 8, match=frames[0]["match"] + "x"), frames[1])
    runs = [published("run", frames), published("fewer", make_run(samples=8)), published("data", other_data)]
    data = leaderboard_data(runs)
    names = {row["questions"]: row["data"] for row in rows_of(data, task="vt")}
    assert set(names) == {"8 samples", *(f"12 samples, data {names[name]}" for name in names if "data" in name)}
    assert len(names) == 3


def test_means_over_other_tasks_are_told_apart(published: Publish) -> None:
    runs = [published("all", make_run(tasks=["vt", "cwe", "fwe"], samples=12)), published("two", make_run(samples=12))]
    means = rows_of(leaderboard_data(runs), task="")
    assert {row["questions"] for row in means} == {"12 samples, 3 tasks", "12 samples, 2 tasks"}


def test_models_of_one_name_are_told_apart_by_what_differs(published: Publish) -> None:
    frames = make_run(samples=12)
    bfloat = (frames[0].assign(dtype="bfloat16", match="x" + frames[0]["match"]), frames[1])
    data = leaderboard_data([published("run", frames), published("bfloat", bfloat)])
    assert {row["model"] for row in data["rows"]} == {"reference (float32)", "reference (bfloat16)"}
    assert all("--model" not in row["command"] for row in data["rows"])  # reference is the default


def test_the_front_is_over_all_runs_of_the_same_questions(published: Publish) -> None:
    weak, strong = make_run(["random"], samples=12), make_run(["criticalkv"], samples=12)
    data = leaderboard_data([published("weak", weak), published("strong", strong)])
    for task in ("", "vt", "cwe"):
        rows = [row for row in rows_of(data, task=task) if row["policy"] != "full"]
        optimal = front([row["kv_bytes_live"] for row in rows], [row["score"] for row in rows])
        assert [row["held_front"] for row in rows] == list(optimal)
        assert {row["policy"] for row in rows if row["held_front"]} == {"criticalkv"}
    assert all("held_front" not in row for row in rows_of(data, policy="full"))


def test_a_lower_score_can_be_better(published: Publish) -> None:
    frames = unaveraged(make_run(["snapkv"], ("0.1", "0.4"), ["vt"], samples=8), "vt")
    frames[0].loc[frames[0]["budget"] == "0.4", "score"] = 4.0
    rows = rows_of(leaderboard_data([published(frames=frames)]), policy="snapkv")
    assert [(row["budget"], row["held_front"]) for row in rows] == [("0.1", True), ("0.4", True)]
    assert all({"lower is better", "not a mean"} <= set(row["marks"]) for row in rows)


def judged(frames: Frames) -> Frames:
    return frames[0].assign(versions=json.dumps({"judge": "gpt", "kvbench": "0.1.0"})), frames[1]


def reading(frames: Frames) -> Frames:
    return reading_few(frames[0], "snapkv"), frames[1]


def of_own_file(frames: Frames) -> Frames:
    return tuple(frame.replace({"policy": {"snapkv": "./mine.py:Mine"}}) for frame in frames)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("mark", "frames"),
    [
        ("failed", make_run(["snapkv"], ("0.2",), ["vt", "cwe"], samples=8, failed=[("snapkv", "0.2", "vt")])),
        ("at chance", make_run(["snapkv"], ("0.2",), ["vt"], samples=8, chance=0.99)),
        ("frees no memory", reading(make_run(["snapkv"], ("0.2",), ["vt"], samples=8))),
        ("own file", of_own_file(make_run(["snapkv"], ("0.2",), ["vt"], samples=8))),
        ("judged", judged(make_run(["snapkv"], ("0.2",), ["vt"], samples=8))),
    ],
)
def test_rows_that_do_not_compare_are_marked(published: Publish, mark: str, frames: Frames) -> None:
    data = leaderboard_data([published(frames=frames)])
    marked = [row for row in data["rows"] if mark in row["marks"]]
    assert marked and data["marks"][mark] == entries.MARKS[mark]
    assert any(row["policy"] != "full" for row in marked)
    if mark == "at chance":
        assert not any("held_front" in row for row in data["rows"])
    unmarked = leaderboard_data([published("plain", make_run(["snapkv"], ("0.2",), ["vt"], samples=8))])
    assert unmarked["marks"] == {} and not any(row["marks"] for row in unmarked["rows"])


def test_a_task_without_full_is_marked(published: Publish) -> None:
    with_full = make_run(["snapkv"], ("0.2",), ["vt", "cwe"], samples=8, failed=[("full", "full", "cwe")])
    cells = with_full[0].copy()
    lost = (cells["task"] == "cwe") & (cells["policy"] != "full")
    cells.loc[lost, ["full_score", "diff", "diff_lo", "diff_hi"]] = float("nan")
    cells.loc[lost, "discriminative"] = False
    data = leaderboard_data([published(frames=(cells, with_full[1]))])
    (row,) = rows_of(data, task="cwe", policy="snapkv")
    assert row["marks"] == ["no full cache"]


def test_disagreeing_runs_are_marked_with_what_differs(published: Publish) -> None:
    frames = make_run(samples=20)
    other = with_scores(frames, 0.0, policy="criticalkv", budget="0.4", task="vt")
    other[0]["device"] = "cuda"
    data = leaderboard_data([published("run", frames), published("other", other)])
    marked = [row for row in data["rows"] if "disagrees" in row["marks"]]
    assert {(row["policy"], row["budget"], row["task"]) for row in marked} == {
        ("criticalkv", "0.4", "vt"), ("criticalkv", "0.4", ""),
    }  # fmt: skip
    (found,) = next(row for row in marked if row["publication"] == 0)["disagreements"]
    assert (found["other"], found["paired"], found["settings"]) == (1, True, [["device", "cpu", "cuda"]])
    assert found["lo"] > 0
    assert dict(data["facts"])["Measured more than once"] == "14 pairs, 1 disagree"


def test_every_row_has_the_command_that_repeats_it(published: Publish) -> None:
    frames = make_run(["snapkv"], ("0.2", "0.4"), lengths=(512,), moments=("question",), samples=8)
    data = leaderboard_data([published(frames=frames, moments=["question"], lengths=[512], dtype="bfloat16")])
    (row,) = rows_of(data, task="vt", budget="0.4")
    assert row["command"] == (
        "kvbench run --policy snapkv --task vt --dtype bfloat16 --samples 8 --length 512 --budget 0.4 --moment question"
    )
    (mean,) = rows_of(data, task="", budget="0.4")
    assert "--task vt,cwe " in mean["command"]
    of_files = leaderboard_data([published("files", frames, tasks=["./vt.jsonl", "./cwe.jsonl"])])
    assert "--task ./vt.jsonl,./cwe.jsonl " in rows_of(of_files, task="vt", budget="0.4")[0]["command"]


def test_a_published_policy_is_never_imported(published: Publish, tmp_path: Path) -> None:
    trap, traces = tmp_path / "trap.py", tmp_path / "imported"
    frames = [frame.replace({"policy": {"snapkv": f"{trap}:Trap"}}) for frame in make_run(samples=8)]
    publication = published(frames=frames)
    trap.write_text(f"open({str(traces)!r}, 'w')")
    assert rows_of(leaderboard_data([publication]), policy=f"{trap}:Trap")
    assert not traces.exists()


@pytest.mark.parametrize(
    ("column", "value"), [("length", None), ("task", None), ("seed", None), ("policy", None), ("cell", "")]
)
def test_a_forged_table_is_one_line(
    published: Publish, monkeypatch: pytest.MonkeyPatch, column: str, value: str | None
) -> None:
    cells, samples = make_run(["snapkv"], ("0.2",), ["vt"], samples=8)
    publication = published(frames=(cells, samples))
    forged = cells.iloc[:0] if value == "" else cells.assign(**{column: value})
    monkeypatch.setattr(entries, "load_frames", lambda *_, **__: (forged, samples[list(entries._COLUMNS)]))
    with pytest.raises(UserError, match="was not written by kvbench publish") as failure:
        leaderboard_data([publication])
    assert str(publication.folder) in str(failure.value)


def test_versions_may_hold_anything(published: Publish) -> None:
    cells, samples = make_run(["snapkv"], ("0.2",), ["vt"], samples=8)
    cells["versions"] = ['{"generation": "x", "judge": [1]}', "no JSON"]
    data = leaderboard_data([published(frames=(cells, samples))])
    assert {row["questions"] for row in data["rows"]} == {"8 samples"}
