"""Publications on a hub of our own, and every reason why an upload fails, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.leaderboard.publication import load_publication

from ..data.conftest import Hub, hub  # noqa: F401 - a fixture
from ..report.conftest import make_run
from .conftest import save_run

REPOSITORY = "someone/runs"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save_run(tmp_path / "run", make_run(["snapkv"], ("0.2",), ["vt"], samples=4))


def push(hub: Hub, run: Path, *arguments: str, repository: str = REPOSITORY, **environment: str) -> tuple[int, str]:  # noqa: F811
    """Publish and push in a process that knows only our hub; return its status and its output."""
    words = ("publish", str(run), "--out", str(hub.home / "board"), "--push", repository, *arguments)
    done = hub.kvbench(*words, cache=hub.home, **environment)
    return done.returncode, done.stdout + done.stderr


def test_a_run_is_uploaded_in_a_folder_of_its_name(hub: Hub, run: Path) -> None:  # noqa: F811
    status, output = push(hub, run, HF_TOKEN="hf_secret")
    assert status == 0, output
    (folder,) = (hub.home / "board").iterdir()
    uploaded = load_publication(hub.root / REPOSITORY / folder.name)
    assert uploaded.digest == load_publication(folder).digest
    assert f"uploaded to {hub.url}/datasets/{REPOSITORY}" in output
    assert "hf_secret" not in output
    (folder / "report").mkdir()
    (folder / "report" / "summary.md").write_text("of this machine")
    status, output = push(hub, folder, repository="someone/more", HF_TOKEN="hf_secret")  # what is published already
    assert status == 0, output
    again = load_publication(hub.root / "someone" / "more" / folder.name)
    assert again.digest == uploaded.digest and {path.name for path in again.folder.iterdir()} == set(again.files)


def test_what_can_only_fail_is_one_line_and_writes_nothing(hub: Hub, run: Path) -> None:  # noqa: F811
    cases = [
        ({}, REPOSITORY, "needs a token; log in with `hf auth login` or set HF_TOKEN"),
        ({"HF_HUB_OFFLINE": "1"}, REPOSITORY, "not contacted because HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:1", "HF_TOKEN": "x"}, REPOSITORY, "cannot be reached"),
        ({"HF_TOKEN": "x"}, "a//b", "Repo id must be"),
    ]
    for environment, repository, message in cases:
        status, output = push(hub, run, "--quiet", repository=repository, **environment)
        assert (status, len(output.splitlines())) == (2, 1), output
        assert message in output
        assert not (hub.home / "board").exists()


def test_a_refused_upload_is_one_line_and_leaves_the_folder(hub: Hub, run: Path) -> None:  # noqa: F811
    hub.gated.add(REPOSITORY)
    status, output = push(hub, run, "--quiet", HF_TOKEN="x")
    assert (status, len(output.splitlines())) == (2, 1), output
    assert "the upload failed" in output and "run the same command again" in output
    assert len([*(hub.home / "board").iterdir()]) == 1
