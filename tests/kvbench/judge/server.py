"""An OpenAI-compatible server on this machine that gives the answers of a test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvbench.judge.settings import JudgeSettings

SECRET = "sk-secret-0123456789"
RETRY_SOON = {"Retry-After-Ms": "1"}
"""A header of every reply: the client then retries at once and the tests do not wait."""


@dataclass
class Reply:
    """A reply of the server."""

    text: str | None = "yes"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    error: Any = None
    delay: float = 0.0
    finish: str = "stop"

    def body(self) -> bytes:
        if self.raw is not None:
            return self.raw
        if self.status != 200:
            return json.dumps({"error": self.error}).encode()
        message = {"role": "assistant", "content": self.text}
        return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": self.finish}]}).encode()


@dataclass
class Server:
    """The server: `answer(body, count)` replies to a request after `count` earlier ones."""

    url: str = ""
    answer: Callable[[dict[str, Any], int], Reply] = lambda body, count: Reply()
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def replies(self, *replies: Reply) -> None:
        """Give these replies in order, and repeat the last one."""
        self.answer = lambda body, count: replies[min(count, len(replies) - 1)]

    def settings(self, **changes: Any) -> JudgeSettings:
        usual: dict[str, Any] = {"url": self.url, "model": "judge-1", "key": SECRET, "timeout": 5}
        return JudgeSettings(**{**usual, **changes})

    @property
    def host(self) -> str:
        return self.url.split("/")[2]

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.bodies]
