"""Models with sliding-window layers: no padding may stand between tokens, for these count it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvbench.decoding import Sampling
from kvbench.engine.draw import choose
from kvbench.engine.driver import engine
from kvbench.harness.protocol import Request
from kvbench.progress import Silent
from kvbench.runs.answers import Prompt
from kvbench.runs.executors.base import answer
from kvbench.runs.worker import Worker

from ..engine.conftest import build
from .cells import make_cell

CELL = make_cell("full", moment="", task="t", group="t", length=0)


class Tokenizer:
    eos_token_id = None

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f" {i}" for i in ids)

    def convert_tokens_to_ids(self, token: str) -> None:
        return None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(x) for x in text.split()]}


class Store:
    def __init__(self) -> None:
        self.held: list[Any] = []

    def keys(self) -> set[Any]:
        return set()

    def append(self, responses: list[Any]) -> None:
        self.held += responses


def greedy(model: Any, ids: list[int], n: int) -> list[int]:
    out: list[int] = []
    while len(out) < n:
        logits = model(torch.tensor([[*ids, *out]])).logits
        out.append(int(logits[0, -1].argmax()))
    return out


def request(i: int, n: int, **turn: Any) -> Request:
    return Request(
        task="t",
        sample_id=f"s{i}",
        doc_id=i,
        question_id=int(turn.get("turn", 0)),
        context_id=f"s{i}",
        context="",
        question="",
        until=(),
        max_new_tokens=n,
        target=(),
        **turn,
    )


def ids(n: int, seed: int) -> tuple[int, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, 128, (n,), generator=g).tolist())


@pytest.mark.parametrize("family", ["gemma3", "llama"])
@torch.no_grad()
def test_questions_of_many_lengths_are_answered_as_if_alone(family: str) -> None:
    model, store = build(family), Store()
    prompts = [Prompt(request(i, 6), ids(40, i), ids(2 + 5 * i, 50 + i)) for i in range(4)]
    with engine(model):
        worker: Any = Worker(model, Silent(), tokenizer=Tokenizer(), store=store)  # type: ignore[arg-type]
        answer(worker, prompts, [CELL])
    answers = {r.sample_id: r.response for r in store.held}
    for p in prompts:
        want = greedy(model, [*p.context_ids, *p.question_ids], 6)
        assert answers[p.request.sample_id] == Tokenizer().decode(want)


@torch.no_grad()
def test_repeats_go_on_from_a_context_each_alone() -> None:
    model, store = copy.deepcopy(build("gemma3")), Store()
    # With the head tied to the embeddings it would say its last token whatever it was told before.
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    asked = replace(request(0, 6), sampling=Sampling(temperature=5.0))
    prompts = [Prompt(asked, ids(40, 0), ids(7, 50), repeat=k) for k in range(3)]
    with engine(model):
        worker: Any = Worker(model, Silent(), tokenizer=Tokenizer(), store=store)  # type: ignore[arg-type]
        answer(worker, prompts, [CELL])
    want = []
    for prompt in prompts:
        row, said = worker.row(CELL, prompt), []
        for n in range(6):
            told = torch.tensor([[*prompt.context_ids, *prompt.question_ids, *said]])
            said += choose(model(told).logits[:, -1], [row.draw], [n])
        want.append(Tokenizer().decode(said))
    assert len(set(want)) == 3
    assert [r.response for r in store.held] == want


@pytest.mark.parametrize("family", ["gemma3", "llama"])
@torch.no_grad()
def test_live_dialogues_do_not_depend_on_their_neighbours(family: str) -> None:
    model, store = build(family), Store()
    prompts, texts = [], {}
    for i, limit in enumerate((2, 14)):
        for turn in range(2):
            new = ids(5 + 6 * i, 90 + 10 * i + turn)
            question = replace(
                request(i, limit, dialogue=f"d{i}", turn=turn),
                delta="" if turn == 0 else Tokenizer().decode(list(new)),
            )
            prompts.append(Prompt(question, ids(30, i), new))
            texts[i, turn] = list(new)
    cell = make_cell("full", moment="turns", task="t", group="t", length=0)
    with engine(model):
        worker: Any = Worker(model, Silent(), tokenizer=Tokenizer(), store=store)  # type: ignore[arg-type]
        answer(worker, prompts, [cell])
    found = {(r.sample_id, r.question_id): r.response for r in store.held}
    for i, limit in enumerate((2, 14)):
        history = list(ids(30, i))
        for turn in range(2):
            history += texts[i, turn]
            said = greedy(model, history, limit)
            history += said
            assert found[f"s{i}", turn] == Tokenizer().decode(said)


@torch.no_grad()
def test_a_question_is_fed_once_when_another_cell_of_the_batch_fails() -> None:
    model = build("gemma3")
    prompts = [Prompt(request(0, 30), ids(40, 0), ids(7, 50))]
    # The dense layer of the first cell reads more than its budget once the answer has grown.
    few, enough = (make_cell("quest:dense_layers=1:page=4", str(n), task="t", group="t", length=0) for n in (30, 40))
    found = []
    for cells in ([few, enough], [enough]):
        store = Store()
        with engine(model):
            worker: Any = Worker(model, Silent(), tokenizer=Tokenizer(), store=store)  # type: ignore[arg-type]
            answer(worker, prompts, cells)
        assert set(worker.failed) == {cell.cell for cell in cells} - {enough.cell}
        found += [response.response for response in store.held if not response.error]
    assert found[0] == found[1]
