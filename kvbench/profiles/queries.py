"""What the queries of a model have in common, head by head.

Their main direction: Godey, Devoto, Zhao, Scardapane, Minervini, de la Clergerie, Sagot: Q-Filters:
Leveraging QK Geometry for Efficient KV Cache Compression, arXiv 2503.02812. Their mean and
covariance: Devoto, Jeblick, Jégou: Expected Attention: KV Cache Compression by Estimating Attention
from Future Queries Distribution, arXiv 2510.00636.
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
"""Queries of each head that are drawn over all prompts for Q-filters, as their authors do."""
FIRST = 4
"""First tokens of a prompt whose queries do not count in mean and covariance, as in kvpress."""


@torch.no_grad()
def sample_queries(
    model: nn.Module, prompts: Sequence[Sequence[int]], seed: int, reporter: Reporter
) -> list[Tensor]:
    """Read prompts and keep queries after RoPE, drawn at random, the same tokens in all heads.

    Args:
        model: A causal language model in evaluation mode.
        prompts: Token ids, one prompt each.
        seed: Seed of the draws.
        reporter: Told of every prompt.

    Returns:
        Of every full-attention layer, float32 `[H_q, n, d]` on the CPU, `n <= QUERIES`.
    """
    layers = model_info(model).layers
    found: list[list[Tensor]] = [[] for _ in range(layers)]
    column = torch.empty(0, dtype=torch.int64)
    each = -(-QUERIES // max(1, len(prompts)))

    def keep(opened: Forward, layer: RaggedLayer, step: Step) -> None:
        found[step.index].append(step.query[0][:, column.to(step.query.device)].float().cpu())

    with engine(model, keep):
        for number, ids in enumerate(prompts):
            drawn = random.Random(f"{seed} {number}").sample(range(len(ids)), min(each, len(ids)))
            prefix = Prefix(model, ())
            column = torch.tensor(sorted(drawn), device=prefix.device)
            prefix.extend(torch.tensor([ids], device=prefix.device))
            reporter.advance()
    return [torch.cat(of_layer, 1)[:, :QUERIES] for of_layer in found]


def filters_of(queries: Tensor, kv_heads: int) -> Tensor:
    """The filters of a layer: the direction that queries share, turned away from most of them.

    For each query head the first right singular vector of its queries, with the sign that makes the
    product with most queries negative; the mean over the query heads of a KV head.

    Args:
        queries: `[H_q, n, d]`.
        kv_heads: KV heads of the layer, `H`.

    Returns:
        float32 `[H, d]`.
    """
    rows = queries.double()
    direction = torch.linalg.svd(rows, full_matrices=False).Vh[:, 0]
    along = (rows @ direction[..., None])[..., 0] > 0
    away = torch.where(along.double().mean(-1) > 0.5, -1.0, 1.0)
    filters: Tensor = (away[:, None] * direction).unflatten(0, (kv_heads, -1)).mean(1)
    return filters.float()


@torch.no_grad()
def query_moments(
    model: nn.Module, prompts: Sequence[Sequence[int]], reporter: Reporter
) -> tuple[Tensor, Tensor, int]:
    """Mean and covariance of the queries before RoPE, over all tokens behind the first four.

    Args:
        model: A causal language model in evaluation mode.
        prompts: Token ids, one prompt each.
        reporter: Told of every prompt.

    Returns:
        The mean, float32 `[L, H_q, d]`; the covariance (the sum divided by the number of queries
        less one), float32 `[L, H_q, d, d]`; and the number of queries of a head.

    Raises:
        UserError: The model has no rotary embedding, or there are fewer than two queries.
    """
    info = model_info(model)
    sums: list[Tensor | None] = [None] * info.layers
    products: list[Tensor | None] = [None] * info.layers

    def keep(opened: Forward, layer: RaggedLayer, step: Step) -> None:
        tokens = step.query.shape[2]
        cos, sin = angles(info, step.index, torch.arange(tokens, device=step.query.device))
        rows = turn_back(step.query[0].float(), cos, sin)[:, FIRST:].double().cpu()
        found = rows.sum(1), rows.mT @ rows
        for held, new in zip((sums, products), found, strict=True):
            before = held[step.index]
            held[step.index] = new if before is None else before + new

    count = sum(max(0, len(ids) - FIRST) for ids in prompts)
    if count < 2:
        raise UserError(
            f"mean and covariance need two queries behind the first {FIRST} tokens of a prompt; "
            "use longer prompts"
        )
    with engine(model, keep):
        for ids in prompts:
            prefix = Prefix(model, ())
            prefix.extend(torch.tensor([ids], device=prefix.device))
            reporter.advance()
    mean = torch.stack([total for total in sums if total is not None]) / count
    product = torch.stack([total for total in products if total is not None])
    covariance = (product - count * mean[..., :, None] * mean[..., None, :]) / (count - 1)
    return mean.float(), covariance.float(), count
