"""Retention by gates: matrices, sparsity per KV head, and the most retained tokens.

Bui, Sharma, Lamba, Mishra, Ying: Cache What Lasts, arXiv 2512.03324: `beta_i^(t-i)` of section 4.1 (figures 4 and 12),
the mean retention of tokens (figure 5a and b) and the sparsity of section 5.1.2 (figure 5c). Everything is computed in
the log domain, in float64.
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


def retention(log_beta: Tensor, steps: Tensor) -> Tensor:
    """Return rows of retention matrices, `beta_i^(t-i)` for `i <= t` and 0 above the diagonal.

    Args:
        log_beta: 0 or less, `[..., T]`.
        steps: Steps `t`, int64 `[R]`.

    Returns:
        float64 `[..., R, T]`.
    """
    age = steps[:, None] - torch.arange(log_beta.shape[-1], device=log_beta.device)
    retained = (age.clamp(min=0) * log_beta.double()[..., None, :]).exp()
    return retained.masked_fill(age < 0, 0.0)


def sparsity(log_beta: Tensor) -> Tensor:
    """Return the forgotten fraction of a head's causal matrix, `1 - 2/(T(T+1)) sum_{i<=t} beta_i^(t-i)`.

    A head that forgets nothing has sparsity 0. (Section 5.1.2 sums over `i < t`, which would give `2/(T+1)`.) The sum
    over `t` is geometric, `(1 - beta^n)/(1 - beta)` for `n` steps, so no matrix is materialised.

    Args:
        log_beta: 0 or less, `[..., T]`.

    Returns:
        float64 `[...]`, in `[0, 1)`.
    """
    logarithms = log_beta.double()
    length = logarithms.shape[-1]
    remaining_steps = length - torch.arange(length, device=logarithms.device, dtype=torch.float64)
    never_fades = logarithms == 0
    safe_logarithms = logarithms.masked_fill(never_fades, -1.0)
    column_sums = torch.where(
        never_fades,
        remaining_steps,
        torch.expm1(remaining_steps * safe_logarithms) / torch.expm1(safe_logarithms),
    )
    return 1 - column_sums.sum(-1) * 2 / (length * (length + 1))


@dataclass
class TokenSums:
    """Summed retention of each vocabulary token.

    Attributes:
        count: Occurrences by token id.
        beta, log_beta: Sums over occurrences of the means over layers and heads.
    """

    count: dict[int, int] = field(default_factory=dict)
    beta: dict[int, float] = field(default_factory=dict)
    log_beta: dict[int, float] = field(default_factory=dict)

    def add(self, token_ids: Sequence[int], log_beta: Tensor) -> None:
        """Add one text.

        Args:
            token_ids: Tokens of the text.
            log_beta: Log retention of the tokens, `[L, H, T]`.
        """
        head_row = log_beta.double().flatten(0, 1)
        token_means = head_row.exp().mean(0).tolist(), head_row.mean(0).tolist()
        for token, beta, logarithm in zip(token_ids, *token_means, strict=True):
            self.count[token] = self.count.get(token, 0) + 1
            self.beta[token] = self.beta.get(token, 0.0) + beta
            self.log_beta[token] = self.log_beta.get(token, 0.0) + logarithm

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per token, most retained first, ties by token id."""
        token_rows = []
        for token, count in self.count.items():
            rate = self.log_beta[token] / count
            token_rows.append(
                {
                    "token_id": token,
                    "count": count,
                    "beta": self.beta[token] / count,
                    "log_beta": rate,
                    "half_life": math.log(0.5) / rate if rate < 0 else math.inf,
                }
            )
        return sorted(token_rows, key=lambda token_row: (-token_row["beta"], token_row["token_id"]))


def binned(values: Floats, max_columns: int) -> Floats:
    """Average neighbouring columns down to at most `max_columns`, ignoring NaN.

    Args:
        values: `[..., columns]`.
        max_columns: Maximum number of columns.
    """
    column_count = values.shape[-1]
    if column_count <= max_columns:
        return values
    bin_edges = np.linspace(0, column_count, max_columns + 1).round().astype(np.int64)[:-1]
    is_finite = np.isfinite(values)
    bin_sums = np.add.reduceat(np.where(is_finite, values, 0.0), bin_edges, axis=-1)
    bin_counts = np.add.reduceat(is_finite.astype(np.float64), bin_edges, axis=-1)
    return np.where(bin_counts > 0, bin_sums / np.maximum(bin_counts, 1), np.nan)


def steps_shown(length: int, limit: int) -> Tensor:
    """Return the steps that a figure shows: all, or `limit` evenly spaced ones including the last."""
    if length <= limit:
        return torch.arange(length)
    return torch.linspace(0, length - 1, limit, dtype=torch.float64).round().long()
