"""Names of lm-eval stand for the tasks and groups that lm-eval itself builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from lm_eval.tasks import TaskManager

from kvbench.errors import UserError
from kvbench.harness import catalogue
from kvbench.harness.named_tasks import benchmarks, index


def resolved(name: str, *folders: Path) -> benchmarks.NamedBenchmark:
    found = benchmarks.resolve(name, [str(folder) for folder in folders])
    assert found is not None
    return found


def test_tasks_groups_and_tags() -> None:
    assert resolved("arc_easy").leaves == ("arc_easy",)
    assert set(resolved("ai2_arc").leaves) == {"arc_challenge", "arc_easy"}
    mmlu = resolved("mmlu")
    assert len(mmlu.leaves) == 57 and len(mmlu.groups) == 5
    assert mmlu.groups[0].name == "mmlu" and mmlu.groups[0].tasks == mmlu.leaves
    assert mmlu.groups[0].metrics == (benchmarks.GroupMetric("acc", None, True),)
    assert benchmarks.resolve("no_such_task") is None


def test_different_tasks_of_one_name_are_refused() -> None:
    message = "openllm gives several tasks the name mmlu; use the names of its members instead"
    with pytest.raises(UserError, match=message):
        benchmarks.resolve("openllm")


def test_members_keep_what_their_group_changes(own_tasks: Path) -> None:
    group = resolved("own_group", own_tasks)
    assert group.leaves == ("own_choice", "own_text")
    assert group.specs["own_text"].overrides["num_fewshot"] == 1
    assert group.groups[0].metrics[1] == benchmarks.GroupMetric("exact_match", ("word",), True)
    built = benchmarks.build(group.specs["own_text"], group.include_path, {})
    assert built.config.num_fewshot == 1


def test_tasks_that_a_group_defines_itself_are_built(
    own_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inline.yaml").write_text(
        "group: inline\naggregate_metric_list: [{metric: acc}]\ntask:\n"
        "  - {task: inner, dataset_path: json, output_type: generate_until, test_split: test, doc_to_text: question, "
        f"doc_to_target: question, dataset_kwargs: {{data_files: {{test: {own_tasks}/rows.jsonl}}}}}}\n"
    )
    group = resolved("inline", tmp_path)
    assert group.leaves == ("inline::inner",) and group.specs["inline::inner"].known_as == ""
    assert len(benchmarks.build(group.specs["inline::inner"], group.include_path, {}).eval_docs) == 6


def test_the_same_as_lm_eval_builds(own_tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs: Any = TaskManager(include_path=str(own_tasks), include_defaults=False).load(["own_group"])
    ours = resolved("own_group", own_tasks)
    assert [*theirs["tasks"]] == [*ours.leaves] and [*theirs["groups"]] == [group.name for group in ours.groups]
    for name, task in theirs["tasks"].items():
        built = benchmarks.build(ours.specs[name], ours.include_path, {})
        mine, other = built.dump_config(), task.dump_config()
        assert {**mine, "metadata": 0} == {**other, "metadata": 0}


def test_resolving_reads_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("data was read"))
    assert len(resolved("bbh_cot_fewshot").leaves) == 27


def test_a_group_that_cannot_be_built_or_is_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("group: wrong\ntask: [3]\n")
    (tmp_path / "empty.yaml").write_text("group: empty\ntask: []\n")
    with pytest.raises(UserError, match="wrong: lm-eval cannot read this group"):
        resolved("wrong", tmp_path)
    with pytest.raises(UserError, match="empty is a group without tasks"):
        resolved("empty", tmp_path)


def test_kvbench_comes_first_and_a_prefix_means_lm_eval() -> None:
    assert catalogue.resolve_task("gsm8k")[0][1].harness == "lm_eval"
    assert catalogue.resolve_task(f"{index.PREFIX}gsm8k")[0][1].harness == benchmarks.HARNESS
    with pytest.raises(UserError, match=r"unknown task 'arc_easyy'; did you mean arc_easy"):
        catalogue.resolve_task("arc_easyy")


def test_a_broken_file_of_the_user_is_named_with_an_unknown_task(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: mine\nmetric_list: [\n")
    with pytest.raises(UserError, match=r"unknown task 'mine'.*mine\.yaml: line 3"):
        catalogue.resolve_task("mine", [str(tmp_path)])


def test_two_tasks_of_one_name_are_one_if_they_are_built_alike(own_tasks: Path) -> None:
    alone = resolved("mmlu_anatomy")
    assert alone.leaves == ("mmlu_anatomy",)
    assert alone.identity("mmlu_anatomy") == resolved("mmlu").identity("mmlu_anatomy")
    shots = resolved("own_group", own_tasks).identity("own_text")
    assert shots != resolved("own_text", own_tasks).identity("own_text")
