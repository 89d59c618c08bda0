"""Decoding: stop conditions, greedy decoding on a prefix, and batches of compressed caches."""

from __future__ import annotations

import copy
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
from kvbench.engine.refill import picked
from kvbench.errors import UserError

NOT_FINITE = (
    "logits are not finite: NaN or infinity; use --dtype float32 or bfloat16, or check the model's configuration"
)
"""Error of a response whose logits cannot be decoded."""

BLOCK = 32
"""Number of given tokens fed per forward if no eviction step lies between them."""


def end_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """Return the end-of-response token ids of the generation configuration and the tokenizer."""
    generation_config: Any = getattr(model, "generation_config", None)
    configured = getattr(generation_config, "eos_token_id", None)
    candidates = configured if isinstance(configured, list) else [configured]
    return [token_id for token_id in (*candidates, tokenizer.eos_token_id) if token_id is not None]


class Stop:
    """Decides when a response ends: at an end token, or at a stop string in the decoded text.

    Thinking, open or closed, and the whitespace after it are not searched for stop strings.

    Args:
        tokenizer: Decodes tokens.
        end_token_ids: Token ids that end a response.
        stop_strings: Strings that end it; the text is truncated before the first one.
        thinking: The tokens around thinking, if the tokenizer has them.
        thinking_open: Whether the prompt has opened thinking.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_token_ids: Sequence[int],
        stop_strings: Sequence[str],
        thinking: Thinking | None = None,
        thinking_open: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos = frozenset(end_token_ids)
        self.until = [stop_string for stop_string in stop_strings if stop_string]
        self.tail = 8 + 4 * max((len(stop_string) for stop_string in self.until), default=0)
        self.thinking = thinking
        self.open = thinking_open

    def start(self, search_start: int, token_id: int, token_count: int) -> int:
        """Return the index of the first token to search for stop strings; -1 while thinking is open.

        Args:
            search_start: The result for the tokens before this one.
            token_count: Number of tokens, including this one.
        """
        if self.thinking is None:
            return search_start
        if token_id == self.thinking.close:
            return token_count
        return -1 if token_id == self.thinking.open else search_start

    def reason(self, tokens: list[int], search_start: int = 0) -> str:
        """Return why the response ends here (`eos` or `stop`), or "" if it continues."""
        if tokens and tokens[-1] in self.eos:
            return "eos"
        if self.until and search_start >= 0:
            tail_text = self._text(tokens[max(search_start, len(tokens) - self.tail) :])
            if search_start:  # whitespace after thinking does not belong to the answer
                tail_text = tail_text.lstrip()
            if any(stop_string in tail_text for stop_string in self.until):
                return "stop"
        return ""

    def text(self, tokens: list[int]) -> str:
        """Return the decoded response, truncated before the first stop string after the thinking."""
        search_start = -1 if self.open else 0
        for token_count, token_id in enumerate(tokens, 1):
            search_start = self.start(search_start, token_id, token_count)
        if search_start < 0:
            return self._text(tokens)
        answer_text = self._text(tokens[search_start:])
        thinking_text = ""
        if search_start:
            stripped = answer_text.lstrip()
            thinking_text = (
                self._text(tokens[: search_start - 1]) + THOUGHT + answer_text[: len(answer_text) - len(stripped)]
            )
            answer_text = stripped
        stop_offsets = [answer_text.find(stop_string) for stop_string in self.until if stop_string in answer_text]
        return thinking_text + (answer_text[: min(stop_offsets)] if stop_offsets else answer_text)

    def _text(self, tokens: list[int]) -> str:
        decoded: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return decoded


@dataclass
class DecodeRow:
    """A response in progress.

    Attributes:
        limit: Maximum number of new tokens.
        stop: Decides when it ends.
        tokens: Tokens generated so far.
        reason: Why it has ended; empty while it continues.
        draw: Sampling of its tokens; None: greedy.
        given: Tokens to measure instead of generating.
        nll: Negative log-likelihood of the given tokens so far, in nats.
        error: Why the response has failed, or "".
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

    def push(self, token_id: int) -> None:
        """Add the next token unless the response has ended; -1 ends it with an error."""
        if self.reason:
            return
        if token_id < 0:
            self._fail()
            return
        self.tokens.append(token_id)
        self._start = self.stop.start(self._start, token_id, len(self.tokens))
        self.reason = self.stop.reason(self.tokens, self._start)
        if not self.reason and len(self.tokens) >= self.limit:
            self.reason = "length"

    def measure(self, logits: Tensor) -> None:
        """Measure the next given tokens.

        Args:
            logits: Logits before each of them, `[n, vocabulary]`; rows beyond the remaining given tokens are ignored.
        """
        measured_tokens = self.given[len(self.tokens) : len(self.tokens) + len(logits)]
        if measured_tokens:
            token_indices = torch.tensor(measured_tokens, device=logits.device)
            log_probs = logits[: len(measured_tokens)].double().log_softmax(-1)
            self.nll -= float(log_probs.gather(1, token_indices[:, None]).sum())
        self.tokens.extend(measured_tokens)
        if not math.isfinite(self.nll):
            self._fail()
        elif len(self.tokens) == len(self.given):
            self.reason = "given"

    def _fail(self) -> None:
        self.reason, self.error = "error", NOT_FINITE

    def text(self) -> str:
        """Return the response text as stored."""
        if self.given:
            return json.dumps({"nll": self.nll, "tokens": len(self.tokens)})
        return self.stop.text(self.tokens)


def greedy(prefix: Prefix, logits: Tensor, max_tokens: int, stop: Stop, *, feed_last: bool = False) -> Iterator[int]:
    """Decode greedily on a full cache of one sequence.

    Args:
        prefix: The prefilled prompt; it is extended.
        logits: Logits after the prompt, `[1, vocabulary]`.
        max_tokens: Maximum number of new tokens.
        stop: Decides when the response ends.
        feed_last: Whether to feed the last token too, so that the prefix holds it.

    Yields:
        Each token before it is fed.

    Raises:
        UserError: The logits are not finite.
    """
    generated: list[int] = []
    while len(generated) < max_tokens:
        (token_id,) = choose(logits, [None], [len(generated)])
        if token_id < 0:
            raise UserError(NOT_FINITE)
        generated.append(token_id)
        yield token_id
        has_ended = len(generated) == max_tokens or bool(stop.reason(generated))
        if has_ended and not feed_last:
            return
        logits = prefix.extend(torch.tensor([[token_id]], device=prefix.device))
        if has_ended:
            return


class Batch:
    """A batch of compressed caches, each with its own response.

    The batch always has `slot_count` rows (the last one is repeated if there are fewer). A constant row count keeps the
    shapes of all matrix products, so the bits of a row do not depend on the other rows.

    Args:
        model: The model, inside `engine`.
        caches: At most `slot_count` packed caches of one sequence each.
        slot_count: Rows of the batch.
    """

    def __init__(self, model: nn.Module, caches: Sequence[RaggedCache], slot_count: int) -> None:
        self.model = model
        self.rows = len(caches)
        self.slots = slot_count
        self.cache = RaggedCache.stack([caches[min(slot_index, self.rows - 1)] for slot_index in range(slot_count)])
        assert self.cache.valid is not None
        self.device = self.cache.valid.device

    def branches(self, row_indices: Sequence[int], slot_count: int) -> Batch:
        """Return a batch of copies of some rows, whose caches have no eviction state.

        Args:
            row_indices: The rows in ascending order; a row can have several copies.
            slot_count: Rows of the new batch.
        """
        branched = copy.copy(self)
        branched.rows, branched.slots = len(row_indices), slot_count
        filler_count = slot_count - len(row_indices)
        branched.cache = picked(self.cache, [*row_indices, *[row_indices[-1]] * filler_count])
        return branched

    def feed(
        self,
        row_tokens: Sequence[Sequence[int]],
        width: int,
        pixels: Mapping[str, Tensor] | None = None,
        token_count: int | None = None,
    ) -> Tensor:
        """Append tokens to every row.

        Args:
            row_tokens: At most `width` tokens per row; a row without tokens waits.
            width: Columns of the forward; shorter rows are padded on the left.
            pixels: The media among the tokens, in the order of the rows.
            token_count: As for `forward`; None: the tokens of all rows.

        Returns:
            Logits after the last token of every row, `[rows, vocabulary]`.
        """
        return self._feed(row_tokens, width, 1, pixels, token_count)[:, -1]

    def feed_all(self, row_tokens: Sequence[Sequence[int]], width: int) -> Tensor:
        """Append tokens to every row as `feed`; return the logits after each column, `[rows, width, vocabulary]`."""
        return self._feed(row_tokens, width, width)

    def _feed(
        self,
        row_tokens: Sequence[Sequence[int]],
        width: int,
        logit_count: int,
        pixels: Mapping[str, Tensor] | None = None,
        token_count: int | None = None,
    ) -> Tensor:
        """Append tokens; return the last logits, `[rows, logit_count, vocabulary]`."""
        # A repeated row gets no token if rows have eviction state or are read one by one, and no image.
        separate_rows = self.cache.eviction_state is not None or bool(self.cache.readings) or pixels is not None
        filler_tokens = () if separate_rows else row_tokens[-1]
        slot_tokens = [*row_tokens, *[filler_tokens] * (self.slots - self.rows)]
        token_ids, token_mask = left_padded(slot_tokens, width)
        partial_mask = None if bool(token_mask.all()) else token_mask.to(self.device)
        token_ids = token_ids.to(self.device)
        if token_count is None:
            token_count = sum(map(len, row_tokens))
        logits = forward(self.model, self.cache, token_ids, partial_mask, logit_count, pixels, token_count=token_count)
        return logits[: self.rows]

    def answer(self, responses: Sequence[DecodeRow], logits: Tensor, pause_ended: bool = False) -> None:
        """Generate until every row has ended.

        Args:
            responses: One response per row of the batch.
            logits: Logits after each row's last prompt token, `[rows, vocabulary]`.
            pause_ended: Whether an ended row gets no more tokens, because its cache is used afterwards or its
                statistics count.
        """
        while True:
            step_counts = [len(response.tokens) for response in responses]
            next_tokens = choose(logits, [response.draw for response in responses], step_counts)
            for response, token_id in zip(responses, next_tokens, strict=True):
                response.push(token_id)
            if all(response.reason for response in responses):
                return
            # A row that failed at its first token has none; an arbitrary token keeps the batch shape.
            next_inputs = [
                () if pause_ended and response.reason else response.tokens[-1:] or (0,) for response in responses
            ]
            open_rows = sum(not response.reason for response in responses)
            logits = self.feed(next_inputs, 1, token_count=open_rows)

    def measure(self, responses: Sequence[DecodeRow], logits: Tensor, width: int = BLOCK) -> None:
        """Feed every row its given tokens and sum their negative log-likelihood.

        Tokens are fed one by one if the cache is evicted from as it grows, or has sliding windows.

        Args:
            responses: One response per row of the batch.
            logits: Logits after each row's last prompt token, `[rows, vocabulary]`.
            width: Columns of every forward otherwise.
        """
        if self.cache.eviction_state is not None or self.cache.forbids_gaps:
            width = 1
        for response, row_logits in zip(responses, logits, strict=True):
            response.measure(row_logits[None])
        while not all(response.reason for response in responses):
            # The last given token is not fed: nothing follows it.
            token_chunks = [response.given[len(response.tokens) - 1 : -1][:width] for response in responses]
            chunk_logits = self._feed(token_chunks, width, width)
            for response, token_chunk, row_logits in zip(responses, token_chunks, chunk_logits, strict=True):
                if token_chunk:
                    response.measure(row_logits[width - len(token_chunk) :])
