"""How answers are made: greedily or by sampling, how many, how long; by the task or by flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.harness.protocol import Request

THINK, THOUGHT = "<think>", "</think>"
"""What models write around their thinking."""


@dataclass(frozen=True)
class Sampling:
    """Answers are drawn; where there is none, they are greedy.

    The logits are divided by the temperature, then all but the `top_k` largest are dropped, then
    all beyond the smallest set that holds the probability `top_p`: the order of transformers.

    Attributes:
        temperature: Above 0.
        top_p: Above 0, at most 1; 1 keeps all tokens.
        top_k: At least 1; 0 keeps all tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise UserError(f"a temperature must be above 0, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise UserError(f"top_k must be at least 1 (or 0, for all), not {self.top_k}")


def from_yaml(kwargs: Mapping[str, Any], where: str) -> Sampling | None:
    """Read the sampling out of an lm-eval YAML's `generation_kwargs`, as lm-eval does.

    Args:
        kwargs: `do_sample` may be left out: a temperature above 0 samples, no temperature does not.
            With `do_sample: true` a temperature that is left out is 1.
        where: Names the task in messages.

    Raises:
        UserError: A value is out of range.
    """
    temperature = kwargs.get("temperature")
    wanted = kwargs.get("do_sample")
    if wanted is None:
        wanted = bool(temperature)
    if not wanted:
        return None
    try:
        return Sampling(
            1.0 if temperature is None else float(temperature),
            float(kwargs.get("top_p") or 1.0),
            int(kwargs.get("top_k") or 0),
        )
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"{where}: its YAML's generation_kwargs: {error}") from None


@dataclass(frozen=True)
class Thinking:
    """Ids of the tokens that open and close thinking; -1 where only the other is a token."""

    open: int
    close: int

    @classmethod
    def of(cls, tokenizer: Any) -> Thinking | None:
        """The tokens of a tokenizer; None where it has no token that closes thinking."""
        ids = [_token(tokenizer, text) for text in (THINK, THOUGHT)]
        return None if ids[1] < 0 else cls(*ids)


def _token(tokenizer: Any, text: str) -> int:
    """Id of a token; -1 where there is no such."""
    found = tokenizer.convert_tokens_to_ids(text)
    return -1 if found is None or tokenizer.convert_ids_to_tokens(found) != text else int(found)


def answer(response: str, until: Sequence[str]) -> str:
    """What is scored of a response of a model that may think.

    It is what follows the end of the thinking, cut at the first stop string: what lm-eval makes of
    it with `think_end_token`. Thinking that was never closed is scored as a whole.
    """
    thought, end, rest = response.rpartition(THOUGHT)
    text = rest.lstrip() if end else thought + rest
    ends = [text.find(u) for u in until if u and u in text]
    return text[: min(ends)] if ends else text


@dataclass(frozen=True)
class Settings:
    """What the flags of a run say about its answers; None leaves it to the task.

    Attributes:
        temperature: 0 is greedy.
        top_p: See `Sampling`.
        top_k: See `Sampling`.
        repeats: Answers to each question.
        max_new_tokens: Limit of each, before those of the rows.
        thinking: What the chat template is told as `enable_thinking`.
        truncate: How a prompt is made to fit, see `Truncation`.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repeats: int | None = None
    max_new_tokens: int | None = None
    thinking: bool | None = None
    truncate: str | None = None

    def applied(self, requests: Sequence[Request], say: Callable[[str], None]) -> list[Request]:
        """The requests of one task as they are to be answered.

        Args:
            requests: As the task has them.
            say: Told once where repeats would all be the same.

        Raises:
            UserError: `top_p` or `top_k` would do nothing, as the task's answers are greedy.
        """
        made = []
        most = 1
        for request in requests:
            if request.given:
                made.append(request)
                continue
            sampling = self._sampling(request.sampling, request.task)
            repeats = self.repeats or request.repeats
            if sampling is None:
                most, repeats = max(most, repeats), 1
            limit = self.max_new_tokens or request.max_new_tokens
            made.append(replace(request, sampling=sampling, repeats=repeats, max_new_tokens=limit))
        if most > 1:
            say(
                f"{requests[0].task} is answered greedily: its {most} repeats would be the same, "
                "and one is made; --temperature 0.6 would draw them"
            )
        return made

    def record(self, request: Request, thinks: bool) -> str:
        """What the name of a cell says about its answers, as canonical JSON; "" for nothing.

        Nothing is said of greedy answers as the task has them. Neither are repeats, which extend a
        run as samples do.

        Args:
            request: One of the task's, as `applied` gives it.
            thinks: Whether the tokenizer has a token that ends thinking.
        """
        said: dict[str, Any] = {}
        if request.sampling is not None:
            said |= asdict(request.sampling)
        if self.max_new_tokens is not None and not request.given:
            said["max_new_tokens"] = self.max_new_tokens
        if thinks and not request.given:
            said["think_end"] = THOUGHT
        for name in ("thinking", "truncate"):
            if (value := getattr(self, name)) is not None:
                said[name] = value
        return json.dumps(said, sort_keys=True) if said else ""

    def _sampling(self, own: Sampling | None, task: str) -> Sampling | None:
        if self.temperature == 0:
            return None
        if own is None and self.temperature is None:
            if self.top_p is not None or self.top_k is not None:
                raise UserError(
                    f"{task} is answered greedily: --top-p and --top-k want a --temperature, as 0.6"
                )
            return None
        given = {
            name: value
            for name in ("temperature", "top_p", "top_k")
            if (value := getattr(self, name)) is not None
        }
        return replace(own or Sampling(), **given)


@dataclass(frozen=True)
class Truncation:
    """Cut the middle of a context so that prompt and answer fit; LongBench cuts whole prompts so.

    Attributes:
        tokens: Prompt and answer together; 0: the model's window.
    """

    tokens: int = 0

    @classmethod
    def parse(cls, spelling: str) -> Truncation:
        """Read `middle` or `middle:4096`.

        Raises:
            UserError: It is neither.
        """
        name, colon, size = spelling.strip().partition(":")
        if name != "middle" or (colon and not (size.isdecimal() and int(size) > 0)):
            raise UserError(
                f"cannot truncate {spelling!r}; middle (to the model's window) or middle:4096 "
                "(prompt and answer, in tokens) would be right"
            )
        return cls(int(size or 0))

    def __str__(self) -> str:
        return f"middle:{self.tokens}" if self.tokens else "middle"

    def cut(self, context: list[int], room: int) -> list[int]:
        """The first and the last half of what fits.

        Args:
            context: Token ids.
            room: Tokens that there are for them. Of more than 1024 a multiple of 64 is used, so
                that questions of about the same length keep the same of a context, and share its
                prefill.
        """
        if len(context) <= room:
            return context
        room -= room % 64 if room > 1024 else 0
        return context[: room - room // 2] + context[len(context) - room // 2 :]
