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
        cache: The packed cache of one sequence; the row owns it.
        logits: After the last prompt token, `[1, vocabulary]`.
        limit: New tokens at most.
        stop: When it ends.
    """

    cache: RaggedCache
    logits: Tensor
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


def decode(model: nn.Module, rows: Sequence[Row], slots: int) -> None:
    """Generate greedily until every row has ended.

    The batch always has `slots` rows (the last one is repeated where there are fewer). With a
    constant number the shapes of all matrix products, and so a row's bits, do not depend on its
    company.

    Args:
        model: The model, inside `engine`.
        rows: At most `slots` rows.
        slots: Rows of the batch.
    """
    for row in rows:
        row.push(int(row.logits.argmax(-1)))
    if all(row.reason for row in rows):
        return
    cache = RaggedCache.stack([rows[min(i, len(rows) - 1)].cache for i in range(slots)])
    device = rows[0].logits.device
    while not all(row.reason for row in rows):
        last = [rows[min(i, len(rows) - 1)].tokens[-1] for i in range(slots)]
        logits = forward(model, cache, torch.tensor(last, device=device)[:, None])
        for row, token in zip(rows, logits.argmax(-1).tolist(), strict=False):
            row.push(token)
