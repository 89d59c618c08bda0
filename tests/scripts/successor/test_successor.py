"""The attempts at a successor of the reference model: their texts, their models, their tasks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvbench.errors import UserError
from kvbench.reference import grammar
from kvbench_tasks.synthetic import generate
from kvbench_tasks.synthetic.lexicon import Lexicon, Niah
from scripts.successor import run
from scripts.successor.deepen import deepened
from scripts.successor.language import (
    AGAIN,
    ANSWER,
    FILLER,
    NEEDLE,
    QUESTION,
    VALUE,
    Kind,
    again,
    sequence,
)
from scripts.successor.train import ATTEMPTS, Part, batch, loss_of, train, visible


def runs(ids: list[int], parts: list[int], part: int) -> list[list[int]]:
    """The stretches of a sequence that belong to one part."""
    found: list[list[int]] = []
    for at, token in enumerate(ids):
        if parts[at] == part:
            if at == 0 or parts[at - 1] != part:
                found.append([])
            found[-1].append(token)
    return found


@pytest.mark.parametrize("kind", ["words", "prose"])
def test_every_answer_stands_in_a_needle(kind: Kind) -> None:
    for seed in range(8):
        ids, parts = sequence(np.random.default_rng(seed), kind, 256, VALUE, 96)
        assert len(ids) == len(parts) == 256
        needles = [" ".join(map(str, part)) for part in runs(ids, parts, NEEDLE)]
        answers = runs(ids, parts, ANSWER)
        assert answers
        for answer in answers:
            assert len(answer) == VALUE + 1
            assert any(" ".join(map(str, answer)) in needle for needle in needles)


def test_a_repeated_context_is_the_context_again() -> None:
    ids, parts = again(np.random.default_rng(3), "prose", 200, VALUE, 96)
    first = parts.index(AGAIN)
    assert first > 8 and ids[first:] == (ids[1:first] * 200)[: 200 - first]


def test_only_questions_and_answers_miss_filler() -> None:
    parts = torch.tensor([[NEEDLE, *[FILLER] * 40, NEEDLE, QUESTION, ANSWER]] * 8)
    seen = visible(parts, np.random.default_rng(0))[:, 0]
    causal = torch.ones(44, 44).tril().bool()
    assert torch.equal(seen[:, :42], causal[:42].expand(8, -1, -1))
    assert bool(seen[:, 42:, [0, 41]].all()), "needles are always seen"
    shares = seen[:, 42, 1:41].float().mean(-1)
    assert float(shares.min()) < 0.5 and torch.equal(seen[:, 42, 1:41], seen[:, 43, 1:41])


def test_a_deeper_model_computes_nearly_the_same(tiny_config: Qwen3Config) -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_config).eval()
    ids = torch.tensor([sequence(np.random.default_rng(1), "prose", 128, VALUE, 96)[0]])
    deeper = deepened(model).eval()
    assert deeper.config.num_hidden_layers == 4
    with torch.no_grad():
        before, after = (m.model(ids).last_hidden_state for m in (model, deeper))
    # Of the norms of queries and keys only the mean scale is left.
    assert torch.cosine_similarity(before, after, dim=-1).mean() > 0.97


@pytest.mark.parametrize("language", ["words", "prose", "digits"])
def test_the_tasks_are_told_in_the_language_of_an_attempt(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(generate.LEXICONS, "reference", run.lexicon_of(language))
    given: dict[str, Any] = {"length": 300, "samples": 3, "seed": 0, "lexicon": "reference"}

    def rows(task: Niah) -> list[dict[str, Any]]:
        def plans(words: Lexicon, index: int) -> Any:
            return words.niah(task)

        return generate.generate("niah", plans, size=lambda *texts: _words(*texts), **given)

    for task in (Niah("noise"), Niah("essay"), Niah("essay", keys=4)):
        for row in rows(task):
            (answer,) = row["outputs"]
            assert len(answer.split()) == VALUE and answer in row["context"]
            assert 250 < _words(row["context"], row["question"]) <= 300
            assert set(row["context"].split()) <= set(grammar.VOCABULARY)
    with pytest.raises(UserError, match="use niah_single_1"):
        rows(Niah("essay", values=4))


def _words(*texts: str) -> int:
    return sum(len(text.split()) for text in texts)


@pytest.mark.slow
def test_training_reduces_the_loss(tiny_config: Qwen3Config) -> None:
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(tiny_config)
    attempt = dataclasses.replace(ATTEMPTS["deep"], parts=(Part(50, (1.0, 0.5), (64,)),))

    def loss() -> float:
        ids, parts = batch(np.random.default_rng(99), attempt, 64)
        with torch.no_grad():
            return float(loss_of(model, ids, parts, np.random.default_rng(0), 1.0)[0])

    before = loss()
    train(model, attempt)
    assert loss() < before - 2
