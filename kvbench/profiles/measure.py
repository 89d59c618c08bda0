"""Measures how much every head retrieves, on the full cache, while the model answers greedily.

Retrieval heads: Wu, Wang, Xiao, Peng, Fu: Retrieval Head Mechanistically Explains Long-Context
Factuality, arXiv 2404.15574 (`copy`). Fu, Cai, Asi, Xiong, Dong, Xiao: Not All Heads Matter: A
Head-Level KV Cache Compression Method with Integrated Retrieval and Reasoning, arXiv 2410.19258
(HeadKV; `reason`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.engine.attachment import Forward, Step, attached
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import Stop
from kvbench.engine.driver import forward
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import decoder_of, model_info
from kvbench.profiles.files import Kind
from kvbench.profiles.needles import Needle
from kvbench.progress import Reporter


@dataclass(frozen=True)
class Measured:
    """What some samples say of the heads.

    Attributes:
        scores: By kind, float64 `[L, H_q]` (CPU), the mean over the samples, not normalised.
        answered: Share of the samples whose answer stands in the response.
    """

    scores: dict[Kind, Tensor]
    answered: float


@torch.no_grad()
def measure(
    model: nn.Module, tokenizer: Any, needles: Sequence[Needle], reporter: Reporter
) -> Measured:
    """Score every query head on needle prompts, one after the other, with the full cache.

    At each step of the answer a head's attention `A` is that of the query which gives the step's
    token (of the first: the prompt's last token), softmax in float32 over all tokens so far.

        copy:   + 1 / |needle|   where the largest `A` lies in the needle, on the token emitted
        reason: + A / |needle|   for each of the |needle| largest `A` that lies in the needle

    Ties go to the more recent token. The answer ends when the needle's value stands in it, at a
    stop string of the task, at the end-of-sequence token or at the task's limit.

    Args:
        model: A causal language model in evaluation mode.
        tokenizer: Its tokenizer.
        needles: The prompts and where their needles are.
        reporter: Told of every sample.

    Returns:
        Both kinds of scores.
    """
    info = model_info(model)
    device = next(model.parameters()).device
    watch = _Watch(info.layers, info.query_heads, device)

    def before(cache: RaggedCache, opened: Forward) -> None:
        opened.on_layer = watch.on_layer

    ends = _ends(model, tokenizer)
    answered = 0
    with attached(model, before, lambda cache, ended: None):
        for needle in needles:
            answered += _answer(model, tokenizer, needle, watch, ends, device)
            reporter.advance()
    scores: dict[Kind, Tensor] = {"reason": watch.reason, "copy": watch.copy}
    count = max(1, len(needles))
    return Measured(
        {kind: x.double().cpu() / count for kind, x in scores.items()}, answered / count
    )


def _answer(
    model: nn.Module,
    tokenizer: Any,
    needle: Needle,
    watch: _Watch,
    ends: Sequence[int],
    device: torch.device,
) -> bool:
    """Answer one prompt; whether the needle's value stands in the response."""
    question = needle.prompt.request
    value = question.target[0]
    stop = Stop(tokenizer, ends, [*question.until, value])
    ids = torch.tensor([*needle.prompt.context_ids, *needle.prompt.question_ids], device=device)
    watch.begin(ids, needle)
    cache = RaggedCache(decoder_of(model).config)
    tokens: list[int] = []
    new = ids
    while len(tokens) < question.max_new_tokens and not stop.reason(tokens):
        token = forward(model, cache, new[None])[0].argmax()
        watch.emitted(token)
        tokens.append(int(token))
        new = token[None]
    return value in tokenizer.decode(tokens, skip_special_tokens=True)


class _Watch:
    """Sees the attention of every layer and adds up what its heads retrieve.

    Args:
        layers: Full-attention layers.
        query_heads: Query heads of a layer.
        device: Of the model.
    """

    def __init__(self, layers: int, query_heads: int, device: torch.device) -> None:
        self.reason = torch.zeros(layers, query_heads, device=device)
        self.copy = torch.zeros(layers, query_heads, device=device)
        self._best = torch.zeros(layers, query_heads, dtype=torch.int64, device=device)

    def begin(self, ids: Tensor, needle: Needle) -> None:
        """Start a prompt of ids `[n]`."""
        self._ids = ids
        self._start, self._stop = needle.start, needle.stop

    def on_layer(self, opened: Forward, layer: RaggedLayer, step: Step) -> None:
        """Look at what the last new query of a layer attends to."""
        assert layer.key is not None
        query = step.query[0, :, -1].float()
        key = layer.key[0].float()
        heads = key.shape[0]
        logits = query.view(heads, -1, query.shape[-1]) @ key.transpose(-1, -2)
        attention = torch.softmax(logits.flatten(0, 1) * step.scale, -1)
        size = self._stop - self._start
        # Flipped, so that a stable sort leaves the more recent of two equals in front.
        order = attention.flip(-1).sort(dim=-1, descending=True, stable=True)
        place = attention.shape[-1] - 1 - order.indices[:, :size]
        inside = (place >= self._start) & (place < self._stop)
        self.reason[step.index] += (order.values[:, :size] * inside).sum(-1) / size
        self._best[step.index] = place[:, 0]

    def emitted(self, token: Tensor) -> None:
        """Take in the token that followed from what was seen last."""
        inside = (self._best >= self._start) & (self._best < self._stop)
        held = self._ids[self._best.clamp(max=len(self._ids) - 1)]
        self.copy += (inside & (held == token)) / (self._stop - self._start)


def _ends(model: nn.Module, tokenizer: Any) -> list[int]:
    """Token ids that end a response."""
    config: Any = getattr(model, "generation_config", None)
    found = getattr(config, "eos_token_id", None)
    listed = found if isinstance(found, list) else [found]
    return [end for end in (*listed, tokenizer.eos_token_id) if end is not None]
