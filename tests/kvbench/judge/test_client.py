"""The judge behind a URL, against a server on this machine."""

from __future__ import annotations

import email.utils
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import UserError
from kvbench.judge import client

from .asking import asks, error, make, response_in, scores
from .server import SECRET, Reply, Server

ATTEMPTS = 1 + client.RETRIES


# --- requests -------------------------------------------------------------------------------------


def test_the_request(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_ADMIN_KEY"):
        monkeypatch.setenv(name, "not-for-the-judge")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: not-for-the-judge")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert scores(make(server, tmp_path).judge(asks("Rome"))) == [1]
    [body] = server.bodies
    assert len(body.pop("messages")) == 1
    assert body == {"model": "judge-1", "max_tokens": 10, "temperature": 0}
    assert server.paths == ["/v1/chat/completions"]
    assert server.headers[0]["authorization"] == f"Bearer {SECRET}"
    make(server, tmp_path, key="", query="version=2&x=a%20b").judge(asks("Oslo"))
    assert "authorization" not in server.headers[1]
    assert server.paths[1] in (
        "/v1/chat/completions?version=2&x=a%20b",
        "/v1/chat/completions?version=2&x=a+b",
    )
    assert "not-for-the-judge" not in str(server.headers)


def test_no_proxy_for_this_machine(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert scores(make(server, tmp_path).judge(asks("Rome"))) == [1]


def test_a_lone_surrogate_is_replaced(server: Server, tmp_path: Path) -> None:
    assert scores(make(server, tmp_path).judge(asks("half \ud83d of \N{SNOWMAN}"))) == [1]
    assert response_in(server.bodies[0]) == "half ? of \N{SNOWMAN}"


def test_models_that_think_get_another_limit_and_no_temperature(server: Server, tmp_path: Path) -> None:
    def thinking_model(body: dict[str, Any], count: int) -> Reply:
        for name in ("max_tokens", "temperature"):
            if name in body:
                return Reply(status=400, error={"message": "unsupported", "param": name})
        return Reply()

    server.answer = thinking_model
    said: list[str] = []
    judge = make(server, tmp_path, said, jobs=1)
    assert scores(judge.judge(asks("Rome", "Oslo"))) == [1, 1]
    assert server.bodies[-1]["max_completion_tokens"] == 2048
    assert not {"max_tokens", "temperature"} & set(server.bodies[-1])
    assert len(server.bodies) == 4, "the second prompt is sent as the first was accepted"
    assert said == [
        "judge-1 does not accept max_tokens: asking without it",
        "judge-1 does not accept temperature: asking without it",
    ]


def test_jobs_limits_the_concurrent_requests(server: Server, tmp_path: Path) -> None:
    server.answer = lambda body, count: Reply(delay=0.1)
    start = time.monotonic()
    make(server, tmp_path, jobs=4).judge(asks(*(f"Rome {i}" for i in range(12))))
    assert server.most_at_once == 4
    assert time.monotonic() - start < 12 * 0.1
    assert len(server.bodies) == 12


def test_without_openai_one_line_says_what_to_install(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UserError, match=r"needs the openai package; run: pip install 'kvbench\["):
        make(server, tmp_path)


# --- retries and refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [
        Reply(status=429, error={"message": "slow down"}),
        Reply(status=503, raw=b"<html>busy</html>"),
    ],
)
def test_temporary_errors_are_retried(server: Server, tmp_path: Path, trouble: Reply) -> None:
    server.replies(trouble, trouble, Reply("no"))
    assert scores(make(server, tmp_path).judge(asks("Rome"))) == [0]
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    "raw",
    [b"{not json", b'{"choices": []}', b"[]", b'{"choices": [{"message": {"content": [1]}}]}'],
)
def test_what_is_not_a_chat_completion_is_asked_once_more(server: Server, tmp_path: Path, raw: bytes) -> None:
    server.replies(Reply(raw=raw), Reply("no"))
    assert scores(make(server, tmp_path / "a").judge(asks("Rome"))) == [0]
    server.replies(Reply(raw=raw))
    text = error(make(server, tmp_path / "b"))
    assert f"{server.host} does not answer with a chat completion; check KVBENCH_JUDGE_URL" in text
    assert len(server.bodies) == 4


def test_a_lasting_error_is_named(server: Server, tmp_path: Path) -> None:
    server.replies(Reply(status=500, error={"message": f"broken: {SECRET}\nsee\x1b[31m log"}))
    assert error(make(server, tmp_path)) == (
        f"the judge at {server.host} answers 500: broken: *** see [31m log; "
        "check KVBENCH_JUDGE_URL, or repeat the command later to continue"
    )
    assert len(server.bodies) == ATTEMPTS


def test_retry_after_is_respected_up_to_two_minutes(server: Server, tmp_path: Path) -> None:
    soon = {"Retry-After-Ms": "", "Retry-After": "0.3"}
    server.replies(Reply(status=429, headers=soon), Reply())
    start = time.monotonic()
    assert scores(make(server, tmp_path).judge(asks("Rome"))) == [1]
    assert time.monotonic() - start > 0.3
    date = email.utils.formatdate(time.time() + 3600, usegmt=True)
    late = {"Retry-After-Ms": "", "Retry-After": date}
    server.replies(Reply(status=429, headers=late, error="come back later"))
    server.bodies.clear()
    text = error(make(server, tmp_path), "Oslo")
    assert "answers 429: come back later; check" in text
    assert "repeat the command later" in text
    assert len(server.bodies) == 1


def test_a_silent_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.replies(Reply(delay=0.6), Reply("no"))
    assert scores(make(server, tmp_path, timeout=0.3).judge(asks("Rome"))) == [0]
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            Reply(status=401, error={"message": "bad key"}),
            "401: bad key; set KVBENCH_JUDGE_KEY to a key that can use judge-1",
        ),
        (Reply(status=403, error="no"), "403: no; set KVBENCH_JUDGE_KEY to a key that can use"),
        (
            Reply(status=404, raw=b""),
            "404: Not Found; check KVBENCH_JUDGE_URL and KVBENCH_JUDGE_MODEL",
        ),
        (Reply(status=404, raw=b'{"detail": "nothing"}'), "404: nothing; check KVBENCH_JUDGE_URL"),
        (
            Reply(status=307, raw=b"", headers={"Location": "/v2/chat/completions"}),
            "307: Temporary Redirect; set KVBENCH_JUDGE_URL to the address that it redirects to",
        ),
        (
            Reply(status=429, error={"message": "paid?", "code": "insufficient_quota"}),
            "429: paid?; check the plan and the billing of the account of KVBENCH_JUDGE_KEY",
        ),
    ],
)
def test_a_refusal_names_the_variable_and_ends_the_asking(
    server: Server, tmp_path: Path, reply: Reply, message: str
) -> None:
    server.replies(reply)
    judge = make(server, tmp_path)
    for _ in range(2):
        assert message in error(judge)
    assert len(server.bodies) == 1


def test_one_refused_prompt_does_not_affect_others(server: Server, tmp_path: Path) -> None:
    server.answer = lambda body, count: (
        Reply(status=400, error={"message": "too long"}) if "Oslo" in str(body) else Reply()
    )
    responses = [f"{'Oslo' if i % 2 else 'Rome'} {i}" for i in range(10)]
    verdicts = make(server, tmp_path, jobs=1).judge(asks(*responses))
    assert scores(verdicts) == [1, None] * 5
    assert str(verdicts[1]) == f"the judge at {server.host} answers 400: too long"
    assert len(server.bodies) == 10


def test_separate_failures_do_not_end_the_asking(server: Server, tmp_path: Path) -> None:
    server.answer = lambda body, count: Reply(status=500 if "Oslo" in str(body) else 200)
    responses = [f"{'Oslo' if i % 2 else 'Rome'} {i}" for i in range(8)]
    judge = make(server, tmp_path, jobs=1)
    assert scores(judge.judge(asks(*responses))) == [1, None] * 4
    server.bodies.clear()
    server.replies(Reply("no"))
    assert scores(make(server, tmp_path).judge(asks(*responses))) == [1, 0] * 4
    assert len(server.bodies) == 4, "only what failed is asked again"


def test_three_prompts_in_a_row_without_answer_end_the_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRIES", 0)
    nowhere = Server(url="http://127.0.0.1:9/v1")
    judge = make(nowhere, tmp_path, jobs=1)
    start = judge._connect
    attempts: list[int] = []

    def counting() -> Any:
        connection = start()
        create = connection.chat.completions.create
        monkeypatch.setattr(connection.chat.completions, "create", lambda **k: attempts.append(1) or create(**k))
        return connection

    monkeypatch.setattr(judge, "_connect", counting)
    verdicts = judge.judge(asks(*(f"Rome {i}" for i in range(50))))
    assert scores(verdicts) == [None] * 50
    assert len(attempts) == 3
    assert "cannot reach the judge at 127.0.0.1:9: " in str(verdicts[0])
    assert "refused; check KVBENCH_JUDGE_URL, or repeat the command later" in str(verdicts[49])


def test_a_server_that_stops_answering_keeps_what_it_answered(server: Server, tmp_path: Path) -> None:
    server.answer = lambda body, count: Reply(status=200 if count < 5 else 503)
    wanted = asks(*(f"Rome {i}" for i in range(100)))
    assert scores(make(server, tmp_path, jobs=2).judge(wanted)).count(1) == 5
    assert len(server.bodies) <= 5 + 4 * ATTEMPTS
    server.answer = lambda body, count: Reply()
    server.bodies.clear()
    assert scores(make(server, tmp_path).judge(wanted)) == [1] * 100
    assert len(server.bodies) == 95
