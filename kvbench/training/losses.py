"""The losses that gates are trained with, in float32.

Bui, Sharma, Lamba, Mishra, Ying: Cache What Lasts: Token Retention for Memory-Bounded KV Cache
in LLMs, arXiv 2512.03324 (TRIM-KV; distillation and next token, Eq. 4). Huang, Yuan, Han, Xiao,
Liu: Locret, arXiv 2410.01805 (retaining heads). Gao, Guo, Cao and others: SeerAttention-R, arXiv
2506.08889, section 2.3 (gates of blocks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SMOOTH = 0.0025
"""LocRet's weight of the difference between neighbours."""

_BLOCK = 256
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Divergence and next-token loss of a student, as means over positions.

    Logits are computed once, block by block, and the gradient with them, so that `[K, vocabulary]`
    is never in memory.

    Args:
        student: Final hidden states of the student, `[K, d_model]`.
        teacher: Final hidden states of the teacher, without gradient, `[K, d_model]`.
        target: Next tokens, int64 `[K]`.
        head: Maps hidden states to logits; frozen.
        terms: Terms to compute; the others are 0.
        block: Positions per block.

    Returns:
        Float32 scalars: the sum of `KL` and `NTP`, which has the gradient, and both without it.
    """
    result: tuple[Tensor, Tensor, Tensor] = _Quality.apply(
        student, teacher, target, head, terms, block
    )  # type: ignore[no-untyped-call]
    return result


class _Quality(torch.autograd.Function):
    """`quality`; the gradient with regard to the student is ready when the forward pass ends."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        target: Tensor,
        head: Callable[[Tensor], Tensor],
        terms: Terms,
        block: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kl = ntp = student.new_zeros((), dtype=torch.float32)
        slope = torch.empty_like(student)
        count = max(1, len(target))
        for i in range(0, len(target), block):
            rows = slice(i, i + block)
            with torch.enable_grad():
                hidden = student[rows].detach().requires_grad_()
                logits = head(hidden)
            taught = head(teacher[rows]) if terms.kl else None
            more_kl, more_ntp, of_logits = _block_quality(
                logits.detach(), taught, target[rows], terms
            )
            kl, ntp = kl + more_kl, ntp + more_ntp
            of_logits = of_logits.div_(count).to(logits.dtype)
            (slope[rows],) = torch.autograd.grad(logits, hidden, of_logits)
        ctx.save_for_backward(slope)
        kl, ntp = kl / count, ntp / count
        ctx.mark_non_differentiable(kl, ntp)
        return kl + ntp, kl, ntp

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return (grads[0] * slope).to(slope.dtype), None, None, None, None, None


def _block_quality(
    logits: Tensor, taught: Tensor | None, target: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of KL and NTP over positions, and the gradient with regard to the student's logits."""
    log_q = F.log_softmax(logits, -1, dtype=torch.float32)
    q = log_q.exp()
    slope = torch.zeros_like(q)
    kl = ntp = q.new_zeros(())
    if terms.ntp:
        own = target[:, None]
        ntp = -log_q.gather(-1, own).sum()
        slope += q
        slope.scatter_add_(-1, own, -torch.ones_like(own, dtype=q.dtype))
    if taught is not None:
        log_p = F.log_softmax(taught, -1, dtype=torch.float32)
        if terms.reverse:  # d/dz sum q (log q - log p) = q (log q - log p - KL)
            difference = log_q.sub_(log_p)
            each = (q * difference).sum(-1, keepdim=True)
            slope.addcmul_(q, difference.sub_(each))
        else:
            p = log_p.exp()
            each = (p * log_p.sub_(log_q)).sum(-1, keepdim=True)
            slope.add_(q).sub_(p)
        kl = each.sum()
    return kl, ntp, slope


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
        predicted: Predicted logits, `[B, L, H, T]`.
        label: Labels, `[B, L, H, T]`.
        usable: Which tokens have a label, bool `[B, L, H, T]`.

    Returns:
        Means over usable tokens, the first over all layers; the second is summed over layers, as in
        the authors' code. Two neighbours count if both are usable.
    """
    fit = F.smooth_l1_loss(predicted, label.masked_fill(~usable, 0.0), reduction="none")
    fit = (fit * usable).sum() / usable.sum().clamp(min=1)
    both = usable[..., 1:] & usable[..., :-1]
    step = (predicted.diff(dim=-1) ** 2 * both).sum((0, 2, 3)) / both.sum((0, 2, 3)).clamp(min=1)
    return fit, step.sum()


def block_shares(query: Tensor, key: Tensor, block: int, scale: float) -> tuple[Tensor, Tensor]:
    """How the attention of every query spreads over the complete blocks before it.

    A block counts by the largest attention weight that any query head of the group gives to any of
    its entries. The block of the query's own token does not count: it is read in any case.

    Args:
        query: Queries after RoPE, `[H, G, T, d]`.
        key: Keys after RoPE, `[H, T, d]`.
        block: Entries of a block.
        scale: Factor of the logits.

    Returns:
        Float32 `[H, T, K]`, a share of 1 per query over the blocks before it, and which blocks
        these are, bool `[T, K]`.
    """
    length = key.shape[1]
    count = length // block
    column = torch.arange(length, device=key.device)
    logits = query.float() @ key.float().transpose(-1, -2)[:, None] * scale
    logits = logits.masked_fill(column > column[:, None], float("-inf"))
    weight = logits.softmax(-1)[..., : count * block].unflatten(-1, (count, block))
    earlier = column[:count] < (column // block)[:, None]
    largest = weight.amax((1, -1)) * earlier
    return largest / largest.sum(-1, keepdim=True).clamp(min=1e-9), earlier


def divergence(logits: Tensor, share: Tensor, earlier: Tensor) -> Tensor:
    """Sum over queries of `KL(share || softmax(logits))`, mean over heads.

    Args:
        logits: Logits of blocks, `[H, T, K]`.
        share: Their shares, `[H, T, K]`.
        earlier: Which blocks come before each query, bool `[T, K]`.
    """
    log_q = logits.masked_fill(~earlier, -1e9).log_softmax(-1)
    return F.kl_div(log_q, share, reduction="none").sum() / len(logits)
