"""Policies that see question and answer: each question has its own cache, at the moments where that makes sense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvbench
from kvbench.errors import UserError
from kvbench.runs.answers import Prompt
from kvbench.runs.grid import Grid
from kvbench.runs.runner import execute

from ..engine.conftest import build, masked_run
from .cells import make_cell
from .small import small_grid
from .test_fidelity import agrees, plain, responses, wanted
from .test_sliding import ids, request


@pytest.mark.parametrize("moment", ["context", "question"])
@pytest.mark.parametrize("target", ["full", "reference"])
@torch.no_grad()
def test_every_question_has_the_cache_that_its_answer_attends_to(moment: str, target: str) -> None:
    model, context = build("llama"), ids(44, 3)
    asked = [Prompt(replace(request(i, 8), target=("7 8 9",)), context, ids(4, 70 + i)) for i in range(2)]
    spec = f"oracle:target={target}"
    # KVzip's replay shares the prefill, and must not touch the oracle's.
    others = [{"policy": "full"}, {"policy": "kvzip", "budget": "6", "moment": moment}]
    found = responses(model, asked, {"policy": spec, "budget": "6", "moment": moment}, *others)
    cell = make_cell(spec, "6", moment, length=0).cell
    sets = []
    for prompt in asked:
        tokens, full = plain(model, prompt)
        seen = torch.tensor([prompt.context_ids if moment == "context" else prompt.ids])
        question = prompt.question_ids if moment == "context" else ()
        answer = tokens[:-1] if target == "full" else [7, 8, 9]
        following = torch.tensor([[*question, *answer]])
        kept = kvbench.kept(model, seen, spec, 6, following=following)
        sets.append(torch.stack([layer for layer in kept if layer is not None]))
        rest = [*question, *tokens[:-1]]
        mask = torch.ones(1, seen.shape[1] + len(rest), dtype=torch.long)
        logits = torch.cat([s[0] for s in masked_run(model, [seen, torch.tensor([rest])], mask, [None, kept])])
        (response,) = (r for r in found if (r.cell, r.sample_id) == (cell, prompt.request.sample_id))
        agrees(response, wanted(full, logits[-len(tokens) :], tokens))
    assert not torch.equal(*(one[..., : len(context)] for one in sets))


def test_moments_and_names_are_checked_before_anything_runs(tmp_path: Path) -> None:
    for moment in ("decode", "chunked:16"):
        with pytest.raises(UserError, match="oracle cannot run on niah_single_1: it sees question and answer"):
            execute(small_grid(tmp_path, policy="oracle", task="niah_single_1", moment=moment))
    own = tmp_path / "texts.jsonl"
    own.write_text('{"context": "the grass is green .", "question": "what is green ?"}\n')
    spec = "oracle:target=reference"
    with pytest.raises(UserError, match="a sample has no reference answer for it to see; use target=full"):
        execute(small_grid(tmp_path, policy=spec, task=str(own), fidelity=True))
    every = {policy.name for policy in Grid.from_dict({"policy": "all", "task": "vt"}).built_policies}
    assert "oracle" not in every
    assert "snapkv" in every


def test_a_sample_without_a_reference_answer_fails_in_one_line() -> None:
    model, prompt = build("llama"), Prompt(request(0, 4), ids(20, 1), ids(3, 2))
    (failed,) = responses(model, [prompt], {"policy": "oracle:target=reference", "budget": "5"}, fails=True)
    assert failed.error == "the sample has no reference answer; use target=full"
