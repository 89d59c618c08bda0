"""The gates that ship agree with the recipes that train them."""

from __future__ import annotations

import json

import pytest

from kvbench.training.recipes import RECIPES
from scripts.reference_model.gates import destination


@pytest.mark.parametrize("policy", sorted(RECIPES))
def test_shipped_gates_were_trained_with_their_recipe(policy: str) -> None:
    folder = destination(policy)
    config = json.loads((folder / "gates.json").read_text())
    training = config["training"]
    assert {key: training[key] for key in RECIPES[policy]} == RECIPES[policy]
    log = (folder / "training.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["step"] == RECIPES[policy]["steps"]
    assert (folder / "README.md").is_file()
