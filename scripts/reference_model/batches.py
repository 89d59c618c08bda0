"""Batches of training samples, with the target distribution of every answer token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvbench.reference import grammar
from kvbench.reference.samples import IDS, Knobs, draw


@dataclasses.dataclass
class Batch:
    """A training batch.

    An answer token can have several targets, because the order of some answers is free. The arrays
    `slots`, `targets` and `weights` list (answer token, target) pairs; the weights of an answer
    token sum to 1.

    Attributes:
        ids: Token ids, `[rows, length]`, padded on the right.
        positions: Flat indices into `ids` from which answer tokens are predicted, `[slots]`.
        slots: Index into `positions` of each pair, `[pairs]`.
        targets: Token id of each pair, `[pairs]`.
        weights: Probability of each pair, `[pairs]`, float32.
        spans: Task, first slot and end slot (exclusive) of every question.
    """

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    spans: list[tuple[str, int, int]]


def make_batch(rng: np.random.Generator, rows: int, length: int, mix: Mapping[str, float], knobs: Knobs) -> Batch:
    """Make a batch; the task of every row is drawn with the probabilities (any scale) in `mix`."""
    names = list(mix)
    shares = np.array([mix[name] for name in names], dtype=np.float64)
    ids = np.full((rows, length), IDS[grammar.PAD], dtype=np.int64)
    positions: list[int] = []
    pairs: list[tuple[int, int, float]] = []
    spans: list[tuple[str, int, int]] = []
    for row, choice in enumerate(rng.choice(len(names), size=rows, p=shares / shares.sum())):
        at = 0
        for part in draw(rng, names[choice], length, knobs).parts:
            if isinstance(part, list):
                ids[row, at : at + len(part)] = [IDS[word] for word in part]
                at += len(part)
                continue
            answer = [IDS[word] for word in part.answer]
            ids[row, at : at + len(part)] = [IDS[word] for word in part.prompt] + answer
            at += len(part.prompt)
            first = len(positions)
            for n, target in enumerate(answer):
                slot = len(positions)
                positions.append(row * length + at + n - 1)
                # In a free order, every word that has not been said yet is a target.
                allowed = answer[n:-1] if part.any_order and n < len(answer) - 1 else [target]
                pairs += [(slot, word, 1 / len(allowed)) for word in allowed]
            spans.append((part.task, first, len(positions)))
            at += len(answer)
    slots, targets, weights = zip(*pairs, strict=True)
    return Batch(
        ids,
        np.array(positions, dtype=np.int64),
        np.array(slots, dtype=np.int64),
        np.array(targets, dtype=np.int64),
        np.array(weights, dtype=np.float32),
        spans,
    )
