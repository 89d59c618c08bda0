"""Logits that are NaN or infinite fail their cell, and no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.engine.decode import NOT_FINITE, DecodeRow, Stop
from kvbench.engine.draw import choose
from kvbench.runs.grid import Grid
from kvbench.runs.runner import execute

from ..engine.test_pool import Words


def run(out: Path, model: str, policy: str, **changes: Any) -> Any:
    usual = {"budget": "0.5", "task": "niah_single_1", "length": 256, "samples": 2}
    grid = {"model": model, "policy": policy, "out": str(out), **usual, **changes}
    return execute(Grid.from_dict(grid)).cells


@pytest.mark.parametrize("changes", [{}, {"moment": "question"}, {"moment": "decode"}])
def test_a_model_that_computes_nan_answers_nothing(changes: dict[str, str], llama_folder: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {**config.get("rope_parameters", {}), "rope_theta": -10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    budget = {"budget": "100"} if changes else {}
    cells = run(tmp_path / "run", str(folder), "streaming_llm", length=400, **changes, **budget)
    assert len(cells) >= 2 and "full" in set(cells.policy)
    assert (cells.status == "error").all()
    assert cells.error.str.contains("logits are not finite").all(), list(cells.error)


def test_a_cell_that_computes_nan_fails_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from kvbench.parts import FunctionScore, TopK, Uniform\n"
        "from kvbench.plugin import Merger, Policy\n"
        "@dataclass(frozen=True)\n"
        "class Nan(Merger):\n"
        "    def merge(self, v, keep, state):\n"
        "        return v.key, v.value * float('nan')\n"
        "def noise(v):\n"
        "    return v.noise()\n"
        "bad = Policy('bad', FunctionScore.of(noise), Uniform(), TopK(), merge=Nan())\n"
    )
    alone = run(tmp_path / "alone", "reference", "snapkv:window=8")
    cells = run(tmp_path / "run", "reference", f"{file}:bad,snapkv:window=8")
    failed = cells[cells.status != "ok"]
    assert set(failed.policy) == {f"{file}:bad"}
    assert failed.error.str.contains("logits are not finite").all()
    good = cells[cells.status == "ok"]
    assert dict(zip(good.policy, good.score, strict=True)) == dict(zip(alone.policy, alone.score, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_value_is_enough_and_masked_tokens_are_none(value: float) -> None:
    logits = torch.zeros(4, 9)
    logits[0, 3], logits[1, 4], logits[2, 5] = 1.0, value, -torch.inf
    logits[3] = -torch.inf
    assert choose(logits, [None] * 4, [0] * 4) == [3, -1, 0, -1]


def test_given_text_that_cannot_be_measured_fails() -> None:
    row = DecodeRow(2, Stop(Words(), [], []), given=(1, 2))
    row.measure(torch.full((2, 5), torch.nan))
    assert (row.reason, row.error) == ("error", NOT_FINITE)
