"""Frames of several runs as one report: what is shown, in which order, and what is not said."""

from __future__ import annotations

import io
import json

import pandas as pd
from rich.console import Console

from kvbench.report import render, run_table
from kvbench.report.frames import answers, prepare, tasks_at_chance, uncompared

from .conftest import unaveraged


def together(*runs):
    """Frames of runs as `load_frames` gives them."""
    return tuple(pd.concat(frames, ignore_index=True) for frames in zip(*runs, strict=True))


def shown(cells):
    console = Console(width=120, file=io.StringIO(), color_system=None)
    console.print(run_table(cells))
    return console.file.getvalue()


def test_panels_with_nothing_but_full_are_left_out(run_frames, tmp_path):
    cells, samples = together(
        run_frames(["snapkv"], ("0.2",), lengths=(512,), moments=("context",), samples=10),
        run_frames(["snapkv"], ("0.2",), lengths=(1024,), moments=("question",), samples=10),
    )
    text = shown(cells)
    assert text.count("│ full ") == 2
    for label, there in {
        "512 tokens, context": True,
        "1024 tokens, question": True,
        "512 tokens, question": False,
        "1024 tokens, context": False,
    }.items():
        assert (label in text) == there, label
    summary = render(cells, samples, tmp_path)[0].read_text()
    assert summary.count("### `ruler`") == 4  # statements and scores of the two
    assert summary.count("| `full` |") == 4  # mean and tasks of the two
    assert "512 tokens, question" not in summary


def test_full_alone_is_shown_once(run_frames):
    only = run_frames([], (), ["vt"], lengths=(512, 1024), samples=10)
    text = shown(only[0])
    assert "512 tokens" in text
    assert "1024 tokens" in text
    moments = ("context", "question")
    other = run_frames(["snapkv"], ("0.2",), ["mine"], group="own", moments=moments, samples=10)
    results = prepare(*together(run_frames([], (), ["vt"], samples=10), other))
    assert [v.label for v in results.variants("reference", "ruler")] == [""]
    assert [v.label for v in results.variants("reference", "own")] == list(moments)


def test_full_is_first_whatever_the_order_of_runs(run_frames, tmp_path):
    bare = run_frames(["random"], ("0.2",), ["vt"], with_full=False, samples=10)
    cells, samples = together(bare, run_frames(["snapkv"], ("0.2",), ["vt"], samples=10))
    results = prepare(cells, samples)
    assert list(results.cells["policy"]) == ["full", "random", "snapkv"]
    assert list(results.overall["policy"]) == ["full", "random", "snapkv"]
    assert results.policies == ["random", "snapkv"]
    rows = [line for line in shown(cells).splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == ["full", "random", "snapkv"]
    assert "- Policies: `full`, `random`, `snapkv`\n" in render(cells, samples, tmp_path)[0].read_text()


def test_tasks_without_full_are_not_called_silent(run_frames, tmp_path):
    cells = pd.concat(
        [
            run_frames(["snapkv"], ("0.2",), lengths=(512,), samples=10)[0],
            run_frames(["snapkv"], ("0.2",), lengths=(1024,), samples=10, with_full=False)[0],
        ]
    )
    assert tasks_at_chance(cells) == []
    assert uncompared(cells) == ["vt", "cwe"]
    assert tasks_at_chance(run_frames(tasks=["vt", "qa_1"])[0]) == ["qa_1"]
    assert tasks_at_chance(run_frames(tasks=["qa_1"], lengths=(512, 1024))[0]) == ["qa_1"]
    assert tasks_at_chance(run_frames(failed=[("full", "full", "vt")])[0]) == []
    some = together(
        run_frames(tasks=["vt"], samples=10),
        run_frames(tasks=["cwe"], samples=10, with_full=False),
    )
    text = render(*some, tmp_path)[0].read_text()
    assert "There is no full cache to compare with on `cwe`: it was not run" in text
    assert "not above chance on" not in text


def test_runs_whose_answers_were_made_otherwise_keep_apart(run_frames):
    greedy, drawn = (run_frames(["snapkv"], ("0.2",), ["vt"], samples=10) for _ in range(2))
    drawn[0]["versions"] = json.dumps({"generation": {"temperature": 0.6, "repeats": 4}})
    for frame in drawn:
        frame["cell"] = "drawn-" + frame["cell"]
    results = prepare(*together(greedy, drawn))
    names = ["reference (greedy)", "reference (temperature 0.6)"]
    assert sorted(results.cells["model"].unique()) == names
    assert all((results.cells["model"] == name).sum() == 2 for name in names)
    assert answers("not JSON") == answers("{}") == "greedy"
    recorded = {"thinking": False, "think_end": "</think>", "truncated": 3}
    assert answers(json.dumps({"generation": recorded})) == "greedy, thinking False"


def test_scores_that_are_no_means_are_named_in_a_remark(run_frames, tmp_path):
    frames = run_frames(["snapkv"], ("0.2",), ["vt", "cwe"], depths=(0, 50), samples=10)
    summary, *files = render(*unaveraged(frames, "cwe"), tmp_path)
    assert "The score of `cwe` is not a mean over samples" in summary.read_text()
    assert {path.name for path in files if path.name.startswith("depth")} == {"depth-vt.png", "depth-vt.svg"}
    assert "not a mean over samples" not in render(*frames, tmp_path)[0].read_text()


def altered(frames, **columns):
    """The run with other values, and so other cells."""
    cells, samples = frames
    return cells.assign(cell="2" + cells["cell"], **columns), samples.assign(cell="2" + samples["cell"])


def test_runs_that_differ_in_what_a_model_ran_with_are_models_with_a_mean_each(run_frames):
    run = run_frames(["snapkv"], ("0.2",), ["vt", "cwe"], samples=10)
    run[0]["data_hash"] = run[0]["task"] + " data"
    both = together(run, altered(run, dtype="bfloat16"))
    results = prepare(*both)
    assert set(results.cells["model"]) == {"reference (float32)", "reference (bfloat16)"}
    means = results.overall.set_index(["model", "policy"])
    assert (means["tasks"] == 2).all() and len(means) == 4
    assert set(results.cells["model_id"]) == {"reference"}
    assert set(both[0]["model"]) == {"reference"}, "the frame that was given is not changed"


def test_other_data_of_a_task_names_that_task_alone(run_frames):
    run = run_frames(["snapkv"], ("0.2",), ["vt", "cwe"], samples=10)
    other = altered(run_frames(["snapkv"], ("0.2",), ["vt"], samples=10), data_hash="other")
    cells = prepare(*together(run, other)).cells
    names = {task: set(rows["model"]) for task, rows in cells.groupby("task")}
    assert names == {"cwe": {"reference"}, "vt": {f"reference ({'ab' * 8})", "reference (other)"}}


def test_two_versions_of_a_policy_are_two_policies_beside_the_others(run_frames):
    run = run_frames(["./mine.py:mine", "snapkv"], ("0.2",), ["vt", "cwe"], samples=10)
    run[0]["versions"] = json.dumps({"policy": "a1"})
    edited = run[0]["policy"] == "./mine.py:mine"
    mine = run[0][edited], run[1][run[1]["policy"] == "./mine.py:mine"]
    results = prepare(*together(run, altered(mine, versions=json.dumps({"policy": "b2"}))))
    assert results.policies == ["./mine.py:mine (a1)", "snapkv", "./mine.py:mine (b2)"]
    assert set(results.overall["model"]) == {"reference"}
    assert results.overall["diff"].notna().all()
    unknown = prepare(*together(run, altered(mine)))
    cells = unknown.cells[unknown.cells["policy"].str.startswith("./mine")]
    assert (cells["policy"] == "./mine.py:mine (" + cells["cell"] + ")").all()


def test_rows_of_one_model_that_were_made_differently_are_named(run_frames):
    first = run_frames(["snapkv"], ("0.2",), ["vt"], samples=10)
    second = run_frames(["random"], ("0.2",), ["vt"], samples=10, with_full=False)
    text = shown(together(first, altered(second, dtype="bfloat16"))[0])
    assert "The rows of reference have different data types: float32, bfloat16." in text
    assert "the full cache holds" not in text, "it has two sizes"
    alone = shown(first[0])
    assert "have different data types" not in alone and "the full cache holds" in alone
