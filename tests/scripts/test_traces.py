"""Texts to train gates on are the prompts of a run with the answers to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.runs.planning import plan
from kvbench.runs.runner import execute
from kvbench.runs.store import RunStore
from scripts import traces
from tests.kvbench.runs.small import small_grid


def test_every_answer_follows_its_own_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions about one context share a sample, so a sample alone does not name a prompt."""
    monkeypatch.setattr(traces, "LEAST", 1)
    questions = tmp_path / "mine.jsonl"
    rows = (
        '{"context": "one two", "question": " three", "answers": ["x"]}',
        '{"context": "one two", "question": " four", "answers": ["x"]}',
    )
    questions.write_text("\n".join(rows))
    grid = small_grid(tmp_path / "run", task=f"niah_single_1,{questions}", policy="full,random", samples=2)
    execute(grid)
    found = traces.traces(grid.path)
    (stage,) = plan(grid, lambda text: None).stages
    prompts = [prompt.request for job in stage.jobs for prompt in job.prompts]
    with RunStore(grid.path) as store:
        answers = {r.response for r in store.responses()}
    assert len(found) == len(prompts) == 4
    for request in prompts:
        whole = request.context + request.question
        assert any(text.startswith(whole) and text[len(whole) :] in answers for text in found)
