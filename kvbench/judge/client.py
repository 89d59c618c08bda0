"""The judge behind an OpenAI-compatible URL: asks in parallel, and never the same twice."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import TimeoutError as NothingYet
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from kvbench.benchmark import Ask, Marks
from kvbench.errors import UserError
from kvbench.files import Journal, digest_of, locked_journal
from kvbench.judge.base import JudgeError, Verdict
from kvbench.judge.rubrics import Rubric, rubric
from kvbench.judge.settings import KEY, MODEL, TOKENS, URL, Settings

RETRIES = 5
_MOST_FAILURES = 3
_PROGRESS_S = 15.0
_THINKING_TOKENS = 2048
_MOST_BYTES = 4 << 20
"""Bytes of a reply; the longest answers take a tenth of that."""
_WAIT_S = 20.0
"""Seconds for connecting and waiting before another try, at most."""
_CHECK = Ask("correct", {"question": "What is 1 + 1?", "answer": "2", "response": "2"})


class _Question(NamedTuple):
    key: str
    rubric: Rubric
    prompt: str


class EndpointJudge:
    """A model behind a URL. See `Judge`.

    It stops asking after a refusal that concerns every prompt (key, model, URL, quota), and after
    three prompts in a row without an answer.

    Args:
        settings: The endpoint.
        folder: Where answers are kept.
        say: Told of the progress and of waits.

    Raises:
        UserError: The `openai` package is not installed.
    """

    def __init__(self, settings: Settings, folder: Path, say: Callable[[str], None]) -> None:
        try:
            import openai  # an optional package, and slow to import
        except ImportError:
            raise UserError(
                "a judge behind a URL needs the openai package; run: pip install 'kvbench[judge]'"
            ) from None
        host = urlsplit(settings.url).netloc
        self.mark = f"judge {settings.model}"
        self.origin = f"{settings.model} at {host}"
        self.notice = (
            f"judged by {self.origin}: questions, reference answers and responses are sent there"
        )
        self._openai, self._settings, self._say = openai, settings, say
        self._model, self._who = settings.model, f"the judge at {host}"
        self._answers: dict[str, str] = {}
        self._refused: set[str] = set()  # parameters that the model does not accept
        self._failures = 0  # prompts in a row without an answer
        self._down: JudgeError | None = None
        omit = openai.Omit()
        self._headers = {
            "Authorization": f"Bearer {settings.key}" if settings.key else omit,
            "OpenAI-Organization": omit,  # OPENAI_ORG_ID belongs to another key
            "OpenAI-Project": omit,
            "Accept-Encoding": "identity",
        }
        self._endpoint = [settings.url, settings.model]
        slug = re.sub(r"[^A-Za-z0-9.-]+", "-", settings.model).strip("-.")[:60]
        self._file = folder / f"{slug}-{digest_of(self._endpoint)[:8]}.jsonl"

    def check(self) -> None:
        """See `Judge`: one short question, whose answer is not kept."""
        question = self._question(_CHECK)
        with self._connect() as client:
            failed = self._ask_all(client, [question], lambda question, answer: None)
        if failed:
            raise failed[question.key]

    def judge(self, asks: Sequence[Ask]) -> list[Verdict]:
        """See `Judge`. The same question is asked once; an unreadable answer is not kept.

        Raises:
            UserError: The folder of the answers cannot be written.
        """
        questions = [self._question(ask) for ask in asks]
        failed: dict[str, JudgeError] = {}
        if self._open(questions):
            waiting = partial(self._say, f"another run is asking {self.origin}: waiting for it")
            with self._connect() as client, locked_journal(self._file, waiting) as journal:
                self._answers |= {entry["key"]: entry["answer"] for entry in journal.entries()}
                if left := self._open(questions):
                    failed = self._ask_all(client, left, partial(self._keep, journal))
        verdicts = (failed.get(question.key) or self._marks(question) for question in questions)
        return [verdict for verdict in verdicts if verdict is not None]  # none is left

    def _question(self, ask: Ask) -> _Question:
        criterion = rubric(ask.rubric)
        # UTF-8 cannot carry the lone surrogates that a response may contain.
        prompt = criterion.render(ask.fields).encode(errors="replace").decode()
        key = digest_of([*self._endpoint, criterion.version, prompt])
        return _Question(key, criterion, prompt)

    def _marks(self, question: _Question) -> Marks | None:
        answer = self._answers.get(question.key)
        return None if answer is None else question.rubric.read(answer)

    def _open(self, questions: Sequence[_Question]) -> list[_Question]:
        """The questions without a readable answer, each once."""
        return list({q.key: q for q in questions if self._marks(q) is None}.values())

    def _keep(self, journal: Journal, question: _Question, answer: str) -> None:
        journal.append([{"key": question.key, "answer": answer}])
        self._answers[question.key] = answer

    def _ask_all(
        self,
        client: Any,
        questions: Sequence[_Question],
        keep: Callable[[_Question, str], None],
    ) -> dict[str, JudgeError]:
        """Ask in parallel, and keep each answer as soon as it arrives.

        Returns:
            Why questions have no answer, by key.
        """
        failed: dict[str, JudgeError] = {}
        answered: set[str] = set()
        told = latest = time.monotonic()
        # A server that sends its headers byte by byte runs into none of the client's limits.
        patience = 2 * (RETRIES + 1) * (self._settings.timeout + _WAIT_S)
        # Ctrl-C does not wait for a silent server: a ThreadPool drops what is queued, and its
        # threads are daemons. Their retries end because the caller closes the client.
        with ThreadPool(min(self._settings.jobs, len(questions))) as pool:
            results = pool.imap_unordered(partial(self._attempt, client), questions)
            while len(answered) + len(failed) < len(questions):
                try:
                    question, answer = results.next(timeout=_PROGRESS_S)
                except NothingYet:
                    if time.monotonic() - latest > patience:
                        silent = self._no_answer(f"{self._who} never completes its reply")
                        failed |= {q.key: silent for q in questions if q.key not in answered}
                else:
                    latest = time.monotonic()
                    if isinstance(answer, JudgeError):
                        failed[question.key] = answer
                    else:
                        keep(question, answer)
                        answered.add(question.key)
                if time.monotonic() - told >= _PROGRESS_S:
                    told = time.monotonic()
                    done = len(answered) + len(failed)
                    self._say(f"{self._model}: {done} of {len(questions)} verdicts")
        return failed

    def _attempt(self, client: Any, question: _Question) -> tuple[_Question, str | JudgeError]:
        try:
            return question, self._ask(client, question)
        except JudgeError as error:
            return question, error

    def _ask(self, client: Any, question: _Question) -> str:
        """Get a readable answer; ask once more if the first one is not."""
        for _ in range(2):
            text, cut = self._complete(client, question)
            if text is not None and question.rubric.read(text) is not None:
                return text
        if text is None:
            raise self._no_answer(f"{self._who} does not answer with a chat completion")
        hint = f"; set {TOKENS}=1024 to leave room for thinking" if cut else ""
        raise JudgeError(f"{self._model} gave no verdict: {self._line(text, 60)!r}{hint}")

    def _complete(self, client: Any, question: _Question) -> tuple[str | None, bool]:
        """Send a prompt.

        Returns:
            The judge's words, or None if the server sends anything but a chat completion; and
            whether the limit of tokens cut them off.

        Raises:
            JudgeError: The prompt has no answer.
        """
        if self._down is not None:
            raise self._down
        options = {"max_tokens": self._settings.tokens or question.rubric.max_tokens}
        if "max_tokens" in self._refused:  # by models whose limit includes their thinking
            options = {"max_completion_tokens": max(*options.values(), _THINKING_TOKENS)}
        if "temperature" not in self._refused:
            options["temperature"] = 0
        message = {"role": "user", "content": question.prompt}
        try:
            reply = client.chat.completions.create(
                model=self._model, messages=[message], extra_headers=self._headers, **options
            )
        except self._openai.APIStatusError as error:
            refused = str(error.param) if error.status_code == 400 else None
            if refused in options and refused != "max_completion_tokens":
                if refused not in self._refused:
                    self._refused.add(refused)
                    self._say(f"{self._model} does not accept {refused}: asking without it")
                return self._complete(client, question)
            raise self._refusal(error) from None
        except self._openai.APIConnectionError as error:
            cause = str(error.__cause__ or "") or error.message
            raise self._no_answer(f"cannot reach {self._who}: {self._line(cause)}") from None
        except _Unending as error:
            raise self._no_answer(f"cannot read the reply of {self._who}: {error}") from None
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return None, False  # it is not JSON, or not as the client expects it
        try:
            choice = reply.choices[0]
            text = self._hidden((choice.message.content or "") + "")  # a TypeError if no text
            cut = choice.finish_reason == "length"
        except (AttributeError, LookupError, TypeError):
            return None, False
        self._failures = 0
        return text, cut

    def _connect(self) -> Any:
        """Make a client. Only the settings decide where it connects and which key it sends."""
        settings, openai = self._settings, self._openai
        local = urlsplit(settings.url).hostname in ("localhost", "127.0.0.1", "::1")
        return openai.OpenAI(
            base_url=settings.url,
            default_query=dict(parse_qsl(settings.query)),
            api_key=settings.key or "none",  # None would read OPENAI_API_KEY
            max_retries=RETRIES,
            timeout=openai.Timeout(settings.timeout, connect=10.0),
            http_client=openai.DefaultHttpxClient(
                follow_redirects=False,
                trust_env=not local,  # a proxy cannot reach this machine
                event_hooks={
                    "response": [
                        partial(_bound, seconds=settings.timeout),
                        _no_retry_without_quota,
                    ]
                },
            ),
        )

    def _refusal(self, error: Any) -> JudgeError:
        """The error for a status other than 200; it ends the asking if it concerns every prompt."""
        status, body = error.status_code, error.body
        if isinstance(body, dict):
            body = body.get("message") or body.get("detail")
        said = self._line(str(body or error.response.reason_phrase))
        text = f"{self._who} answers {status}: {said}"
        if status in (401, 403):
            advice = f"set {KEY} to a key that can use {self._model}"
        elif status == 404:
            advice = f"check {URL} and {MODEL}"
        elif 300 <= status < 400:
            advice = f"set {URL} to the address that it redirects to"
        elif "insufficient_quota" in (error.code, error.type):
            advice = f"check the plan and the billing of the account of {KEY}"
        elif status in (408, 409, 429) or status >= 500:
            return self._no_answer(text)
        else:
            return JudgeError(text)
        self._down = JudgeError(f"{text}; {advice}")
        return self._down

    def _no_answer(self, text: str) -> JudgeError:
        """The error for a prompt that retries did not help."""
        error = JudgeError(f"{text}; check {URL}, or repeat the command later to continue")
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            self._down = error
        return error

    def _hidden(self, text: str) -> str:
        return text.replace(self._settings.key, "***") if self._settings.key else text

    def _line(self, text: str, most: int = 160) -> str:
        """A text of the server as one short line without the key."""
        shown = (c if c.isprintable() else " " for c in self._hidden(text))
        line = " ".join("".join(shown).split())
        return line if len(line) <= most else f"{line[:most]}..."


class _Unending(Exception):
    """A reply is too long, or takes too long."""


def _bound(response: Any, seconds: float) -> None:
    """Limit the bytes and the seconds of a reply; the client limits only the time between bytes."""
    response.headers.pop("content-encoding", None)  # we ask for none; a few bytes can become many
    original, end = response.stream, time.monotonic() + seconds
    # Of httpx or of its successor httpx2, whichever this version of openai uses.
    base: Any = next(c for c in type(original).__mro__ if c.__name__ == "SyncByteStream")

    class Bounded(base):  # type: ignore[misc]
        def __iter__(self) -> Iterator[bytes]:
            size = 0
            for chunk in original:
                size += len(chunk)
                if size > _MOST_BYTES:
                    raise _Unending(f"it is longer than {_MOST_BYTES >> 20} MB")
                if time.monotonic() > end:
                    raise _Unending(f"it takes longer than {seconds:g} s")
                yield chunk

        def close(self) -> None:
            original.close()

    response.stream = Bounded()


def _no_retry_without_quota(response: Any) -> None:
    """Stop the client from retrying: it retries every 429, but waiting restores no quota."""
    if response.status_code == 429 and b"insufficient_quota" in response.read():
        response.headers["x-should-retry"] = "false"
