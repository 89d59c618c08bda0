"""Log-likelihood of texts on caches: many branches of a prompt in one batch, or a text on the full model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import BLOCK, Batch
from kvbench.engine.draw import most_likely
from kvbench.engine.driver import forward
from kvbench.engine.models import decoder_of

DENSE_BLOCK = 256
"""Tokens fed per forward of a full cache: the logits of a long text together would take gigabytes."""


@dataclass
class MeasuredText:
    """A text whose log-likelihood is measured while it is fed.

    Attributes:
        input_ids: Tokens to feed; the last measured token is only predicted.
        answer_ids: Measured tokens.
        fed: Number of input tokens fed so far.
        loglikelihood: Sum over the tokens measured so far, in nats.
        is_greedy: Whether greedy decoding would produce them.
    """

    input_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    fed: int = 0
    loglikelihood: float = 0.0
    is_greedy: bool = True

    @property
    def pending_ids(self) -> tuple[int, ...]:
        """Return the input tokens that are still to be fed."""
        return self.input_ids[self.fed :]

    @property
    def is_finite(self) -> bool:
        """Return whether the logits so far were finite."""
        return math.isfinite(self.loglikelihood)

    def take(self, logits: Tensor) -> None:
        """Measure the tokens that follow the next input tokens, from the logits after each, `[n, vocabulary]`."""
        for block_logits in logits.split(BLOCK):  # in double precision, all of a long text could exhaust memory
            self.advance(log_probabilities(block_logits))

    def advance(self, log_probs: Tensor) -> None:
        """Measure the tokens that follow the next input tokens.

        Args:
            log_probs: Log-probabilities after each of these input tokens, `[n, vocabulary]`.
        """
        unmeasured = len(self.input_ids) - len(self.answer_ids)  # the first inputs, before those that predict
        first = self.fed - unmeasured
        self.fed += len(log_probs)
        target_ids = self.answer_ids[max(0, first) : max(0, first + len(log_probs))]
        if target_ids:
            predicting = log_probs[-len(target_ids) :]
            token_ids = torch.tensor(target_ids, device=log_probs.device)
            self.loglikelihood += float(predicting.gather(1, token_ids[:, None]).sum())
            self.is_greedy &= bool((most_likely(predicting) == token_ids).all())


def log_probabilities(logits: Tensor) -> Tensor:
    """Return log-probabilities `[n, vocabulary]` in double precision."""
    return logits.double().log_softmax(-1)


def feed_texts(batch: Batch, texts: Sequence[MeasuredText], width: int) -> None:
    """Feed every row the rest of its text, `width` tokens per forward, and measure it.

    Args:
        batch: A batch with a row for each text.
        texts: The texts.
        width: Columns of every forward. 1 if the cache is evicted from as it grows.
    """
    while any(text.pending_ids for text in texts):
        token_chunks = [text.pending_ids[:width] for text in texts]
        chunk_logits = batch.feed_all(token_chunks, width)
        for text, token_chunk, row_logits in zip(texts, token_chunks, chunk_logits, strict=True):
            if token_chunk:
                text.take(row_logits[width - len(token_chunk) :])


def feed_text(model: nn.Module, cache: RaggedCache, text: MeasuredText, width: int = BLOCK) -> None:
    """Feed the rest of a text to a cache of one sequence, without padding, and measure it.

    Args:
        model: The model, inside `engine`.
        cache: A cache of any kind.
        text: The text.
        width: Maximum number of tokens per forward.
    """
    device = next(model.parameters()).device
    while token_chunk := text.pending_ids[:width]:
        logits = forward(model, cache, torch.tensor([token_chunk], device=device), logit_count=len(token_chunk))
        text.take(logits[0])


def measure_alone(model: nn.Module, input_ids: tuple[int, ...], answer_ids: tuple[int, ...]) -> MeasuredText:
    """Measure a text on the full cache, without anything before its input tokens."""
    text = MeasuredText(input_ids, answer_ids)
    feed_text(model, RaggedCache(decoder_of(model).config), text, DENSE_BLOCK)
    return text
