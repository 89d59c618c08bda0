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
from kvbench.training.folder import claim, is_finished, latest_checkpoint

pytest.importorskip("accelerate")

SMALL = {"steps": 6, "length": 64, "capacity": 16, "accumulate": 2, "hidden_dim": 16, "lr": 1e-2}


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    lines = [{"context": f"{'word ' * (9 + n)} {n}.", "question": " Which?", "answers": [str(n)]} for n in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def _plan(model: str, rows: str, out: Path, policy: str = "trimkv", **changes: Any) -> Any:
    given = {**SMALL, **changes}
    if policy == "locret":
        del given["capacity"]
    if policy == "lococo":
        del given["hidden_dim"]
        given |= {"capacity": 8, "chunk": 9, "kernel_size": 3}
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


@pytest.mark.parametrize("policy", ["trimkv", "dbtrimkv", "locret", "lococo"])
def test_gates_log_and_picture_are_written(llama_folder: str, rows: str, tmp_path: Path, policy: str) -> None:
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
    names = {"locret": {"fit", "smooth"}, "lococo": {"ntp"}}
    assert names.get(policy, {"kl", "ntp", "capacity", "retained"}) < set(log[0])
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "checkpoints").exists()


@pytest.mark.slow
def test_a_killed_training_continues_to_the_same_weights(llama_folder: str, rows: str, tmp_path: Path) -> None:
    """Killed between two checkpoints; another kill left a torn checkpoint."""
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
    logs = [[json.loads(line) for line in (f / "training.jsonl").read_text().splitlines()] for f in (whole, broken)]
    for record in (*logs[0], *logs[1]):
        del record["seconds"]
    assert logs[0] == logs[1]


def test_a_finished_training_is_not_repeated(llama_folder: str, rows: str, tmp_path: Path) -> None:
    out = tmp_path / "gates"
    _train(llama_folder, rows, out)
    with pytest.raises(UserError, match=r"holds a training run with lr=0\.01 instead of 0\.02"):
        _train(llama_folder, rows, out, lr=0.02)
    before = load_file(out / "gates.safetensors")
    log = (out / "training.jsonl").read_bytes()
    made = (out / "gates.json").stat().st_mtime_ns
    (line,) = _train(llama_folder, rows, out)
    assert "already holds these gates; use --fresh" in line
    assert (out / "training.jsonl").read_bytes() == log
    assert (out / "gates.json").stat().st_mtime_ns == made
    _train(llama_folder, rows, out, fresh=True)
    assert (out / "gates.json").stat().st_mtime_ns > made
    assert all(torch.equal(x, before[k]) for k, x in load_file(out / "gates.safetensors").items())


def test_the_newest_whole_checkpoint_counts(tmp_path: Path) -> None:
    for n, whole in ((2, True), (10, True), (12, False)):
        folder = tmp_path / "checkpoints" / f"checkpoint-{n}"
        folder.mkdir(parents=True)
        if whole:
            (folder / "complete").touch()
    assert latest_checkpoint(tmp_path) == (tmp_path / "checkpoints" / "checkpoint-10", 10)
    assert not (tmp_path / "checkpoints" / "checkpoint-12").exists()


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
        ("--policy trimkv --length 9999", "has 4096 positions"),
        ("--policy trimkv --no-kl --no-ntp --no-capacity", "leaves no loss"),
        ("--policy trimkv --no-kl --reverse-kl", "contradict each other; use one of them"),
        ("--policy trimkv --steps 5 --tokens 5", "both set the length"),
        ("--policy trimkv --steps 0", "--steps 0 is too small; use 1 or more"),
        ("--policy trimkv --gate conv", "--gate conv is unknown; use mlp or linear"),
        ("--policy trimkv --schedule step", "use linear or cosine or constant"),
        ("--policy trimkv --lr 0", "use a number above 0"),
        ("--policy locret --no-kl", "--no-kl does not apply to locret"),
        ("--policy locret --capacity 5", "--capacity does not apply to locret"),
        (
            "--policy trimkv --chunk 9",
            "--chunk does not apply to trimkv; leave it out",
        ),
        ("--policy locret --mix 0.1", "--mix does not apply to locret"),
        ("--policy lococo --bias 2", "--bias does not apply to lococo; leave it out"),
        ("--policy lococo --no-kl", "--no-kl does not apply to lococo"),
        ("--policy lococo --kernel-size 4", "--kernel-size 4 is even; use an odd number"),
        ("--policy lococo --keep-rate 1", "leaves none of --capacity 512 to merge into"),
        ("--policy lococo --mix 2", "--mix 2.0 is invalid; use a number from 0 to 1"),
        ("--policy lococo --length 512", "must be more than --capacity 512, or nothing"),
        (
            "--policy seerattn_r --capacity 5",
            "--capacity does not apply to seerattn_r",
        ),
        (
            "--policy seerattn_r --no-kl",
            "--no-kl does not apply to seerattn_r; leave it out",
        ),
        ("--policy seerattn_r --length 100", "--length 100 holds no two blocks of 64 tokens"),
        ("--policy seerattn_r --block 0", "--block 0 is too small; use 1 or more"),
        ("--policy trimkv --block 16", "--block does not apply to trimkv"),
        ("--policy trimkv --data reference", "which .* does not have"),
        ("--policy trimkv --data nosuch.jsonl", "cannot read nosuch.jsonl"),
        ("--policy trimkv", "no recipe for trimkv gates .* name data, such as --data chats"),
        ("--policy trimkv --data nosuchtask", "unknown task 'nosuchtask'"),
        ("--policy trimkv --data no/such", "--data no/such cannot be loaded"),
    ],
)
def test_wrong_input_is_one_line(
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


def test_a_diverging_loss_ends_the_training(llama_folder: str, rows: str, tmp_path: Path) -> None:
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
    assert "250 steps of 1 x 4 sequences of up to 1000 tokens: up to 1000000 tokens" in text
    assert "KL + next token + 1 x capacity of 64 tokens" in text
    assert not out.exists()


def test_fresh_removes_gates_that_another_training_left(tmp_path: Path) -> None:
    """A kill right after --fresh must not make the earlier gates look like the new training's."""
    old, new = {"lr": 0.1}, {"lr": 0.2}
    claim(tmp_path, old, fresh=False)
    (tmp_path / "gates.json").write_text("{}")
    assert is_finished(tmp_path, old)
    claim(tmp_path, new, fresh=True)
    assert not is_finished(tmp_path, new)
