from __future__ import annotations

import pytest

from kvbench.errors import UserError
from kvbench.judge.settings import read

from .server import SECRET

GOOD = {"KVBENCH_JUDGE_URL": "http://localhost:8000/v1", "KVBENCH_JUDGE_MODEL": "m"}


@pytest.mark.parametrize(
    ("url", "base", "query"),
    [
        ("http://localhost:8000/v1", "http://localhost:8000/v1", ""),
        ("https://h/v1/", "https://h/v1", ""),
        ("https://h/v1/chat/completions", "https://h/v1", ""),
        ("https://h/x?version=1#top", "https://h/x", "version=1"),
    ],
)
def test_urls(url: str, base: str, query: str) -> None:
    settings = read({**GOOD, "KVBENCH_JUDGE_URL": url})
    assert (settings.url, settings.query) == (base, query)


def test_other_variables() -> None:
    settings = read(
        {
            **GOOD,
            "KVBENCH_JUDGE_URL": f"http://h/v1?token={SECRET}",
            "KVBENCH_JUDGE_KEY": f" {SECRET}\n",
            "KVBENCH_JUDGE_JOBS": "3",
        }
    )
    assert settings.key == SECRET
    assert (settings.jobs, settings.timeout, settings.tokens) == (3, 120, 0)
    assert SECRET not in repr(settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"KVBENCH_JUDGE_MODEL": " "}, "KVBENCH_JUDGE_MODEL names no model; set it to one such as"),
        ({"KVBENCH_JUDGE_URL": "localhost:8000"}, "KVBENCH_JUDGE_URL is not a URL; set it to one"),
        ({"KVBENCH_JUDGE_URL": "http://h:x/v1"}, "KVBENCH_JUDGE_URL is not a URL; set it to one"),
        ({"KVBENCH_JUDGE_URL": "http://secret:p@h/v1"}, "KVBENCH_JUDGE_URL contains a user name"),
        ({"KVBENCH_JUDGE_KEY": "sk secret"}, "KVBENCH_JUDGE_KEY contains a space or a non-ASCII"),
        ({"KVBENCH_JUDGE_KEY": "sk-secret-ü"}, "KVBENCH_JUDGE_KEY contains a space or a non-ASCII"),
        ({"KVBENCH_JUDGE_JOBS": "0"}, "KVBENCH_JUDGE_JOBS is '0'; set it to a whole number from 1"),
        ({"KVBENCH_JUDGE_TIMEOUT": "1.5"}, "KVBENCH_JUDGE_TIMEOUT is '1.5'; set it to a whole"),
    ],
)
def test_a_wrong_variable_is_one_line(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read({**GOOD, **changes})
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)
