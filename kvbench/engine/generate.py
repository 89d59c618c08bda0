"""Greedy generation on compressed caches, many rows at a time, each from its own cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.engine.cache import RaggedCache
from kvbench.engine.prefix import forward


class Stop:
    """When a response ends: an end-of-sequence token, or a stop string in the decoded text.

    Args:
        tokenizer: Decodes tokens.
        eos: Token ids that end a response.
        until: Strings that end it; the text is cut before the first.
    """

    def __init__(self, tokenizer: Any, eos: Sequence[int], until: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.eos = frozenset(eos)
        self.until = [u for u in until if u]
        self.tail = 8 + 4 * max((len(u) for u in self.until), default=0)

    def reason(self, tokens: list[int]) -> str:
        """Why the response ends here (`eos`, `stop`), or an empty string."""
        if tokens and tokens[-1] in self.eos:
            return "eos"
        if self.until and any(u in self._text(tokens[-self.tail :]) for u in self.until):
            return "stop"
        return ""

    def text(self, tokens: list[int]) -> str:
        """The response: decoded, cut before the first stop string."""
        text = self._text(tokens)
        ends = [text.find(u) for u in self.until if u in text]
        return text[: min(ends)] if ends else text

    def _text(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


@dataclass
class Row:
    """One response in the making.

    Attributes:
        limit: New tokens at most.
        stop: When it ends.
        tokens: What was generated so far.
        reason: Why it has ended; empty while it goes on.
    """

    limit: int
    stop: Stop
    tokens: list[int] = field(default_factory=list)
    reason: str = ""

    def push(self, token: int) -> None:
        """Take in the next token unless the response has ended."""
        if self.reason:
            return
        self.tokens.append(token)
        self.reason = self.stop.reason(self.tokens)
        if not self.reason and len(self.tokens) >= self.limit:
            self.reason = "length"


class Batch:
    """Compressed caches side by side.

    The batch always has `slots` rows (the last one is repeated where there are fewer). With a
    constant number the shapes of all matrix products, and so a row's bits, do not depend on its
    company.

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

    def feed(self, tokens: Sequence[Sequence[int]], width: int) -> Tensor:
        """Append tokens to every row.

        Args:
            tokens: At most `width` tokens for each row; a row that gets none waits.
            width: Columns of the forward; what a row has not is padded on the left.

        Returns:
            Logits after the last token of every row, `[rows, vocabulary]`.
        """
        # Where rows are cut as they go a repeated one would be cut for nothing: it waits.
        spare = () if self.cache.upkeep is not None else tokens[-1]
        own = [*tokens, *[spare] * (self.slots - self.rows)]
        ids = torch.tensor([[0] * (width - len(t)) + list(t) for t in own], device=self.device)
        if all(len(t) == width for t in own):
            return forward(self.model, self.cache, ids)[: self.rows]
        count = torch.tensor([len(t) for t in own], device=self.device)
        mask = torch.arange(width, device=self.device) >= width - count[:, None]
        return forward(self.model, self.cache, ids, mask)[: self.rows]

    def answer(self, rows: Sequence[Row], logits: Tensor, pause: bool = False) -> None:
        """Generate greedily until every row has ended.

        Args:
            rows: One for each row of the batch.
            logits: After the last prompt token of each, `[rows, vocabulary]`.
            pause: Whether a row that has ended gets no further tokens, because its cache matters
                to others or lives on.
        """
        while True:
            for row, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
                row.push(token)
            if all(row.reason for row in rows):
                return
            last = [() if pause and row.reason else (row.tokens[-1],) for row in rows]
            logits = self.feed(last, 1)
