"""`python -m scripts.ablations` from end to end on a tiny model with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.progress import Silent
from kvbench.training.folder import is_finished
from scripts.ablations import run
from scripts.ablations.__main__ import main
from scripts.ablations.recipe import read

pytest.importorskip("accelerate")

RECIPE = """\
model: {model}
data: {data}
seeds: [0, 1]
train: {{steps: 1, length: 64, capacity: 16, accumulate: 1, hidden_dim: 8, lr: 0.01}}
evaluate: [{{task: {data}, budget: "0.3", samples: 3}}]
tables:
  parts:
    title: Parts
    paper: none
    policy: trimkv
    variants: [{{name: all}}, {{name: no KL, train: {{kl: false}}, paper: worse}}]
"""


@pytest.fixture
def recipe(llama_folder: str, tmp_path: Path) -> Path:
    data = tmp_path / "mine.jsonl"
    rows = [{"context": f"{'word ' * (9 + n)} {n}.", "question": " Which?", "answers": [str(n)]} for n in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(model=llama_folder, data=data))
    return path


def _counted(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> list[str]:
    trained: list[str] = []

    def counted(training: Any, reporter: Any) -> Any:
        trained.append(training.out.name)
        if len(trained) == stop_at:
            raise KeyboardInterrupt
        return train(training, reporter)

    train = run.train
    monkeypatch.setattr(run, "train", counted)
    return trained


@pytest.mark.slow
def test_a_stopped_recipe_continues_and_writes_its_tables(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    command = ["--recipe", str(recipe), "--out", str(out)]
    with monkeypatch.context() as patch:
        first = _counted(patch, stop_at=3)
        assert main(command) == 130
    assert first[:2] == ["trimkv-seed-0", "trimkv-kl-false-seed-0"]
    assert "the same command continues" in capsys.readouterr().err
    assert main([*command, "--dry-run"]) == 0
    assert "4 trainings, 2 of them finished" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        rest = _counted(patch)
        assert main(command) == 0
    assert rest == ["trimkv-seed-1", "trimkv-kl-false-seed-1"]
    printed = capsys.readouterr().out
    text = (out / "parts.md").read_text()
    assert text in printed
    assert "| no KL | " in text
    assert "4 trainings on " in text
    assert text.count("\n| ") == 4  # head, ruler, 2 rows
    before = (out / "parts.md").read_bytes()
    with monkeypatch.context() as patch:
        again = _counted(patch)
        assert main([*command, "parts"]) == 0
    assert again == []
    assert (out / "parts.md").read_bytes() == before


@pytest.mark.slow
def test_gates_of_another_training_are_not_reused(recipe: Path, tmp_path: Path) -> None:
    training = run.trainings(read(recipe), read(recipe).pick(["parts"]), tmp_path)[0]

    def is_done() -> bool:
        return is_finished(training.out, training.identity())

    assert not is_done()
    run.train(training, Silent())
    assert is_done()
    training.settings["lr"] = 0.02
    assert not is_done()
    training.settings["lr"] = 0.01
    (training.out / "checkpoints").mkdir()
    assert not is_done()


def test_a_folder_that_a_spelling_cannot_hold_is_refused(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--recipe", str(recipe), "--out", f"{tmp_path}/a:b"]
    assert main(command) == 2
    assert "use a name without them" in capsys.readouterr().err
