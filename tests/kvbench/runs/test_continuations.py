"""Measured continuations: the full cache equals a plain forward, and an eviction a masked one, choice by choice."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.benchmark import Marks
from kvbench.engine.decode import Batch
from kvbench.engine.driver import engine
from kvbench.engine.loading import load_model, load_tokenizer
from kvbench.engine.measure import measure_alone
from kvbench.engine.models import model_info
from kvbench.harness.encode import Branch
from kvbench.harness.protocol import Continuation, Key, LoadedTask, Request
from kvbench.progress import Silent
from kvbench.runs import worker as worker_module
from kvbench.runs.answers import Prompt, key_of
from kvbench.runs.batching import Batching
from kvbench.runs.executors.base import answer
from kvbench.runs.prompts import Prompts, Window, prompts_of
from kvbench.runs.worker import Worker

from ..engine.conftest import masked_run
from .cells import make_cell
from .test_sliding import Store, request

FACTS = "the box is red . the cup is blue . the key is black . " * 6
LETTERS = tuple(Continuation("what is the cup ? answer :", f" {word}") for word in ("red", "blue", "black", "the"))
TEXTS = tuple(Continuation("what is it ? answer :", text) for text in (" red", " blue cup", " the black key is red ."))
OPTIONS = (Continuation("the red", " cup is blue ."), Continuation("the blue box", " cup is blue ."))
LONG = (Continuation("what ?", " the red cup is the box ." * 8), Continuation("what ?", " is"))
ALONE = tuple(Continuation("", text, alone=True) for text in (" red", " the cup is blue ."))


class Task(LoadedTask):
    def score_metrics(self, responses: Mapping[Key, str], marks: Sequence[Marks] | None = None) -> Any:
        raise NotImplementedError


def asked(*continuations: tuple[Continuation, ...], context: str = FACTS) -> list[Request]:
    """Requests about one context."""
    return [
        replace(
            request(n, 0),
            context_id="c",
            context=context,
            question=entry[0].question,
            continuations=entry,
        )
        for n, entry in enumerate(continuations)
    ]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("reference", None)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model("reference", None, torch.device("cpu"), torch.float32)


@pytest.fixture
def tokenise(tokenizer: Any) -> Callable[[Sequence[Request]], Prompts]:
    def tokenised(requests: Sequence[Request]) -> Prompts:
        task = Task("t", "t", "1", "d", "acc", True, 0.0, 0, requests)
        return prompts_of(task, tokenizer, Window("reference", 1024), None, print)[0]

    return tokenised


def measured(model: Any, tokenizer: Any, prompts: Sequence[Prompt], *cells: Any, store: Any = None) -> Any:
    """What every cell answers, by cell and sample."""
    store = store or Store()
    with engine(model):
        worker: Any = Worker(model, Silent(), tokenizer=tokenizer, store=store)
        answer(worker, prompts, [make_cell(length=0, **cell) for cell in cells])
    assert not any(r.error for r in store.held)
    return {(r.cell, r.sample_id): json.loads(r.response) for r in store.held}


def plain(model: Any, prompt: Prompt, branch: Branch) -> Tensor:
    """Logits before each measured token in one forward."""
    token_ids = [*(() if branch.alone else prompt.ids), *branch.lead_ids, *branch.answer_ids]
    return model(torch.tensor([token_ids])).logits[0, -len(branch.answer_ids) - 1 : -1]


def likely_text(model: Any, tokenizer: Any, prompt: Prompt) -> Continuation:
    """What greedy decoding appends to a prompt."""
    token_ids = [*prompt.ids, *prompt.branches[0].lead_ids]
    for _ in range(3):
        token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return Continuation(LETTERS[0].question, " " + tokenizer.decode(token_ids[-3:]))


def agrees(said: Any, index: int, branch: Branch, logits: Tensor) -> None:
    log_probs, token_ids = logits.log_softmax(-1), torch.tensor(branch.answer_ids)
    total = float(log_probs.gather(1, token_ids[:, None]).sum())
    assert said["loglikelihood"][index] == pytest.approx(total, rel=1e-5, abs=2e-4)
    assert said["greedy"][index] == bool((log_probs.argmax(-1) == token_ids).all())
    assert said["tokens"][index] == len(branch.answer_ids)


KEEPS_ALL = [("full", "full", ""), *(("knorm", "900", m) for m in ("context", "question", "decode", "chunked:16"))]


@pytest.mark.parametrize(("policy", "budget", "moment"), KEEPS_ALL)
@torch.no_grad()
def test_a_cache_that_keeps_everything_equals_a_plain_forward(
    model: Any, tokenizer: Any, tokenise: Any, policy: str, budget: str, moment: str
) -> None:
    likely = likely_text(model, tokenizer, tokenise(asked(LETTERS))[0])
    prompts = tokenise(asked((*LETTERS, likely), TEXTS, OPTIONS, LONG, LETTERS + ALONE))
    found = measured(model, tokenizer, prompts, {"policy": policy, "budget": budget, "moment": moment})
    greedy = 0
    for prompt in prompts:
        (said,) = (said for (_, sample_id), said in found.items() if sample_id == prompt.request.sample_id)
        for index, branch in enumerate(prompt.branches):
            agrees(said, index, branch, plain(model, prompt, branch))
        greedy += sum(said["greedy"])
    assert greedy == 1


@pytest.mark.parametrize("policy", ["snapkv:window=4", "adakv:window=4"])
@pytest.mark.parametrize("moment", ["context", "question"])
@torch.no_grad()
def test_an_eviction_equals_a_masked_forward(
    model: Any, tokenizer: Any, tokenise: Any, policy: str, moment: str
) -> None:
    prompts = tokenise(asked(LETTERS, TEXTS, OPTIONS, LONG))
    found = measured(model, tokenizer, prompts, {"policy": policy, "budget": "0.3", "moment": moment})
    changed = 0.0
    for prompt in prompts:
        (said,) = (said for (_, sample_id), said in found.items() if sample_id == prompt.request.sample_id)
        seen = torch.tensor([prompt.context_ids if moment == "context" else prompt.ids])
        kept = kvbench.kept(model, seen, policy, 0.3)
        assert not all(bool(layer.all()) for layer in kept)
        for index, branch in enumerate(prompt.branches):
            rest = [*(prompt.question_ids if moment == "context" else ()), *branch.input_ids]
            mask = torch.ones(1, seen.shape[1] + len(rest), dtype=torch.long)
            logits = masked_run(model, [seen, torch.tensor([rest])], mask, [None, kept])[1][0]
            agrees(said, index, branch, logits[-len(branch.answer_ids) :])
            full = plain(model, prompt, branch).log_softmax(-1)
            changed = max(changed, float((full - logits[-len(branch.answer_ids) :].log_softmax(-1)).abs().max()))
    assert changed > 0.1


@torch.no_grad()
def test_texts_without_a_prompt_are_the_same_for_all_cells_and_measured_once(
    model: Any, tokenizer: Any, tokenise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, lengths = tokenise(asked(LETTERS + ALONE, TEXTS + ALONE)), []

    def counted(model: Any, input_ids: Any, answer_ids: Any) -> Any:
        lengths.append(len(answer_ids))
        return measure_alone(model, input_ids, answer_ids)

    monkeypatch.setattr(worker_module, "measure_alone", counted)
    found = measured(model, tokenizer, prompts, {"policy": "full"}, {"policy": "knorm", "budget": "0.1"})
    assert lengths == [1, 5]
    assert len({tuple(said["loglikelihood"][-2:]) for said in found.values()}) == 1


@torch.no_grad()
def test_a_policy_that_goes_on_evicts_while_branches_are_fed(model: Any, tokenizer: Any, tokenise: Any) -> None:
    prompts, budget, sinks = tokenise(asked(LETTERS, TEXTS, OPTIONS, LONG)), 12, 4
    policy = f"streaming_llm:sinks={sinks}:buffer=1"
    found = measured(model, tokenizer, prompts, {"policy": policy, "budget": str(budget), "moment": "decode"})
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    for prompt in prompts:
        (said,) = (said for (_, sample_id), said in found.items() if sample_id == prompt.request.sample_id)
        for index, branch in enumerate(prompt.branches):
            chunks = [torch.tensor([prompt.ids]), *(torch.tensor([[token]]) for token in branch.input_ids)]
            kept: list[Any] = [None]
            for seen in range(len(prompt.ids), len(prompt.ids) + len(branch.input_ids)):
                held = torch.zeros(1, heads, seen, dtype=torch.bool)
                held[..., :sinks] = held[..., seen - (budget - sinks) :] = True
                kept.append([held] * layers)
            mask = torch.ones(1, len(prompt.ids) + len(branch.input_ids), dtype=torch.long)
            logits = torch.cat([step[0] for step in masked_run(model, chunks, mask, kept)])
            agrees(said, index, branch, logits[-len(branch.answer_ids) :])


CELLS = [
    {"policy": "full"},
    *(
        {"policy": "snapkv:window=4", "budget": budget, "moment": moment}
        for budget in ("0.2", "0.5")
        for moment in ("context", "question")
    ),
    {"policy": "knorm:buffer=2", "budget": "16", "moment": "decode"},
    {"policy": "knorm", "budget": "0.3", "moment": "chunked:16"},
    {"policy": "quest:page=4", "budget": "0.5", "moment": "question"},
    {"policy": "full:bits=4", "moment": "context"},
]


class Resumed(Store):
    """A store that has some responses already."""

    def __init__(self, keys: set[Any]) -> None:
        super().__init__()
        self._keys = keys

    def keys(self) -> set[Any]:
        return self._keys


@torch.no_grad()
def test_a_response_does_not_depend_on_what_else_is_measured(model: Any, tokenizer: Any, tokenise: Any) -> None:
    prompts = tokenise(asked(LETTERS, TEXTS, OPTIONS, LONG, LETTERS[:2], TEXTS[1:], OPTIONS[::-1]))
    whole = measured(model, tokenizer, prompts, *CELLS)
    done = {key_of(make_cell(length=0, **cell), prompt) for cell in CELLS[1:] for prompt in prompts[:4]}
    done |= {key_of(make_cell(length=0, **CELLS[0]), prompt) for prompt in prompts[1::2]}
    resumed = measured(model, tokenizer, prompts, *CELLS, store=Resumed(done))
    assert 0 < len(resumed) < len(whole)
    assert resumed == {key: whole[key] for key in resumed}  # bit by bit


def test_branches_of_copies_keep_to_the_memory_for_caches(
    model: Any, tokenizer: Any, tokenise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tokenise(asked(*[LETTERS] * 4))
    info, found = model_info(model), []
    cache_bytes = (len(prompts[0].context_ids) + 20) * info.layers * info.kv_heads * (2 * info.head_dim * 4 + 4)
    monkeypatch.setattr(Batching, "_available", lambda plan: 7 * cache_bytes)
    feed = Batch._feed

    def recording(batch: Batch, *args: Any) -> Tensor:
        found.append(batch.slots)
        return feed(batch, *args)

    monkeypatch.setattr(Batch, "_feed", recording)
    measured(model, tokenizer, prompts, {"policy": "random:merge=ema", "budget": "0.9"})
    assert found and set(found) <= {1, 2}, "of 4 caches that fit, 2 wait and are copied"
