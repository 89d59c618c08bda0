"""Settings of the judge's endpoint, from environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from kvbench.errors import UserError, quoted

KIND, URL, KEY = "KVBENCH_JUDGE", "KVBENCH_JUDGE_URL", "KVBENCH_JUDGE_KEY"
MODEL, JOBS = "KVBENCH_JUDGE_MODEL", "KVBENCH_JUDGE_JOBS"
TIMEOUT, TOKENS = "KVBENCH_JUDGE_TIMEOUT", "KVBENCH_JUDGE_TOKENS"


@dataclass(frozen=True)
class JudgeSettings:
    """Connection settings of a judge's endpoint.

    Attributes:
        url: Base URL of the API; the client adds `/chat/completions`.
        model: The server's name for the judge.
        key: Bearer token, or "". Never shown.
        query: The URL's query, or "". Never shown, because it can contain a secret.
        jobs: Number of concurrent requests.
        timeout: Seconds to wait for an answer.
        tokens: Limit of an answer, in tokens; 0: the rubric's limit.
    """

    url: str
    model: str
    key: str = field(default="", repr=False)
    query: str = field(default="", repr=False)
    jobs: int = 8
    timeout: float = 120.0
    tokens: int = 0


def read(environment: Mapping[str, str] = os.environ) -> JudgeSettings:
    """Read the settings.

    Raises:
        UserError: One is missing or wrong; the message names its variable and shows no key.
    """
    model, key = (environment.get(variable, "").strip() for variable in (MODEL, KEY))
    if not model or not model.isprintable():
        raise UserError(f"{MODEL} names no model; set it to one such as gpt-4o-2024-08-06")
    if not all("!" <= character <= "~" for character in key):
        raise UserError(f"{KEY} contains a space or a non-ASCII character; set it to the bare key")
    url, query = _url(environment.get(URL, "").strip())
    jobs = _whole(environment, JOBS, 8, 1, 256)
    timeout = _whole(environment, TIMEOUT, 120, 1, 3600)
    return JudgeSettings(url, model, key, query, jobs, timeout, _whole(environment, TOKENS, 0, 0, 65536))


def _url(address: str) -> tuple[str, str]:
    """Return the base URL of the API, and the query."""
    try:
        url_parts = urlsplit(address)
        is_valid = url_parts.scheme in ("http", "https") and url_parts.hostname and url_parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UserError(f"{URL} is not a URL; set it to one such as https://api.openai.com/v1")
    if url_parts.username is not None:
        raise UserError(f"{URL} contains a user name; remove it, and put the key into {KEY}")
    path = url_parts.path.rstrip("/").removesuffix("/chat/completions")
    return urlunsplit((url_parts.scheme, url_parts.netloc, path, "", "")), url_parts.query


def _whole(environment: Mapping[str, str], variable: str, default: int, minimum: int, maximum: int) -> int:
    setting = environment.get(variable, "").strip() or str(default)
    if not setting.isdecimal() or len(setting) > 9 or not minimum <= int(setting) <= maximum:
        raise UserError(f"{variable} is {quoted(setting)}; set it to a whole number from {minimum} to {maximum}")
    return int(setting)
