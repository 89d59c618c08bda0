"""Measures what KV heads contribute to an answer by what the answer loses without their context.

A head is ablated as an eviction policy would do it: after the context is prefilled, the head keeps
only the first `SINKS` and the last `WINDOW` tokens of it, before the question is seen. The loss is
the drop of the log-likelihood of the answer that the model gives with the full cache, in nats per
token. A token's probability counts as at least 1 / |vocabulary|, that of a random guess.

Attention scores (`measure`) say where heads look, not what the model needs: a model may, for
example, copy a statement into the tokens behind it and fetch it from there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import engine, forward
from kvbench.engine.models import model_info
from kvbench.engine.prefix import Prefix
from kvbench.profiles.measure import Answer
from kvbench.progress import Reporter
from kvbench.stats import T, Z

SINKS, WINDOW = 4, 32
"""First and last tokens of the context that an ablated head keeps."""
LEAST_ANSWERS = 3
"""Fewest correct answers from which a loss can be told from chance."""

_BYTES = 1 << 30
"""Bytes of caches that are held at once."""

Head = tuple[int, int]
"""Index among the full-attention layers, and KV head."""


@dataclass(frozen=True)
class Mean:
    """The mean of a loss over answers, with its 95% confidence interval (Student's t).

    Attributes:
        mean: Float64, any shape.
        margin: Half the width of the interval, same shape.
    """

    mean: Tensor
    margin: Tensor

    @classmethod
    def of(cls, samples: Tensor) -> Mean:
        """Average samples `[S, ...]`, at least two."""
        count = len(samples)
        quantile = T[count - 2] if count - 2 < len(T) else Z
        return cls(samples.mean(0), quantile * samples.std(0) / count**0.5)

    @property
    def lower(self) -> Tensor:
        """Lower end of the interval."""
        return self.mean - self.margin


@torch.no_grad()
def head_losses(
    model: nn.Module, answers: Sequence[Answer], seed: int, reporter: Reporter
) -> Tensor:
    """Share of every KV head in what the answers lose when all heads are ablated.

    The heads are ablated one after the other, in a random order and in its reverse, and each step's
    loss is that of the head ablated last: the Shapley value, estimated from two orders per answer.
    Ablating single heads instead would miss heads that stand in for one another. The shares of an
    answer sum to its loss without all heads.

    Args:
        model: A causal language model in evaluation mode.
        answers: Answers that the model gives with the full cache.
        seed: Seed of the orders.
        reporter: Told of every answer.

    Returns:
        Nats per token, float64 `[S, L, H]`, on the CPU.
    """
    info = model_info(model)
    heads = [(i, h) for i in range(info.layers) for h in range(info.kv_heads)]
    shares = torch.zeros(len(answers), info.layers, info.kv_heads, dtype=torch.float64)
    with engine(model):
        for n, answer in enumerate(answers):
            pair = orders(heads, seed, n)
            steps = [order[: k + 1] for order in pair for k in range(len(heads))]
            lost = losses(model, answer, steps).view(2, -1)
            gained = lost.diff(dim=-1, prepend=torch.zeros(2, 1, dtype=lost.dtype))
            for order, row in zip(pair, gained, strict=True):
                for (i, h), x in zip(order, row.tolist(), strict=True):
                    shares[n, i, h] += x / 2
            reporter.advance()
    return shares


def orders(heads: Sequence[Head], seed: int, n: int) -> tuple[list[Head], list[Head]]:
    """A random order of the heads for the `n`-th answer, and its reverse."""
    order = list(heads)
    random.Random(f"{seed} {n}").shuffle(order)
    return order, order[::-1]


@dataclass(frozen=True)
class Evidence:
    """Whether the heads that a profile favours matter more than others.

    Attributes:
        heads: The fewest heads that hold half of the profile.
        total: KV heads of the model.
        top: Mean loss without these heads, in nats per token.
        others: Mean loss without as many other heads, drawn for every answer.
        holds: Whether the former is larger, beyond chance.
    """

    heads: int
    total: int
    top: float
    others: float
    holds: bool


@torch.no_grad()
def verify(
    model: nn.Module, answers: Sequence[Answer], scores: Tensor, seed: int, reporter: Reporter
) -> Evidence:
    """Ablate the heads that hold half of a profile, and as many others.

    Args:
        model: As in `head_losses`.
        answers: As in `head_losses`; at least two.
        scores: The profile, `[L, H]`, not necessarily normalised.
        seed: Seed of the draws.
        reporter: Told of every answer.
    """
    top = top_heads(scores)
    rest = [(i, h) for i in range(len(scores)) for h in range(scores.shape[1])]
    rest = [head for head in rest if head not in top]
    lost = []
    with engine(model):
        for n, answer in enumerate(answers):
            others = random.Random(f"{seed} {n}").sample(rest, min(len(top), len(rest)))
            lost.append(losses(model, answer, [top, others]))
            reporter.advance()
    both = torch.stack(lost)
    means = both.mean(0).tolist()
    ahead = Mean.of(both[:, 0] - both[:, 1])
    return Evidence(len(top), scores.numel(), means[0], means[1], holds=float(ahead.lower) > 0)


def top_heads(scores: Tensor) -> list[Head]:
    """The fewest heads that hold half of a profile `[L, H]`, the best first."""
    flat = scores.flatten().double()
    order = flat.argsort(descending=True, stable=True)
    held = flat[order].cumsum(0) / flat.sum()
    count = int((held < 0.5 - 1e-9).sum()) + 1
    return [divmod(i, scores.shape[1]) for i in order[:count].tolist()]


def losses(model: nn.Module, answer: Answer, ablated: Iterable[Sequence[Head]]) -> Tensor:
    """What an answer loses when heads are ablated.

    Args:
        model: The model, inside `engine`.
        answer: An answer that it gives with the full cache.
        ablated: Sets of heads.

    Returns:
        Nats per token for every set, float64 `[len(ablated)]`, on the CPU.
    """
    prompt = answer.needle.prompt
    ids = [*prompt.context_ids, *prompt.question_ids, *answer.tokens[:-1]]
    context = min(len(prompt.context_ids), len(ids) - len(answer.tokens))
    device = next(model.parameters()).device
    prefix = Prefix(model, ())
    prefix.extend(torch.tensor([ids[:context]], device=device))
    rest = torch.tensor(ids[context:], device=device)
    tokens = torch.tensor(answer.tokens, device=device)
    sets: list[Sequence[Head]] = [(), *ablated]
    size = max(1, _BYTES // max(1, prefix.cache.full_bytes(0)))
    likelihood = []
    for start in range(0, len(sets), size):
        caches = [ablate(prefix.cache, heads, len(rest)) for heads in sets[start : start + size]]
        batch = RaggedCache.stack(caches)
        logits = forward(model, batch, rest.expand(len(caches), -1), logit_count=len(tokens))
        chosen = tokens[None, :, None].expand(len(caches), -1, 1)
        token_likelihood = logits.float().log_softmax(-1).gather(-1, chosen)[..., 0]
        # Below the probability of a random guess there is nothing left to lose, only noise.
        likelihood.append(token_likelihood.clamp(min=-math.log(logits.shape[-1])).mean(-1))
    means = torch.cat(likelihood).double().cpu()
    return means[0] - means[1:]


def ablate(cache: RaggedCache, heads: Sequence[Head], reserve: int) -> RaggedCache:
    """Give a packed copy of a prefilled cache whose `heads` keep only sinks and window.

    Args:
        cache: A dense cache; not changed.
        heads: The heads to ablate.
        reserve: Number of tokens that will follow.
    """
    keep = everything(cache)
    for i, h in heads:
        keep[i][:, h, SINKS : max(SINKS, keep[i].shape[-1] - WINDOW)] = False
    return keep_only(cache, keep, reserve)


def everything(cache: RaggedCache) -> list[Tensor]:
    """Which entries of a dense cache to keep: all, bool `[B, H, T]` per full-attention layer."""
    keys = [layer.key for layer in cache.ragged if layer.key is not None]
    return [torch.ones(key.shape[:3], dtype=torch.bool, device=key.device) for key in keys]


def keep_only(cache: RaggedCache, keep: Sequence[Tensor], reserve: int) -> RaggedCache:
    """Give a packed copy of a dense cache that holds some of its entries.

    Args:
        cache: A dense cache; not changed.
        keep: Entries to keep, bool `[B, H, T]` per full-attention layer.
        reserve: Number of tokens that will follow.
    """
    copy = cache.fork()
    for dense, layer, stays in zip(cache.ragged, copy.ragged, keep, strict=True):
        assert dense.key is not None and dense.value is not None
        columns = torch.arange(stays.shape[-1], device=stays.device).expand(dense.key.shape[:3])
        layer.pack(dense.key, dense.value, stays, columns, {}, reserve)
    return copy
