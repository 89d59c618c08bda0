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
"""Positions whose logits are held at once."""


@dataclass(frozen=True)
class Terms:
    """Which parts the quality loss has.

    Attributes:
        kl: The divergence between teacher and student.
        ntp: The negative log-likelihood of the next token.
        reverse: `KL(student || teacher)` and not `KL(teacher || student)`.
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
    """Divergence and next-token loss of a student, means over the positions.

    Logits are made block by block and again in the backward pass: `[K, vocabulary]` is never held.

    Args:
        student: Final hidden states of the student at the positions, `[K, d_model]`.
        teacher: The teacher's, without gradient.
        target: The tokens that follow, int64 `[K]`.
        head: From hidden states to logits.
        terms: What is computed; the others are 0.
        block: Positions at once.

    Returns:
        `KL` and `NTP`, scalars, float32.
    """

    def part(own: Tensor, other: Tensor, next_token: Tensor) -> tuple[Tensor, Tensor]:
        q = F.log_softmax(head(own).float(), -1)
        kl = ntp = q.new_zeros(())
        if terms.ntp:
            ntp = F.nll_loss(q, next_token, reduction="sum")
        if terms.kl:
            p = F.log_softmax(head(other).float(), -1)
            first, second = (q, p) if terms.reverse else (p, q)
            kl = F.kl_div(second, first, reduction="sum", log_target=True)
        return kl, ntp

    kl = ntp = student.new_zeros((), dtype=torch.float32)
    single = len(target) <= block
    for i in range(0, len(target), block):
        given = student[i : i + block], teacher[i : i + block], target[i : i + block]
        more = part(*given) if single else checkpoint(part, *given, use_reentrant=False)
        kl, ntp = kl + more[0], ntp + more[1]
    count = max(1, len(target))
    return kl / count, ntp / count


def retained(log_beta: Tensor, valid: Tensor | None = None) -> Tensor:
    """Share of its tokens that a head retains at the end, `sum_i beta_i^(t - i) / t`, the mean.

    Args:
        log_beta: `[B, L, H, T]`.
        valid: Which columns are tokens, bool `[B, T]`; None: all. Padding is on the left.

    Returns:
        A scalar in (0, 1].
    """
    length = log_beta.shape[-1]
    age = torch.arange(length - 1, -1, -1, device=log_beta.device)
    weight = (age * log_beta.detach().float()).exp()
    if valid is None:
        return weight.mean()
    held = (weight * valid[:, None, None]).sum(-1) / valid.sum(-1)[:, None, None]
    return held.mean()


def answer_logits(
    query: Tensor, key: Tensor, asked: Tensor, scale: float, block: int = 256
) -> Tensor:
    """The largest logit that every token gets from the answer's queries: LocRet's labels.

    Args:
        query: After RoPE, `[B, H_q, T, d]`.
        key: After RoPE, `[B, H, T, d]`.
        asked: Which positions are answer queries: those that predict a token of an answer, bool
            `[B, T]`.
        scale: Factor of the logits.
        block: Queries at once.

    Returns:
        Float32 `[B, H, T]`, the maximum over the group and the answer queries after the token;
        `-inf` where there is none.
    """
    batch, heads, length, _ = key.shape
    column = torch.arange(length, device=key.device)
    result = key.new_full((batch, heads, length), float("-inf"), dtype=torch.float32)
    for row in range(batch):
        places = column[asked[row]]
        k = key[row].float()
        for at in places.split(block):
            q = query[row].float()[:, at].unflatten(0, (heads, -1)).flatten(1, 2)
            logits = q @ k.transpose(-1, -2) * scale
            later = at.repeat(query.shape[1] // heads)[:, None] > column
            logits = logits.masked_fill(~later, float("-inf"))
            result[row] = torch.maximum(result[row], logits.amax(1))
    return result


def regression(predicted: Tensor, label: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """LocRet's two terms: smooth L1 to the labels, mean square between neighbours.

    Args:
        predicted: `[..., T]`.
        label: `[..., T]`.
        usable: Which entries have a label, bool `[..., T]`.

    Returns:
        Both as means over what is usable; a neighbour is usable where both tokens are.
    """
    fit = F.smooth_l1_loss(predicted, label.masked_fill(~usable, 0.0), reduction="none")
    fit = (fit * usable).sum() / usable.sum().clamp(min=1)
    both = usable[..., 1:] & usable[..., :-1]
    step = (predicted.diff(dim=-1) ** 2 * both).sum() / both.sum().clamp(min=1)
    return fit, step
