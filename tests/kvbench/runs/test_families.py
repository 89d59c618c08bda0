"""Runs of families with sinks, hybrid layers, latents or shared keys and values: as if every question were alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import kvbench
from benchmarks.family_models import FAMILIES, Family
from kvbench.budget import Budget
from kvbench.engine.driver import engine
from kvbench.harness.encode import encode
from kvbench.progress import Silent
from kvbench.report.frames import prepare
from kvbench.runs.answers import Prompt
from kvbench.runs.executors.base import answer
from kvbench.runs.runner import run
from kvbench.runs.worker import Worker

from .test_sliding import CELL, Store, Tokenizer, greedy, ids, request

BY_NAME = {family.name: family for family in FAMILIES}
TRIED = ("gpt_oss", "gemma4_text", "qwen3_5_text", "deepseek_v3", "granitemoehybrid", "opt", "falcon_h1")


def words(count: int, seed: int) -> list[str]:
    g = torch.Generator().manual_seed(seed)
    return [f"w{number}" for number in torch.randint(0, 90, (count,), generator=g).tolist()]


def family_of(name: str) -> Family:
    family = BY_NAME[name]
    if not family.exists:
        pytest.skip(f"this transformers has no {name}")
    return family


@pytest.mark.parametrize("name", TRIED)
@torch.no_grad()
def test_questions_of_many_lengths_are_answered_as_if_alone(name: str) -> None:
    model, store = family_of(name).build(), Store()
    model.generation_config.eos_token_id = None
    prompts = [Prompt(request(i, 6), ids(40, i), ids(2 + 5 * i, 50 + i)) for i in range(3)]
    with engine(model):
        worker: Any = Worker(model, Silent(), tokenizer=Tokenizer(), store=store)  # type: ignore[arg-type]
        answer(worker, prompts, [CELL])
    answers = {r.sample_id: r.response for r in store.held}
    for prompt in prompts:
        expected = greedy(model, [*prompt.context_ids, *prompt.question_ids], 6)
        assert answers[prompt.request.sample_id] == Tokenizer().decode(expected)


@pytest.mark.parametrize("name", TRIED)
@torch.no_grad()
def test_a_run_keeps_exact_budgets_and_answers_as_the_stock_model(
    name: str, tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    family = family_of(name)
    sizes: dict[str, Any] = {"vocab_size": len(bpe_tokenizer)}
    sizes |= {f"{token}_token_id": getattr(bpe_tokenizer, f"{token}_token_id") for token in ("bos", "eos", "pad")}
    model = replace(family, settings={**family.settings, **sizes}).build()
    model.save_pretrained(tmp_path / "model")
    bpe_tokenizer.save_pretrained(tmp_path / "model")
    rows = {
        f"x{seed}": {"context": " ".join(words(40, seed)), "question": " ".join(words(3 + 4 * seed, 9 + seed))}
        for seed in range(2)
    }
    lines = [json.dumps({**row, "answers": answer}) for answer, row in rows.items()]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines), encoding="utf-8")
    grid = {
        "model": str(tmp_path / "model"),
        "policy": "snapkv:window=4,adakv:window=4",
        "budget": "0.25,0.5",
        "moment": "context,question",
        "task": str(tmp_path / "mine.jsonl"),
        "max_new_tokens": 8,
        "chat_template": False,
        "out": str(tmp_path / "run"),
    }
    run(grid, progress=False)
    cells, samples = kvbench.load(tmp_path / "run")
    assert len(cells) == 9 and (cells["held_entries"] == cells["budget_entries"]).all()
    assert (samples["error"] == "").all()
    for cell in prepare(cells, samples).cells.to_dict("records"):
        of_cell = samples[samples["cell"] == cell["cell"]]
        lengths = of_cell["context_tokens"] + of_cell["question_tokens"] * (cell["moment"] == "question")
        kept = [Budget.parse(cell["budget"]).per_head(length) for length in lengths]
        assert cell["held_tokens"] == pytest.approx(sum(kept) / len(kept)), "shared and recurrent layers hold nothing"
    is_full = samples["cell"].isin(cells.loc[cells["policy"] == "full", "cell"])
    for sample in samples[is_full].to_dict("records"):
        [answer_key] = sample["target"]
        row = rows[answer_key]
        prompt = torch.tensor([encode(bpe_tokenizer, row["context"] + "\n" + row["question"])])
        assert prompt.shape[1] == sample["context_tokens"] + sample["question_tokens"]
        generated = model.generate(prompt, max_new_tokens=8, do_sample=False)
        expected = bpe_tokenizer.decode(generated[0, prompt.shape[1] :], skip_special_tokens=True)
        assert sample["response"] == expected
