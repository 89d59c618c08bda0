"""Retention by the gates: matrices, sparsity per KV head, and which tokens are retained most.

Bui, Sharma, Lamba, Mishra, Ying: Cache What Lasts, arXiv 2512.03324: `beta_i^(t-i)` of section 4.1
(figures 4 and 12), the mean retention of tokens (figure 5a and b) and the sparsity of section 5.1.2
(figure 5c). Everything is computed in the log domain, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.stats import Floats


def retention(log_beta: Tensor, rows: Tensor) -> Tensor:
    """Rows of retention matrices, `beta_i^(t-i)` for `i <= t` and 0 above the diagonal.

    Args:
        log_beta: 0 or less, `[..., T]`.
        rows: Which steps `t`, int64 `[R]`.

    Returns:
        float64 `[..., R, T]`.
    """
    age = rows[:, None] - torch.arange(log_beta.shape[-1], device=log_beta.device)
    left = (age.clamp(min=0) * log_beta.double()[..., None, :]).exp()
    return left.masked_fill(age < 0, 0.0)


def sparsity(log_beta: Tensor) -> Tensor:
    """How much of a head's causal matrix is forgotten, `1 - 2/(T(T+1)) sum_{i<=t} beta_i^(t-i)`.

    A head that forgets nothing has 0. (Section 5.1.2 sums over `i < t`, which would give such a
    head `2/(T+1)`.) The sum over `t` is geometric, `(1 - beta^n)/(1 - beta)` for `n` steps, so no
    matrix is built.

    Args:
        log_beta: 0 or less, `[..., T]`.

    Returns:
        float64 `[...]`, in `[0, 1)`.
    """
    x = log_beta.double()
    tokens = x.shape[-1]
    steps = tokens - torch.arange(tokens, device=x.device, dtype=torch.float64)
    still = x == 0
    safe = x.masked_fill(still, -1.0)
    sums = torch.where(still, steps, torch.expm1(steps * safe) / torch.expm1(safe))
    return 1 - sums.sum(-1) * 2 / (tokens * (tokens + 1))


@dataclass
class TokenSums:
    """Sums the retention of each token of the vocabulary.

    Attributes:
        count: Occurrences by token id.
        beta, log_beta: Sums over occurrences of the means over layers and heads.
    """

    count: dict[int, int] = field(default_factory=dict)
    beta: dict[int, float] = field(default_factory=dict)
    log_beta: dict[int, float] = field(default_factory=dict)

    def add(self, ids: Sequence[int], log_beta: Tensor) -> None:
        """Add one text.

        Args:
            ids: Its tokens.
            log_beta: Their log retention, `[L, H, T]`.
        """
        flat = log_beta.double().flatten(0, 1)
        means = flat.exp().mean(0).tolist(), flat.mean(0).tolist()
        for token, beta, logarithm in zip(ids, *means, strict=True):
            self.count[token] = self.count.get(token, 0) + 1
            self.beta[token] = self.beta.get(token, 0.0) + beta
            self.log_beta[token] = self.log_beta.get(token, 0.0) + logarithm

    def rows(self) -> list[dict[str, Any]]:
        """A row per token, the most retained first, ties in the order of token ids."""
        rows = []
        for token, count in self.count.items():
            rate = self.log_beta[token] / count
            rows.append(
                {
                    "token_id": token,
                    "count": count,
                    "beta": self.beta[token] / count,
                    "log_beta": rate,
                    "half_life": math.log(0.5) / rate if rate < 0 else math.inf,
                }
            )
        return sorted(rows, key=lambda row: (-row["beta"], row["token_id"]))


def binned(picture: Floats, most: int) -> Floats:
    """Average neighbouring columns until there are `most` at most, ignoring NaN.

    Args:
        picture: `[..., columns]`.
        most: The most columns that a figure shows.
    """
    columns = picture.shape[-1]
    if columns <= most:
        return picture
    edges = np.linspace(0, columns, most + 1).round().astype(np.int64)[:-1]
    known = np.isfinite(picture)
    total = np.add.reduceat(np.where(known, picture, 0.0), edges, axis=-1)
    count = np.add.reduceat(known.astype(np.float64), edges, axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def steps_shown(tokens: int, most: int) -> Tensor:
    """Steps that a figure shows: all, or `most` of them, evenly spaced and including the last."""
    if tokens <= most:
        return torch.arange(tokens)
    return torch.linspace(0, tokens - 1, most, dtype=torch.float64).round().long()
