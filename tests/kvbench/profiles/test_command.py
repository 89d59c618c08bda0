"""`kvbench profile heads` from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kvbench
from kvbench import cli
from kvbench.errors import UserError
from kvbench.profiles import files
from kvbench.profiles.command import describe, normalised, profile_heads
from kvbench.profiles.measure import Measured
from kvbench.progress import Lines, Silent
from kvbench.runs import planning


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def small(llama_folder: str) -> list[str]:
    return ["profile", "heads", "--model", llama_folder, "--length", "280", "--no-chat-template"]


def test_a_profile_is_written_where_policies_look(
    small: list[str], llama_folder: str, cache: Path
) -> None:
    done = CliRunner().invoke(cli.app.app, [*small, "--samples", "2", "--seed", "5"])
    assert done.exit_code == 0, done.output
    path = files.user_path(llama_folder, "reason")
    assert path.parent == cache / "profiles"
    assert f"wrote {path}" in done.stdout
    assert "2 layers by 2 KV heads" in done.stdout
    content = json.loads(path.read_text())
    assert content | {"scores": 0, "answered": 0} == {
        "model": llama_folder,
        "revision": planning.model_digest(llama_folder),
        "kind": "reason",
        "layers": 2,
        "kv_heads": 2,
        "query_heads": 4,
        "scores": 0,
        "task": "niah_depth",
        "lengths": [280],
        "samples": 2,
        "seed": 5,
        "answered": 0,
        "kvbench": kvbench.__version__,
    }
    assert sum(map(sum, content["scores"])) == pytest.approx(1, abs=1e-6)
    # It is the one that a policy finds, and its digest joins the hash of a cell.
    found = files.load(llama_folder, "reason", None, 2, 2)
    chosen = kvbench.policy("headkv:window=4")
    assert found.samples == 2
    assert chosen.allocate.fingerprint(llama_folder) == files.fingerprint(
        llama_folder, "reason", None
    )


def test_the_same_command_writes_the_same_file(small: list[str], tmp_path: Path) -> None:
    texts = []
    for name in ("a.json", "b.json"):
        path = tmp_path / name
        done = CliRunner().invoke(cli.app.app, [*small, "--samples", "1", "--out", str(path)])
        assert done.exit_code == 0, done.output
        assert f"profile={path}" in done.stdout
        texts.append(path.read_text())
    assert texts[0] == texts[1]


def test_the_scores_are_those_of_the_query_heads_of_each_group() -> None:
    scores = torch.tensor([[1.0, 2.0, 0.0, 1.0], [0.0, 0.0, 3.0, 1.0]], dtype=torch.float64)
    found = Measured({"reason": scores, "copy": scores * 0}, 0.25)
    assert normalised(found, "reason", 2) == ((0.375, 0.125), (0.0, 0.5))
    assert normalised(found, "reason", 4)[1] == (0.0, 0.0, 0.375, 0.125)
    with pytest.raises(UserError, match=r"no head .* copy profile .*25%.*--kind reason") as error:
        normalised(found, "copy", 2)
    assert "\n" not in str(error.value)


def test_the_summary_names_the_largest_heads_and_warns_of_a_model_that_fails() -> None:
    made = files.HeadProfile("m", "", "reason", 2, 2, 4, ((0.1, 0.6), (0.1, 0.2)), answered=0.2)
    text = describe(made)
    assert "half of it lies in 1 of the 4 heads (layer 0 head 1 60.0%, layer 1 head 1 20" in text
    assert "answered 20% of the samples rightly, which is little" in text


def test_progress_is_told_of_every_sample(llama_folder: str) -> None:
    lines: list[str] = []
    given = {"lengths": "280", "samples": 3, "chat_template": False}
    profile_heads(llama_folder, "reason", given, None, Lines(lines.append))
    assert any("3/3" in line for line in lines)


def test_the_users_profile_of_the_reference_model_is_not_read_in_silence() -> None:
    given = {"lengths": "128", "samples": 1}
    lines = profile_heads("reference", "reason", given, None, Silent())
    assert "the shipped profile goes before it" in lines[-1]


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
        (["--task", "vt", "--model", "reference", "--length", "256", "--samples", "1"], "answers"),
        (["--task", "niah_deepth"], "niah_depth"),
        (["--out", "."], "is a folder"),
        (["--out", "/dev/null/p.json"], "cannot write /dev/null/p.json"),
        (["--kind", "copy", "--samples", "1"], "no head of the model attends to a needle"),
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


def test_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["profile", "heads", "--help"]) == 0
    assert "--kind" in capsys.readouterr().out
