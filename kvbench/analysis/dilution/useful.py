"""Useful tokens of a context: those that spell a reference answer."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvbench.analysis.retention.texts import pieces
from kvbench.runs.answers import Prompt


def answer_tokens(tokenizer: Any, prompt: Prompt) -> Tensor:
    """Return the context tokens that spell a reference answer, wherever it occurs, bool `[T]`."""
    token_texts = pieces(tokenizer, prompt.context_ids)
    ends = [*accumulate(map(len, token_texts))]
    text = "".join(token_texts)
    useful = torch.zeros(len(token_texts), dtype=torch.bool)
    for target in filter(None, (target.strip() for target in prompt.request.target)):
        start = text.find(target)
        while start >= 0:
            stop = start + len(target)
            for position, end in enumerate(ends):
                # A token is useful if it covers a character of the answer.
                if end > start and end - len(token_texts[position]) < stop:
                    useful[position] = True
            start = text.find(target, stop)
    return useful
