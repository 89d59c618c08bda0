"""Generation flags of a run, and truncation of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvbench.decoding import THOUGHT, Sampling
from kvbench.errors import UserError, quoted
from kvbench.harness.protocol import Request, kept

_DIGITS = 10
"""Maximum number of digits of a token count."""


@dataclass(frozen=True)
class GenerationFlags:
    """Generation flags of a run. None leaves a value to the task.

    Attributes:
        temperature: 0 is greedy.
        top_p: See `Sampling`.
        top_k: See `Sampling`.
        repeats: Number of answers to each question.
        max_new_tokens: Limit of each answer; it takes precedence over the limits of rows.
        thinking: Passed to the chat template as `enable_thinking`.
        truncate: How to truncate prompts; see `Truncation`.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repeats: int | None = None
    max_new_tokens: int | None = None
    thinking: bool | None = None
    truncate: str | None = None

    def applied(self, requests: Sequence[Request], notify: Callable[[str], None]) -> Sequence[Request]:
        """Apply the flags to the requests of one task.

        Args:
            requests: The requests as the task defines them.
            notify: Receives one line if all repeats would be equal.

        Raises:
            UserError: `top_p` or `top_k` would have no effect because the answers are greedy.
        """
        max_repeats = 1

        def changed(request: Request) -> Request:
            nonlocal max_repeats
            if request.measures:
                return request
            sampling = self._sampling(request.sampling, request.task)
            repeats = self.repeats or request.repeats
            if sampling is None:
                max_repeats, repeats = max(max_repeats, repeats), 1
            token_limit = self.max_new_tokens or request.max_new_tokens
            return replace(request, sampling=sampling, repeats=repeats, max_new_tokens=token_limit)

        changed_requests = kept(map(changed, requests))
        if max_repeats > 1:
            notify(
                f"{requests[0].task} is answered greedily, so its {max_repeats} repeats would be the same; "
                "only one is run (use --temperature 0.6 to sample answers)"
            )
        return changed_requests

    def record(self, request: Request, thinks: bool, prompt_settings: Mapping[str, Any] | None = None) -> str:
        """Return what a cell's hash records about its answers, as canonical JSON; "" for nothing.

        Greedy answers as the task defines them are not recorded. Neither are repeats, which extend a run as samples do.

        Args:
            request: A request of the task, as `applied` returns it; one that is answered, unless all are measured.
            thinks: Whether the tokenizer has a token that ends thinking.
            prompt_settings: See `LoadedTask.recorded`.
        """
        recorded: dict[str, Any] = dict(prompt_settings or {})
        if request.sampling is not None:
            recorded |= asdict(request.sampling)
        if self.max_new_tokens is not None and not request.measures:
            recorded["max_new_tokens"] = self.max_new_tokens
        if thinks and not request.measures:
            recorded["think_end"] = THOUGHT
        for option in ("thinking", "truncate"):
            if (value := getattr(self, option)) is not None:
                recorded[option] = value
        return json.dumps(recorded, sort_keys=True) if recorded else ""

    def _sampling(self, task_sampling: Sampling | None, task: str) -> Sampling | None:
        if self.temperature == 0:
            return None
        if task_sampling is None and self.temperature is None:
            if self.top_p is not None or self.top_k is not None:
                raise UserError(f"{task} is answered greedily; --top-p and --top-k need a --temperature such as 0.6")
            return None
        overrides = {
            option: value
            for option in ("temperature", "top_p", "top_k")
            if (value := getattr(self, option)) is not None
        }
        return replace(task_sampling or Sampling(), **overrides)


@dataclass(frozen=True)
class Truncation:
    """Removal of the middle of a context so that prompt and answer fit (as LongBench truncates prompts).

    Attributes:
        tokens: Limit of prompt and answer together; 0: the model's window.
    """

    tokens: int = 0

    @classmethod
    def parse(cls, spelling: str) -> Truncation:
        """Parse `middle` or `middle:4096`.

        Raises:
            UserError: The spelling is neither.
        """
        mode, separator, size_text = spelling.strip().partition(":")
        has_size = size_text.isdecimal() and len(size_text) <= _DIGITS and int(size_text) > 0
        if mode != "middle" or (separator and not has_size):
            raise UserError(
                f"unknown truncation {quoted(spelling)}; use middle (to the model's window) "
                "or middle:4096 (tokens of prompt and answer)"
            )
        return cls(int(size_text or 0))

    def __str__(self) -> str:
        return f"middle:{self.tokens}" if self.tokens else "middle"

    def cut(self, context: list[int], available: int) -> list[int]:
        """Keep the first and the last half of what fits.

        Args:
            context: Token ids.
            available: Tokens available for the context. Above 1024 it is rounded down to a multiple of 64, so that
                questions of similar length keep the same part of a context and share its prefill.
        """
        if len(context) <= available:
            return context
        available -= available % 64 if available > 1024 else 0
        return context[: available - available // 2] + context[len(context) - available // 2 :]
