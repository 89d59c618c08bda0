"""`kvbench train gates` from end to end on a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvbench.cli import call
from kvbench.errors import UserError
from kvbench.progress import Silent
from kvbench.training.command import plan, train
from kvbench.training.recipes import RECIPES
from kvbench.training.ship import destination
from kvbench.training.trainer import latest

pytest.importorskip("accelerate")

SMALL = {"steps": 6, "length": 64, "capacity": 16, "accumulate": 2, "hidden_dim": 16, "lr": 1e-2}


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    lines = [
        {"context": f"{'word ' * (9 + n)} {n}.", "question": " Which?", "answers": [str(n)]}
        for n in range(8)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def _plan(model: str, rows: str, out: Path, policy: str = "trimkv", **changes: Any) -> Any:
    given = {**SMALL, **changes}
    if policy == "locret":
        del given["capacity"]
    return plan(model, policy, rows, given, out=out, device="cpu")


def _train(*args: Any, fresh: bool = False, **kwargs: Any) -> list[str]:
    return train(_plan(*args, **kwargs), Silent(), fresh=fresh)


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": -1.0},
        {"schedule": "zigzag"},
        {"column": "missing"},
        {"data": "nowhere.jsonl"},
    ],
)
def test_a_start_that_fails_does_not_spoil_its_folder(
    llama_folder: str, rows: str, tmp_path: Path, bad: dict[str, Any]
) -> None:
    out = tmp_path / "gates"
    wrong = dict(bad)
    with pytest.raises(UserError):
        _train(llama_folder, wrong.pop("data", rows), out, **wrong)
    _train(llama_folder, rows, out)
    assert (out / "gates.json").is_file()
    assert len((out / "training.jsonl").read_text().splitlines()) == SMALL["steps"]


def test_a_training_that_ended_before_its_first_checkpoint_keeps_no_folder(
    llama_folder: str, rows: str, tmp_path: Path
) -> None:
    out = tmp_path / "gates"
    (out / "checkpoints" / "checkpoint-1").mkdir(parents=True)  # torn: it lacks the last file
    (out / "training.json").write_text('{"lr": 5}')
    _train(llama_folder, rows, out)
    assert json.loads((out / "training.json").read_text())["lr"] == SMALL["lr"]


@pytest.mark.parametrize("policy", ["trimkv", "dbtrimkv", "locret"])
def test_gates_log_and_picture_are_written(
    llama_folder: str, rows: str, tmp_path: Path, policy: str
) -> None:
    out = tmp_path / "gates"
    _train(llama_folder, rows, out, policy=policy)
    config = json.loads((out / "gates.json").read_text())
    assert config["kind"] == policy
    assert config["training"]["steps"] == 6
    assert config["base_model"] == llama_folder
    assert config["base_revision"]
    state = load_file(out / "gates.safetensors")
    assert all(bool(x.isfinite().all()) for x in state.values())
    assert not any("embed" in name for name in state)
    log = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [1, 2, 3, 4, 5, 6]
    names = {"fit", "smooth"} if policy == "locret" else {"kl", "ntp", "capacity", "retained"}
    assert names < set(log[0])
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "checkpoints").exists()


def test_a_killed_training_goes_on_to_the_same_weights(
    llama_folder: str, rows: str, tmp_path: Path
) -> None:
    """Killed between two checkpoints, and once more while one is written."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    _train(llama_folder, rows, whole, save_steps=2, steps=12)
    flags = "--steps 12 --length 64 --capacity 16 --accumulate 2 --hidden-dim 16 --lr 1e-2"
    command = [sys.executable, "-m", "kvbench", "train", "gates", "--policy", "trimkv"]
    command += ["--model", llama_folder, "--data", rows, "--out", str(broken), *flags.split()]
    command += ["--device", "cpu", "--save-steps", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        end = time.monotonic() + 120
        while not (broken / "checkpoints" / "checkpoint-4" / "complete").is_file():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (broken / "gates.safetensors").exists()
    torn = broken / "checkpoints" / "checkpoint-99"
    torn.mkdir()
    (torn / "gates.safetensors").write_bytes(b"torn")
    assert call(command[3:]) == 0
    one, other = (load_file(f / "gates.safetensors") for f in (whole, broken))
    assert all(torch.equal(one[name], other[name]) for name in one)
    logs = [
        [json.loads(line) for line in (f / "training.jsonl").read_text().splitlines()]
        for f in (whole, broken)
    ]
    for record in (*logs[0], *logs[1]):
        del record["seconds"]
    assert logs[0] == logs[1]


def test_a_done_training_is_not_done_again(llama_folder: str, rows: str, tmp_path: Path) -> None:
    out = tmp_path / "gates"
    _train(llama_folder, rows, out)
    with pytest.raises(UserError, match=r"holds a training with lr=0\.01 and not 0\.02"):
        _train(llama_folder, rows, out, lr=0.02)
    before = load_file(out / "gates.safetensors")
    _train(llama_folder, rows, out)
    _train(llama_folder, rows, out, fresh=True)
    assert all(torch.equal(x, before[k]) for k, x in load_file(out / "gates.safetensors").items())


def test_the_newest_whole_checkpoint_counts(tmp_path: Path) -> None:
    for n, whole in ((2, True), (10, True), (12, False)):
        folder = tmp_path / f"checkpoint-{n}"
        folder.mkdir()
        if whole:
            (folder / "complete").touch()
    assert latest(tmp_path) == tmp_path / "checkpoint-10"
    assert not (tmp_path / "checkpoint-12").exists()


def test_no_checkpoint_holds_weights_of_the_model(
    llama_folder: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gates"
    monkeypatch.setattr("kvbench.training.command.shutil.rmtree", lambda *a, **k: None)
    _train(llama_folder, rows, out, steps=2, save_steps=2)
    folder = out / "checkpoints" / "checkpoint-2"
    names = {path.name for path in folder.iterdir()}
    assert "training_args.bin" not in names  # a pickle
    assert not names & {"model.safetensors", "pytorch_model.bin"}
    saved = load_file(folder / "gates.safetensors")
    assert all(name.startswith("layers.") for name in saved)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--policy trimkw", "unknown trainer 'trimkw'; did you mean trimkv"),
        ("--policy trimkv --length 64 --capacity 64", "is not below --length 64"),
        ("--policy trimkv --length 9999", "takes 4096"),
        ("--policy trimkv --no-kl --no-ntp --no-capacity", "leaves nothing to train with"),
        ("--policy trimkv --no-kl --reverse-kl", "one of them would be right"),
        ("--policy trimkv --steps 5 --tokens 5", "say the same"),
        ("--policy trimkv --steps 0", "1 or more would be right"),
        ("--policy trimkv --gate conv", "mlp, linear would be right"),
        ("--policy trimkv --schedule step", "linear, cosine, constant would be right"),
        ("--policy trimkv --lr 0", "more than 0"),
        ("--policy locret --no-kl", "--no-kl is not for locret"),
        ("--policy locret --capacity 5", "--capacity is not for locret"),
        ("--policy trimkv --data reference", "which .* does not know"),
        ("--policy trimkv --data nosuch.jsonl", "cannot read nosuch.jsonl"),
        ("--policy trimkv --data nosuchtask", "unknown task 'nosuchtask'"),
        ("--policy trimkv --data no/such", "--data no/such cannot be loaded"),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    llama_folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    message: str,
) -> None:
    command = ["train", "gates", "--model", llama_folder, "--out", str(tmp_path / "o")]
    assert call([*command, "--device", "cpu", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_a_diverging_loss_is_said(llama_folder: str, rows: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss is (nan|inf) at step"):
        _train(llama_folder, rows, tmp_path / "gates", lr=1e30, steps=4)


def test_locret_needs_answers(llama_folder: str, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": "some words " * 20}) + "\n")
    with pytest.raises(UserError, match="learns from answers"):
        _train(llama_folder, str(path), tmp_path / "gates", policy="locret")


def test_a_dry_run_writes_nothing(
    llama_folder: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gates"
    command = f"train gates --policy dbtrimkv --model {llama_folder} --data {rows} --out {out}"
    assert call([*command.split(), "--dry-run", "--tokens", "1000000", "--length", "1000"]) == 0
    text = capsys.readouterr().out
    assert "250 steps of 1 x 4 sequences" in text
    assert "KL + next token + 1 x capacity of 64 tokens" in text
    assert not out.exists()


@pytest.mark.parametrize("policy", sorted(RECIPES))
def test_the_gates_that_ship_were_trained_by_their_recipe(policy: str) -> None:
    folder = destination(policy)
    config = json.loads((folder / "gates.json").read_text())
    given = config["training"]
    assert {key: given[key] for key in RECIPES[policy]} == RECIPES[policy]
    log = (folder / "training.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["step"] == RECIPES[policy]["steps"]
    assert (folder / "README.md").is_file()
