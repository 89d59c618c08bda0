"""Commands that run a model do so on a simulated GPU: none mixes what is on it and on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

import kvbench
from kvbench import cli
from kvbench.runs.integrity import recorded_names
from tests.devices import gpu
from tests.sweeps import slow, slow_but

CAUSES = "analyze causes --task niah_single_2 --length 256 --samples 6 --policy snapkv --budget 16 --dtype float32"
SMALL = "--task niah_single_2 --length 128 --samples 1 --dtype float32"
COMMANDS = [
    CAUSES,
    f"analyze perturbation --policy snapkv,criticalkv {SMALL}",
    f"analyze allocation --policy snapkv,adakv {SMALL}",
    f"analyze attention {SMALL}",
    f"analyze queries {SMALL}",
    f"analyze dilution --policy snapkv {SMALL}",
    f"analyze retention --policy trimkv {SMALL}",
    "analyze vision --model reference-vl --task shapes_vqa --length 256 --samples 1 --policy snapkv --dtype float32",
    "bench --policy snapkv,h2o --context 128 --generate 4 --moment context,decode,chunked:64 --dtype float32",
    "profile heads --length 256 --samples 8 --dtype float32",
    "profile qfilters --length 256 --samples 1 --dtype float32",
    "profile queries --length 256 --samples 1 --dtype float32",
    *(f"train gates --policy {policy} --steps 2 --length 128" for policy in ("trimkv", "dbtrimkv", "locret", "kvzap")),
    "train gates --policy lococo --steps 2 --length 256",
    "train gates --policy seerattn_r --steps 2 --length 256",
    "tune --task niah_single_2 --length 128 --trials 3 --samples 2 --dtype float32",
]


@pytest.mark.parametrize("command", slow_but(COMMANDS, CAUSES))
def test_a_command_runs_on_a_gpu(command: str, tmp_path: Path) -> None:
    with gpu():
        arguments = [*command.split(), "--device", "cuda", "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(cli.app.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_a_model_is_tested_on_a_gpu() -> None:
    with gpu():
        result = CliRunner().invoke(cli.app.app, ["list", "models", "--check", "reference", "--json"])
    record = json.loads(result.output)
    assert (result.exit_code, record["device"], record["dtype"], record["problem"]) == (0, "cuda", "bfloat16", "")


@pytest.mark.parametrize(
    ("model", "task", "length", "budget", "moment"),
    [
        slow("reference", "niah_single_2", 128, "0.2", "context,question"),
        slow("reference", "niah_single_2", 160, "24", "decode"),
        slow("reference", "niah_single_2", 256, "0.3", "chunked:64"),
        slow("reference-vl", "shapes_vqa", 256, "visual:8", "context"),
    ],
)
def test_every_policy_answers_on_a_gpu_as_on_a_cpu(
    model: str, task: str, length: int, budget: str, moment: str, tmp_path: Path
) -> None:
    grid = {
        "model": model,
        "task": task,
        "length": length,
        "samples": 1,
        "policy": "all",
        "budget": budget,
        "moment": moment,
        "dtype": "float32",
    }
    cells, rows = {}, {}
    for device in ("cpu", "cuda"):
        with gpu():
            run = kvbench.run({**grid, "device": device, "out": str(tmp_path / device)}, progress=False)
        cells[device] = run.cells[["policy", "budget", "moment", "status", "error"]]
        rows[device] = run.samples[["policy", "budget", "moment", "response", "held_entries"]]
        assert recorded_names(run.path, "gpu_code") == (["torch"] if device == "cuda" else [])
    assert cells["cpu"]["status"].eq("ok").sum() > 30
    pd.testing.assert_frame_equal(cells["cpu"], cells["cuda"])
    pd.testing.assert_frame_equal(rows["cpu"], rows["cuda"])
