"""Ablation: contribution of KV heads to an answer, measured by the loss without their context.

A head is ablated as by an eviction policy: after the prefill of the context, before the question, the head keeps only
the first `SINKS` and the last `WINDOW` tokens. The loss is the drop in log-likelihood, in nats per token, of the answer
given with the full cache. A token's probability is clamped to at least 1 / |vocabulary|, that of a random guess.

Attention scores (`needle_attention`) show where heads look, not what the model needs: a model may, for example, copy a
statement into the tokens after it and retrieve it from there.
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
from kvbench.engine.masks import everything, keep_only
from kvbench.engine.models import model_info
from kvbench.engine.prefix import Prefix
from kvbench.profiles.needle_attention import NeedleAnswer
from kvbench.progress import Reporter
from kvbench.stats import T, Z

SINKS, WINDOW = 4, 32
"""First and last tokens of the context that an ablated head keeps."""
LEAST_ANSWERS = 3
"""Minimum number of correct answers for a significant loss."""

_BYTES = 1 << 30
"""Maximum bytes of caches in memory."""

Head = tuple[int, int]
"""Index among the full-attention layers, and KV head."""


@dataclass(frozen=True)
class Mean:
    """Mean loss over answers, with its 95% confidence interval (Student's t).

    Attributes:
        mean: Float64, any shape.
        margin: Half the width of the interval, same shape.
    """

    mean: Tensor
    margin: Tensor

    @classmethod
    def of(cls, samples: Tensor) -> Mean:
        """Average at least two samples, `[S, ...]`."""
        sample_count = len(samples)
        quantile = T[sample_count - 2] if sample_count - 2 < len(T) else Z
        return cls(samples.mean(0), quantile * samples.std(0) / sample_count**0.5)

    @property
    def lower(self) -> Tensor:
        """Lower end of the interval."""
        return self.mean - self.margin


@torch.no_grad()
def head_losses(model: nn.Module, answers: Sequence[NeedleAnswer], seed: int, reporter: Reporter) -> Tensor:
    """Return each KV head's contribution to the loss of ablating all heads.

    Heads are ablated one by one, in a random order and its reverse, and each step's loss is attributed to the head
    ablated last: the Shapley value, estimated from two orders per answer. Ablating single heads would miss heads that
    replace one another. The contributions of an answer sum to its loss without all heads.

    Args:
        model: A causal language model in evaluation mode.
        answers: The model's answers with the full cache.
        seed: Seed of the orders.
        reporter: Progress reporter.

    Returns:
        Nats per token, float64 `[S, L, H]`, on the CPU.
    """
    info = model_info(model)
    heads = [(layer, kv_head) for layer in range(info.layers) for kv_head in range(info.kv_heads)]
    shares = torch.zeros(len(answers), info.layers, info.kv_heads, dtype=torch.float64)
    with engine(model):
        for answer_index, answer in enumerate(answers):
            head_orders = orders(heads, seed, answer_index)
            ablations = [order[: head_index + 1] for order in head_orders for head_index in range(len(heads))]
            answer_losses = losses(model, answer, ablations).view(2, -1)
            loss_gains = answer_losses.diff(dim=-1, prepend=torch.zeros(2, 1, dtype=answer_losses.dtype))
            for order, order_gains in zip(head_orders, loss_gains, strict=True):
                for (layer, kv_head), gain in zip(order, order_gains.tolist(), strict=True):
                    shares[answer_index, layer, kv_head] += gain / 2
            reporter.advance()
    return shares


def orders(heads: Sequence[Head], seed: int, answer_index: int) -> tuple[list[Head], list[Head]]:
    """Return a random order of the heads for the `answer_index`-th answer, and its reverse."""
    shuffled = list(heads)
    random.Random(f"{seed} {answer_index}").shuffle(shuffled)
    return shuffled, shuffled[::-1]


@dataclass(frozen=True)
class Evidence:
    """Test of whether the heads that a profile ranks highest matter more than others.

    Attributes:
        heads: Smallest number of heads that hold half of the profile.
        total: KV heads of the model.
        top: Mean loss without these heads, in nats per token.
        others: Mean loss without as many other heads, drawn per answer.
        holds: Whether the former is significantly larger.
    """

    heads: int
    total: int
    top: float
    others: float
    holds: bool


@torch.no_grad()
def verify(
    model: nn.Module, answers: Sequence[NeedleAnswer], scores: Tensor, seed: int, reporter: Reporter
) -> Evidence:
    """Ablate the heads that hold half of a profile, and as many others.

    Args:
        model: As in `head_losses`.
        answers: As in `head_losses`; at least two.
        scores: The profile, `[L, H]`, not necessarily normalised.
        seed: Seed of the draws.
        reporter: Progress reporter.
    """
    best_heads = top_heads(scores)
    other_heads = [(layer, kv_head) for layer in range(len(scores)) for kv_head in range(scores.shape[1])]
    other_heads = [head for head in other_heads if head not in best_heads]
    answer_losses = []
    with engine(model):
        for answer_index, answer in enumerate(answers):
            drawn_heads = random.Random(f"{seed} {answer_index}").sample(
                other_heads, min(len(best_heads), len(other_heads))
            )
            answer_losses.append(losses(model, answer, [best_heads, drawn_heads]))
            reporter.advance()
    loss_pairs = torch.stack(answer_losses)
    means = loss_pairs.mean(0).tolist()
    advantage = Mean.of(loss_pairs[:, 0] - loss_pairs[:, 1])
    return Evidence(len(best_heads), scores.numel(), means[0], means[1], holds=float(advantage.lower) > 0)


def top_heads(scores: Tensor) -> list[Head]:
    """Return the smallest set of heads that holds half of a profile `[L, H]`, best first."""
    flat_scores = scores.flatten().double()
    ranking = flat_scores.argsort(descending=True, stable=True)
    cumulative = flat_scores[ranking].cumsum(0) / flat_scores.sum()
    head_count = int((cumulative < 0.5 - 1e-9).sum()) + 1
    return [divmod(flat_index, scores.shape[1]) for flat_index in ranking[:head_count].tolist()]


def losses(model: nn.Module, answer: NeedleAnswer, ablated: Iterable[Sequence[Head]]) -> Tensor:
    """Return the loss of an answer for each set of ablated heads.

    Args:
        model: The model, inside `engine`.
        answer: The model's answer with the full cache.
        ablated: Sets of heads.

    Returns:
        Nats per token, float64 `[len(ablated)]`, on the CPU.
    """
    prompt = answer.needle.prompt
    token_ids = [*prompt.context_ids, *prompt.question_ids, *answer.tokens[:-1]]
    context_length = min(len(prompt.context_ids), len(token_ids) - len(answer.tokens))
    device = next(model.parameters()).device
    prefix = Prefix(model, ())
    prefix.extend(torch.tensor([token_ids[:context_length]], device=device))
    remaining_ids = torch.tensor(token_ids[context_length:], device=device)
    answer_ids = torch.tensor(answer.tokens, device=device)
    head_sets: list[Sequence[Head]] = [(), *ablated]
    batch_size = max(1, _BYTES // max(1, prefix.cache.full_bytes(0)))
    likelihoods = []
    for batch_start in range(0, len(head_sets), batch_size):
        caches = [
            ablate(prefix.cache, heads, len(remaining_ids))
            for heads in head_sets[batch_start : batch_start + batch_size]
        ]
        stacked_cache = RaggedCache.stack(caches)
        logits = forward(model, stacked_cache, remaining_ids.expand(len(caches), -1), logit_count=len(answer_ids))
        gather_index = answer_ids[None, :, None].expand(len(caches), -1, 1)
        token_likelihood = logits.float().log_softmax(-1).gather(-1, gather_index)[..., 0]
        # Below the probability of a random guess, differences are noise.
        likelihoods.append(token_likelihood.clamp(min=-math.log(logits.shape[-1])).mean(-1))
    mean_likelihood = torch.cat(likelihoods).double().cpu()
    return mean_likelihood[0] - mean_likelihood[1:]


def ablate(cache: RaggedCache, heads: Sequence[Head], reserved_tokens: int) -> RaggedCache:
    """Return a packed copy of a prefilled cache whose `heads` keep only sinks and window.

    Args:
        cache: A dense cache; not changed.
        heads: The heads to ablate.
        reserved_tokens: Number of tokens to reserve space for.
    """
    masks = everything(cache)
    for layer, kv_head in heads:
        masks[layer][:, kv_head, SINKS : max(SINKS, masks[layer].shape[-1] - WINDOW)] = False
    return keep_only(cache, masks, reserved_tokens)
