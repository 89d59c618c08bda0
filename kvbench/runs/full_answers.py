"""The full cache's own answers, which fidelity and informed policies need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvbench.benchmark import Medium
from kvbench.engine.decode import BLOCK, Stop
from kvbench.engine.fidelity import SHORT_ANSWER, FullAnswer, answer_greedily
from kvbench.engine.prefix import Prefix
from kvbench.harness.protocol import Request
from kvbench.runs.answers import Prompt
from kvbench.runs.continuations import branch_width
from kvbench.runs.worker import ModelRunner


def answer_limit(request: Request, tokenizer: Any) -> int:
    """Return the maximum number of tokens of the full cache's answer to a request.

    It is the request's own limit, but at most `SHORT_ANSWER` if the reference answers are that short together: a task
    can ask for all of them.
    """
    limit = request.max_new_tokens
    if limit > SHORT_ANSWER and request.target:
        lengths = [len(tokenizer(target, add_special_tokens=False)["input_ids"]) for target in request.target]
        limit = SHORT_ANSWER if sum(lengths) <= SHORT_ANSWER else limit
    return limit


def answer_widths(limit: int) -> set[int]:
    """Return the columns of the forwards that can feed an answer of at most `limit` tokens."""
    return {branch_width(token_count) or 1 for token_count in range(min(limit, BLOCK + 1))}


class FullAnswers:
    """The full cache's greedy answers to questions about one context, each generated when it is first needed.

    Args:
        runner: The model.
        tokenizer: Its tokenizer.
        stop: Returns the stop condition of the answers to a prompt.
        context_ids: Tokens of the context.
        media: Its images and videos.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        stop: Callable[[Prompt], Stop],
        context_ids: Sequence[int],
        media: Sequence[Medium],
    ) -> None:
        self.runner, self.tokenizer, self.stop = runner, tokenizer, stop
        self.context_ids, self.media = context_ids, media
        self._prefilled: tuple[Prefix, Tensor] | None = None
        self._answers: dict[tuple[object, ...], FullAnswer] = {}

    def share(self, prefix: Prefix, logits: Tensor) -> None:
        """Take over a prefilled context and the logits after it."""
        self._prefilled = prefix, logits

    def of(self, prompt: Prompt) -> FullAnswer:
        """Return the answer to a prompt about the context."""
        limit = answer_limit(prompt.request, self.tokenizer)
        key = (prompt.question_ids, limit, prompt.request.until)
        if key not in self._answers:
            if self._prefilled is None:
                self._prefilled = self.runner.prefill(self.context_ids, (), self.media)
            prefix, logits = self._prefilled
            prefix = unobserved(prefix)
            if prompt.question_ids:
                logits = prefix.extend(self.runner.tensor(prompt.question_ids))
            self._answers[key] = answer_greedily(prefix, logits, limit, self.stop(prompt))
        return self._answers[key]

    def following(self, prompt: Prompt, *, question_fed: bool) -> dict[str, Tensor]:
        """Return the tokens that follow a compressed cache, `[1, n]` each; see `RaggedCache.following`.

        Args:
            prompt: The prompt.
            question_fed: Whether the question is in the cache already.
        """
        runner, request = self.runner, prompt.request
        question_ids = () if question_fed else prompt.question_ids
        following = {"full": runner.tensor([*question_ids, *self.of(prompt).tokens[:-1]])}
        if request.target:
            reference = self.tokenizer(", ".join(request.target), add_special_tokens=False)["input_ids"]
            following["reference"] = runner.tensor([*question_ids, *reference])
        return {target: token_ids.long() for target, token_ids in following.items()}


def unobserved(prefix: Prefix) -> Prefix:
    """Return a copy of a prefix without observers, which would only take time."""
    copied = prefix.fork()
    copied.cache.observers.clear()
    copied.cache.token_observers.clear()
    return copied
