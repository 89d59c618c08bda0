"""Causal attention under retention gates, with gradients for the gates.

The student's attention in gate training: the model's own attention, whose logits
`z = scale q_t . k_i` are discounted by the gate's `beta_i <= 1` of token i and its age,

    additive        z + (t - i) log beta_i         a forgotten token has weight 0 (DBTrimKV)
    multiplicative  beta_i^(t - i) z               a forgotten token has logit 0 (TRIM-KV, Eq. 3)

over `i <= t`, followed by the usual softmax and sum. Positions are token indices: padding is on the
left and does not count.

Cost per layer with `P = B H_q T^2 / 2` pairs: forward `4 P d` flops and P exponentials (2 P if
multiplicative); backward `10 P d` in two kernels that recompute the logits, so `14 P d` are
executed, with `2 P` exponentials (4 P). Bytes in bfloat16: forward
`2 B T d (2 H_q + 2 H) + 4 B T (H + H_q)`, backward twice as much plus `8 B T H_q`; nothing of size
`T x T`. For 32 query heads on 8 KV heads of 128 at T = 16K: 2.2e12 flops, 2.75 ms on an H100 at 800
TFLOP/s, and 5.5e12 in 6.9 ms (9.6 with recomputation); 0.34 GB take 0.1 ms. This is arithmetic, not
a measurement.

Triton handles head dims up to 128 (padded to a power of two in registers). The torch path handles
any; it goes by blocks of queries and holds `BLOCK x T` logits of a head at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.engine.kernels.launch import by_triton
from kvbench.errors import UserError

from ..gated import exp_, starts

BLOCK = 128
"""Number of queries of a block on the torch path."""
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
    """Attend under retention gates; differentiable in `q`, `k`, `v` and `log_beta`.

    Args:
        q: Queries after RoPE `[B, H_q, T, d]`, bfloat16, float16, float32 or float64.
        k: Keys after RoPE `[B, H, T, d]`, `H_q = G H`; query head `h` reads KV head `h // G`.
        v: Values `[B, H, T, d]`.
        log_beta: `log beta <= 0`, finite, `[B, H, T]`, float32 (float64 if `q` is).
        scale: Factor of the products, usually `d ** -0.5`.
        gating: `additive` or `multiplicative`.
        valid: bool `[B, T]`, False on padding, which is on the left. Inputs on padding are not
            read; its outputs and gradients are 0.

    Returns:
        `[B, H_q, T, d]` in the type of `q`; sums and softmax in float32 (float64 for float64).

    Raises:
        UserError: A wrong shape, type or choice.
    """
    _check(q, k, v, log_beta, gating)
    start = starts(valid, q.shape[0], q.shape[2], q.device)
    given = [q, k, v, log_beta]
    if valid is not None:
        inside = valid[:, None, :, None]
        given = [torch.where(inside, x, 0.0) for x in (q, k, v)]
        given.append(torch.where(valid[:, None], log_beta, 0.0))
    mult = gating == "multiplicative"
    out: Tensor = torch.ops.kvbench.retention_attention(*given, start, scale, mult)[0]
    return out if valid is None else torch.where(inside, out, 0.0)


def _check(q: Tensor, k: Tensor, v: Tensor, log_beta: Tensor, gating: str) -> None:
    if gating not in ("additive", "multiplicative"):
        raise UserError(f"unknown gating={gating}; use additive or multiplicative")
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise UserError("q is not [B, H_q, T, d], or k and v are not both [B, H, T, d]")
    batch, heads, length, dim = k.shape
    if (q.shape[0], *q.shape[2:]) != (batch, length, dim) or q.shape[1] % heads:
        raise UserError(
            f"q is {list(q.shape)} instead of [{batch}, multiple of {heads}, {length}, {dim}]"
        )
    if log_beta.shape != (batch, heads, length):
        raise UserError(f"log_beta is {list(log_beta.shape)} instead of {[batch, heads, length]}")
    if not q.dtype == k.dtype == v.dtype:
        raise UserError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; use one type")
    wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
    if log_beta.dtype != wanted:
        raise UserError(f"log_beta is {log_beta.dtype} instead of {wanted}")


@torch.library.custom_op("kvbench::retention_attention", mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor, log_beta: Tensor, start: Tensor, scale: float, mult: bool
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, H_q, T, d]`, and log sums `[B, H_q, T]` of the rows in the path's own base.

    `start` is int32 `[B]`: columns before it are masked, but must be finite.
    """
    if by_triton(q) and q.shape[-1] <= LARGEST_DIM:
        from .triton import attend as run

        return run(q, k, v, log_beta, start, scale, mult)
    return _attend(q, k, v, log_beta, start, scale, mult)


@torch.library.custom_op("kvbench::retention_attention_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    start: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mult: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and log_beta from the gradient of the outputs."""
    if by_triton(q) and q.shape[-1] <= LARGEST_DIM:
        from .triton import backward as run

        return run(grad, q, k, v, log_beta, start, out, lse, scale, mult)
    return _backward(grad, q, k, v, log_beta, start, out, lse, scale, mult)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_beta: Tensor, start: Tensor, scale: float, mult: bool
) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty(q.shape[:3], dtype=log_beta.dtype)


@attend_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    start: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mult: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v), _like(log_beta)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.mult = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, _lse: Tensor) -> tuple[Tensor | None, ...]:
    # `lse` never leaves `retention_attention`, so its gradient is 0.
    grads = torch.ops.kvbench.retention_attention_backward(
        grad, *ctx.saved_tensors, ctx.scale, ctx.mult
    )
    return (*grads, None, None, None)


attend.register_autograd(_differentiate, setup_context=_save)


class _Block(NamedTuple):
    """Queries `rows` of every head against the `n` keys up to the last of them.

    The G heads of a group and the queries share one axis, so that products are plain matrices.
    """

    rows: slice
    n: int
    age: Tensor  # [queries, n], at least 0
    product: Tensor  # scale q . k, [B, H, G, queries, n]
    fade: Tensor  # beta^age [B, H, 1, queries, n] (1 for additive gating)
    logit: Tensor  # [B, H, G, queries, n], -inf where nothing is seen


def _blocks(
    q: Tensor, k: Tensor, log_beta: Tensor, start: Tensor, scale: float, mult: bool
) -> Iterator[_Block]:
    batch, heads, group, length, _ = q.shape
    i = torch.arange(length, device=q.device)
    for begin in range(0, length, BLOCK):
        n = min(begin + BLOCK, length)
        age = i[begin:n, None] - i[:n]
        seen = (age >= 0) & (i[:n] >= start[:, None, None])  # [B, queries, n]
        age = age.clamp_min_(0)
        product = q[:, :, :, begin:n].flatten(2, 3) @ k[:, :, :n].mT
        product = product.mul_(scale).view(batch, heads, group, n - begin, n)
        faded = (age * log_beta[:, :, None, :n])[:, :, None]
        fade = exp_(faded) if mult else torch.ones_like(faded[..., :1, :1])
        logit = product * fade if mult else product + faded
        logit = logit.masked_fill_(~seen[:, None, None], -torch.inf)
        yield _Block(slice(begin, n), n, age, product, fade, logit)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, log_beta: Tensor, start: Tensor, scale: float, mult: bool
) -> tuple[Tensor, Tensor]:
    """`attend` in torch."""
    queries, keys, values = (x.to(log_beta.dtype) for x in (q, k, v))
    queries = queries.unflatten(1, (k.shape[1], -1))
    out = torch.empty_like(queries)
    lse = out.new_empty(out.shape[:-1])
    for block in _blocks(queries, keys, log_beta, start, scale, mult):
        most = block.logit.amax(-1, keepdim=True)
        most = most.masked_fill_(most.isneginf(), 0.0)  # a padded query sees nothing
        weight = exp_(block.logit.sub_(most))
        total = weight.sum(-1, keepdim=True)
        total = total.masked_fill_(total == 0, 1.0)
        mixed = weight.flatten(2, 3) @ values[:, :, : block.n]
        out[:, :, :, block.rows] = mixed.view_as(out[:, :, :, block.rows]) / total
        lse[:, :, :, block.rows] = (most + total.log()).squeeze(-1)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    start: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mult: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attend_backward` in torch."""
    keys, values = k.to(log_beta.dtype), v.to(log_beta.dtype)
    queries, slope, result = (
        x.to(log_beta.dtype).unflatten(1, (k.shape[1], -1)) for x in (q, grad, out)
    )
    delta = (slope * result).sum(-1, keepdim=True)
    total = lse.unflatten(1, (k.shape[1], -1))[..., None]
    dq = torch.empty_like(queries)
    dk, dv, drate = (torch.zeros_like(x) for x in (keys, values, log_beta))
    for block in _blocks(queries, keys, log_beta, start, scale, mult):
        rows, n = block.rows, block.n
        weight = exp_(block.logit.sub_(total[:, :, :, rows]))
        flat = slope[:, :, :, rows].flatten(2, 3)
        dv[:, :, :n] += weight.flatten(2, 3).mT @ flat
        dlogit = (flat @ values[:, :, :n].mT).view_as(weight)
        dlogit = dlogit.sub_(delta[:, :, :, rows]).mul_(weight)
        if mult:
            dlogit = dlogit.mul_(block.fade)
            drate[:, :, :n] += (dlogit * block.product * block.age).sum((2, 3))
        else:
            drate[:, :, :n] += (dlogit.sum(2) * block.age).sum(2)
        dproduct = dlogit.mul_(scale).flatten(2, 3)
        mixed = dproduct @ keys[:, :, :n]
        dq[:, :, :, rows] = mixed.view_as(dq[:, :, :, rows])
        dk[:, :, :n] += dproduct.mT @ queries[:, :, :, rows].flatten(2, 3)
    kinds = q.dtype
    return dq.flatten(1, 2).to(kinds), dk.to(kinds), dv.to(kinds), drate
