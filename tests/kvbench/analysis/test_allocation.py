"""Entries per layer and KV head, against what `kvbench.kept` keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvbench
from kvbench.analysis.allocation import analyze
from kvbench.analysis.common import make_grid, stages
from kvbench.progress import Silent


@pytest.mark.parametrize("moment", ["context", "question"])
def test_counts_are_those_of_what_is_kept(folder: str, questions: str, moment: str) -> None:
    from transformers import AutoModelForCausalLM

    grid = make_grid({
        "policies": "snapkv:window=4,adakv:window=4,knorm:allocate=global", "budgets": "0.3,9",
        "models": folder, "tasks": questions, "samples": 4, "moments": moment,
        "chat_template": False, "device": "cpu",
    })  # fmt: skip
    found = analyze(grid, Silent())
    assert not found.failed
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    (stage,) = stages(grid, print)
    prompts = stage.jobs[0].prompts
    if moment == "question":
        contexts = [[*p.context_ids, *p.question_ids] for p in prompts]
    else:
        contexts = [list(ids) for ids in dict.fromkeys(p.context_ids for p in prompts)]
        assert len(contexts) == 3
    for (policy, budget), rows in found.table.groupby(["policy", "budget"]):
        counts = []
        for ids in contexts:
            kept = kvbench.kept(model, torch.tensor([ids]), policy, budget)
            counts.append(np.array([k[0].sum(-1).tolist() for k in kept if k is not None]))
        for row in rows.itertuples():
            mine = [c[row.layer][row.kv_head] for c in counts]
            assert row.entries == pytest.approx(np.mean(mine))
            assert row.entries_sd == pytest.approx(np.std(mine, ddof=1))
            assert (row.entries_min, row.entries_max) == (min(mine), max(mine))
            shares = [m / c.mean() for m, c in zip(mine, counts, strict=True)]
            assert row.share == pytest.approx(np.mean(shares))
            assert row.compressions == len(contexts)
            assert row.tokens == pytest.approx(np.mean([len(c) for c in contexts]))
        assert rows["share"].mean() == pytest.approx(1.0)
        if policy.startswith("snapkv"):
            assert rows["share"].nunique() == 1


def test_a_context_counts_once_however_many_questions_it_has(grouped: str, questions: str) -> None:
    grid = make_grid({
        "policies": "adakv:window=4", "budgets": "0.3", "models": grouped, "tasks": questions,
        "samples": 2, "chat_template": False, "device": "cpu",
    })  # fmt: skip
    assert set(analyze(grid, Silent()).table["compressions"]) == {1}
