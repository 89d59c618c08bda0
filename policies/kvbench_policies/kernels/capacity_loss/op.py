"""The capacity loss: the entries that retention gates hold beyond a budget, with exact gradients.

TRIM-KV trains its gates with a loss per head, DBTrimKV with one over all layers and heads. With
`S_t = sum_{i <= t} beta_i^(t - i)`, the number of entries that a head in effect holds at step t,

    head    mean (or sum) over layers and heads of  1 / (T (T - M)) sum_t max(0, S_t - M)
    global  1 / (L H T (T - M)) sum_t max(0, sum_{l,h} S_t - M L H)

and 0 if `T <= M`. (DBTrimKV prints no normaliser; this one is kvbench's own.)

**Forward.** One `exp` for each pair `i <= t`, in blocks: `T^2 / 2` exponentials per row, and
nothing of size `T x T` in memory. The exponentials are the bottleneck: a model of 36 layers and 8
KV heads (288 rows) at T = 128K needs 2.5e12 of them and 7.4e12 other flops, and moves 0.30 GB (log
beta in, S out). An H100 computes 3.7e12 exponentials per second, so 667 ms at best (10.4 ms at
16K); its memory would allow 0.09 ms. This is arithmetic, not a measurement. From 64K (`EXACT`) on,
the linear forward of `factored` is used instead, on any device; its sums are within 2e-6 of these.
On the torch path most of the work is matrix products: over blocks of 64 steps, `exp((t0 + a - i) l)
= exp(a l) exp((t0 - i) l)`.

**Backward.** The gradient of `S_t` is one number wherever the hinge is active and 0 elsewhere, so
each run of active steps is a geometric sum in closed form: exact, and linear in T for a few runs. A
row with more than `T / 64` runs (a hinge that flickers) is computed pair by pair.

Numerics: float32 throughout (or float64, on the torch path). Sums over steps and heads exceed 2^24
at 128K and are in float64.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.engine.kernels.launch import by_triton
from kvbench.errors import UserError

from ..gated import exp_, starts
from . import factored

BLOCK = 64
"""Steps of a block on the torch path; above `T / BLOCK` runs, going pair by pair is cheaper."""
EXACT = 1 << 16
"""Number of steps from which the forward is `factored`; float64 stays pair by pair."""


def capacity_loss(
    log_beta: Tensor,
    budget: int,
    *,
    scope: Literal["head", "global"] = "head",
    reduce: Literal["mean", "sum"] = "mean",
    valid: Tensor | None = None,
) -> Tensor:
    """Mean over the batch of the entries held beyond `budget` per head, a scalar.

    Args:
        log_beta: `log beta <= 0`, finite, float32 or float64 `[B, L, H, T]` or `[B, H, T]`. Values
            on padding are not read.
        budget: M, entries per head, 1 or more.
        scope: `head`: one hinge per head; `global`: one hinge over all heads and layers.
        reduce: Reduction over layers and heads for scope `head`: `mean` (kvbench's own) or `sum`.
        valid: bool `[B, T]`, False on padding, which is on the left; T is then each sequence's own
            length.

    Raises:
        UserError: A wrong shape, type or choice.
    """
    _check(log_beta, budget, scope, reduce)
    batch, length = log_beta.shape[0], log_beta.shape[-1]
    log_beta = log_beta.reshape(batch, -1, length)
    heads = log_beta.shape[1]
    start = starts(valid, batch, length, log_beta.device)
    together = scope == "global"
    kept: Tensor = torch.ops.kvbench.capacity_sums(log_beta, start, together)
    most = budget * heads if together else budget
    excess = (kept - most).relu().sum((1, 2), dtype=torch.float64)
    tokens = (length - start).double()
    share = heads if together or reduce == "mean" else 1
    scale = torch.where(tokens > budget, 1 / (tokens * (tokens - budget) * share), 0.0)
    return (excess * scale).mean().to(log_beta.dtype)


def _check(log_beta: Tensor, budget: int, scope: str, reduce: str) -> None:
    if log_beta.dim() not in (3, 4):
        raise UserError(f"log_beta has {log_beta.dim()} axes instead of [B, L, H, T] or [B, H, T]")
    if log_beta.dtype not in (torch.float32, torch.float64):
        raise UserError(f"log_beta is {log_beta.dtype}; use float32, as bf16 rounds beta to 1")
    if budget < 1:
        raise UserError(f"budget={budget} is too small; use 1 or more entries")
    if scope not in ("head", "global"):
        raise UserError(f"unknown scope={scope}; use head or global")
    if reduce not in ("mean", "sum"):
        raise UserError(f"unknown reduce={reduce}; use mean or sum")


@torch.library.custom_op("kvbench::capacity_sums", mutates_args=())
def capacity_sums(log_beta: Tensor, start: Tensor, together: bool) -> Tensor:
    """`S_t = sum_{start <= i <= t} exp((t - i) log_beta_i)` for every row.

    Args:
        log_beta: `[B, R, T]`.
        start: First column of each sequence, int32 `[B]`; S is 0 before it.
        together: Whether to sum over the rows, in float64.

    Returns:
        `[B, R, T]` in the type of `log_beta`, or float64 `[B, 1, T]`.
    """
    if log_beta.shape[-1] >= EXACT and log_beta.dtype == torch.float32:
        return factored.sums(log_beta, start, together)
    if by_triton(log_beta):
        from .triton import sums

        kept = sums(log_beta, start)
    else:
        kept = _sums(log_beta, start)
    return kept.sum(1, keepdim=True, dtype=torch.float64) if together else kept


@torch.library.custom_op("kvbench::capacity_sums_backward", mutates_args=())
def capacity_sums_backward(grad: Tensor, log_beta: Tensor, start: Tensor) -> Tensor:
    """Gradient of `capacity_sums`: `grad_i = sum_{t >= i} grad_t (t - i) exp((t - i) log_beta_i)`.

    Args:
        grad: `[B, R, T]`, or `[B, 1, T]` if all rows share it, as with the global hinge.
        log_beta: `[B, R, T]`.
        start: int32 `[B]`.
    """
    grad = grad.to(log_beta.dtype)
    runs = find_runs(grad, max(8, grad.shape[-1] // BLOCK))
    if by_triton(log_beta):
        from .triton import backward

        return backward(grad, log_beta, start, runs)
    if bool((runs[2] <= runs[0].shape[-1]).all()):
        return _backward_runs(grad, log_beta, start, runs)
    return _backward_direct(grad, log_beta, start)


@capacity_sums.register_fake
def _(log_beta: Tensor, start: Tensor, together: bool) -> Tensor:
    if together:
        return log_beta.new_empty((log_beta.shape[0], 1, log_beta.shape[2]), dtype=torch.float64)
    return torch.empty_like(log_beta, memory_format=torch.contiguous_format)


@capacity_sums_backward.register_fake
def _(grad: Tensor, log_beta: Tensor, start: Tensor) -> Tensor:
    return torch.empty_like(log_beta, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.kvbench.capacity_sums_backward(grad, *ctx.saved_tensors), None, None


capacity_sums.register_autograd(_differentiate, setup_context=_save)


def find_runs(grad: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the runs in which a gradient keeps one nonzero value, without waiting for a GPU.

    Args:
        grad: `[B, R, T]`.
        limit: Number of runs per row that are listed; further runs are only counted.

    Returns:
        First steps and ends (exclusive), int32 `[B, R, limit]`, filled with T; counts int32
        `[B, R]`, which may exceed `limit`.
    """
    length = grad.shape[-1]
    differs = grad[..., 1:] != grad[..., :-1]
    edge = torch.ones_like(grad[..., :1], dtype=torch.bool)
    on = grad != 0
    opens = on & torch.cat([edge, differs], -1)
    closes = on & torch.cat([differs, edge], -1)
    step = torch.arange(length, dtype=torch.int32, device=grad.device).expand(grad.shape)

    def listed(marks: Tensor, value: Tensor) -> Tensor:
        slot = torch.where(marks, marks.cumsum(-1) - 1, limit).clamp_max(limit)
        room = step.new_full((*grad.shape[:-1], limit + 1), length)
        return room.scatter_(-1, slot, value)[..., :limit].contiguous()

    return listed(opens, step), listed(closes, step + 1), opens.sum(-1, dtype=torch.int32)


def _blocks(log_beta: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Rates `[B, R, n, BLOCK]`, 0 outside the sequence; what is inside, bool `[B, 1, n, BLOCK]`."""
    length = log_beta.shape[-1]
    padded = -(-length // BLOCK) * BLOCK
    i = torch.arange(padded, device=log_beta.device)
    inside = ((i >= start[:, None]) & (i < length))[:, None]
    rate = torch.nn.functional.pad(log_beta, (0, padded - length)).masked_fill(~inside, 0.0)
    return rate.unflatten(-1, (-1, BLOCK)), inside.unflatten(-1, (-1, BLOCK))


def _sums(log_beta: Tensor, start: Tensor) -> Tensor:
    """`capacity_sums` in torch, block by block of entries."""
    rate, inside = _blocks(log_beta, start)
    out = torch.zeros_like(rate)
    a = torch.arange(BLOCK, device=rate.device)
    age = a[:, None] - a
    for c in range(rate.shape[2]):
        x, here = rate[:, :, c, None], inside[:, :, c, None]
        shown = (age >= 0) & here
        out[:, :, c] += torch.where(shown, exp_(age.clamp_min(0) * x), 0.0).sum(-1)
        far = (torch.arange(1, rate.shape[2] - c, device=a.device)[:, None] * BLOCK - a) * x
        weight = exp_(far).masked_fill_(~here, 0.0)  # [B, R, later blocks, entries]
        out[:, :, c + 1 :] += weight @ exp_(a[:, None] * x).mT
    return out.flatten(2)[..., : log_beta.shape[-1]].contiguous()


def _backward_direct(grad: Tensor, log_beta: Tensor, start: Tensor) -> Tensor:
    """`capacity_sums_backward` for any gradient, block by block of entries."""
    rate, inside = _blocks(log_beta, start)
    count = rate.shape[2]
    g = torch.nn.functional.pad(grad, (0, count * BLOCK - grad.shape[-1]))
    g = g.unflatten(-1, (-1, BLOCK))
    out = torch.zeros_like(rate)
    a = torch.arange(BLOCK, device=rate.device)
    age = (a[:, None] - a).clamp_min(0)
    for c in range(count):
        x = rate[:, :, c, None]
        out[:, :, c] += (g[:, :, c, :, None] * age * exp_(age * x)).sum(-2)
        ahead = torch.arange(1, count - c, device=a.device)[:, None] * BLOCK - a
        near = exp_(a[:, None] * x)
        later = g[:, :, c + 1 :]
        term = ahead * (later @ near) + later @ (a[:, None] * near)
        out[:, :, c] += (exp_(ahead * x) * term).sum(-2)
    out = out.masked_fill_(~inside, 0.0)
    return out.flatten(2)[..., : log_beta.shape[-1]].contiguous()


def _backward_runs(
    grad: Tensor, log_beta: Tensor, start: Tensor, runs: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """`capacity_sums_backward` by runs; the recursion is explained in `triton.backward_runs`."""
    first, end, count = runs
    length = log_beta.shape[-1]
    i = torch.arange(length, device=grad.device)
    inside = (i >= start[:, None])[:, None]
    rate = log_beta.masked_fill(~inside, 0.0)
    out = torch.zeros_like(rate)
    for r in range(int(count.max()) if count.numel() else 0):
        opens, closes = first[..., r, None].long(), end[..., r, None]
        g = grad.gather(-1, opens.clamp_max(length - 1))
        begin = torch.maximum(opens, i)
        n = (closes - begin).clamp_min(0)
        k, a, b = torch.zeros_like(n), torch.zeros_like(out), torch.zeros_like(out)
        for shift in reversed(range(int(n.max()).bit_length())):
            w = exp_(k * rate)
            b = b + w * (k * a + b)
            a = a * (1 + w)
            k = n >> shift
            w = torch.where(k % 2 == 1, w * w, 0.0)
            b = b + (k - 1) * w
            a = a + w
        age = begin - i
        out += g * exp_(age * rate) * (age * a + b)
    return out.masked_fill_(~inside, 0.0)
