"""Given text is measured under the cell's cache: as a forward, or an oracle that masks, says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvbench
from kvbench.engine.decode import BLOCK
from kvbench.engine.driver import engine
from kvbench.progress import Silent
from kvbench.runs.answers import Prompt
from kvbench.runs.executors.base import answer
from kvbench.runs.worker import Worker

from ..engine.conftest import build, masked_run
from .cells import make_cell
from .test_sliding import Store, Tokenizer, ids, request

SIZES = ((40, 3, 5), (51, 12, BLOCK + 2), (33, 1, 1))


def prompts(sizes: Sequence[tuple[int, int, int]] = SIZES) -> list[Prompt]:
    return [
        Prompt(
            replace(request(i, 6), given="x"),
            ids(context, i),
            ids(question, 50 + i),
            ids(n, 90 + i),
        )
        for i, (context, question, n) in enumerate(sizes)
    ]


def measured(model: Any, asked: Sequence[Prompt], batch: int | str = "auto", **cell: Any) -> Any:
    store: Any = Store()
    with engine(model):
        worker: Any = Worker(model, Silent(), tokenizer=Tokenizer(), store=store, batch_size=batch)  # type: ignore[arg-type]
        answer(worker, asked, [make_cell(**{"policy": "full", "length": 0, **cell})])
    assert not any(r.error for r in store.held)
    assert all(r.stop == "given" for r in store.held)
    return {r.sample_id: json.loads(r.response) for r in store.held}


def losses(logits: torch.Tensor, given: Sequence[int]) -> float:
    """Negative log-likelihood of the last tokens; `logits` are those of all columns."""
    logs = logits[-len(given) - 1 : -1].double().log_softmax(-1)
    return -sum(float(row[token]) for row, token in zip(logs, given, strict=True))


FULL = [("full", "full", ""), *(("knorm", "900", m) for m in ("question", "decode", "chunked:16"))]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(("policy", "budget", "moment"), FULL)
@torch.no_grad()
def test_where_nothing_is_cut_one_forward_says_the_same(family: str, policy: str, budget: str, moment: str) -> None:
    model, asked = build(family), prompts(SIZES if family == "llama" else SIZES[::2])
    found = measured(model, asked, policy=policy, budget=budget, moment=moment)
    for prompt in asked:
        whole = [*prompt.context_ids, *prompt.question_ids, *prompt.given_ids]
        want = losses(model(torch.tensor([whole])).logits[0], prompt.given_ids)
        said = found[prompt.request.sample_id]
        assert said["tokens"] == len(prompt.given_ids)
        assert said["nll"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("policy", ["snapkv:window=4", "knorm"])
@torch.no_grad()
def test_a_cut_context_is_what_the_given_text_sees(policy: str) -> None:
    model = build("llama")
    found = measured(model, prompts(), policy=policy, budget="0.3", moment="context")
    for prompt in prompts():
        context = torch.tensor([prompt.context_ids])
        rest = torch.tensor([[*prompt.question_ids, *prompt.given_ids]])
        kept = kvbench.kept(model, context, policy, 0.3)
        mask = torch.ones(1, context.shape[1] + rest.shape[1], dtype=torch.long)
        logits = masked_run(model, [context, rest], mask, [None, kept])[1][0]
        want = losses(logits, prompt.given_ids)
        assert found[prompt.request.sample_id]["nll"] == pytest.approx(want, rel=1e-4)


@torch.no_grad()
def test_at_decode_the_cache_is_cut_after_every_given_token() -> None:
    model, budget, sink = build("llama"), 12, 4
    asked = prompts(((30, 4, 20), (25, 2, 9)))
    policy = f"streaming_llm:sinks={sink}:buffer=1"
    found = measured(model, asked, policy=policy, budget=str(budget), moment="decode")
    wider = measured(model, asked, policy=f"{policy[:-1]}6", budget=str(budget), moment="decode")
    for prompt in asked:
        whole = [*prompt.context_ids, *prompt.question_ids]
        chunks = [torch.tensor([whole]), *(torch.tensor([[t]]) for t in prompt.given_ids)]
        kept: list[Any] = [None]
        for seen in range(len(whole), len(whole) + len(prompt.given_ids)):
            held = torch.zeros(1, 2, seen, dtype=torch.bool)
            held[..., :sink] = held[..., seen - (budget - sink) :] = True
            kept.append([held] * 3)
        mask = torch.ones(1, len(whole) + len(prompt.given_ids), dtype=torch.long)
        logits = masked_run(model, chunks, mask, kept)
        want = losses(torch.cat([step[0] for step in logits]), prompt.given_ids)
        name = prompt.request.sample_id
        assert found[name]["nll"] == pytest.approx(want, rel=1e-4)
        assert abs(wider[name]["nll"] - want) > 1e-3


@pytest.mark.parametrize("moment", ["context", "decode", "chunked:16"])
@torch.no_grad()
def test_what_is_measured_does_not_depend_on_the_batch(moment: str) -> None:
    model, cell = build("llama"), {"policy": "knorm:buffer=3", "budget": "16", "moment": moment}
    assert measured(model, prompts(), 1, **cell) == measured(model, prompts(), 16, **cell)
