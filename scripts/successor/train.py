"""Train the attempts at a successor of reference-1, one after the other.

    python -m scripts.successor.train --out DIR [--attempt in_place|prose|deep|digits]

Each attempt starts from the one before, the first from reference-1. In all of them, questions and
answers cannot see a random share of the filler, from none to 95%. A copy of a needle in the filler
behind it is then of no use, and the model must read the needle where it stands.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from kvbench import reference
from scripts.reference_model.train import optimizers, save_model
from scripts.successor.deepen import deepened
from scripts.successor.language import AGAIN, ANSWER, FILLER, QUESTION, VALUE, Kind, again, sequence

_TOKENS = 4096
_HIDDEN = 0.95
_LANGUAGE_SHARE = 0.6
_REPEAT_WEIGHT = 0.5
_WARMUP_STEPS = 40


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of an attempt: optimizer steps, rates at its start and end, and lengths."""

    steps: int
    rates: tuple[float, float]
    lengths: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A training.

    Attributes:
        kind: The language.
        parts: Its parts, in order.
        language: Weight of the loss on tokens that are no answers.
        repeated: Share of sequences that are a repeated context.
        numerals: How many numerals numbers are made of.
        deeper: Whether the model first loses its norms of queries and keys and gains two layers.
        seed: Seed of every batch.
    """

    kind: Kind
    parts: tuple[Part, ...]
    language: float
    repeated: float = 0.0
    numerals: int = 96
    deeper: bool = False
    seed: int = 1


# Steps are those that were done in the processor time that each part was given.
ATTEMPTS: dict[str, Attempt] = {
    "in_place": Attempt(
        "words",
        (
            Part(132, (0.4, 0.4), (64, 96, 128)),
            Part(274, (0.4, 0.2), (128, 256, 512)),
            Part(158, (0.2, 0.0), (256, 512, 1024)),
        ),
        language=0.05,
    ),
    "prose": Attempt(
        "prose",
        (
            Part(100, (0.4, 0.4), (128, 192)),
            Part(332, (0.4, 0.3), (128, 256, 512)),
            Part(184, (0.3, 0.0), (256, 512, 1024)),
        ),
        language=0.3,
    ),
    "deep": Attempt(
        "prose",
        (
            Part(360, (0.35, 0.3), (128, 256, 512)),
            Part(212, (0.3, 0.0), (256, 512, 1024, 1024)),
        ),
        language=0.4,
        repeated=0.25,
        deeper=True,
        seed=2,
    ),
    "digits": Attempt(
        "prose",
        (
            Part(295, (0.35, 0.3), (128, 192, 256, 512)),
            Part(183, (0.3, 0.0), (256, 512, 1024, 1024)),
        ),
        language=0.4,
        repeated=0.2,
        numerals=10,
        seed=3,
    ),
}


def visible(parts: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """What each token sees, bool `[B, 1, n, n]`: all before it, but questions not all filler."""
    rows, length = parts.shape
    asks = (parts == QUESTION) | (parts == ANSWER)
    share = torch.from_numpy((rng.random(rows) * _HIDDEN).astype(np.float32))[:, None]
    share = share * torch.from_numpy(rng.random(rows) >= 0.1)[:, None]
    drawn = torch.from_numpy(rng.random((rows, length)).astype(np.float32))
    hidden = (drawn < share) & (parts == FILLER)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return (causal & ~(asks[:, :, None] & hidden[:, None, :]))[:, None]


def batch(rng: np.random.Generator, attempt: Attempt, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and parts of a step, `[B, length]`."""
    rows = []
    for _ in range(_TOKENS // length):
        make = again if rng.random() < attempt.repeated else sequence
        rows.append(make(rng, attempt.kind, length, VALUE, attempt.numerals))
    ids, parts = zip(*rows, strict=True)
    return torch.tensor(ids), torch.tensor(parts)


def loss_of(
    model: Any, ids: torch.Tensor, parts: torch.Tensor, rng: np.random.Generator, language: float
) -> tuple[torch.Tensor, float]:
    """The loss of a batch, and the share of answers that are right token by token."""
    hidden = model.model(ids, attention_mask=visible(parts, rng), use_cache=False)
    hidden = hidden.last_hidden_state[:, :-1]
    targets, kinds = ids[:, 1:], parts[:, 1:]

    def entropy(chosen: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model.lm_head(hidden[chosen]), targets[chosen])

    answers, repeats = kinds == ANSWER, kinds == AGAIN
    others = ~answers & ~repeats & torch.from_numpy(rng.random(kinds.shape) < _LANGUAGE_SHARE)
    loss = language * entropy(others)
    if repeats.any():
        loss = loss + _REPEAT_WEIGHT * entropy(repeats)
    right = float("nan")
    if answers.any():
        loss = loss + entropy(answers)
        hits = model.lm_head(hidden[answers]).argmax(-1) == targets[answers]
        right = float(hits.view(-1, VALUE + 1)[:, :-1].all(1).float().mean())
    return loss, right


def train(model: Any, attempt: Attempt) -> None:
    """Train a model in place."""
    optims = optimizers(model.train())
    full = [o.param_groups[0]["lr"] for o in optims]
    step, started, shares = 0, time.monotonic(), []
    for part in attempt.parts:
        for done in range(part.steps):
            level = part.rates[0] + (part.rates[1] - part.rates[0]) * done / part.steps
            level *= min(1.0, (step + 1) / _WARMUP_STEPS)
            for optimizer, rate in zip(optims, full, strict=True):
                optimizer.param_groups[0]["lr"] = rate * level
            rng = np.random.default_rng([attempt.seed, step])
            ids, parts = batch(rng, attempt, int(rng.choice(part.lengths)))
            loss, right = loss_of(model, ids, parts, rng, attempt.language)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optims:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            shares.append(right)
            if step % 50 == 0:
                seconds = time.monotonic() - started
                print(f"step {step}, {seconds:.0f} s, right {np.nanmean(shares):.3f}", flush=True)
                shares.clear()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train successors of the reference model.")
    parser.add_argument("--out", type=Path, required=True, help="a folder per attempt is written")
    parser.add_argument("--attempt", choices=ATTEMPTS, default=None, help="one only")
    parser.add_argument("--threads", type=int, default=1, help="processor threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = reference.path()
    for name, attempt in ATTEMPTS.items():
        if options.attempt in (None, name):
            model: Any = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
            if attempt.deeper:
                model = deepened(model)
            train(model, attempt)
            save_model(options.out / name, model.eval())
        start = options.out / name


if __name__ == "__main__":
    main()
