"""Capacity loss: the entries that retention gates hold beyond a budget, with exact gradients.

TRIM-KV trains its gates with a loss per head, DBTrimKV with one over all layers and heads. With
`S_t = sum_{i <= t} beta_i^(t - i)`, the effective number of entries of a head at step t,

    head    mean (or sum) over layers and heads of  1 / (T (T - M)) sum_t max(0, S_t - M)
    global  1 / (L H T (T - M)) sum_t max(0, sum_{l,h} S_t - M L H)

and 0 if `T <= M`. (DBTrimKV gives no normaliser; this one is kvbench's.)

**Forward.** One `exp` per pair `i <= t`, in blocks: `T^2 / 2` exponentials per row, without a `T x T` matrix in memory.
The exponentials are the bottleneck: a model of 36 layers and 8 KV heads (288 rows) at T = 128K needs 2.5e12 of them and
7.4e12 other flops, and moves 0.30 GB (log beta in, S out). An H100 computes 3.7e12 exponentials per second, so 667 ms
at best (10.4 ms at 16K); its memory would allow 0.09 ms. These are estimates, not measurements. From 64K (`EXACT`) on,
the linear forward of `factored` is used instead, on any device; its sums are within 2e-6 of these. On the torch path,
most of the work is matrix products over blocks of 64 steps, `exp((t0 + a - i) l) = exp(a l) exp((t0 - i) l)`.

**Backward.** The gradient of `S_t` is constant where the hinge is active and 0 elsewhere, so each run of active steps
is a geometric sum in closed form: exact, and linear in T for a few runs. A row with more than `T / 64` runs is computed
pair by pair.

Numerics: float32 throughout (or float64, on the torch path). Sums over steps and heads exceed 2^24 at 128K and are in
float64.
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
"""Steps per block on the torch path; above `T / BLOCK` runs, the pairwise path is cheaper."""
EXACT = 1 << 16
"""Number of steps from which the `factored` forward is used; float64 stays pairwise."""


def capacity_loss(
    log_beta: Tensor,
    budget: int,
    *,
    scope: Literal["head", "global"] = "head",
    reduce: Literal["mean", "sum"] = "mean",
    valid: Tensor | None = None,
) -> Tensor:
    """Return the batch mean of the entries held beyond `budget` per head, a scalar.

    Args:
        log_beta: `log beta <= 0`, finite, float32 or float64 `[B, L, H, T]` or `[B, H, T]`; padding is ignored.
        budget: M, entries per head, 1 or more.
        scope: `head`: one hinge per head; `global`: one hinge over all heads and layers.
        reduce: Reduction over layers and heads for scope `head`: `mean` (kvbench's choice) or `sum`.
        valid: bool `[B, T]`, False on left padding; T is then the length of each sequence.

    Raises:
        UserError: An argument has a wrong shape, dtype or value.
    """
    _check(log_beta, budget, scope, reduce)
    batch_size, length = log_beta.shape[0], log_beta.shape[-1]
    log_beta = log_beta.reshape(batch_size, -1, length)
    head_count = log_beta.shape[1]
    first_steps = starts(valid, batch_size, length, log_beta.device)
    is_global = scope == "global"
    retained: Tensor = torch.ops.kvbench.capacity_sums(log_beta, first_steps, is_global)
    limit = budget * head_count if is_global else budget
    excess = (retained - limit).relu().sum((1, 2), dtype=torch.float64)
    token_counts = (length - first_steps).double()
    head_share = head_count if is_global or reduce == "mean" else 1
    loss_scale = torch.where(token_counts > budget, 1 / (token_counts * (token_counts - budget) * head_share), 0.0)
    return (excess * loss_scale).mean().to(log_beta.dtype)


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
def capacity_sums(log_beta: Tensor, first_steps: Tensor, is_global: bool) -> Tensor:
    """Return `S_t = sum_{start <= i <= t} exp((t - i) log_beta_i)` for every row.

    Args:
        log_beta: `[B, R, T]`.
        first_steps: First column of each sequence, int32 `[B]`; S is 0 before it.
        is_global: Sum over the rows, in float64.

    Returns:
        `[B, R, T]` in the type of `log_beta`, or float64 `[B, 1, T]`.
    """
    if log_beta.shape[-1] >= EXACT and log_beta.dtype == torch.float32:
        return factored.sums(log_beta, first_steps, is_global)
    if by_triton(log_beta):
        from .triton import sums

        retained = sums(log_beta, first_steps)
    else:
        retained = _sums(log_beta, first_steps)
    return retained.sum(1, keepdim=True, dtype=torch.float64) if is_global else retained


@torch.library.custom_op("kvbench::capacity_sums_backward", mutates_args=())
def capacity_sums_backward(gradient: Tensor, log_beta: Tensor, first_steps: Tensor) -> Tensor:
    """Return the gradient of `capacity_sums`: `grad_i = sum_{t >= i} grad_t (t - i) exp((t - i) log_beta_i)`.

    Args:
        gradient: `[B, R, T]`, or `[B, 1, T]` if shared by all rows (global hinge).
        log_beta: `[B, R, T]`.
        first_steps: int32 `[B]`.
    """
    gradient = gradient.to(log_beta.dtype)
    runs = find_runs(gradient, max(8, gradient.shape[-1] // BLOCK))
    if by_triton(log_beta):
        from .triton import backward

        return backward(gradient, log_beta, first_steps, runs)
    if bool((runs[2] <= runs[0].shape[-1]).all()):
        return _backward_runs(gradient, log_beta, first_steps, runs)
    return _backward_direct(gradient, log_beta, first_steps)


@capacity_sums.register_fake
def _(log_beta: Tensor, first_steps: Tensor, is_global: bool) -> Tensor:
    if is_global:
        return log_beta.new_empty((log_beta.shape[0], 1, log_beta.shape[2]), dtype=torch.float64)
    return torch.empty_like(log_beta, memory_format=torch.contiguous_format)


@capacity_sums_backward.register_fake
def _(gradient: Tensor, log_beta: Tensor, first_steps: Tensor) -> Tensor:
    return torch.empty_like(log_beta, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.kvbench.capacity_sums_backward(grad, *ctx.saved_tensors), None, None


capacity_sums.register_autograd(_differentiate, setup_context=_save)


def find_runs(gradient: Tensor, run_limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find runs of one nonzero gradient value, without a GPU synchronisation.

    Args:
        gradient: `[B, R, T]`.
        run_limit: Maximum number of runs listed per row; further runs are only counted.

    Returns:
        First steps and ends (exclusive), int32 `[B, R, run_limit]`, filled with T; counts int32 `[B, R]`, which may
        exceed `run_limit`.
    """
    length = gradient.shape[-1]
    changes = gradient[..., 1:] != gradient[..., :-1]
    edge_mask = torch.ones_like(gradient[..., :1], dtype=torch.bool)
    is_nonzero = gradient != 0
    run_opens = is_nonzero & torch.cat([edge_mask, changes], -1)
    run_closes = is_nonzero & torch.cat([changes, edge_mask], -1)
    step_indices = torch.arange(length, dtype=torch.int32, device=gradient.device).expand(gradient.shape)

    def listed(run_marks: Tensor, step_values: Tensor) -> Tensor:
        run_slots = torch.where(run_marks, run_marks.cumsum(-1) - 1, run_limit).clamp_max(run_limit)
        run_steps = step_indices.new_full((*gradient.shape[:-1], run_limit + 1), length)
        return run_steps.scatter_(-1, run_slots, step_values)[..., :run_limit].contiguous()

    return (
        listed(run_opens, step_indices),
        listed(run_closes, step_indices + 1),
        run_opens.sum(-1, dtype=torch.int32),
    )


def _blocks(log_beta: Tensor, first_steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rates `[B, R, n, BLOCK]` (0 outside the sequence) and the inside mask, bool `[B, 1, n, BLOCK]`."""
    length = log_beta.shape[-1]
    padded_length = -(-length // BLOCK) * BLOCK
    step_indices = torch.arange(padded_length, device=log_beta.device)
    inside_mask = ((step_indices >= first_steps[:, None]) & (step_indices < length))[:, None]
    log_rates = torch.nn.functional.pad(log_beta, (0, padded_length - length)).masked_fill(~inside_mask, 0.0)
    return log_rates.unflatten(-1, (-1, BLOCK)), inside_mask.unflatten(-1, (-1, BLOCK))


def _sums(log_beta: Tensor, first_steps: Tensor) -> Tensor:
    """Compute `capacity_sums` in torch, one block of entries at a time."""
    log_rates, inside_mask = _blocks(log_beta, first_steps)
    retained = torch.zeros_like(log_rates)
    offsets = torch.arange(BLOCK, device=log_rates.device)
    age_matrix = offsets[:, None] - offsets
    for block_index in range(log_rates.shape[2]):
        block_rates, block_mask = log_rates[:, :, block_index, None], inside_mask[:, :, block_index, None]
        visible_mask = (age_matrix >= 0) & block_mask
        retained[:, :, block_index] += torch.where(visible_mask, exp_(age_matrix.clamp_min(0) * block_rates), 0.0).sum(
            -1
        )
        exponents = (
            torch.arange(1, log_rates.shape[2] - block_index, device=offsets.device)[:, None] * BLOCK - offsets
        ) * block_rates
        # [B, R, later blocks, entries]
        far_weights = exp_(exponents).masked_fill_(~block_mask, 0.0)
        retained[:, :, block_index + 1 :] += far_weights @ exp_(offsets[:, None] * block_rates).mT
    return retained.flatten(2)[..., : log_beta.shape[-1]].contiguous()


def _backward_direct(gradient: Tensor, log_beta: Tensor, first_steps: Tensor) -> Tensor:
    """Compute `capacity_sums_backward` for any gradient, one block of entries at a time."""
    log_rates, inside_mask = _blocks(log_beta, first_steps)
    block_count = log_rates.shape[2]
    gradient_blocks = torch.nn.functional.pad(gradient, (0, block_count * BLOCK - gradient.shape[-1]))
    gradient_blocks = gradient_blocks.unflatten(-1, (-1, BLOCK))
    rate_gradient = torch.zeros_like(log_rates)
    offsets = torch.arange(BLOCK, device=log_rates.device)
    age_matrix = (offsets[:, None] - offsets).clamp_min(0)
    for block_index in range(block_count):
        block_rates = log_rates[:, :, block_index, None]
        rate_gradient[:, :, block_index] += (
            gradient_blocks[:, :, block_index, :, None] * age_matrix * exp_(age_matrix * block_rates)
        ).sum(-2)
        distances = torch.arange(1, block_count - block_index, device=offsets.device)[:, None] * BLOCK - offsets
        near_weights = exp_(offsets[:, None] * block_rates)
        later_gradient = gradient_blocks[:, :, block_index + 1 :]
        later_terms = distances * (later_gradient @ near_weights) + later_gradient @ (offsets[:, None] * near_weights)
        rate_gradient[:, :, block_index] += (exp_(distances * block_rates) * later_terms).sum(-2)
    rate_gradient = rate_gradient.masked_fill_(~inside_mask, 0.0)
    return rate_gradient.flatten(2)[..., : log_beta.shape[-1]].contiguous()


def _backward_runs(
    gradient: Tensor, log_beta: Tensor, first_steps: Tensor, runs: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Compute `capacity_sums_backward` by runs; `triton.backward_runs` explains the recursion."""
    run_starts, run_ends, run_counts = runs
    length = log_beta.shape[-1]
    step_indices = torch.arange(length, device=gradient.device)
    inside_mask = (step_indices >= first_steps[:, None])[:, None]
    log_rates = log_beta.masked_fill(~inside_mask, 0.0)
    rate_gradient = torch.zeros_like(log_rates)
    for run_index in range(int(run_counts.max()) if run_counts.numel() else 0):
        open_steps, close_steps = run_starts[..., run_index, None].long(), run_ends[..., run_index, None]
        run_gradient = gradient.gather(-1, open_steps.clamp_max(length - 1))
        begin_steps = torch.maximum(open_steps, step_indices)
        n = (close_steps - begin_steps).clamp_min(0)
        k, a, b = torch.zeros_like(n), torch.zeros_like(rate_gradient), torch.zeros_like(rate_gradient)
        for shift in reversed(range(int(n.max()).bit_length())):
            step_weights = exp_(k * log_rates)
            b = b + step_weights * (k * a + b)
            a = a * (1 + step_weights)
            k = n >> shift
            step_weights = torch.where(k % 2 == 1, step_weights * step_weights, 0.0)
            b = b + (k - 1) * step_weights
            a = a + step_weights
        begin_ages = begin_steps - step_indices
        rate_gradient += run_gradient * exp_(begin_ages * log_rates) * (begin_ages * a + b)
    return rate_gradient.masked_fill_(~inside_mask, 0.0)
