"""A hub of our own: what the Hugging Face clients ask of an endpoint, over HTTP on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Datasets as folders below `root`.

    Attributes:
        root: Holds `organisation/name/...`.
        home: The clients' caches.
        commit: The commit of every branch.
        gated: Datasets whose files are refused.
        stalled: Files whose second half is not sent until `released` is set.
        requests: Method and path of every request.
    """

    root: Path
    home: Path
    url: str = ""
    commit: str = SHA
    gated: set[str] = field(default_factory=set)
    stalled: set[str] = field(default_factory=set)
    released: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)

    def add(self, dataset: str, file: str, content: bytes) -> None:
        path = self.root / dataset / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        own = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        return {
            **own,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "KVBENCH_CACHE": str(cache),
            "NO_PROXY": "127.0.0.1",
            **more,
        }

    def python(self, code: str, cache: Path, **more: str) -> subprocess.CompletedProcess[str]:
        """Run code in a process that takes this for the hub, and wait for it."""
        process = self.start(code, cache, **more)
        out, error = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    def start(self, code: str, cache: Path, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env=self.environment(cache, **more),
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kvbench(self, *arguments: str, cache: Path, **more: str) -> subprocess.CompletedProcess[str]:
        return self.python(command(*arguments), cache, **more)


def command(*arguments: str) -> str:
    """The code that runs `kvbench` with arguments."""
    return f"import sys; from kvbench import cli; sys.exit(cli.call({list(arguments)!r}))"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    own = Hub(tmp_path / "root", tmp_path / "home")
    own.root.mkdir()
    own.home.mkdir()

    class Handler(_Handler):
        hub = own

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield own
    own.released.set()
    server.shutdown()
    server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts == [""]:
            self.answer(b"a hub")
        elif parts[:2] == ["api", "datasets"]:
            self.describe("/".join(parts[2:4]), parts[4:])
        elif parts[0] == "datasets" and parts[3:4] == ["resolve"]:
            self.give("/".join(parts[1:3]), parts[4], "/".join(parts[5:]))
        else:
            self.answer(b"", 404)

    def do_POST(self) -> None:
        """Create a dataset, or take the files of a commit; only of a client with a token."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if not self.headers.get("Authorization", "").startswith("Bearer "):
            self.answer(b"{}", 401)
        elif parts == ["api", "repos", "create"]:
            wanted = json.loads(body)
            dataset = f"{wanted['organization']}/{wanted['name']}"
            (self.hub.root / dataset).mkdir(parents=True, exist_ok=True)
            self.answer(json.dumps({"url": f"{self.hub.url}/datasets/{dataset}"}).encode())
        elif (dataset := "/".join(parts[2:4])) in self.hub.gated:
            self.answer(b"{}", 403, X_Error_Message="You may not write here")
        elif parts[4] == "preupload":
            files = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            self.answer(json.dumps({"files": files}).encode())
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.hub.add(dataset, line["value"]["path"], base64.b64decode(line["value"]["content"]))
            url = f"{self.hub.url}/datasets/{dataset}/commit/{self.hub.commit}"
            commit = {"commitOid": self.hub.commit, "commitUrl": url, "success": True}
            self.answer(json.dumps(commit).encode())

    def describe(self, dataset: str, rest: list[str]) -> None:
        folder = self.hub.root / dataset
        if not folder.is_dir():
            self.answer(b"{}", 401, X_Error_Code="RepoNotFound")
            return
        files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        siblings = [{"rfilename": f} for f in files]
        found: Any = {"id": dataset, "sha": self.hub.commit, "siblings": siblings}
        if rest[:1] == ["tree"]:
            below = "".join(f"{part}/" for part in rest[2:])
            tree: dict[str, Any] = {}
            for file in (f for f in files if f.startswith(below)):
                inner = file.removeprefix(below)
                if "/" in inner and "recursive=true" not in self.path:
                    path = below + inner.partition("/")[0]
                    tree[path] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": path}
                else:
                    size = (folder / file).stat().st_size
                    tree[file] = {"type": "file", "oid": "0" * 40, "size": size, "path": file}
            found = list(tree.values())
        self.answer(json.dumps(found).encode(), Content_Type="application/json")

    def give(self, dataset: str, revision: str, file: str) -> None:
        path = self.hub.root / dataset / file
        commit = revision if len(revision) == 40 else self.hub.commit
        if dataset in self.hub.gated:
            self.answer(b"", 401, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted")
        elif not path.is_file():
            self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        else:
            content = path.read_bytes()
            tag = hashlib.sha1(content).hexdigest()
            self.answer(content, stall=file, ETag=f'"{tag}"', X_Repo_Commit=commit)

    def answer(self, body: bytes, status: int = 200, stall: str = "", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD" and stall in self.hub.stalled:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.hub.released.wait()
        elif self.command != "HEAD":
            self.wfile.write(body)
