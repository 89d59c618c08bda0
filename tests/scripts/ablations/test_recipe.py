"""Recipes: problems are one clear line, and the recipe of the papers can be run."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.errors import UserError
from scripts.ablations.recipe import PAPERS, read
from scripts.ablations.run import describe, grids, policies, trainings

GOOD = """\
model: reference
data: reference
seeds: [0, 1]
train: {steps: 2}
evaluate: [{task: vt, budget: "0.2", samples: 3}]
tables:
  parts:
    title: Parts
    paper: none
    policy: trimkv
    variants:
      - {name: all, paper: [2.0]}
      - {name: less, train: {kl: false}, paper: [1.0]}
"""


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_the_recipe_of_the_papers_can_be_trained_and_run() -> None:
    recipe = read(PAPERS)
    chosen = recipe.pick([])
    assert [t.name for t in chosen] == list(recipe.tables)
    plans = trainings(recipe, chosen, Path("x"))
    assert len({p.out for p in plans}) == len(plans)
    settings = [tuple(sorted((k, str(v)) for k, v in p.settings.items())) for p in plans]
    kinds = [p.method.name for p in plans]
    data = [p.data for p in plans]
    assert len(set(zip(kinds, data, settings, strict=True))) == len(plans)  # no training twice
    assert set(data) == {"reference", "cwe,fwe"}
    for table in chosen:
        names = policies(recipe, table, Path("x"))
        assert len(names) == len(table.variants) * len(recipe.seeds)
        for grid in grids(recipe, table, Path("x")):
            assert grid.policies == tuple(names)
    text = "\n".join(describe(recipe, chosen, Path("x")))
    assert f"{len(plans)} trainings, 0 of them finished" in text


def test_variants_of_the_same_training_share_their_gates() -> None:
    recipe = read(PAPERS)
    (horizon,) = recipe.pick(["horizon"])
    assert len(trainings(recipe, [horizon], Path("x"))) == len(recipe.seeds)


def test_gates_of_other_data_are_other_gates(tmp_path: Path) -> None:
    (data,) = read(PAPERS).pick(["data"])
    here, other = data.variants
    assert here.folder == "trimkv" and other.folder.startswith("trimkv-data-cwe")
    full = read(PAPERS.with_name("trimkv_figure8.yaml"))
    assert [variant.data for variant in full.tables["data"].variants] == ["", "general.jsonl"]
    (grid,) = grids(full, full.tables["data"], Path("x"))
    assert [timing.moment for timing in grid.timings] == ["decode"] and len(grid.tasks) == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("model: reference\n", "", "recipe: model is missing"),
        ("seeds: [0, 1]", "seeds: [-1]", "use whole numbers"),
        ("seeds: [0, 1]", "seeds: []", "seeds: [] is invalid; use a list"),
        ("title: Parts", "titel: Parts", "table parts: title is missing"),
        ("name: less", "name: all", "use at least two variants with different names"),
        (
            "paper: [1.0]",
            "paper: [1.0, 2.0]",
            "parts, less: paper: [1.0, 2.0] is invalid; use 1 scores",
        ),
        ("paper: [1.0]", "paper: much", "use scores, better or worse"),
        ("train: {kl", "trian: {kl", "unknown key 'trian'; did you mean train?"),
        ("samples: 3", "policy: snapkv", "evaluate: policy is invalid, because the tables set it"),
        ("tables:", "tables: 3\nmore:", "unknown key 'more'"),
        ("model: reference", "model: [", "is not YAML"),
    ],
)
def test_a_wrong_recipe_is_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    path = _written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(UserError) as error:
        read(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_setting_that_training_does_not_know_is_refused(tmp_path: Path) -> None:
    recipe = read(_written(tmp_path, GOOD.replace("{kl: false}", "{gate: cubic}")))
    with pytest.raises(UserError, match="--gate cubic"):
        trainings(recipe, recipe.pick([]), tmp_path)
    recipe = read(_written(tmp_path, GOOD.replace("{kl: false}", "{klx: false}")))
    with pytest.raises(UserError, match="klx"):
        trainings(recipe, recipe.pick([]), tmp_path)


def test_an_unknown_table_names_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown table 'tieing'; did you mean tying"):
        read(PAPERS).pick(["tieing"])
