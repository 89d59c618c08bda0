"""Measure how much attention heads give to the needle while the model answers with the full cache.

Retrieval heads: Wu, Wang, Xiao, Peng, Fu: Retrieval Head Mechanistically Explains Long-Context Factuality, arXiv
2404.15574 (`copy`). Fu, Cai, Asi, Xiong, Dong, Xiao: Not All Heads Matter: A Head-Level KV Cache Compression Method
with Integrated Retrieval and Reasoning, arXiv 2410.19258 (HeadKV; `reason`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.engine.attachment import Forward, Step
from kvbench.engine.decode import Stop, end_tokens, greedy
from kvbench.engine.driver import engine
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import model_info
from kvbench.engine.prefix import Prefix
from kvbench.profiles.needles import Needle
from kvbench.progress import Reporter
from kvbench.view.softmax import attention_weights, capped


@dataclass(frozen=True)
class NeedleAnswer:
    """The model's answer to a prompt with the full cache.

    Attributes:
        needle: The prompt and the location of its needle.
        tokens: Token ids of the answer.
        correct: Whether the needle's value is in the answer.
    """

    needle: Needle
    tokens: tuple[int, ...]
    correct: bool


@dataclass(frozen=True)
class NeedleAttention:
    """Answers to needle prompts, and the heads' attention scores meanwhile.

    Attributes:
        scores: By kind (`reason`, `copy`), float64 `[L, H_q]` on the CPU, averaged over samples, not normalised.
        answers: Answers in the order of the prompts.
    """

    scores: dict[str, Tensor]
    answers: tuple[NeedleAnswer, ...]

    @property
    def answered(self) -> float:
        """Fraction of the samples that were answered correctly."""
        return sum(answer.correct for answer in self.answers) / max(1, len(self.answers))


@torch.no_grad()
def measure(model: nn.Module, tokenizer: Any, needles: Sequence[Needle], reporter: Reporter) -> NeedleAttention:
    """Answer needle prompts with the full cache, and score every query head.

    At each step of the answer, a head's attention `A` is that of the query that produces the step's token (for the
    first step, the prompt's last token), softmax in float32 over all tokens so far.

        copy:   + 1 / |needle|   if the largest `A` is in the needle, on the emitted token
        reason: + A / |needle|   for each of the |needle| largest `A` that is in the needle

    Ties go to the more recent token. The answer ends when it contains the needle's value, at a stop string of the task,
    at the end-of-sequence token or at the task's limit.

    Args:
        model: A causal language model in evaluation mode.
        tokenizer: The model's tokenizer.
        needles: The prompts and the locations of their needles.
        reporter: Progress reporter.
    """
    info = model_info(model)
    device = next(model.parameters()).device
    observer = _Watch(info.layers, info.query_heads, device)
    answers = []
    with engine(model, observer.on_layer):
        for needle in needles:
            answers.append(_answer(model, tokenizer, needle, observer))
            reporter.advance()
    needle_count = max(1, len(needles))
    score_sums = {"reason": observer.reason, "copy": observer.copy}
    mean_scores = {score_kind: score_sum.double().cpu() / needle_count for score_kind, score_sum in score_sums.items()}
    return NeedleAttention(mean_scores, tuple(answers))


def _answer(model: nn.Module, tokenizer: Any, needle: Needle, observer: _Watch) -> NeedleAnswer:
    """Answer one prompt."""
    request = needle.prompt.request
    needle_value = request.target[0]
    stop_rule = Stop(tokenizer, end_tokens(model, tokenizer), [*request.until, needle_value])
    prefix = Prefix(model, ())
    prompt_ids = torch.tensor([*needle.prompt.context_ids, *needle.prompt.question_ids])
    observer.begin(prompt_ids.to(prefix.device), needle)
    logits = prefix.extend(prompt_ids[None].to(prefix.device))
    answer_ids = []
    for token in greedy(prefix, logits, request.max_new_tokens, stop_rule):
        observer.emitted(token)
        answer_ids.append(token)
    is_correct = needle_value in tokenizer.decode(answer_ids, skip_special_tokens=True)
    return NeedleAnswer(needle, tuple(answer_ids), is_correct)


class _Watch:
    """Observer that accumulates head scores from the attention of every layer.

    Args:
        layers: Full-attention layers.
        query_heads: Query heads per layer.
        device: Device of the model.
    """

    def __init__(self, layers: int, query_heads: int, device: torch.device) -> None:
        self.reason = torch.zeros(layers, query_heads, device=device)
        self.copy = torch.zeros(layers, query_heads, device=device)
        self._best = torch.zeros(layers, query_heads, dtype=torch.int64, device=device)

    def begin(self, prompt_ids: Tensor, needle: Needle) -> None:
        """Start a prompt with token ids `[n]`."""
        self._ids = prompt_ids
        self._start, self._stop = needle.start, needle.stop

    def on_layer(self, forward_pass: Forward, layer: RaggedLayer, step: Step) -> None:
        """Score the attention of a layer's last new query."""
        assert layer.key is not None
        query = step.query[0, :, -1].float()
        key = layer.key[0].float()
        kv_heads = key.shape[0]
        logits = query.view(kv_heads, -1, query.shape[-1]) @ key.transpose(-1, -2)
        logits = capped(logits * step.scale, step.scale)[None, :, :, None]
        attention = attention_weights(logits, step.scale).flatten(0, 3)
        needle_length = self._stop - self._start
        # Flipped, so that a stable sort puts the more recent of two ties first.
        ranking = attention.flip(-1).sort(dim=-1, descending=True, stable=True)
        positions = attention.shape[-1] - 1 - ranking.indices[:, :needle_length]
        in_needle = (positions >= self._start) & (positions < self._stop)
        self.reason[step.index] += (ranking.values[:, :needle_length] * in_needle).sum(-1) / needle_length
        self._best[step.index] = positions[:, 0]

    def emitted(self, token: int) -> None:
        """Score the token emitted after the last observed query."""
        in_needle = (self._best >= self._start) & (self._best < self._stop)
        attended_ids = self._ids[self._best.clamp(max=len(self._ids) - 1)]
        self.copy += (in_needle & (attended_ids == token)) / (self._stop - self._start)
