from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench import registry
from kvbench.errors import UserError
from kvbench.harness import catalogue
from kvbench.runs.cell import versions
from kvbench.runs.grid import Grid
from kvbench_policies.snapkv import WindowAttention

from .cells import make_cell

MINE = {"policies": "snapkv", "tasks": "vt"}

# --- reading a grid -------------------------------------------------------------------------------


def test_flags_and_lists_read_the_same() -> None:
    text = Grid.from_dict({"policy": "a,b:x=1", "budget": "0.2, 512", "task": "vt", "length": "64"})
    lists = Grid.from_dict({"policies": ["a", "b:x=1"], "budgets": [0.2, 512], "tasks": ["vt"], "lengths": [64]})
    assert text == lists
    assert text.policies == ("a", "b:x=1")
    assert text.budgets == ("0.2", "512")
    assert text.lengths == (64,)


def test_repeated_flags_may_hold_commas() -> None:
    assert Grid.from_dict({**MINE, "policies": ["a,b", "c", "a"]}).policies == ("a", "b", "c")


def test_budgets_are_canonical_and_each_once() -> None:
    assert Grid.from_dict({**MINE, "budgets": "0.20,.2,1.0,full,1"}).budgets == ("0.2", "full", "1")


def test_defaults_are_those_of_the_design() -> None:
    grid = Grid.from_dict(MINE)
    assert (grid.models, grid.lengths, grid.samples) == (("reference",), (1024,), 50)
    assert (grid.budgets, grid.moments, grid.full) == (("0.2",), ("context",), True)


def test_to_dict_reads_back() -> None:
    grid = Grid.from_dict({**MINE, "budgets": [0.1, "full"], "chat_template": False, "out": "x"})
    assert Grid.from_dict(grid.to_dict()) == grid
    assert Grid.from_dict(json.loads(json.dumps(grid.to_dict()))) == grid


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"polices": "x"}, "did you mean policies"),
        ({"policy": "x"}, "given twice"),
        ({"budgets": [1.5]}, "budget 1.5 is out of range"),
        ({"budgets": [float("nan")]}, "budget 'nan'"),
        ({"budgets": None}, "budgets must be"),
        ({"policies": []}, "policies must be"),
        ({"policies": [3]}, "policies must be names"),
        ({"moments": "chunked:x"}, "use chunked:512"),
        ({"moments": "context:5"}, "context takes no number"),
        ({"moments": "contxt"}, "did you mean context"),
        ({"lengths": [0]}, "length must be an integer"),
        ({"samples": 0}, "samples must be an integer"),
        ({"samples": True}, "samples must be an integer"),
        ({"samples": 10**10}, "samples must be an integer"),
        ({"seed": -1}, "seed must be"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"batch_size": "many"}, "batch_size must be"),
        ({"chat_template": "maybe"}, "chat_template must be true or false"),
        ({"full": 1}, "full must be true or false"),
        ({"device": ""}, "device must be"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        Grid.from_dict({**MINE, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("given", "flag"), [({"task": "vt"}, "--policy"), ({}, "--policy")])
def test_what_is_missing_is_named(given: dict[str, Any], flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        Grid.from_dict(given)


# --- files ----------------------------------------------------------------------------------------


def test_a_file_reads_like_flags_and_flags_go_before_it(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("policies: [snapkv, full]\nbudget: 0.2\ntasks:\n  - vt\n  - cwe\nfull: false\n")
    grid = Grid.from_yaml(path, {"budgets": "0.4", "samples": 3})
    assert grid.policies == ("snapkv", "full")
    assert grid.tasks == ("vt", "cwe")
    assert (grid.budgets, grid.samples, grid.full) == (("0.4",), 3, False)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("policies: a\nbudgets: [0.2\ntasks: b\n", 3, "expected"),
        ("policies: a\n\nbudgetz: 0.2\n", 3, "did you mean budget"),
        ("policies: a\ntasks: b\nbudgets:\n  - 1.5\n", 3, "out of range"),
        ("policies: a\ntasks: b\npolicies: c\n", 3, "given twice"),
        ("policies: a\ntasks: b\npolicy: c\n", 3, "given twice"),
        ("a: b\n\tc: d\n", 2, "cannot start any token"),
        ("policies: a\ntasks: !!python/name:os.system\n", 2, "could not determine a constructor"),
        ("[1, 2]: a\n", 1, "cannot be a key"),
        ("- a\n", 1, "mapping"),
        ("", 1, "mapping"),
    ],
)
def test_an_error_in_a_file_names_its_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        Grid.from_yaml(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert "\n" not in str(caught.value)


def test_a_wrong_flag_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("policies: a\ntasks: b\nbudgets: 0.1\n")
    with pytest.raises(UserError, match=r"^budget 1\.5"):
        Grid.from_yaml(path, {"budgets": "1.5"})


def test_a_file_that_is_not_there_or_not_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        Grid.from_yaml(tmp_path / "none.yaml")
    (tmp_path / "raw.yaml").write_bytes(b"policies: \xff")
    with pytest.raises(UserError, match="not UTF-8"):
        Grid.from_yaml(tmp_path / "raw.yaml")
    (tmp_path / "half.yaml").write_text("policies: a")
    with pytest.raises(UserError, match="has no tasks"):
        Grid.from_yaml(tmp_path / "half.yaml")


# --- the folder -----------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"samples": 200}, {"out": "x"}, {"batch_size": 4}])
def test_what_extends_or_moves_a_run_keeps_its_digest(changes: dict[str, Any]) -> None:
    assert Grid.from_dict({**MINE, **changes}).digest == Grid.from_dict(MINE).digest


def test_the_order_of_a_list_keeps_the_digest() -> None:
    one = Grid.from_dict({"policies": "a,b", "tasks": "vt,cwe", "budgets": "0.1,0.2"})
    other = Grid.from_dict({"policies": "b,a", "tasks": "cwe,vt", "budgets": "0.2,0.1"})
    assert one.digest == other.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"policies": "h2o"},
        {"tasks": "cwe"},
        {"budgets": "0.3"},
        {"models": "x"},
        {"moments": "question"},
        {"lengths": 512},
        {"seed": 1},
        {"device": "cuda"},
        {"dtype": "bfloat16"},
        {"revision": "v2"},
        {"chat_template": False},
        {"full": False},
    ],
)
def test_all_else_changes_the_digest(changes: dict[str, Any]) -> None:
    assert Grid.from_dict({**MINE, **changes}).digest != Grid.from_dict(MINE).digest


def test_the_folder_is_what_is_given() -> None:
    assert Grid.from_dict({**MINE, "out": "there"}).path == Path("there")


# --- tasks ----------------------------------------------------------------------------------------


def write_rows(path: Path) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"context": "c", "question": "q", "answers": ["a"]}) + "\n")
    return str(path)


def test_a_task_named_twice_counts_once(tmp_path: Path) -> None:
    mine = write_rows(tmp_path / "mine.jsonl")
    grid = Grid.from_dict({"policies": "a", "tasks": ["ruler", "vt", mine, mine]})
    leaves = [leaf for leaf, _ in grid.leaves()]
    assert leaves.count("vt") == leaves.count("mine") == 1
    assert len(leaves) == len(catalogue.resolve_task("ruler")) + 1


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    one, two = write_rows(tmp_path / "a" / "mine.jsonl"), write_rows(tmp_path / "b" / "mine.jsonl")
    with pytest.raises(UserError, match=r"two tasks are called 'mine'"):
        Grid.from_dict({"policies": "a", "tasks": [one, two]}).leaves()
    with pytest.raises(UserError, match=r"two tasks are called 'vt'"):
        Grid.from_dict({"policies": "a", "tasks": ["vt", write_rows(tmp_path / "vt.jsonl")]}).leaves()


def test_the_chat_template_can_be_used_everywhere() -> None:
    given = {"policy": "snapkv", "budget": "0.2", "task": "longbench"}
    usual = Grid.from_dict(given)
    everywhere = Grid.from_dict({**given, "chat_template_everywhere": True})
    assert {task for task, group in usual.leaves() if task in group.plain} >= {"longbench_trec", "longbench_lcc"}
    assert not [task for task, group in everywhere.leaves() if task in group.plain]
    assert [task for task, _ in usual.leaves()] == [task for task, _ in everywhere.leaves()]
    assert usual.digest != everywhere.digest


def test_an_unknown_task_gives_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean ruler"):
        Grid.from_dict({"policies": "a", "tasks": "rulr"}).leaves()


# --- variants and cells ---------------------------------------------------------------------------


def test_variants_are_the_product_with_full_once() -> None:
    grid = Grid.from_dict(
        {
            "policies": "criticalkv,critical_adakv,h2o",
            "tasks": "vt",
            "budgets": "0.1,0.2",
            "moments": "context,question",
        }
    )
    variants = grid.variants()
    assert len(variants) == len(set(variants)) == 1 + 2 * 2 * 2
    assert [variant.is_full for variant in variants] == [True] + [False] * 8
    assert (str(variants[0].budget), variants[0].timing) == ("full", None)


def test_full_is_left_out_only_if_nobody_asks_for_it() -> None:
    def policies(**grid: object) -> list[str]:
        return [str(v.policy) for v in Grid.from_dict({**MINE, **grid}).variants()]

    assert policies(full=False) == ["snapkv"]
    assert policies(full=False, policies="snapkv,full") == ["full", "snapkv"]
    assert policies(full=False, budgets="0.2,full") == ["full", "snapkv"]
    assert policies() == ["full", "snapkv"]


def test_all_stands_for_every_policy_and_names_none() -> None:
    grid = Grid(policies=("all",), tasks=("vt",), full=False)
    names = [str(variant.policy) for variant in grid.variants()]
    assert "full" not in names and {"snapkv", "d2o", "criticalkv"} <= set(names)
    assert len(names) == len(set(names))
    assert Grid(policies=("all",), tasks=("vt",)).variants()[0].is_full
    assert grid.named_policies == frozenset()
    assert Grid(policies=("all", "snapkv:window=32"), tasks=("vt",)).named_policies == {"snapkv"}


def test_full_has_a_variant_of_its_own_at_turns() -> None:
    grid = Grid.from_dict({**MINE, "moments": "turns,context"})
    full = [str(v.timing or "") for v in grid.variants() if v.is_full]
    assert full == ["turns", ""]


CHANGED: dict[str, Any] = {
    "model": "n",
    "model_revision": "s",
    "task": "cwe",
    "length": 512,
    "policy": "h2o",
    "budget": "0.3",
    "moment": "question",
    "seed": 1,
    "dtype": "bfloat16",
    "device": "cuda",
    "attention": "eager",
    "chat_template": "chatml",
    "data_hash": "e",
    "task_version": "2",
    "prompts": "p2",
    "versions": {"torch": "3"},
    "generation": '{"temperature": 0.6}',
}


@pytest.mark.parametrize("name", CHANGED)
def test_whatever_can_change_a_response_changes_the_cell(name: str) -> None:
    assert make_cell(**{name: CHANGED[name]}).cell != make_cell().cell


ASKED = {"model", "task", "length", "policy", "budget", "moment", "seed", "data_hash", "generation"}


@pytest.mark.parametrize("name", CHANGED)
def test_only_what_is_asked_changes_the_match(name: str) -> None:
    changed = make_cell(**{name: CHANGED[name]}).match != make_cell().match
    assert changed == (name in ASKED)


def test_group_and_device_index_change_neither_hash() -> None:
    assert make_cell(group="mine").cell == make_cell().cell
    assert make_cell(device="cuda:1").cell == make_cell(device="cuda:0").cell
    assert make_cell(device="cuda:1").device == "cuda"


def test_full_has_no_budget_and_no_moment() -> None:
    one = make_cell("full", "0.2", "context")
    other = make_cell("full", "0.4", "question")
    assert one == other
    assert (one.cell, one.match) == (other.cell, other.match)


def test_hashes_are_the_same_on_every_machine() -> None:
    cell = make_cell()
    assert cell.cell == "09a7a6a698f81375"
    assert cell.match == "26a3993d5dbd481f"


def test_a_row_says_what_the_cell_is() -> None:
    cell = make_cell(chat_template="chatml")
    row = cell.row()
    assert row["cell"] == cell.cell
    assert row["match"] == cell.match
    assert (row["length"], row["seed"]) == (1024, 0)
    assert "chat_template" not in row
    assert json.loads(str(row["versions"])) == {
        "torch": "2",
        "chat_template": "chatml",
        "prompts": "p1",
    }


def test_a_files_content_is_part_of_the_versions(tmp_path: Path) -> None:
    path = tmp_path / "my_policy.py"
    path.write_text("def a(v, window=1):\n    return v.noise()\n")
    before = versions(kvbench.policy(f"{path}:a:window=3"))
    path.write_text("def a(v, window=1):\n    return -v.noise()\n")
    after = versions(kvbench.policy(f"{path}:a:window=3"))
    assert before.pop("policy") != after.pop("policy")
    assert before == after
    assert set(before) == {"kvbench", "torch", "transformers", "lm_eval"}


def test_packages_of_policy_and_parts_are_part_of_the_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "origin", lambda group, name: f"{group} {name}")
    found = versions(kvbench.policy("snapkv:merge=ema:window=3"))
    assert found["policy"] == "kvbench.policies snapkv"
    assert found["merge"] == "kvbench.parts merge.ema"
    assert "score" not in found


def test_only_a_raised_version_of_a_part_changes_the_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WindowAttention, "version", 1)
    before = versions(kvbench.policy("snapkv"))
    assert "part_versions" not in before
    monkeypatch.setattr(WindowAttention, "version", 3)
    after = versions(kvbench.policy("snapkv"))
    assert after.pop("part_versions") == {"score.window": 3}
    assert after == before


@pytest.mark.parametrize("word", ["1:30", "010", "0x10", "0b1", "1_000", "2026-11-23", ".inf", ".nan"])
@pytest.mark.parametrize("text", ["{}", "[snapkv, {}]", "\n  - {}"])
def test_a_word_that_yaml_takes_for_something_else_is_refused(tmp_path: Path, word: str, text: str) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(f"tasks: vt\nout: {text.format(word)}\n")
    line = 3 if "\n" in text else 2
    with pytest.raises(UserError, match=rf"grid\.yaml:{line}: YAML takes {re.escape(word)} for .*"):
        Grid.from_yaml(path)
    path.write_text(f"policies: snapkv\ntasks: vt\nout: '{word}'\n")
    assert Grid.from_yaml(path).out == word


def test_every_value_that_stands_for_itself_is_read(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(
        "policies: &p [snapkv]\ntasks: vt\nbudgets: [0.2, .5, 64, 1.0]\nsamples: +5\n"
        "seed: 0\nfull: True\nchat_template: null\nrevision: ~\ntruncate:\n"
        "temperature: 1.0e-1\nmodels: !!str reference\nlengths: [1024]\n"
    )
    grid = Grid.from_yaml(path)
    assert grid.budgets[:3] == ("0.2", "0.5", "64")
    assert (grid.samples, grid.seed, grid.full, grid.chat_template) == (5, 0, True, None)
    assert grid.temperature == 0.1
