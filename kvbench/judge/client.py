"""A judge behind an OpenAI-compatible URL: asks in parallel, and no question twice."""

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
from kvbench.judge.settings import KEY, MODEL, TOKENS, URL, JudgeSettings

RETRIES = 5
_MOST_FAILURES = 3
_PROGRESS_S = 15.0
_THINKING_TOKENS = 2048
_MOST_BYTES = 4 << 20
"""Maximum bytes of a reply; the longest answers take a tenth of that."""
_WAIT_S = 20.0
"""Maximum seconds for connecting and for waiting before a retry."""
_CHECK = Ask("correct", {"question": "What is 1 + 1?", "answer": "2", "response": "2"})


class _Question(NamedTuple):
    key: str
    rubric: Rubric
    prompt: str


class EndpointJudge:
    """A model behind a URL. See `Judge`.

    It stops asking after a refusal that concerns every prompt (key, model, URL, quota), and after three prompts in a
    row without an answer.

    Args:
        settings: The endpoint.
        cache_folder: Folder of the stored answers.
        notify: Receives messages about progress and waits.

    Raises:
        UserError: The `openai` package is not installed.
    """

    def __init__(self, settings: JudgeSettings, cache_folder: Path, notify: Callable[[str], None]) -> None:
        try:
            import openai  # an optional package, and slow to import
        except ImportError:
            raise UserError(
                "a judge behind a URL needs the openai package; run: pip install 'kvbench[judge]'"
            ) from None
        host = urlsplit(settings.url).netloc
        self.mark = f"judge {settings.model}"
        self.origin = f"{settings.model} at {host}"
        self.notice = f"judged by {self.origin}: questions, reference answers and responses are sent there"
        self._openai, self._settings, self._say = openai, settings, notify
        self._model, self._who = settings.model, f"the judge at {host}"
        self._answers: dict[str, str] = {}
        self._refused: set[str] = set()  # parameters that the model does not accept
        self._failures = 0  # consecutive prompts without an answer
        self._down: JudgeError | None = None
        omitted_header = openai.Omit()
        self._headers = {
            "Authorization": f"Bearer {settings.key}" if settings.key else omitted_header,
            "OpenAI-Organization": omitted_header,  # OPENAI_ORG_ID belongs to another key
            "OpenAI-Project": omitted_header,
            "Accept-Encoding": "identity",
        }
        self._endpoint = [settings.url, settings.model]
        model_slug = re.sub(r"[^A-Za-z0-9.-]+", "-", settings.model).strip("-.")[:60]
        self._file = cache_folder / f"{model_slug}-{digest_of(self._endpoint)[:8]}.jsonl"

    def check(self) -> None:
        """Ask one short question, whose answer is not stored. See `Judge`."""
        question = self._question(_CHECK)
        with self._connect() as client:
            failures = self._ask_all(client, [question], lambda question, answer: None)
        if failures:
            raise failures[question.key]

    def judge(self, asks: Sequence[Ask]) -> list[Verdict]:
        """Return the verdicts; see `Judge`. Duplicates are asked once; unreadable answers are not stored.

        Raises:
            UserError: The folder of the answers cannot be written.
        """
        questions = [self._question(ask) for ask in asks]
        failures: dict[str, JudgeError] = {}
        if self._open(questions):
            notify_waiting = partial(self._say, f"another run is asking {self.origin}: waiting for it")
            with self._connect() as client, locked_journal(self._file, notify_waiting) as journal:
                self._answers |= {entry["key"]: entry["answer"] for entry in journal.entries()}
                if open_questions := self._open(questions):
                    failures = self._ask_all(client, open_questions, partial(self._keep, journal))
        verdicts = (failures.get(question.key) or self._marks(question) for question in questions)
        return [verdict for verdict in verdicts if verdict is not None]  # for the type checker: none is None

    def _question(self, ask: Ask) -> _Question:
        criterion = rubric(ask.rubric)
        # UTF-8 cannot encode lone surrogates, which a response may contain.
        prompt = criterion.render(ask.fields).encode(errors="replace").decode()
        system = [criterion.system] if criterion.system else []  # keeps the keys of rubrics without one
        key = digest_of([*self._endpoint, criterion.version, prompt, *system])
        return _Question(key, criterion, prompt)

    def _marks(self, question: _Question) -> Marks | None:
        answer = self._answers.get(question.key)
        return None if answer is None else question.rubric.read(answer)

    def _open(self, questions: Sequence[_Question]) -> list[_Question]:
        """Return the distinct questions without a readable answer."""
        return list({question.key: question for question in questions if self._marks(question) is None}.values())

    def _keep(self, journal: Journal, question: _Question, answer: str) -> None:
        journal.append([{"key": question.key, "answer": answer}])
        self._answers[question.key] = answer

    def _ask_all(
        self,
        client: Any,
        questions: Sequence[_Question],
        on_answer: Callable[[_Question, str], None],
    ) -> dict[str, JudgeError]:
        """Ask in parallel, storing each answer as soon as it arrives.

        Returns:
            Errors of unanswered questions, by key.
        """
        failures: dict[str, JudgeError] = {}
        answered: set[str] = set()
        last_message = last_answer = time.monotonic()
        # A server that sends its headers byte by byte exceeds none of the client's limits.
        time_limit = 2 * (RETRIES + 1) * (self._settings.timeout + _WAIT_S)
        # Ctrl-C must not wait for a silent server: a ThreadPool drops queued work, and its threads are daemons. Their
        # retries end because the caller closes the client.
        with ThreadPool(min(self._settings.jobs, len(questions))) as thread_pool:
            completions = thread_pool.imap_unordered(partial(self._attempt, client), questions)
            while len(answered) + len(failures) < len(questions):
                try:
                    question, answer = completions.next(timeout=_PROGRESS_S)
                except NothingYet:
                    if time.monotonic() - last_answer > time_limit:
                        timeout_error = self._no_answer(f"{self._who} never completes its reply")
                        failures |= {
                            open_question.key: timeout_error
                            for open_question in questions
                            if open_question.key not in answered
                        }
                else:
                    last_answer = time.monotonic()
                    if isinstance(answer, JudgeError):
                        failures[question.key] = answer
                    else:
                        on_answer(question, answer)
                        answered.add(question.key)
                if time.monotonic() - last_message >= _PROGRESS_S:
                    last_message = time.monotonic()
                    finished_count = len(answered) + len(failures)
                    self._say(f"{self._model}: {finished_count} of {len(questions)} verdicts")
        return failures

    def _attempt(self, client: Any, question: _Question) -> tuple[_Question, str | JudgeError]:
        try:
            return question, self._ask(client, question)
        except JudgeError as error:
            return question, error

    def _ask(self, client: Any, question: _Question) -> str:
        """Return a readable answer, asking once more if the first is unreadable."""
        for _ in range(2):
            reply_text, is_truncated = self._complete(client, question)
            if reply_text is not None and question.rubric.read(reply_text) is not None:
                return reply_text
        if reply_text is None:
            raise self._no_answer(f"{self._who} does not answer with a chat completion")
        hint = f"; set {TOKENS}=1024 to leave room for thinking" if is_truncated else ""
        raise JudgeError(f"{self._model} gave no verdict: {self._line(reply_text, 60)!r}{hint}")

    def _complete(self, client: Any, question: _Question) -> tuple[str | None, bool]:
        """Send a prompt.

        Returns:
            The judge's text, or None if the server sends anything but a chat completion; and whether the token limit
            truncated it.

        Raises:
            JudgeError: The prompt has no answer.
        """
        if self._down is not None:
            raise self._down
        request_options = {"max_tokens": self._settings.tokens or question.rubric.max_tokens}
        if "max_tokens" in self._refused:  # by models whose limit includes their thinking
            request_options = {"max_completion_tokens": max(*request_options.values(), _THINKING_TOKENS)}
        if "temperature" not in self._refused:
            request_options["temperature"] = 0
        messages = [{"role": "user", "content": question.prompt}]
        if question.rubric.system:
            messages.insert(0, {"role": "system", "content": question.rubric.system})
        try:
            reply = client.chat.completions.create(
                model=self._model,
                messages=messages,
                extra_headers=self._headers,
                **request_options,
            )
        except self._openai.APIStatusError as error:
            refused_option = str(error.param) if error.status_code == 400 else None
            if refused_option in request_options and refused_option != "max_completion_tokens":
                if refused_option not in self._refused:
                    self._refused.add(refused_option)
                    self._say(f"{self._model} does not accept {refused_option}: asking without it")
                return self._complete(client, question)
            raise self._refusal(error) from None
        except self._openai.APIConnectionError as error:
            cause = str(error.__cause__ or "") or error.message
            raise self._no_answer(f"cannot reach {self._who}: {self._line(cause)}") from None
        except _Unending as error:
            raise self._no_answer(f"cannot read the reply of {self._who}: {error}") from None
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return None, False  # not JSON, or not as the client expects it
        try:
            choice = reply.choices[0]
            reply_text = self._hidden((choice.message.content or "") + "")  # a TypeError if no text
            is_truncated = choice.finish_reason == "length"
        except (AttributeError, LookupError, TypeError):
            return None, False
        self._failures = 0
        return reply_text, is_truncated

    def _connect(self) -> Any:
        """Create a client. Only the settings decide where it connects and which key it sends."""
        settings, openai = self._settings, self._openai
        is_local = urlsplit(settings.url).hostname in ("localhost", "127.0.0.1", "::1")
        return openai.OpenAI(
            base_url=settings.url,
            default_query=dict(parse_qsl(settings.query)),
            api_key=settings.key or "none",  # None would read OPENAI_API_KEY
            max_retries=RETRIES,
            timeout=openai.Timeout(settings.timeout, connect=10.0),
            http_client=openai.DefaultHttpxClient(
                follow_redirects=False,
                trust_env=not is_local,  # a proxy cannot reach this machine
                event_hooks={
                    "response": [
                        partial(_bound, seconds=settings.timeout),
                        _no_retry_without_quota,
                    ]
                },
            ),
        )

    def _refusal(self, error: Any) -> JudgeError:
        """Return the error for a status other than 200; asking stops if it concerns every prompt."""
        status_code, error_body = error.status_code, error.body
        if isinstance(error_body, dict):
            error_body = error_body.get("message") or error_body.get("detail")
        explanation = self._line(str(error_body or error.response.reason_phrase))
        message = f"{self._who} answers {status_code}: {explanation}"
        if status_code in (401, 403):
            advice = f"set {KEY} to a key that can use {self._model}"
        elif status_code == 404:
            advice = f"check {URL} and {MODEL}"
        elif 300 <= status_code < 400:
            advice = f"set {URL} to the address that it redirects to"
        elif "insufficient_quota" in (error.code, error.type):
            advice = f"check the plan and the billing of the account of {KEY}"
        elif status_code in (408, 409, 429) or status_code >= 500:
            return self._no_answer(message)
        else:
            return JudgeError(message)
        self._down = JudgeError(f"{message}; {advice}")
        return self._down

    def _no_answer(self, message: str) -> JudgeError:
        """Return the error for a prompt that still failed after its retries."""
        judge_error = JudgeError(f"{message}; check {URL}, or repeat the command later to continue")
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            self._down = judge_error
        return judge_error

    def _hidden(self, text: str) -> str:
        return text.replace(self._settings.key, "***") if self._settings.key else text

    def _line(self, full_text: str, max_length: int = 160) -> str:
        """Shorten the server's text to one line without the key."""
        printable = (character if character.isprintable() else " " for character in self._hidden(full_text))
        single_line = " ".join("".join(printable).split())
        return single_line if len(single_line) <= max_length else f"{single_line[:max_length]}..."


class _Unending(Exception):
    """Error for a reply that is too long or takes too long."""


def _bound(response: Any, seconds: float) -> None:
    """Limit the total bytes and seconds of a reply; the client limits only the time between bytes."""
    response.headers.pop("content-encoding", None)  # none was requested; a few compressed bytes can become many
    stream, deadline = response.stream, time.monotonic() + seconds
    # The stream class of httpx or of its successor httpx2, whichever this version of openai uses.
    stream_class: Any = next(
        parent_class for parent_class in type(stream).__mro__ if parent_class.__name__ == "SyncByteStream"
    )

    class Bounded(stream_class):  # type: ignore[misc]
        def __iter__(self) -> Iterator[bytes]:
            byte_count = 0
            for chunk in stream:
                byte_count += len(chunk)
                if byte_count > _MOST_BYTES:
                    raise _Unending(f"it is longer than {_MOST_BYTES >> 20} MB")
                if time.monotonic() > deadline:
                    raise _Unending(f"it takes longer than {seconds:g} s")
                yield chunk

        def close(self) -> None:
            stream.close()

    response.stream = Bounded()


def _no_retry_without_quota(response: Any) -> None:
    """Stop the client from retrying a 429 without quota, because waiting restores no quota."""
    if response.status_code == 429 and b"insufficient_quota" in response.read():
        response.headers["x-should-retry"] = "false"
