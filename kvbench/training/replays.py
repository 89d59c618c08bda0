"""Training of gates that predict KVzip+ scores.

The teacher is KVzip+: the engine prefills a text, replays it, and observes the maximum attention that every entry
receives, with the norms of KVzip+ (`kvbench.plugin.Replay`). The gates learn to predict its logarithm from hidden
states of the prefill. Jégou, Jeblick: KVzap, arXiv 2601.07891, section 3.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvbench.engine.attachment import Forward, Step
from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import engine, forward, start_observers
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import decoder_of, model_info
from kvbench.engine.replay import observe_replays
from kvbench.errors import UserError
from kvbench.plugin import Replay
from kvbench.training.data import TOGETHER, Item
from kvbench.training.method import Gates, Method

NEED = Replay(norm=True)
"""The teacher's observation: KVzip+."""


@dataclass(frozen=True)
class ReplayTargets:
    """Teacher outputs for one sequence.

    Attributes:
        hidden: Input of the attention block per layer, `[1, T, d_model]`.
        label: Log of the received attention, float32 `[L, H, T]`; `-inf` for none.
    """

    hidden: tuple[Tensor, ...]
    label: Tensor


class ReplayStudent(nn.Module):
    """Frozen model with gates; its forward pass returns the training loss.

    The teacher's outputs are cached for the last `TOGETHER` sequences, so that repetitions need no new replay.

    Args:
        model: A causal language model.
        gates: The only trained parameters.
        method: Training method of the gates.
    """

    def __init__(self, model: nn.Module, gates: nn.Module, method: Method) -> None:
        super().__init__()
        self.base = model.requires_grad_(False)
        self.gates = gates.float().requires_grad_(True)
        self.method = method
        self._info = model_info(model)
        self._measured: OrderedDict[bytes, ReplayTargets] = OrderedDict()
        self.train()

    def train(self, mode: bool = True) -> ReplayStudent:
        """Set the gates to training mode; the base model stays in inference mode (no dropout)."""
        super().train(mode)
        self.base.eval()
        return self

    def forward(
        self,
        input_ids: Tensor,
        supervised: Tensor,
        valid: Tensor | None = None,
        **pixels: Tensor,
    ) -> dict[str, Tensor]:
        """Compute the loss on a batch.

        Args:
            input_ids: `[B, T]`, padded on the left.
            supervised: Ignored: all tokens are learned.
            valid: Token positions, bool `[B, T]`; None for all.
            pixels: Image inputs, which a replay does not support.

        Returns:
            `loss`, the mean squared error of the predictions over tokens, heads and layers; `fit`, the same without
            gradient.

        Raises:
            UserError: The batch contains images.
        """
        if pixels:
            raise UserError(f"{self.method.name} is trained on text only; use data without images")
        prediction_errors = []
        for sequence_index, token_ids in enumerate(input_ids):
            measurement = self.measure(token_ids if valid is None else token_ids[valid[sequence_index]])
            usable_mask = measurement.label.isfinite()
            prediction_errors.append((self.predict(measurement) - measurement.label)[usable_mask])
        mean_loss = torch.cat(prediction_errors).square().mean()
        return {"loss": mean_loss, "fit": mean_loss.detach()}

    def predict(self, measurement: ReplayTargets) -> Tensor:
        """Return the gates' predictions for one sequence, float32 `[L, H, T]`."""
        gates = cast("Gates", self.gates)
        return torch.cat([gates.score(layer, hidden_states) for layer, hidden_states in enumerate(measurement.hidden)])

    def measure(self, token_ids: Tensor) -> ReplayTargets:
        """Prefill and replay one sequence, int64 `[T]`, or return the cached result."""
        cache_key = token_ids.cpu().numpy().tobytes()
        if cache_key in self._measured:
            self._measured.move_to_end(cache_key)
        else:
            self._measured[cache_key] = self._replay(token_ids[None])
            if len(self._measured) > TOGETHER:
                self._measured.popitem(last=False)
        return self._measured[cache_key]

    @torch.no_grad()
    def _replay(self, token_ids: Tensor) -> ReplayTargets:
        cache = RaggedCache(decoder_of(self.base).config)
        start_observers(cache, frozenset({NEED}), self._info)
        hidden_states: dict[int, Tensor] = {}

        def record_hidden(forward_pass: Forward, layer: RaggedLayer, step: Step) -> None:
            if forward_pass.cache is cache:  # not a copy, on which a chunk is replayed
                hidden_states[step.index] = step.hidden

        with engine(self.base, record_hidden):
            forward(self.base, cache, token_ids)
            observe_replays(self.base, cache, self._info)
        observer: Any = cache.observers[NEED]
        labels = torch.cat([observer.read(layer_index) for layer_index in range(self._info.layers)])
        return ReplayTargets(tuple(hidden_states[layer_index] for layer_index in sorted(hidden_states)), labels.log())


@torch.no_grad()
def agreement(student: ReplayStudent, sequences: Iterable[Item]) -> dict[str, float]:
    """Measure how well gates predict the labels of sequences, at least one.

    Returns:
        `sequences` and `tokens`: their counts; `r2` and `spearman`: explained variance and rank correlation per head
            over all tokens, averaged over heads and layers; `spearman_model`: rank correlation over all tokens, heads
            and layers together, the order that a global budget uses.
    """
    labels, predictions = [], []
    for sequence in sequences:
        measurement = student.measure(sequence["input_ids"].to(next(student.gates.parameters()).device))
        labels.append(measurement.label.cpu())
        predictions.append(student.predict(measurement).cpu())
    all_labels, all_predictions = (
        torch.cat(labels, -1).flatten(0, 1),
        torch.cat(predictions, -1).flatten(0, 1),
    )
    usable_mask = all_labels.isfinite()
    head_pairs = [
        (head_predictions[head_mask].double(), head_labels[head_mask].double())
        for head_predictions, head_labels, head_mask in zip(all_predictions, all_labels, usable_mask, strict=True)
    ]
    explained = [
        float(1 - (head_predictions - head_labels).square().mean() / head_labels.var(correction=0))
        for head_predictions, head_labels in head_pairs
    ]
    correlations = [_spearman(head_predictions, head_labels) for head_predictions, head_labels in head_pairs]
    return {
        "sequences": len(labels),
        "tokens": all_labels.shape[-1],
        "r2": round(sum(explained) / len(explained), 4),
        "spearman": round(sum(correlations) / len(correlations), 4),
        "spearman_model": round(_spearman(all_predictions[usable_mask], all_labels[usable_mask]), 4),
    }


def _spearman(first: Tensor, second: Tensor) -> float:
    """Return the rank correlation of two vectors without ties."""
    ranks = torch.stack([vector.argsort().argsort().double() for vector in (first, second)])
    return float(torch.corrcoef(ranks)[0, 1])


def describe_agreement(facts: Mapping[str, float]) -> str:
    """Format the result of `agreement` as text."""
    return (
        f"on {facts['sequences']} held-out sequences: R² {facts['r2']:.3f} and "
        f"Spearman {facts['spearman']:.3f} within heads, Spearman {facts['spearman_model']:.3f} "
        "over all heads"
    )
