from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from .server import RETRY_SOON, Server


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet per reply: two would wait 40 ms for a delayed acknowledgement

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                count = len(state.bodies)
                state.bodies.append(body)
                state.headers.append({k.lower(): v for k, v in self.headers.items()})
                state.paths.append(self.path)
                state.at_once += 1
                state.most_at_once = max(state.most_at_once, state.at_once)
            reply = state.answer(body, count)
            time.sleep(reply.delay)
            data = reply.body()
            with state.lock:
                state.at_once -= 1
            try:
                self.send_response(reply.status)
                self.send_header("Content-Type", "application/json")
                for name, value in {**RETRY_SOON, **reply.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # the client did not wait
                pass

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    yield state
    http.shutdown()
    thread.join()
    http.server_close()
