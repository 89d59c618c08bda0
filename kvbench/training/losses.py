"""The losses that gates are trained with, in float32.

Bui, Sharma, Lamba, Mishra, Ying: Cache What Lasts: Token Retention for Memory-Bounded KV Cache
in LLMs, arXiv 2512.03324 (TRIM-KV; distillation and next token, Eq. 4). Huang, Yuan, Han, Xiao,
Liu: Locret, arXiv 2410.01805 (retaining heads).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SMOOTH = 0.0025
"""LocRet's weight of the difference between neighbours."""

_BLOCK = 1024
"""Positions whose logits are in memory at once."""


@dataclass(frozen=True)
class Terms:
    """Terms of the quality loss.

    Attributes:
        kl: Whether to use the divergence between teacher and student.
        ntp: Whether to use the negative log-likelihood of the next token.
        reverse: Whether to use `KL(student || teacher)` instead of `KL(teacher || student)`.
    """

    kl: bool = True
    ntp: bool = True
    reverse: bool = False


def quality(
    student: Tensor,
    teacher: Tensor,
    target: Tensor,
    head: Callable[[Tensor], Tensor],
    terms: Terms,
    block: int = _BLOCK,
) -> tuple[Tensor, Tensor]:
    """Divergence and next-token loss of a student, as means over positions.

    Logits are computed block by block, and again in the backward pass, so that `[K, vocabulary]` is
    never in memory.

    Args:
        student: Final hidden states of the student, `[K, d_model]`.
        teacher: Final hidden states of the teacher, without gradient, `[K, d_model]`.
        target: Next tokens, int64 `[K]`.
        head: Maps hidden states to logits.
        terms: Terms to compute; the others are 0.
        block: Positions per block.

    Returns:
        `KL` and `NTP`, float32 scalars.
    """

    def part(hidden: Tensor, taught: Tensor, next_token: Tensor) -> tuple[Tensor, Tensor]:
        q = F.log_softmax(head(hidden).float(), -1)
        kl = ntp = q.new_zeros(())
        if terms.ntp:
            ntp = F.nll_loss(q, next_token, reduction="sum")
        if terms.kl:
            p = F.log_softmax(head(taught).float(), -1)
            first, second = (q, p) if terms.reverse else (p, q)
            kl = F.kl_div(second, first, reduction="sum", log_target=True)
        return kl, ntp

    kl = ntp = student.new_zeros((), dtype=torch.float32)
    single = len(target) <= block
    for i in range(0, len(target), block):
        rows = student[i : i + block], teacher[i : i + block], target[i : i + block]
        sums = part(*rows) if single else checkpoint(part, *rows, use_reentrant=False)
        kl, ntp = kl + sums[0], ntp + sums[1]
    count = max(1, len(target))
    return kl / count, ntp / count


def retained(log_beta: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean share of tokens that a head retains at the end, `sum_i beta_i^(t - i) / t`.

    Args:
        log_beta: `[B, L, H, T]`.
        valid: Which columns are tokens, bool `[B, T]`; None for all. Padding is on the left.

    Returns:
        A scalar in (0, 1].
    """
    length = log_beta.shape[-1]
    age = torch.arange(length - 1, -1, -1, device=log_beta.device)
    weight = (age * log_beta.detach().float()).exp()
    if valid is None:
        return weight.mean()
    return ((weight * valid[:, None, None]).sum(-1) / valid.sum(-1)[:, None, None]).mean()


def answer_logits(
    query: Tensor, key: Tensor, supervised: Tensor, scale: float, block: int = 256
) -> Tensor:
    """The largest logit that each token gets from the answer's queries: LocRet's labels.

    Args:
        query: Queries after RoPE, `[B, H_q, T, d]`.
        key: Keys after RoPE, `[B, H, T, d]`.
        supervised: Positions of the answer's queries, which predict its tokens, bool `[B, T]`.
        scale: Factor of the logits.
        block: Queries per block.

    Returns:
        Float32 `[B, H, T]`: the maximum over the query heads of the group and the answer's queries
        after the token; `-inf` if there are no such queries.
    """
    batch, heads, length, _ = key.shape
    column = torch.arange(length, device=key.device)
    result = key.new_full((batch, heads, length), float("-inf"), dtype=torch.float32)
    for row in range(batch):
        k = key[row].float()
        for positions in column[supervised[row]].split(block):
            q = query[row].float()[:, positions].unflatten(0, (heads, -1)).flatten(1, 2)
            logits = q @ k.transpose(-1, -2) * scale
            later = positions.repeat(query.shape[1] // heads)[:, None] > column
            logits = logits.masked_fill(~later, float("-inf"))
            result[row] = torch.maximum(result[row], logits.amax(1))
    return result


def regression(predicted: Tensor, label: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """LocRet's two terms: smooth L1 to the labels, and the mean square between neighbours.

    Args:
        predicted: Predicted logits, `[..., T]`.
        label: Labels, `[..., T]`.
        usable: Which tokens have a label, bool `[..., T]`.

    Returns:
        Both as means over usable tokens; two neighbours count if both are usable.
    """
    fit = F.smooth_l1_loss(predicted, label.masked_fill(~usable, 0.0), reduction="none")
    fit = (fit * usable).sum() / usable.sum().clamp(min=1)
    both = usable[..., 1:] & usable[..., :-1]
    step = (predicted.diff(dim=-1) ** 2 * both).sum() / both.sum().clamp(min=1)
    return fit, step
