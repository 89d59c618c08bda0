"""Sampling with temperature, top-k and top-p, and noise seeds of sampling and policies.

The sampled token is the largest `logit + Gumbel noise`, a sample from the softmax of the logits (the Gumbel-max trick).
The noise is an integer hash of the response's key, step and token. There is no generator state, so a response depends
neither on its batch, nor on resuming, nor on other cells. The key contains neither policy nor budget: all cells of a
comparison use the same noise, and two caches with equal logits give the same answer, which makes paired differences
less noisy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.decoding import Sampling
from kvbench.engine.cache import RaggedCache

_WORD = 1 << 64


@dataclass(frozen=True)
class Draw:
    """Sampling of the tokens of one response.

    Attributes:
        sampling: Temperature, top-k and top-p.
        key: Identifies the response: (seed, task, sample_id, question_id, repeat).
    """

    sampling: Sampling
    key: tuple[int | str, ...]

    def state(self, step: int) -> int:
        """Return the initial noise state of a step, a signed 64-bit integer."""
        key_bytes = repr((*self.key, step)).encode()
        digest = hashlib.blake2b(key_bytes, digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


def warped(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits `[N, V]` at the temperature, with -inf for tokens removed by top-k and then top-p.

    Equivalent to transformers' `TemperatureLogitsWarper`, `TopKLogitsWarper` and `TopPLogitsWarper` in this order: all
    logits equal to the k-th largest stay, and at least one token stays.
    """
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest_logit = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_logit, -torch.inf)
    if sampling.top_p < 1:
        # Ascending: remove tokens while their total is at most 1 - top_p, but never the last one.
        sorted_logits, sort_order = logits.sort(dim=-1, stable=True)
        is_dropped = sorted_logits.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        is_dropped[:, -1] = False
        logits = logits.masked_fill(torch.zeros_like(is_dropped).scatter(-1, sort_order, is_dropped), -torch.inf)
    return logits


def gumbel(states: Sequence[int], vocabulary_size: int, device: torch.device) -> Tensor:
    """Return standard Gumbel noise `[N, tokens]`, float64, from one 64-bit state per row.

    Token v of a row is output v of SplitMix64 from the row's state.
    """
    golden_gamma = _signed(0x9E3779B97F4A7C15)
    token_numbers = torch.arange(1, vocabulary_size + 1, device=device, dtype=torch.int64)
    z = torch.tensor(list(states), device=device, dtype=torch.int64)[:, None] + token_numbers * golden_gamma
    z = (z ^ _right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _right(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _right(z, 31)
    uniform = (_right(z, 12).double() + 0.5) * 2.0**-52  # never 0 or 1
    return -torch.log(-torch.log(uniform))


def most_likely(logits: Tensor) -> Tensor:
    """Return the index of the largest number of every row, int64: the first of equal ones; NaN is larger than any.

    Args:
        logits: `[..., V]`.
    """
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    # numpy's takes a tenth of the time or less.
    numbers = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return torch.from_numpy(numbers.detach().numpy().argmax(-1))


def choose(
    logits: Tensor, draws: Sequence[Draw | None], steps: Sequence[int], rows: Sequence[int] | None = None
) -> list[int]:
    """Choose the next token of rows; -1 where the logits are NaN or infinite.

    Logits of -inf are allowed unless all are: some models mask tokens with them.

    Args:
        logits: `[N, V]`.
        draws: Sampling of each row; None: greedy.
        steps: Number of tokens generated so far in each row.
        rows: The rows to choose for, in this order, without copying their logits; None: all.
    """
    rows = range(len(logits)) if rows is None else rows
    best_tokens = most_likely(logits)
    is_finite = logits.gather(-1, best_tokens[:, None])[:, 0].isfinite()
    row_tokens: list[int] = best_tokens.where(is_finite, -1).tolist()
    token_ids = [row_tokens[row] for row in rows]
    sampling_groups: dict[Sampling, list[int]] = {}
    for row_index, draw in enumerate(draws):
        if draw is not None and token_ids[row_index] >= 0:
            sampling_groups.setdefault(draw.sampling, []).append(row_index)
    for sampling, row_indices in sampling_groups.items():
        states = [draw.state(steps[row_index]) for row_index in row_indices if (draw := draws[row_index]) is not None]
        noise = gumbel(states, logits.shape[-1], logits.device)
        row_logits = logits[[rows[row_index] for row_index in row_indices]]
        sampled_tokens = most_likely(warped(row_logits, sampling).double() + noise).tolist()
        for row_index, token_id in zip(row_indices, sampled_tokens, strict=True):
            token_ids[row_index] = token_id
    return token_ids


def row_seeds(cache: RaggedCache, seed: int) -> Tensor:
    """Return noise seeds of the sequences, int64 `[B]`, from the run's seed and the sequence's tokens.

    Padding does not count, so that a sequence has the same noise in every batch.
    """
    assert cache.valid is not None
    if cache.ids is None:
        return torch.full((cache.batch,), seed, device=cache.valid.device)
    token_ids = torch.cat([forward_ids.to(cache.valid.device) for forward_ids in cache.ids], 1)
    row_seeds = []
    for sequence_ids, token_mask in zip(token_ids.cpu(), cache.valid.cpu(), strict=True):
        token_text = ",".join(map(str, sequence_ids[token_mask].tolist()))
        digest = hashlib.blake2b(f"{seed}|{token_text}".encode(), digest_size=4).digest()
        row_seeds.append(int.from_bytes(digest, "big"))
    return torch.tensor(row_seeds, device=cache.valid.device)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def _right(numbers: Tensor, bit_count: int) -> Tensor:
    """Shift right and fill with zeros; a plain int64 shift would copy the sign."""
    return (numbers >> bit_count) & ((1 << (64 - bit_count)) - 1)
