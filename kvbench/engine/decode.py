"""Decoding: when a response ends, greedy decoding on a prefix, and batches of compressed caches."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.decoding import THOUGHT, Thinking
from kvbench.engine.cache import RaggedCache
from kvbench.engine.draw import Draw, choose
from kvbench.engine.driver import forward, left_padded
from kvbench.engine.prefix import Prefix
from kvbench.errors import UserError

NOT_FINITE = (
    "logits are not finite: NaN or infinity; use --dtype float32 or bfloat16, or check the model's "
    "configuration"
)
"""Why a response fails whose logits cannot be decoded."""

BLOCK = 32
"""Given tokens that are fed at once if nothing is cut between them."""


def end_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """Token ids that end a response: those of the generation configuration and the tokenizer."""
    config: Any = getattr(model, "generation_config", None)
    configured = getattr(config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return [token for token in (*listed, tokenizer.eos_token_id) if token is not None]


class Stop:
    """Decides when a response ends: at an end token, or at a stop string in the decoded text.

    Stop strings are not looked for in thinking, open or closed, or in the white space after it.

    Args:
        tokenizer: Decodes tokens.
        eos: Token ids that end a response.
        until: Strings that end it; the text is cut before the first one.
        thinking: The tokens around thinking, if the tokenizer has them.
        open: Whether the prompt has opened thinking.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos: Sequence[int],
        until: Sequence[str],
        thinking: Thinking | None = None,
        open: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos = frozenset(eos)
        self.until = [u for u in until if u]
        self.tail = 8 + 4 * max((len(u) for u in self.until), default=0)
        self.thinking = thinking
        self.open = open

    def start(self, start: int, token: int, count: int) -> int:
        """Index of the first token to search for stop strings; -1 while thinking is open.

        Args:
            start: The result for the tokens before this one.
            token: The new token.
            count: Number of tokens, including this one.
        """
        if self.thinking is None:
            return start
        if token == self.thinking.close:
            return count
        return -1 if token == self.thinking.open else start

    def reason(self, tokens: list[int], start: int = 0) -> str:
        """Why the response ends here: `eos`, `stop`, or an empty string if it does not."""
        if tokens and tokens[-1] in self.eos:
            return "eos"
        if self.until and start >= 0:
            tail = self._text(tokens[max(start, len(tokens) - self.tail) :])
            if start:  # white space after thinking does not belong to the answer
                tail = tail.lstrip()
            if any(u in tail for u in self.until):
                return "stop"
        return ""

    def text(self, tokens: list[int]) -> str:
        """The decoded response, cut before the first stop string after the thinking."""
        start = -1 if self.open else 0
        for count, token in enumerate(tokens, 1):
            start = self.start(start, token, count)
        if start < 0:
            return self._text(tokens)
        text = self._text(tokens[start:])
        before = ""
        if start:
            bare = text.lstrip()
            before = self._text(tokens[: start - 1]) + THOUGHT + text[: len(text) - len(bare)]
            text = bare
        ends = [text.find(u) for u in self.until if u in text]
        return before + (text[: min(ends)] if ends else text)

    def _text(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


@dataclass
class Row:
    """A response that is being generated.

    Attributes:
        limit: Most new tokens.
        stop: Decides when it ends.
        tokens: Tokens generated so far.
        reason: Why it has ended; empty while it continues.
        draw: How its tokens are drawn; None: greedily.
        given: Tokens that are measured instead of generated.
        nll: Negative log-likelihood of the given tokens so far, in nats.
        error: Why the response has failed, or an empty string.
    """

    limit: int
    stop: Stop
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    draw: Draw | None = None
    given: tuple[int, ...] = ()
    nll: float = 0.0
    error: str = ""
    _start: int = 0

    def __post_init__(self) -> None:
        self._start = -1 if self.stop.open else 0

    def push(self, token: int) -> None:
        """Add the next token unless the response has ended; -1 ends it with an error."""
        if self.reason:
            return
        if token < 0:
            self._fail()
            return
        self.tokens.append(token)
        self._start = self.stop.start(self._start, token, len(self.tokens))
        self.reason = self.stop.reason(self.tokens, self._start)
        if not self.reason and len(self.tokens) >= self.limit:
            self.reason = "length"

    def measure(self, logits: Tensor) -> None:
        """Measure the next given tokens.

        Args:
            logits: Logits before each of them, `[n, vocabulary]`; only as many are used as given
                tokens are left.
        """
        taken = self.given[len(self.tokens) : len(self.tokens) + len(logits)]
        if taken:
            index = torch.tensor(taken, device=logits.device)
            logs = logits[: len(taken)].double().log_softmax(-1)
            self.nll -= float(logs.gather(1, index[:, None]).sum())
        self.tokens.extend(taken)
        if not math.isfinite(self.nll):
            self._fail()
        elif len(self.tokens) == len(self.given):
            self.reason = "given"

    def _fail(self) -> None:
        self.reason, self.error = "error", NOT_FINITE

    def text(self) -> str:
        """The response as it is stored."""
        if self.given:
            return json.dumps({"nll": self.nll, "tokens": len(self.tokens)})
        return self.stop.text(self.tokens)


def greedy(
    prefix: Prefix, logits: Tensor, limit: int, stop: Stop, *, feed_last: bool = False
) -> Iterator[int]:
    """Decode greedily on a full cache of one sequence.

    Args:
        prefix: The prompt, prefilled; it is extended.
        logits: Logits after the prompt, `[1, vocabulary]`.
        limit: Most new tokens.
        stop: Decides when the response ends.
        feed_last: Whether the last token is fed as well, so that the prefix holds it.

    Yields:
        Each token before it is fed.

    Raises:
        UserError: The logits are not finite.
    """
    tokens: list[int] = []
    while len(tokens) < limit:
        (token,) = choose(logits, [None], [len(tokens)])
        if token < 0:
            raise UserError(NOT_FINITE)
        tokens.append(token)
        yield token
        ended = len(tokens) == limit or bool(stop.reason(tokens))
        if ended and not feed_last:
            return
        logits = prefix.extend(torch.tensor([[token]], device=prefix.device))
        if ended:
            return


class Batch:
    """A batch of compressed caches, each with a response of its own.

    The batch always has `slots` rows (the last one is repeated if there are fewer). With a constant
    number the shapes of all matrix products, and so the bits of a row, do not depend on the other
    rows.

    Args:
        model: The model, inside `engine`.
        caches: At most `slots` packed caches of one sequence each.
        slots: Rows of the batch.
    """

    def __init__(self, model: nn.Module, caches: Sequence[RaggedCache], slots: int) -> None:
        self.model = model
        self.rows = len(caches)
        self.slots = slots
        self.cache = RaggedCache.stack([caches[min(i, self.rows - 1)] for i in range(slots)])
        assert self.cache.valid is not None
        self.device = self.cache.valid.device

    def feed(
        self,
        tokens: Sequence[Sequence[int]],
        width: int,
        pixels: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Append tokens to every row.

        Args:
            tokens: At most `width` tokens for each row; a row without tokens waits.
            width: Columns of the forward; shorter rows are padded on the left.
            pixels: The media among the tokens, in a batch of one slot.

        Returns:
            Logits after the last token of every row, `[rows, vocabulary]`.
        """
        return self._feed(tokens, width, 1, pixels)[:, -1]

    def _feed(
        self,
        tokens: Sequence[Sequence[int]],
        width: int,
        last: int,
        pixels: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Append tokens; return the logits after the last columns, `[rows, last, vocabulary]`."""
        # If rows are cut as they grow, or read one by one, a repeated row gets no token.
        alone = self.cache.upkeep is not None or bool(self.cache.readings)
        spare = () if alone else tokens[-1]
        own = [*tokens, *[spare] * (self.slots - self.rows)]
        ids, mask = left_padded(own, width)
        some = None if bool(mask.all()) else mask.to(self.device)
        ids = ids.to(self.device)
        return forward(self.model, self.cache, ids, some, last, pixels)[: self.rows]

    def answer(self, rows: Sequence[Row], logits: Tensor, pause: bool = False) -> None:
        """Generate until every row has ended.

        Args:
            rows: One response for each row of the batch.
            logits: Logits after the last prompt token of each, `[rows, vocabulary]`.
            pause: Whether a row that has ended gets no more tokens, because its cache is used
                afterwards or counts in statistics.
        """
        while True:
            steps = [len(row.tokens) for row in rows]
            tokens = choose(logits, [row.draw for row in rows], steps)
            for row, token in zip(rows, tokens, strict=True):
                row.push(token)
            if all(row.reason for row in rows):
                return
            # A row that failed at its first token has none; any keeps the batch as it is.
            last = [() if pause and row.reason else row.tokens[-1:] or (0,) for row in rows]
            logits = self.feed(last, 1)

    def measure(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Feed every row its given tokens and sum up their negative log-likelihood.

        If the cache is cut while it grows, or has sliding windows, the tokens are fed one by one.

        Args:
            rows: One response for each row of the batch.
            logits: Logits after the last prompt token of each, `[rows, vocabulary]`.
        """
        width = 1 if self.cache.upkeep is not None or self.cache.slides else BLOCK
        for row, own in zip(rows, logits, strict=True):
            row.measure(own[None])
        while not all(row.reason for row in rows):
            # The last given token is not fed: nothing follows it.
            parts = [row.given[len(row.tokens) - 1 : -1][:width] for row in rows]
            after = self._feed(parts, width, width)
            for row, part, own in zip(rows, parts, after, strict=True):
                if part:
                    row.measure(own[width - len(part) :])
