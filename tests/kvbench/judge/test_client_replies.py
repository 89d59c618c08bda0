"""Replies of a judge that have the wrong shape, or no end."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import UserError
from kvbench.judge import client

from .asking import error, make
from .server import Reply, Server


def _choice(**message: Any) -> bytes:
    return json.dumps({"choices": [{"message": message}]}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"null",
        b"[]",
        b"3",
        b'"yes"',
        b'{"choices": 5}',
        b'{"choices": "yes"}',
        b'{"choices": {"0": 1}}',
        b'{"choices": [[]]}',
        b'{"choices": [{"message": ["yes"]}]}',
        _choice(content=["yes"]),
        _choice(content={"text": "yes"}),
        _choice(content=1),
        _choice(content=True),
        b"[" * 100_000,
        b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"choices": ' + b"9" * 5000 + b"}",
        b"\xff\xfe",
    ],
)
@pytest.mark.parametrize("key", ["sk-secret-0123456789", ""])
def test_a_reply_of_the_wrong_shape_is_one_line(server: Server, tmp_path: Path, body: bytes, key: str) -> None:
    server.replies(Reply(raw=body))
    assert "does not answer with a chat completion" in error(make(server, tmp_path, key=key))


@pytest.mark.parametrize("body", [{"param": ["max_tokens"]}, {"param": {"a": 1}, "message": [1]}, ["no"], 3, None])
def test_an_error_of_the_wrong_shape_is_one_line(server: Server, tmp_path: Path, body: Any) -> None:
    server.replies(Reply(status=400, error=body))
    assert "answers 400" in error(make(server, tmp_path))


def test_a_reply_has_a_limit_of_bytes(server: Server, tmp_path: Path) -> None:
    server.replies(Reply(text="yes " * (2 << 20)))
    assert f"cannot read the reply of the judge at {server.host}: it is longer than 4 MB" in error(
        make(server, tmp_path)
    )


def test_a_reply_is_not_unpacked(server: Server, tmp_path: Path) -> None:
    packed = gzip.compress(Reply().body() + b" " * (16 << 20))
    server.replies(Reply(raw=packed, headers={"Content-Encoding": "gzip"}))
    assert "does not answer with a chat completion" in error(make(server, tmp_path))
    assert server.headers[0]["accept-encoding"] == "identity"


@contextmanager
def _dripping(head: bytes) -> Iterator[str]:
    """A server that sends a beginning at once, and then a byte every 20 ms without end."""
    stopped = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(65536)
                connection.sendall(head)
                while not stopped.wait(0.02):
                    connection.sendall(b"a")
            except OSError:
                pass

    def serve() -> None:
        while not stopped.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        stopped.set()


_BODY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
_HEADERS = b"HTTP/1.1 200 OK\r\nX: "


@pytest.mark.parametrize(
    ("head", "says"),
    [(_BODY, "it takes longer than 0.3 s"), (_HEADERS, "never completes its reply")],
    ids=["body", "headers"],
)
@pytest.mark.parametrize("ask", [lambda judge: judge.check(), error], ids=["check", "judge"])
def test_a_reply_has_a_limit_of_time(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    head: bytes,
    says: str,
    ask: Callable[[client.EndpointJudge], str | None],
) -> None:
    monkeypatch.setattr(client, "RETRIES", 0)
    monkeypatch.setattr(client, "_WAIT_S", 0.2)
    monkeypatch.setattr(client, "_PROGRESS_S", 0.1)
    begin = time.monotonic()
    with _dripping(head) as url:
        judge = make(server, tmp_path, url=url, timeout=0.3)
        try:
            text = str(ask(judge))
        except UserError as refused:
            text = str(refused)
    assert says in text
    assert time.monotonic() - begin < 30
