"""`kvbench run --task` with tasks of lm-eval by name, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import kvbench
from kvbench import cli
from kvbench.reference import path as reference_path
from kvbench.runs.load import load_groups


def run(folder: Path, out: Path, *arguments: str, task: str = "own_choice") -> int:
    given = ["--include-path", str(folder), "--task", task, "--out", str(out), *arguments]
    return cli.call(["run", "--policy", "streaming_llm", "--budget", "0.4", *given])


def test_a_group_is_scored_as_lm_eval_scores_it(
    own_tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(own_tasks, tmp_path, "--moment", "question", "--limit", "3", task="own_group") == 0
    out = capsys.readouterr().out
    assert "own_group" in out
    theirs: Any = simple_evaluate(
        model=HFLM(pretrained=str(reference_path()), device="cpu", dtype="float32"),
        tasks=["own_group"],
        task_manager=TaskManager(include_path=str(own_tasks), include_defaults=False),
        bootstrap_iters=0,
        limit=3,
    )
    groups = load_groups(tmp_path)
    full = groups[groups["policy"] == "full"]
    found = {f"{entry.metric},{entry.filter or 'none'}": entry.score for entry in full.itertuples()}
    expected = {
        key: value for key, value in theirs["groups"]["own_group"].items() if "," in key and "_stderr" not in key
    }
    assert found == pytest.approx(expected)


def test_flags_of_lm_eval_are_recorded_and_change_the_cell(own_tasks: Path, tmp_path: Path) -> None:
    flags = [[], ["--num-fewshot", "1"], ["--context", "document"], ["--system-instruction", "read"]]
    cells = set()
    for index, given in enumerate(flags):
        assert run(own_tasks, tmp_path / str(index), "--samples", "2", "--quiet", *given) == 0
        frame = kvbench.load(tmp_path / str(index))[0]
        cells |= set(frame["cell"])
        recorded = json.loads(frame["versions"].iloc[0])["generation"]
        assert recorded["context"] == ("document" if "document" in given else "fewshot")
        assert recorded["num_fewshot"] == (1 if "--num-fewshot" in given else 2)
    assert len(cells) == 2 * len(flags)


def test_a_larger_limit_extends_a_run(own_tasks: Path, tmp_path: Path) -> None:
    assert run(own_tasks, tmp_path / "two", "--limit", "2", "--quiet") == 0
    journal = tmp_path / "two/responses.jsonl"
    first = journal.read_bytes()
    assert run(own_tasks, tmp_path / "two", "--limit", "4", "--quiet") == 0
    assert journal.read_bytes().startswith(first)
    assert run(own_tasks, tmp_path / "four", "--limit", "4", "--quiet") == 0
    columns = ["cell", "sample_id", "response", "metrics"]
    extended, alone = (kvbench.load(tmp_path / name)[1][columns].sort_values(columns[:2]) for name in ("two", "four"))
    assert len(alone) == 8 and extended.to_numpy().tolist() == alone.to_numpy().tolist()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--task", "no_such_task"], "unknown task 'no_such_task'"),
        (["--num-fewshot", "7"], "own_choice has 2 examples, not 7; use a smaller --num-fewshot"),
        (["--num-fewshot", "0", "--context", "fewshot"], "has no examples and no instruction in 6 of 6 prompts; use"),
        (["--context", "shots"], "--context shots; did you mean fewshot?"),
        (["--gen-kwargs", "x"], "gen_kwargs must be such as max_gen_toks=64"),
        (["--task", "own_code"], "add --confirm-run-unsafe-code"),
        (["--task", "own_rolling"], "measures whole texts"),
        (["--include-path", "nowhere"], "--include-path nowhere is not a folder"),
        (["--apply-chat-template"], "has no chat template"),
        (["--task", "ruler", "--num-fewshot", "2"], "--num-fewshot is for tasks of lm-eval by name"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    own_tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    task = arguments[1] if arguments[0] == "--task" else "own_choice"
    folder = Path(arguments[1]) if arguments[0] == "--include-path" else own_tasks
    rest = [] if arguments[0] in ("--include-path",) else arguments[2 if arguments[0] == "--task" else 0 :]
    assert run(folder, tmp_path / "out", *rest, task=task) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_tasks_are_found_by_a_part_of_their_name(
    own_tasks: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.call(["list", "tasks", "--search", "GSM8K", "--json"]) == 0
    names = {entry["name"]: entry["kind"] for entry in json.loads(capsys.readouterr().out)}
    assert names["gsm8k"] == "group" and names["lm_eval:gsm8k"] == "task" and names["gsm8k_cot"] == "task"
    assert cli.call(["list", "tasks", "--search", "own_", "--include-path", str(own_tasks)]) == 0
    assert "own_rolling" in capsys.readouterr().out
    assert cli.call(["list", "tasks", "--search", "qqqqq"]) == 2
    assert cli.call(["list", "policies", "--search", "x"]) == 2


def test_data_of_a_task_is_fetched_or_the_reason_told(
    own_tasks: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.call(["data", "fetch", "own_choice", "--include-path", str(own_tasks)]) == 0
    assert "own_choice: 6 documents of json" in capsys.readouterr().out
    assert cli.call(["data", "fetch", "arc_easy"]) == 1
    assert "arc_easy: its data set allenai/ai2_arc is not in the cache, and the hub" in capsys.readouterr().err
    assert cli.call(["data", "list", "arc_easy"]) == 2
    assert "`kvbench data fetch arc_easy` gets it" in capsys.readouterr().err


def test_the_template_has_an_optional_name() -> None:
    from kvbench.cli.run import with_default_values

    assert with_default_values(["run", "--apply-chat-template", "--limit", "2"])[2] == "default"
    assert with_default_values(["run", "--apply-chat-template"])[-1] == "default"
    assert with_default_values(["run", "--apply-chat-template", "tool"])[-1] == "tool"
