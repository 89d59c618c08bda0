"""Real Ray workers on this machine."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.faults import workers_of
from kvbench import native
from kvbench.engine.kernels import launch
from kvbench.errors import UserError
from kvbench.progress import Silent
from kvbench.runs.executors import ray
from kvbench.runs.runner import execute
from tests.kvbench.runs.small import small_grid, stored


class Listening(Silent):
    """Keeps the messages of a run."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


def test_workers_compute_with_the_code_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch in (native.SWITCH, launch.SWITCH):
        monkeypatch.setenv(switch, "0")
    hired: dict[str, Any] = {}

    def remote(**options: Any) -> Any:
        hired.update(options)
        return lambda worker: worker

    missing: Any = None
    needs: Any = SimpleNamespace(cpus=1, gpus=0)
    ray._Crew(SimpleNamespace(remote=remote), missing, needs, missing, missing, missing, {})
    variables = hired["runtime_env"]["env_vars"]
    assert variables["KVBENCH_NATIVE"] == variables["KVBENCH_TRITON"] == "0"


def test_rays_error_says_whether_a_worker_ran_and_why_it_died() -> None:
    exceptions = pytest.importorskip("ray.exceptions", reason="ray is not installed: pip install 'kvbench[ray]'")
    context = exceptions.ActorDiedErrorContext

    def error(**facts: Any) -> Exception:
        died: Exception = exceptions.ActorDiedError(context(class_name="RemoteWorker", actor_id=b"0" * 16, **facts))
        return died

    never_ran = error(never_started=True, error_message="The actor died because its node has died. Node Id: 0\n\tgone")
    assert all(text in str(never_ran) for text in ray._NEVER_RAN)
    assert ray._reason(never_ran) == "The actor died because its node has died"
    killed = error(never_started=False, error_message="The actor is dead because its worker process has died. Exit: 1")
    assert not any(text in str(killed) for text in ray._NEVER_RAN)
    assert ray._reason(killed) == "The actor is dead because its worker process has died"
    assert ray._reason(exceptions.ActorUnavailableError("Socket closed", None)).endswith(
        "is unavailable: Socket closed"
    )


@pytest.mark.slow
def test_a_run_on_ray_is_that_of_one_process(tmp_path: Path, undisturbed: Any) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'kvbench[ray]'")
    listening = Listening()
    execute(small_grid(tmp_path / "run", executor="ray", workers=1), listening)
    assert any("Ray on this machine: 1 worker" in text for text in listening.said)
    assert stored(tmp_path / "run") == stored(undisturbed.path)


@pytest.mark.faults
def test_a_killed_worker_changes_no_byte(tmp_path: Path, undisturbed: Any) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'kvbench[ray]'")

    class Killer(Listening):
        killed = 0

        def advance(self, n: int = 1, seconds_left: float | None = None) -> None:
            if not self.killed:
                (self.killed,) = workers_of(os.getpid())
                os.kill(self.killed, signal.SIGKILL)

    # The only worker: at its first response there is a task left to do, so its loss is always seen.
    killer = Killer()
    execute(small_grid(tmp_path / "run", executor="ray", workers=1), killer)
    assert killer.killed and any("a Ray worker was lost" in text for text in killer.said)
    assert stored(tmp_path / "run") == stored(undisturbed.path)
    lines = (tmp_path / "run" / "responses.jsonl").read_bytes().splitlines()
    assert len(lines) == len(stored(undisturbed.path))


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'kvbench\[ray\]'"):
        execute(small_grid(tmp_path, executor="ray"))


def test_an_address_where_nobody_listens_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'kvbench[ray]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UserError, match=rf"cannot reach Ray at {address}: .*refused; start it with"):
        execute(small_grid(tmp_path, executor="ray", ray_address=address))


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_an_address_where_something_else_listens_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reply: bytes
) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'kvbench[ray]'")
    monkeypatch.setattr("kvbench.runs.executors.ray._ANSWER_S", 0.5)

    def answer() -> None:
        connection, _ = listener.accept()
        connections.append(connection)
        connection.sendall(reply)

    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UserError, match=f"cannot reach Ray at {address}: what listens there is not Ray; start"):
            execute(small_grid(tmp_path, executor="ray", ray_address=address))
    for connection in connections:
        connection.close()


def test_a_port_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'kvbench[ray]'")
    with pytest.raises(UserError, match="a port is a number from 1 to 65535"):
        execute(small_grid(tmp_path, executor="ray", ray_address=f"127.0.0.1:{'9' * 5000}"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"executor": "rey"}, "unknown executor 'rey'; did you mean ray"),
        ({"workers": 2}, "workers needs the executor ray; add --executor ray"),
        ({"executor": "ray", "workers": 0}, "workers must be an integer from 1"),
        ({"executor": "ray", "device": "cuda:1"}, "cuda:1 names one GPU.*use cuda"),
        ({"executor": "ray", "gpus_per_cell": 1.5}, "fraction of a GPU or a whole number"),
        ({"executor": "ray", "gpus_per_cell": 0}, "fraction of a GPU or a whole number"),
    ],
)
def test_wrong_options_are_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small_grid(tmp_path, **changes)


def test_where_a_run_is_executed_is_no_part_of_it(tmp_path: Path) -> None:
    digest = small_grid(tmp_path).digest
    elsewhere = {"ray_address": "10.0.0.1:6379", "gpus_per_cell": 2, "workers": 8}
    assert small_grid(tmp_path, executor="ray", **elsewhere).digest == digest
