"""Causal attention under retention gates, with gradients for the gates.

This is the student's attention in gate training: the model's attention, whose logits `z = scale q_t . k_i` are
discounted by the gate's `beta_i <= 1` of token i and its age,

    additive        z + (t - i) log beta_i         a forgotten token has weight 0 (DBTrimKV)
    multiplicative  beta_i^(t - i) z               a forgotten token has logit 0 (TRIM-KV, Eq. 3)

over `i <= t`, followed by the usual softmax and sum. Positions are token indices, without the left padding. Where a
family bends its logits by a soft cap, `z` is the capped logit; its attention sinks, which no gate forgets, take part in
the softmax.

Cost per layer with `P = B H_q T^2 / 2` pairs: forward `4 P d` flops and P exponentials (2 P if multiplicative);
backward `10 P d` in two kernels, which recompute the logits (`14 P d` executed), with `2 P` exponentials (4 P). Bytes
in bfloat16: forward `2 B T d (2 H_q + 2 H) + 4 B T (H + H_q)`, backward twice as much plus `8 B T H_q`; no `T x T`
matrix is stored. For 32 query heads on 8 KV heads of 128 at T = 16K: 2.2e12 flops, 2.75 ms on an H100 at 800 TFLOP/s,
and 5.5e12 in 6.9 ms (9.6 with recomputation); 0.34 GB take 0.1 ms. These are estimates, not measurements.

Triton handles head dims up to 128 (padded to a power of two in registers) that keys and values share. The torch path
handles any head dim, in blocks of queries with `BLOCK x T` logits per head in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.engine.kernels.launch import by_triton
from kvbench.errors import UserError
from kvbench.view.softmax import cap_of, sinks_of

from ..gated import exp_, starts

BLOCK = 128
"""Queries per block on the torch path."""
LARGEST_DIM = 128
"""Largest head dim at which the kernels do not spill registers."""


def retention_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    *,
    scale: float,
    gating: Literal["additive", "multiplicative"] = "additive",
    valid: Tensor | None = None,
) -> Tensor:
    """Apply attention under retention gates; differentiable in `q`, `k`, `v` and `log_beta`.

    Args:
        q: Queries after RoPE `[B, H_q, T, d]`, bfloat16, float16, float32 or float64.
        k: Keys after RoPE `[B, H, T, d]`, `H_q = G H`; query head `h` reads KV head `h // G`.
        v: Values `[B, H, T, d_v]`.
        log_beta: `log beta <= 0`, finite, `[B, H, T]`, float32 (float64 if `q` is).
        scale: Factor of the dot products, usually `d ** -0.5`, with a soft cap and sinks (constants) if the family has
            them.
        gating: `additive` or `multiplicative`.
        valid: bool `[B, T]`, False on left padding, whose inputs are ignored and whose outputs and gradients are 0.

    Returns:
        `[B, H_q, T, d_v]` in the type of `q`; sums and softmax in float32 (float64 for float64).

    Raises:
        UserError: An argument has a wrong shape, dtype or value.
    """
    _check(q, k, v, log_beta, gating)
    first_steps = starts(valid, q.shape[0], q.shape[2], q.device)
    inputs = [q, k, v, log_beta]
    if valid is not None:
        inside_mask = valid[:, None, :, None]
        inputs = [torch.where(inside_mask, tensor, 0.0) for tensor in (q, k, v)]
        inputs.append(torch.where(valid[:, None], log_beta, 0.0))
    multiplicative = gating == "multiplicative"
    sinks, cap = sinks_of(scale), cap_of(scale)
    if sinks is not None:
        sinks = sinks.to(q.device, log_beta.dtype)
    outputs: Tensor = torch.ops.kvbench.retention_attention(
        *inputs, first_steps, float(scale), multiplicative, sinks, cap
    )[0]
    return outputs if valid is None else torch.where(inside_mask, outputs, 0.0)


def _check(q: Tensor, k: Tensor, v: Tensor, log_beta: Tensor, gating: str) -> None:
    if gating not in ("additive", "multiplicative"):
        raise UserError(f"unknown gating={gating}; use additive or multiplicative")
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise UserError("q is not [B, H_q, T, d], or k and v are not both [B, H, T, d]")
    batch_size, head_count, length, head_dim = k.shape
    if (q.shape[0], *q.shape[2:]) != (batch_size, length, head_dim) or q.shape[1] % head_count:
        raise UserError(
            f"q is {list(q.shape)} instead of [{batch_size}, multiple of {head_count}, {length}, {head_dim}]"
        )
    if log_beta.shape != (batch_size, head_count, length):
        raise UserError(f"log_beta is {list(log_beta.shape)} instead of {[batch_size, head_count, length]}")
    if not q.dtype == k.dtype == v.dtype:
        raise UserError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; use one type")
    expected_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if log_beta.dtype != expected_dtype:
        raise UserError(f"log_beta is {log_beta.dtype} instead of {expected_dtype}")


@torch.library.custom_op("kvbench::retention_attention", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    first_steps: Tensor,
    scale: float,
    multiplicative: bool,
    sinks: Tensor | None,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs `[B, H_q, T, d_v]` and row log sums `[B, H_q, T]` in the backend's own base.

    `first_steps` is int32 `[B]`: columns before it are masked, but must be finite. `sinks` is `[H_q]`.
    """
    if _has_kernel(q, v):
        from .triton import attend as run

        return run(q, k, v, log_beta, first_steps, scale, multiplicative, sinks, cap)
    return _attend(q, k, v, log_beta, first_steps, scale, multiplicative, sinks, cap)


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    return by_triton(q) and q.shape[-1] == v.shape[-1] <= LARGEST_DIM


@torch.library.custom_op("kvbench::retention_attention_backward", mutates_args=())
def attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    first_steps: Tensor,
    outputs: Tensor,
    log_sums: Tensor,
    scale: float,
    multiplicative: bool,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and log_beta from the gradient of the outputs.

    Sinks are in `log_sums`, and their value is 0, so they change no formula.
    """
    if _has_kernel(q, v):
        from .triton import backward as run

        return run(gradient, q, k, v, log_beta, first_steps, outputs, log_sums, scale, multiplicative, cap)
    return _backward(gradient, q, k, v, log_beta, first_steps, outputs, log_sums, scale, multiplicative, cap)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    first_steps: Tensor,
    scale: float,
    multiplicative: bool,
    sinks: Tensor | None,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=log_beta.dtype)


@attend_backward.register_fake
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    first_steps: Tensor,
    outputs: Tensor,
    log_sums: Tensor,
    scale: float,
    multiplicative: bool,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v), _like(log_beta)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.mult, _sinks, ctx.cap = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, _lse: Tensor) -> tuple[Tensor | None, ...]:
    # `lse` never leaves `retention_attention`, so its gradient is 0.
    grads = torch.ops.kvbench.retention_attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.mult, ctx.cap)
    return (*grads, None, None, None, None, None)


attend.register_autograd(_differentiate, setup_context=_save)


class _Block(NamedTuple):
    """Queries `rows` of every head against the `n` keys up to the last query.

    The G heads of a group and the queries share one axis, so that products are plain matrix products.
    """

    rows: slice
    n: int
    age: Tensor  # [queries, n], at least 0
    product: Tensor  # scale q . k, capped, [B, H, G, queries, n]
    fade: Tensor  # beta^age [B, H, 1, queries, n] (1 for additive gating)
    logit: Tensor  # [B, H, G, queries, n], -inf where masked


def _blocks(
    queries: Tensor,
    keys: Tensor,
    log_beta: Tensor,
    first_steps: Tensor,
    scale: float,
    multiplicative: bool,
    cap: float | None,
) -> Iterator[_Block]:
    batch_size, head_count, group_size, length, _ = queries.shape
    step_indices = torch.arange(length, device=queries.device)
    for block_begin in range(0, length, BLOCK):
        key_count = min(block_begin + BLOCK, length)
        age_matrix = step_indices[block_begin:key_count, None] - step_indices[:key_count]
        # [B, queries, n]
        visible_mask = (age_matrix >= 0) & (step_indices[:key_count] >= first_steps[:, None, None])
        age_matrix = age_matrix.clamp_min_(0)
        products = queries[:, :, :, block_begin:key_count].flatten(2, 3) @ keys[:, :, :key_count].mT
        products = products.mul_(scale).view(batch_size, head_count, group_size, key_count - block_begin, key_count)
        if cap is not None:
            products = cap * torch.tanh(products / cap)
        log_fades = (age_matrix * log_beta[:, :, None, :key_count])[:, :, None]
        fade_factors = exp_(log_fades) if multiplicative else torch.ones_like(log_fades[..., :1, :1])
        logits = products * fade_factors if multiplicative else products + log_fades
        logits = logits.masked_fill_(~visible_mask[:, None, None], -torch.inf)
        yield _Block(slice(block_begin, key_count), key_count, age_matrix, products, fade_factors, logits)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    first_steps: Tensor,
    scale: float,
    multiplicative: bool,
    sinks: Tensor | None,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute `attend` in torch."""
    queries, keys, values = (tensor.to(log_beta.dtype) for tensor in (q, k, v))
    queries = queries.unflatten(1, (k.shape[1], -1))
    outputs = queries.new_empty(*queries.shape[:-1], v.shape[-1])
    log_sums = outputs.new_empty(outputs.shape[:-1])
    for block in _blocks(queries, keys, log_beta, first_steps, scale, multiplicative, cap):
        row_maxima = block.logit.amax(-1, keepdim=True)
        # The row of a padded query is fully masked.
        row_maxima = row_maxima.masked_fill_(row_maxima.isneginf(), 0.0)
        attention = exp_(block.logit.sub_(row_maxima))
        row_sums = attention.sum(-1, keepdim=True)
        if sinks is not None:
            row_sums += (sinks.view(k.shape[1], -1, 1, 1) - row_maxima).exp()
        row_sums = row_sums.masked_fill_(row_sums == 0, 1.0)
        mixed_values = attention.flatten(2, 3) @ values[:, :, : block.n]
        outputs[:, :, :, block.rows] = mixed_values.view_as(outputs[:, :, :, block.rows]) / row_sums
        log_sums[:, :, :, block.rows] = (row_maxima + row_sums.log()).squeeze(-1)
    return outputs.flatten(1, 2).to(q.dtype), log_sums.flatten(1, 2)


def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    first_steps: Tensor,
    outputs: Tensor,
    log_sums: Tensor,
    scale: float,
    multiplicative: bool,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `attend_backward` in torch."""
    keys, values = k.to(log_beta.dtype), v.to(log_beta.dtype)
    queries, output_gradient, results = (
        tensor.to(log_beta.dtype).unflatten(1, (k.shape[1], -1)) for tensor in (q, gradient, outputs)
    )
    delta = (output_gradient * results).sum(-1, keepdim=True)
    row_log_sums = log_sums.unflatten(1, (k.shape[1], -1))[..., None]
    query_gradient = torch.empty_like(queries)
    key_gradient, value_gradient, rate_gradient = (torch.zeros_like(tensor) for tensor in (keys, values, log_beta))
    for block in _blocks(queries, keys, log_beta, first_steps, scale, multiplicative, cap):
        query_rows, key_count = block.rows, block.n
        attention = exp_(block.logit.sub_(row_log_sums[:, :, :, query_rows]))
        flat_gradient = output_gradient[:, :, :, query_rows].flatten(2, 3)
        value_gradient[:, :, :key_count] += attention.flatten(2, 3).mT @ flat_gradient
        logit_gradient = (flat_gradient @ values[:, :, :key_count].mT).view_as(attention)
        logit_gradient = logit_gradient.sub_(delta[:, :, :, query_rows]).mul_(attention)
        if multiplicative:
            logit_gradient = logit_gradient.mul_(block.fade)
            rate_gradient[:, :, :key_count] += (logit_gradient * block.product * block.age).sum((2, 3))
        else:
            rate_gradient[:, :, :key_count] += (logit_gradient.sum(2) * block.age).sum(2)
        if cap is not None:
            logit_gradient = logit_gradient.mul_(1 - (block.product / cap) ** 2)
        scaled_gradient = logit_gradient.mul_(scale).flatten(2, 3)
        mixed_keys = scaled_gradient @ keys[:, :, :key_count]
        query_gradient[:, :, :, query_rows] = mixed_keys.view_as(query_gradient[:, :, :, query_rows])
        key_gradient[:, :, :key_count] += scaled_gradient.mT @ queries[:, :, :, query_rows].flatten(2, 3)
    input_dtype = q.dtype
    return (
        query_gradient.flatten(1, 2).to(input_dtype),
        key_gradient.to(input_dtype),
        value_gradient.to(input_dtype),
        rate_gradient,
    )
