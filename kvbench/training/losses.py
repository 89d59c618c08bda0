"""Training losses of gates, in float32.

Bui, Sharma, Lamba, Mishra, Ying: Cache What Lasts: Token Retention for Memory-Bounded KV Cache in LLMs, arXiv
2512.03324 (TRIM-KV; distillation and next-token loss, Eq. 4). Huang, Yuan, Han, Xiao, Liu: Locret, arXiv 2410.01805
(retaining heads). Gao, Guo, Cao and others: SeerAttention-R, arXiv 2506.08889, section 2.3 (gates of blocks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.view.softmax import attention_weights, capped

SMOOTH = 0.0025
"""LocRet's weight of the smoothness term."""

_BLOCK = 256
"""Positions per block of logits in memory."""


@dataclass(frozen=True)
class Terms:
    """Terms of the quality loss.

    Attributes:
        kl: Use the KL divergence between teacher and student.
        ntp: Use the negative log-likelihood of the next token.
        reverse: Use `KL(student || teacher)` instead of `KL(teacher || student)`.
    """

    kl: bool = True
    ntp: bool = True
    reverse: bool = False


def quality(
    student: Tensor,
    teacher: Tensor,
    target: Tensor,
    output_head: Callable[[Tensor], Tensor],
    terms: Terms,
    block_size: int = _BLOCK,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a student's KL divergence and next-token loss, averaged over positions.

    Logits and their gradient are computed once, in blocks, so that `[K, vocabulary]` is never in memory.

    Args:
        student: Final hidden states of the student, `[K, d_model]`.
        teacher: Final hidden states of the teacher, without gradient, `[K, d_model]`.
        target: Next tokens, int64 `[K]`.
        output_head: Maps hidden states to logits; frozen.
        terms: Terms to compute; the others are 0.
        block_size: Positions per block.

    Returns:
        Float32 scalars: the sum of `KL` and `NTP`, with gradient, and each of them without.
    """
    quality_losses: tuple[Tensor, Tensor, Tensor] = _Quality.apply(
        student, teacher, target, output_head, terms, block_size
    )  # type: ignore[no-untyped-call]
    return quality_losses


class _Quality(torch.autograd.Function):
    """Autograd function of `quality`; the forward pass already computes the student's gradient."""

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
        kl_loss = ntp_loss = student.new_zeros((), dtype=torch.float32)
        student_gradient = torch.empty_like(student)
        target_count = max(1, len(target))
        for block_start in range(0, len(target), block):
            block_rows = slice(block_start, block_start + block)
            with torch.enable_grad():
                hidden_states = student[block_rows].detach().requires_grad_()
                logits = head(hidden_states)
            teacher_logits = head(teacher[block_rows]) if terms.kl else None
            block_kl, block_ntp, logits_gradient = _block_quality(
                logits.detach(), teacher_logits, target[block_rows], terms
            )
            kl_loss, ntp_loss = kl_loss + block_kl, ntp_loss + block_ntp
            logits_gradient = logits_gradient.div_(target_count).to(logits.dtype)
            (student_gradient[block_rows],) = torch.autograd.grad(logits, hidden_states, logits_gradient)
        ctx.save_for_backward(student_gradient)
        kl_loss, ntp_loss = kl_loss / target_count, ntp_loss / target_count
        ctx.mark_non_differentiable(kl_loss, ntp_loss)
        return kl_loss + ntp_loss, kl_loss, ntp_loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (grads[0] * gradient).to(gradient.dtype), None, None, None, None, None


def _block_quality(
    logits: Tensor, teacher_logits: Tensor | None, target: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Return KL and NTP summed over positions, and the gradient with respect to the student's logits."""
    student_log_probs = F.log_softmax(logits, -1, dtype=torch.float32)
    student_probs = student_log_probs.exp()
    logits_gradient = torch.zeros_like(student_probs)
    kl_sum = ntp_sum = student_probs.new_zeros(())
    if terms.ntp:
        target_index = target[:, None]
        ntp_sum = -student_log_probs.gather(-1, target_index).sum()
        logits_gradient += student_probs
        logits_gradient.scatter_add_(-1, target_index, -torch.ones_like(target_index, dtype=student_probs.dtype))
    if teacher_logits is not None:
        teacher_log_probs = F.log_softmax(teacher_logits, -1, dtype=torch.float32)
        if terms.reverse:  # d/dz sum q (log q - log p) = q (log q - log p - KL)
            difference = student_log_probs.sub_(teacher_log_probs)
            row_divergence = (student_probs * difference).sum(-1, keepdim=True)
            logits_gradient.addcmul_(student_probs, difference.sub_(row_divergence))
        else:
            teacher_probs = teacher_log_probs.exp()
            row_divergence = (teacher_probs * teacher_log_probs.sub_(student_log_probs)).sum(-1, keepdim=True)
            logits_gradient.add_(student_probs).sub_(teacher_probs)
        kl_sum = row_divergence.sum()
    return kl_sum, ntp_sum, logits_gradient


def retained(log_beta: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the mean fraction of tokens that a head retains at the end, `sum_i beta_i^(t - i) / t`.

    Args:
        log_beta: `[B, L, H, T]`.
        valid: Token columns, bool `[B, T]`, left-padded; None for all.

    Returns:
        A scalar in (0, 1].
    """
    token_count = log_beta.shape[-1]
    token_age = torch.arange(token_count - 1, -1, -1, device=log_beta.device)
    retention = (token_age * log_beta.detach().float()).exp()
    if valid is None:
        return retention.mean()
    return ((retention * valid[:, None, None]).sum(-1) / valid.sum(-1)[:, None, None]).mean()


def answer_logits(query: Tensor, key: Tensor, supervised: Tensor, scale: float, block_size: int = 256) -> Tensor:
    """Return LocRet's labels: the largest logit that each token gets from the answer's queries.

    Args:
        query: Queries after RoPE, `[B, H_q, T, d]`.
        key: Keys after RoPE, `[B, H, T, d]`.
        supervised: Positions of the answer's queries, which predict its tokens, bool `[B, T]`.
        scale: Factor of the logits; see `LogitScale`.
        block_size: Queries per block.

    Returns:
        Float32 `[B, H, T]`: the maximum over the query heads of the group and the answer's queries after the token;
        `-inf` without such queries.
    """
    batch_size, kv_heads, length, _ = key.shape
    columns = torch.arange(length, device=key.device)
    labels = key.new_full((batch_size, kv_heads, length), float("-inf"), dtype=torch.float32)
    for sequence_index in range(batch_size):
        keys = key[sequence_index].float()
        for query_positions in columns[supervised[sequence_index]].split(block_size):
            queries = query[sequence_index].float()[:, query_positions].unflatten(0, (kv_heads, -1)).flatten(1, 2)
            logits = capped(queries @ keys.transpose(-1, -2) * scale, scale)
            is_later = query_positions.repeat(query.shape[1] // kv_heads)[:, None] > columns
            logits = logits.masked_fill(~is_later, float("-inf"))
            labels[sequence_index] = torch.maximum(labels[sequence_index], logits.amax(1))
    return labels


def regression(predictions: Tensor, labels: Tensor, usable_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute LocRet's two terms: smooth L1 to the labels, and the mean square between neighbours.

    Args:
        predictions: Predicted logits, `[B, L, H, T]`.
        labels: `[B, L, H, T]`.
        usable_mask: Tokens with a label, bool `[B, L, H, T]`.

    Returns:
        Means over usable tokens, the first over all layers; the second is summed over layers, as in the authors' code.
        Two neighbours count if both are usable.
    """
    fit_loss = F.smooth_l1_loss(predictions, labels.masked_fill(~usable_mask, 0.0), reduction="none")
    fit_loss = (fit_loss * usable_mask).sum() / usable_mask.sum().clamp(min=1)
    pair_mask = usable_mask[..., 1:] & usable_mask[..., :-1]
    smooth_loss = (predictions.diff(dim=-1) ** 2 * pair_mask).sum((0, 2, 3)) / pair_mask.sum((0, 2, 3)).clamp(min=1)
    return fit_loss, smooth_loss.sum()


def block_shares(query: Tensor, key: Tensor, block_size: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return the distribution of every query's attention over the complete blocks before it.

    A block's weight is the largest attention weight from any query head of the group to any of its entries. The block
    of the query's own token is excluded, because it is always read.

    Args:
        query: Queries after RoPE, `[H, G, T, d]`.
        key: Keys after RoPE, `[H, T, d]`.
        block_size: Entries per block.
        scale: Factor of the logits; see `LogitScale`.

    Returns:
        Float32 `[H, T, K]`, summing to 1 per query over the blocks before it, and the mask of these blocks, bool
        `[T, K]`.
    """
    length = key.shape[1]
    block_count = length // block_size
    columns = torch.arange(length, device=key.device)
    logits = capped(query.float() @ key.float().transpose(-1, -2)[:, None] * scale, scale)
    logits = logits.masked_fill(columns > columns[:, None], float("-inf"))
    weights = attention_weights(logits, scale)[..., : block_count * block_size]
    block_weights = weights.unflatten(-1, (block_count, block_size))
    earlier_blocks = columns[:block_count] < (columns // block_size)[:, None]
    largest_weights = block_weights.amax((1, -1)) * earlier_blocks
    return largest_weights / largest_weights.sum(-1, keepdim=True).clamp(min=1e-9), earlier_blocks


def divergence(logits: Tensor, target_shares: Tensor, earlier_blocks: Tensor) -> Tensor:
    """Return `KL(target || softmax(logits))`, summed over queries and averaged over heads.

    Args:
        logits: Logits of blocks, `[H, T, K]`.
        target_shares: Target distribution, `[H, T, K]`.
        earlier_blocks: Blocks before each query, bool `[T, K]`.
    """
    log_predictions = logits.masked_fill(~earlier_blocks, -1e9).log_softmax(-1)
    return F.kl_div(log_predictions, target_shares, reduction="none").sum() / len(logits)
