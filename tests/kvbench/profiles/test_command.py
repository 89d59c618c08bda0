"""`kvbench profile heads` from end to end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvbench
from kvbench import cli, reference
from kvbench.named import model_digest
from kvbench.profiles import files
from kvbench.profiles.command import describe, profile_heads
from kvbench.profiles.files import PROFILES
from kvbench.progress import LineProgress, Silent


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The reference model under another name, so that nothing ships for it."""
    path = tmp_path_factory.mktemp("models") / "mine"
    shutil.copytree(reference.path(), path)
    return str(path)


@pytest.fixture(scope="module")
def small(folder: str) -> list[str]:
    return ["profile", "heads", "--model", folder, "--length", "200"]


def test_a_profile_is_written_where_policies_look(small: list[str], folder: str, cache: Path) -> None:
    done = CliRunner().invoke(cli.app.app, [*small, "--samples", "11", "--seed", "5"])
    assert done.exit_code == 0, done.output
    path = PROFILES.user_path(folder, "ablation")
    assert path.parent == cache / "profiles"
    assert f"wrote {path}" in done.stdout
    assert "4 layers by 2 KV heads" in done.stdout
    content = json.loads(path.read_text())
    varies = {"scores": 0, "answered": 0, "loss_top": 0, "loss_others": 0}
    assert content | varies == varies | {
        "model": folder,
        "revision": model_digest(folder),
        "kind": "ablation",
        "layers": 4,
        "kv_heads": 2,
        "query_heads": 4,
        "task": "facts",
        "lengths": [200],
        "samples": 11,
        "seed": 5,
        "kvbench": kvbench.__version__,
    }
    assert sum(map(sum, content["scores"])) == pytest.approx(1, abs=1e-6)
    assert content["loss_top"] > content["loss_others"]
    # It is the one that a policy finds, and its digest joins the hash of a cell.
    found = files.load(folder, None, None, 4, 2)
    chosen = kvbench.policy("headkv:window=4")
    assert found.samples == 11
    assert chosen.allocate.fingerprint(folder) == files.fingerprint(folder, None, None)


@pytest.mark.slow
def test_the_same_command_writes_the_same_file(small: list[str], tmp_path: Path) -> None:
    texts = []
    for name in ("a.json", "b.json"):
        path = tmp_path / name
        done = CliRunner().invoke(cli.app.app, [*small, "--samples", "11", "--out", str(path)])
        assert done.exit_code == 0, done.output
        assert f"profile={path}" in done.stdout
        texts.append(path.read_text())
    assert texts[0] == texts[1]


def test_the_summary_names_the_largest_heads_and_what_they_are_worth() -> None:
    table = ((0.1, 0.6), (0.1, 0.2))
    made = files.HeadProfile("m", "", "reason", 2, 2, 4, table, answered=0.2, loss_top=2.5, loss_others=0.01)
    text = describe(made)
    assert "half of it lies in 1 of the 4 heads (layer 0 head 1 60.0%, layer 1 head 1 20" in text
    assert "lose 2.5 nats per token without that half, and 0.01 without as many other" in text
    assert "answered 20% of the samples correctly" in text
    assert "nats" not in describe(files.HeadProfile("m", "", "copy", 2, 2, 4, table))


def test_progress_is_told_of_every_sample(folder: str) -> None:
    lines: list[str] = []
    profile_heads(folder, "ablation", {"length": "200", "samples": 11}, None, LineProgress(lines.append))
    assert any("answers: 11/11" in line for line in lines)
    assert any("ablated one by one: 11/11" in line for line in lines)


def test_the_users_profile_of_the_reference_model_is_not_read_in_silence() -> None:
    given = {"length": "200", "samples": 11}
    lines = profile_heads("reference", "ablation", given, None, Silent())
    assert "policies prefer the shipped profile" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kind", "copies"], "did you mean copy"),
        (["--samples", "0"], "samples"),
        (["--length", "1k"], "length"),
        (["--length", "99999999"], "do not fit into"),
        (["--device", "nowhere"], "device nowhere"),
        (["--dtype", "fp8"], "fp8"),
        (["--model", "./none"], "no such folder"),
        (["--task", "vt", "--samples", "1"], "answers"),
        (["--task", "niah_deepth"], "niah_depth"),
        (["--out", "."], "is a folder"),
        (["--out", "/dev/null/p.json"], "cannot write /dev/null/p.json"),
        (["--samples", "2"], "of 2 samples correctly, too few"),
        (["--kind", "reason", "--samples", "6", "--task", "niah_depth"], "the answers lose"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call([*small, *arguments]) == 2
    text = capsys.readouterr().err
    last = text.splitlines()[-1]
    assert last.startswith("kvbench: ")
    assert says in last
    assert "Traceback" not in text


def test_a_model_that_answers_nothing_has_no_profile(llama_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--length", "280", "--no-chat-template", "--samples", "3"]
    assert cli.call(["profile", "heads", "--model", llama_folder, *given]) == 2
    assert "answers 0 of 3 samples correctly, too few" in capsys.readouterr().err


def test_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["profile", "heads", "--help"]) == 0
    assert "ablation" in capsys.readouterr().out


def test_ctrl_c_says_what_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvbench.profiles.command.profile_heads", interrupted)
    assert cli.call(["profile", "heads"]) == 130
    assert "kvbench: stopped; the profile is written at the end" in capsys.readouterr().err
