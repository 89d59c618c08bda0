"""Summaries of a model's queries per head.

Main direction: Godey, Devoto, Zhao, Scardapane, Minervini, de la Clergerie, Sagot: Q-Filters: Leveraging QK Geometry
for Efficient KV Cache Compression, arXiv 2503.02812. Mean and covariance: Devoto, Jeblick, Jégou: Expected Attention:
KV Cache Compression by Estimating Attention from Future Queries Distribution, arXiv 2510.00636.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kvbench.engine.attachment import Forward, Step
from kvbench.engine.driver import engine
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import model_info
from kvbench.engine.prefix import Prefix
from kvbench.errors import UserError
from kvbench.progress import Reporter
from kvbench.view.rope import angles, turn_back

QUERIES = 3000
"""Queries sampled per head over all prompts for Q-filters, as in the authors' code."""
FIRST = 4
"""First tokens of a prompt whose queries mean and covariance skip, as in kvpress."""


@torch.no_grad()
def sample_queries(model: nn.Module, prompts: Sequence[Sequence[int]], seed: int, reporter: Reporter) -> list[Tensor]:
    """Sample queries after RoPE from prompts, at the same tokens in all heads.

    Args:
        model: A causal language model in evaluation mode.
        prompts: Token ids, one prompt each.
        seed: Seed of the draws.
        reporter: Progress reporter.

    Returns:
        float32 `[H_q, n, d]` on the CPU per full-attention layer, `n <= QUERIES`.
    """
    layer_count = model_info(model).layers
    layer_samples: list[list[Tensor]] = [[] for _ in range(layer_count)]
    columns = torch.empty(0, dtype=torch.int64)
    per_prompt = -(-QUERIES // max(1, len(prompts)))

    def record_queries(forward_pass: Forward, layer: RaggedLayer, step: Step) -> None:
        layer_samples[step.index].append(step.query[0][:, columns.to(step.query.device)].float().cpu())

    with engine(model, record_queries):
        for prompt_index, prompt_ids in enumerate(prompts):
            drawn_columns = random.Random(f"{seed} {prompt_index}").sample(
                range(len(prompt_ids)), min(per_prompt, len(prompt_ids))
            )
            prefix = Prefix(model, ())
            columns = torch.tensor(sorted(drawn_columns), device=prefix.device)
            prefix.extend(torch.tensor([prompt_ids], device=prefix.device))
            reporter.advance()
    return [torch.cat(layer_queries, 1)[:, :QUERIES] for layer_queries in layer_samples]


def filters_of(queries: Tensor, kv_heads: int) -> Tensor:
    """Return the filters of a layer: the main direction of the queries, with negative sign.

    For each query head, this is the first right singular vector of its queries, with the sign that makes the product
    with most queries negative, averaged over the query heads of a KV head.

    Args:
        queries: `[H_q, n, d]`.
        kv_heads: KV heads of the layer, `H`.

    Returns:
        float32 `[H, d]`.
    """
    query_rows = queries.double()
    directions = torch.linalg.svd(query_rows, full_matrices=False).Vh[:, 0]
    is_aligned = (query_rows @ directions[..., None])[..., 0] > 0
    signs = torch.where(is_aligned.double().mean(-1) > 0.5, -1.0, 1.0)
    filters: Tensor = (signs[:, None] * directions).unflatten(0, (kv_heads, -1)).mean(1)
    return filters.float()


@torch.no_grad()
def query_moments(model: nn.Module, prompts: Sequence[Sequence[int]], reporter: Reporter) -> tuple[Tensor, Tensor, int]:
    """Return mean and covariance of the queries before RoPE, over all tokens after the first four.

    Args:
        model: A causal language model in evaluation mode.
        prompts: Token ids, one prompt each.
        reporter: Progress reporter.

    Returns:
        The mean, float32 `[L, H_q, d]`; the covariance (the sum divided by the number of queries less one), float32
        `[L, H_q, d, d]`; and the number of queries per head.

    Raises:
        UserError: The model has no rotary embedding, or there are fewer than two queries.
    """
    info = model_info(model)
    query_sums: list[Tensor | None] = [None] * info.layers
    outer_products: list[Tensor | None] = [None] * info.layers

    def record_moments(forward_pass: Forward, layer: RaggedLayer, step: Step) -> None:
        token_count = step.query.shape[2]
        cos, sin = angles(info, step.index, torch.arange(token_count, device=step.query.device))
        query_rows = turn_back(step.query[0].float(), cos, sin)[:, FIRST:].double().cpu()
        layer_moments = query_rows.sum(1), query_rows.mT @ query_rows
        for totals, addend in zip((query_sums, outer_products), layer_moments, strict=True):
            previous = totals[step.index]
            totals[step.index] = addend if previous is None else previous + addend

    query_count = sum(max(0, len(prompt_ids) - FIRST) for prompt_ids in prompts)
    if query_count < 2:
        raise UserError(
            f"mean and covariance need two queries after the first {FIRST} tokens of a prompt; use longer prompts"
        )
    with engine(model, record_moments):
        for prompt_ids in prompts:
            prefix = Prefix(model, ())
            prefix.extend(torch.tensor([prompt_ids], device=prefix.device))
            reporter.advance()
    query_mean = torch.stack([layer_total for layer_total in query_sums if layer_total is not None]) / query_count
    product_sums = torch.stack([layer_total for layer_total in outer_products if layer_total is not None])
    covariance = (product_sums - query_count * query_mean[..., :, None] * query_mean[..., None, :]) / (query_count - 1)
    return query_mean.float(), covariance.float(), query_count
