"""`kvbench publish` and `kvbench leaderboard`."""

from __future__ import annotations

import re
import webbrowser
from pathlib import Path

import pytest

from kvbench.cli import call
from kvbench.leaderboard.publication import MANIFEST, load_publication

from ..leaderboard.conftest import save_run
from ..report.conftest import make_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_run(tmp_path / "run", make_run(["snapkv"], ("0.2",), ["vt"], samples=5))
    return Path("run")


def test_a_run_is_published_and_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["publish", str(run), "--hardware", "NVIDIA H200"]) == 0
    *remark, wrote, following = capsys.readouterr().out.splitlines()
    assert " ".join(remark).startswith("remark: The model reference is kvbench's own tiny model")
    assert re.fullmatch(r"wrote leaderboard/reference-vt-[0-9a-f]{8} \([\d.]+ KiB\)", wrote)
    (folder,) = Path("leaderboard").iterdir()
    assert load_publication(folder).hardware == "NVIDIA H200"
    assert following == "leaderboard: kvbench leaderboard leaderboard"
    assert call(following.split()[2:]) == 0
    assert capsys.readouterr().out == "leaderboard-site/index.html\n"
    assert "NVIDIA H200" in Path("leaderboard-site/index.html").read_text()
    assert call(["publish", str(folder)]) == 0  # nothing is published twice
    assert f"checked {folder}" in capsys.readouterr().out


def test_quiet_prints_only_paths(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["publish", str(run), "--out", "board", "--quiet"]) == 0
    (folder,) = Path("board").iterdir()
    assert capsys.readouterr() == (f"{folder}\n", "")
    assert call(["leaderboard", "board", "--out", "site", "--quiet"]) == 0
    assert capsys.readouterr() == ("site/index.html\n", "")


def test_the_site_can_be_opened(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: bool(opened.append(url)))
    assert call(["publish", str(run)]) == call(["leaderboard", "leaderboard", "--open"]) == 0
    assert opened == [Path("leaderboard-site/index.html").resolve().as_uri()]
    assert "cannot open a browser" in capsys.readouterr().err


def test_errors_are_one_line_and_write_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["publish", "nowhere"]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert call(["leaderboard", "run"]) == 2
    assert "run holds no published run; `kvbench publish RUN --out run` writes one" in capsys.readouterr().err
    assert call(["publish", str(run), "--quiet"]) == 0
    (folder,) = Path("leaderboard").iterdir()
    (folder / "grid.yaml").write_text("policies: [other]")
    capsys.readouterr()
    for command in (["leaderboard", "leaderboard"], ["publish", str(folder)], ["publish", str(run)]):
        assert call(command) == 2
        assert f"{folder}/grid.yaml differs from what was published" in capsys.readouterr().err
    assert not Path("leaderboard-site").exists()
    assert (folder / MANIFEST).is_file()
