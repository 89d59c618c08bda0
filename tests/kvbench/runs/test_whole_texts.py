"""Whole texts: windows of the full cache equal plain forwards, and what a policy evicts meanwhile a masked one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.harness.protocol import Request
from kvbench.runs.answers import Prompt, key_of
from kvbench.runs.prompts import Window, prompts_of

from ..engine.conftest import masked_run
from .cells import make_cell
from .test_continuations import FACTS, Resumed, Task, agrees, measured, model, tokenizer
from .test_sliding import request

__all__ = ["model", "tokenizer"]

TEXTS = (FACTS, "the red cup is blue and the key is the red box .", "red")
WINDOW = 40


def prompts(tokenizer: Any, texts: Sequence[str] = TEXTS) -> list[Prompt]:
    requests: list[Request] = [
        replace(request(n, 0), context_id=f"c{n}", context=text, rolling=True) for n, text in enumerate(texts)
    ]
    task = Task("t", "t", "1", "d", "ppl", False, 0.0, 0, requests)
    return [*prompts_of(task, tokenizer, Window("reference", WINDOW), None, print)[0]]


def agree(found: Any, asked: Sequence[Prompt], logits_of: Any) -> None:
    """Compare responses with the logits before each measured token, window by window."""
    for prompt in asked:
        (said,) = (said for (_, sample_id), said in found.items() if sample_id == prompt.request.sample_id)
        logits = [logits_of(branch)[-len(branch.answer_ids) :] for branch in prompt.branches]
        answer_ids = tuple(token for branch in prompt.branches for token in branch.answer_ids)
        whole = replace(prompt.branches[0], answer_ids=answer_ids)
        agrees(said, 0, whole, torch.cat(logits))
        assert len(said["loglikelihood"]) == 1


@torch.no_grad()
def test_windows_of_the_full_cache_equal_plain_forwards(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.runs.whole_texts.DENSE_BLOCK", 7)
    asked = prompts(tokenizer)
    assert [len(prompt.branches) for prompt in asked] == [3, 1, 1]
    found = measured(model, tokenizer, asked, {"policy": "full"})
    agree(found, asked, lambda branch: model(torch.tensor([branch.input_ids])).logits[0])


def masked(model: Any, branch: Any, steps: Sequence[int], budget: int, sinks: int) -> Tensor:
    """Logits of a window fed in steps; before each but the first, only the sinks and the newest entries are held."""
    config, chunks, kept, seen = model.config, [], [], 0
    for step in steps:
        held = torch.zeros(1, config.num_key_value_heads, seen, dtype=torch.bool)
        held[..., :sinks] = held[..., max(0, seen - (budget - sinks)) :] = True
        kept.append([held] * config.num_hidden_layers if seen else None)
        chunks.append(torch.tensor([branch.input_ids[seen : seen + step]]))
        seen += step
    mask = torch.ones(1, seen, dtype=torch.long)
    return torch.cat([logits[0] for logits in masked_run(model, chunks, mask, kept)])


@pytest.mark.parametrize("budget", [6, 12])
@torch.no_grad()
def test_at_decode_a_text_is_evicted_from_after_every_token(model: Any, tokenizer: Any, budget: int) -> None:
    asked = prompts(tokenizer)
    cell = {"policy": "streaming_llm:sinks=4:buffer=1", "budget": str(budget), "moment": "decode"}
    found = measured(model, tokenizer, asked, cell)

    def logits(branch: Any) -> Tensor:
        return masked(model, branch, [1] * len(branch.input_ids), budget, 4)

    agree(found, asked, logits)


@pytest.mark.parametrize("chunk", [5, 16])
@torch.no_grad()
def test_chunks_are_measured_after_the_cut_of_those_before(model: Any, tokenizer: Any, chunk: int) -> None:
    asked = prompts(tokenizer)
    cell = {"policy": "streaming_llm:sinks=2", "budget": "9", "moment": f"chunked:{chunk}"}
    found = measured(model, tokenizer, asked, cell)

    def logits(branch: Any) -> Tensor:
        length = len(branch.input_ids)
        steps = [min(chunk, length - start) for start in range(0, length, chunk)]
        return masked(model, branch, steps, 9, 2)

    agree(found, asked, logits)


CELLS = [
    {"policy": "full"},
    {"policy": "knorm:buffer=2", "budget": "8", "moment": "decode"},
    {"policy": "h2o:buffer=2", "budget": "8", "moment": "decode"},
    {"policy": "snapkv:window=4", "budget": "0.3", "moment": "chunked:8"},
    {"policy": "quest:page=4", "budget": "8", "moment": "decode"},
]


@torch.no_grad()
def test_a_text_does_not_depend_on_what_else_is_measured(model: Any, tokenizer: Any) -> None:
    asked = prompts(tokenizer)
    whole = measured(model, tokenizer, asked, *CELLS)
    assert len({said["loglikelihood"][0] for (_, sample_id), said in whole.items() if sample_id == "s0"}) == len(CELLS)
    done = {key_of(make_cell(length=0, **cell), asked[n]) for cell in CELLS[:3] for n in (0, 2)}
    resumed = measured(model, tokenizer, asked, *CELLS, store=Resumed(done))
    assert 0 < len(resumed) < len(whole)
    assert resumed == {key: whole[key] for key in resumed}  # bit by bit
