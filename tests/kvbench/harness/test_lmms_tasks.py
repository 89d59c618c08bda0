"""Tasks of lmms-eval by their names: the index, what is refused, and equality with lmms-eval's own loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

import kvbench
from kvbench.data.records import NotFetched
from kvbench.errors import LeftOut, UserError
from kvbench.harness import lmms_eval, lmms_tasks
from kvbench.harness.lmms_tasks import CLASS, GROUP, TAG, TASK, LmmsBenchmark, LmmsEntry
from kvbench.harness.protocol import GroupMetric

from ...lmms import needs_lmms_eval
from ...vision import load_task

YAML = {
    "base.yaml": "output_type: generate_until\ntag: [coloured, all]\n",
    "a/one.yaml": "task: one\ninclude: ../base.yaml\ndoc_to_text: !function utils.ask\n",
    "a/two.yaml": "task: two\ntag: coloured\n",
    "b/three.yaml": "task: three\nclass: !function task.Three\n",
    "b/some.yaml": "group: some\ntask: [three, {group: inner, task: [two]}, coloured]\n"
    "aggregate_metric_list: [{metric: acc}, {metric: anls, weight_by_size: true}]\n",
    "b/empty.yaml": "group: empty\ntask: []\n",
    "b/round.yaml": "group: round\ntask: [round]\n",
    "b/wrong.yaml": "group: wrong\ntask: [one, fuor]\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of tasks in the place of lmms-eval's."""
    for name, text in YAML.items():
        path = tmp_path / "tasks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(lmms_tasks, "tasks_folder", lambda: tmp_path / "tasks")
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    lmms_tasks._names.cache_clear()
    yield tmp_path / "tasks"
    lmms_tasks._names.cache_clear()


@needs_lmms_eval
def test_the_index_has_tasks_groups_and_tags(folder: Path) -> None:
    names = lmms_tasks.names()
    assert names["one"] == LmmsEntry(TASK, "a/one.yaml", [])
    assert names["three"] == LmmsEntry(CLASS, "b/three.yaml", [])
    assert names["some"] == LmmsEntry(
        GROUP, "b/some.yaml", ["three", "two", "coloured"], [("acc", False), ("anls", True)]
    )
    assert names["coloured"].kind == TAG
    assert sorted(names["coloured"].members) == ["one", "two"]
    assert names["all"].members == ["one"]
    assert len(names) == 9


@needs_lmms_eval
def test_the_index_is_read_from_the_disk_until_a_file_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lmms_tasks.names()
    lmms_tasks._names.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(lmms_tasks, "_scanned", lambda folder: pytest.fail("the YAML is read again"))
        assert lmms_tasks.names().keys() == first.keys()
        assert lmms_tasks.resolve("some") is not None
    (folder / "a" / "four.yaml").write_text("task: four\n")
    assert lmms_tasks.names().keys() - first.keys() == {"four"}


@needs_lmms_eval
def test_a_name_stands_for_its_tasks(folder: Path) -> None:
    resolved = lmms_tasks.resolve("lmms_eval:some")
    assert resolved is not None
    assert sorted(name for name, _ in resolved) == ["one", "three", "two"]
    (_, benchmark), *_ = lmms_tasks.resolve("one") or []
    assert isinstance(benchmark, LmmsBenchmark)
    assert benchmark.definitions == {"one": folder / "a/one.yaml"}
    assert benchmark.identity("one") == dict(resolved)["one"].identity("one")
    assert isinstance(resolved[0][1], LmmsBenchmark)
    (group,) = resolved[0][1].groups
    assert (group.name, sorted(group.tasks)) == ("some", ["one", "three", "two"])
    assert group.metrics == (GroupMetric("acc", None, False), GroupMetric("anls", None, True))
    assert lmms_tasks.resolve("five") is None
    for name, says in (
        ("empty", "empty is a group of lmms-eval without tasks"),
        ("round", "group round of lmms-eval names itself"),
        ("wrong", "names 'fuor', which lmms-eval does not have"),
    ):
        with pytest.raises(UserError, match=says):
            lmms_tasks.resolve(name)


def test_without_lmms_eval_there_are_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmms_tasks.importlib.util, "find_spec", lambda name: None)
    assert lmms_tasks.names() == {}
    assert lmms_tasks.resolve("mme") is None


@needs_lmms_eval
@pytest.mark.slow
def test_the_index_is_that_of_lmms_eval() -> None:
    from lmms_eval.tasks import TaskManager

    folder = lmms_tasks.tasks_folder()
    kinds = {"python_task": CLASS}
    expected = {
        name: (
            kinds.get(entry["type"], entry["type"]),
            "" if entry["yaml_path"] == -1 else str(Path(entry["yaml_path"]).relative_to(str(folder))),
        )
        for name, entry in TaskManager(verbosity="ERROR").task_index.items()
    }
    assert {name: (entry.kind, entry.yaml) for name, entry in lmms_tasks.names().items()} == expected


# --- what is refused ------------------------------------------------------------------------------


def loaded(name: str, folder: Path, **settings: Any) -> Any:
    ((task_name, benchmark),) = lmms_tasks.resolve(name) or []
    return load_task(task_name, benchmark, folder, **settings)


@needs_lmms_eval
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ifeval", "its prompts have no images; use --task lm_eval:ifeval"),
        ("seedbench_ppl", "its output type is multiple_choice"),
        ("vstat", "a Python class defines it; run it by `kvbench lmms-eval"),
        ("phyx_mc", "lmms-eval cannot read its definition .*Failed to import function"),
    ],
)
def test_tasks_that_kvbench_cannot_answer_are_left_out_in_one_line(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(LeftOut, match=says):
        loaded(name, tmp_path)


@needs_lmms_eval
def test_data_that_is_not_there_is_named_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    says = (
        r"its data set lmms-lab-encoder/POPE is not in the cache, and the hub .*; `kvbench data fetch lmms_eval:pope`"
    )
    with pytest.raises(NotFetched, match=says):
        loaded("pope", tmp_path)


@needs_lmms_eval
def test_scripts_of_data_sets_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}

    def refuse(**given: Any) -> None:
        options.update(given)
        raise RuntimeError("Dataset scripts are no longer supported, but found POPE.py")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(LeftOut, match="its data set needs a loading script, and kvbench never runs one"):
        loaded("pope", tmp_path)
    assert options["path"] == "lmms-lab-encoder/POPE"
    assert not {"token", "trust_remote_code"} & options.keys()


@needs_lmms_eval
def test_a_text_model_is_told_before_data_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(LeftOut, match="model tiny takes no images; use --model with a vision"):
        loaded("pope", tmp_path, processor=None)


# --- equality with lmms-eval's loop ---------------------------------------------------------------


@needs_lmms_eval
@pytest.mark.parametrize("task", ["ai2d", "mmmu_val", "mme"])
def test_responses_and_scores_are_those_of_lmms_evals_own_loop(task: str, tmp_path: Path) -> None:
    from benchmarks.lmms_eval_truth import compare

    comparison = compare(task, tmp_path)
    assert comparison.is_equal, comparison
    assert any(comparison.kvbench.given.values())


@needs_lmms_eval
def test_the_comparison_sees_a_filter_that_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.lmms_eval_truth import compare

    monkeypatch.setattr(
        lmms_eval.NamedLmmsTask, "_filtered", lambda self, request, responses: {"flexible-extract": responses[0]}
    )
    assert not compare("ai2d", tmp_path).is_equal


@needs_lmms_eval
def test_prompts_with_and_without_images_are_compressed_after_the_question(tmp_path: Path) -> None:
    from benchmarks.lmms_eval_rows import ROWS, served

    grid = {
        "models": ["reference-vl"],
        "tasks": ["lmms_eval:scienceqa"],
        "policies": ["snapkv:window=4"],
        "budgets": ["0.3"],
    }
    grid |= {"samples": ROWS, "device": "cpu", "max_new_tokens": 4, "out": str(tmp_path / "run")}
    with served():
        with pytest.raises(UserError, match="scienceqa: 2 of 8 prompts have no images, so no context; use another"):
            kvbench.run({**grid, "moments": ["context"]}, progress=False)
        run = kvbench.run({**grid, "moments": ["question"]}, progress=False)
    assert not run.failed
    assert len(run.samples) == 2 * ROWS


@needs_lmms_eval
def test_questions_about_one_picture_share_their_context(tmp_path: Path) -> None:
    from benchmarks.lmms_eval_rows import served

    with served():
        task = loaded("docvqa_val", tmp_path)
        ((_, benchmark),) = lmms_tasks.resolve("docvqa_val") or []
        assert lmms_eval.fetch(benchmark, "docvqa_val") == "8 documents of lmms-lab-encoder/DocVQA DocVQA"
        again = loaded("docvqa_val", tmp_path, samples=2)
    assert len({request.context_id for request in task.requests}) == 4
    assert [request.question_id for request in task.requests] == [0, 1] * 4
    assert again.data_hash == task.data_hash
    assert [request.digest for request in again.requests] == [request.digest for request in task.requests[:2]]
