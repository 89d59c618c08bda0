"""What is counted, against loops over what a cache keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

import kvbench
from kvbench.analysis.common import make_grid, stages
from kvbench.analysis.vision.image_shares import VisionResult, analyze
from kvbench.analysis.vision.options import MOMENTS, VisionOptions
from kvbench.analysis.vision.tables import frames
from kvbench.budget import Budget
from kvbench.engine.driver import engine, forward
from kvbench.engine.prefix import Compression, Prefix
from kvbench.progress import Silent
from kvbench.runs.answers import Prompt
from kvbench.runs.worker import ModelRunner

GLOBAL = "random:allocate=global:buffer=0"


def grid_of(folder: str, task: str, policies: str, **more: Any) -> Any:
    given = {"policies": policies, "models": folder, "tasks": task, "device": "cpu", **more}
    return make_grid(given, MOMENTS, pruning=True)


def asked(grid: Any) -> tuple[Prompt, Any]:
    """The last prompt of the first sample, and what turns its images into pixels."""
    (stage,) = stages(grid, print, pruning=True)
    prompt = [p for p in stage.jobs[0].prompts if p.request.sample_id == "a"][-1]
    return prompt, stage.vision


def kinds_of(model: Any, prompt: Prompt) -> dict[str, list[int]]:
    names = {"visual": "image_token_id"}
    names |= {name: f"{name}_token_id" for name in ("vision_start", "vision_end")}
    tokens = {kind: getattr(model.config, name, None) for kind, name in names.items()}
    return {
        kind: [i for i, token in enumerate(prompt.ids) if token == wanted]
        for kind, wanted in tokens.items()
        if wanted is not None
    }


def check(found: VisionResult, model: Any, prompt: Prompt, kept: list[Tensor]) -> pd.DataFrame:
    """Compare the tables with what was kept at every step, bool `[L, H, tokens]`."""
    data = frames(found)
    rows = data["usage"]
    rows = rows[(rows["sample_id"] == "a") & (rows["question_id"] == 1)]
    kinds = kinds_of(model, prompt)
    assert len(rows) == len(kept) * kept[0].shape[0] * kept[0].shape[1]
    for row in rows.itertuples():
        own = kept[row.step][row.layer, row.kv_head].tolist()
        assert row.entries == sum(own)
        for kind, places in kinds.items():
            assert getattr(row, kind) == sum(own[i] for i in places)
    means = data["steps"][data["steps"]["question_id"] == 1].set_index("step")
    assert means["visual"].tolist() == pytest.approx(rows.groupby("step")["visual"].mean().tolist())
    tokens = data["tokens"]
    tokens = tokens[(tokens["sample_id"] == "a") & (tokens["question_id"] == 1)]
    assert set(tokens["position"]) == set(kinds["visual"])
    for row in tokens.itertuples():
        held = [bool(step[row.layer, row.kv_head, row.position]) for step in kept]
        gone = len(held) if pd.isna(row.evicted) else int(row.evicted)
        assert held == [True] * gone + [False] * (len(held) - gone)
    return tokens


@pytest.mark.parametrize("kind", ["qwen2_vl", "llava"])
@torch.no_grad()
def test_while_an_answer_is_written_counts_are_those_of_an_attached_model(
    kind: str, models: dict[str, str], task: str
) -> None:
    grid = grid_of(models[kind], task, GLOBAL, budgets="12", moments="decode", samples=1)
    found = analyze(grid, VisionOptions(), Silent())
    assert not found.failed
    prompt, vision = asked(grid)
    model: Any = AutoModelForImageTextToText.from_pretrained(models[kind]).eval()
    ids = torch.tensor([prompt.ids])
    pixels = dict(vision.pixels(prompt.media, torch.device("cpu")))
    if kind != "llava":
        pixels["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    kept: list[Tensor] = []
    with kvbench.attach(model, GLOBAL, 12, moment="decode") as cache:

        def look(*_: Any, **__: Any) -> Tensor:
            kept.append(torch.stack([layer[0] for layer in cache.kept() if layer is not None]))
            return torch.tensor([False])

        said = model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=5,
            do_sample=False,
            stopping_criteria=[look],
            **pixels,
        )
    check(found, model, prompt, kept)
    assert sum(int(step.sum()) for step in kept) < sum(step.numel() for step in kept)
    (answer,) = (k.answer for k in found.tasks[0].samples[-1].records)
    words = AutoTokenizer.from_pretrained(models[kind])
    assert answer == words.decode(said[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("moment", ["context", "question"])
@torch.no_grad()
def test_a_prompt_is_compressed_once_with_its_images(moment: Any, models: dict[str, str], task: str) -> None:
    policies = f"{GLOBAL},snapkv:window=4"
    more = {"budgets": "visual:0.25", "moments": moment, "samples": 1}
    grid = grid_of(models["qwen2_vl"], task, policies, **more)
    found = analyze(grid, VisionOptions(), Silent())
    prompt, vision = asked(grid)
    model: Any = AutoModelForImageTextToText.from_pretrained(models["qwen2_vl"]).eval()
    pixels = vision.pixels(prompt.media, torch.device("cpu"))
    for number, spec in enumerate(policies.split(",")):
        policy = kvbench.policy(spec)
        with engine(model):
            prefix = Prefix(model, policy.needs)
            prefix.extend(torch.tensor([prompt.context_ids]), pixels=pixels)
            question = torch.tensor([prompt.question_ids])
            if moment == "question":
                prefix.extend(question)
            wish = Compression(policy, Budget.parse("visual:0.25"), moment, 0)
            (cache,) = prefix.compress([wish], 20)
            if moment == "context":
                forward(model, cache, question)
        held = torch.stack([layer[0] for layer in cache.kept() if layer is not None])
        shown = found.tasks[0].samples[0]
        kept = shown.records[number]
        (of_task,) = found.tasks
        alone = replace(found, tasks=[replace(of_task, samples=[replace(shown, records=[kept])])])
        steps = [
            torch.cat([held, torch.ones(*held.shape[:2], step, dtype=torch.bool)], -1) for step in range(kept.steps)
        ]
        check(alone, model, prompt, steps)
        visual = kinds_of(model, prompt)["visual"]
        tokens = len(prompt.context_ids) + len(prompt.question_ids) * (moment == "question")
        assert kept.trace.budget == tokens - len(visual) + (len(visual) + 2) // 4


def test_the_last_question_follows_all_images_and_others_are_on_request(models: dict[str, str], task: str) -> None:
    grid = grid_of(models["qwen2_vl"], task, "knorm", budgets="9", samples=2)
    names = {}
    for questions in ("last", "all"):
        found = analyze(grid, VisionOptions(questions=questions, new_tokens=1), Silent())
        names[questions] = [shown.name for shown in found.tasks[0].samples]
        assert all(kept.steps == 1 for shown in found.tasks[0].samples for kept in shown.records)
    assert names == {"last": ["a/1", "b"], "all": ["a", "a/1", "b"]}


@pytest.mark.parametrize("moment", ["context", "question"])
def test_policies_that_prune_in_the_prefill_hold_the_same_in_all_heads(
    moment: str, models: dict[str, str], task: str
) -> None:
    policies = "divprune,knorm,fastv:layer=1"
    grid = grid_of(models["qwen2_vl"], task, policies, budgets="visual:3", moments=moment, samples=1)
    found = analyze(grid, VisionOptions(), Silent())
    assert not found.failed
    (shown,) = found.tasks[0].samples
    assert [kept.cell.policy.name for kept in shown.records] == ["divprune", "knorm", "fastv"]
    for kept in (shown.records[0], shown.records[2]):
        held = kept.held([0])[..., 0, :]
        assert (held[..., shown.visual].sum(-1) == 3).all()
        assert held[..., ~shown.visual].all()
        assert (held == held[0, 0]).all()


@torch.no_grad()
def test_other_analyses_show_the_images_too(models: dict[str, str], task: str) -> None:
    from kvbench.analysis.allocation import analyze as count

    folder = models["qwen2_vl"]
    grid = make_grid({
        "policies": "adakv:window=4", "budgets": "0.3", "models": folder, "tasks": task,
        "samples": 1, "device": "cpu",
    })  # fmt: skip
    found = count(grid, Silent())
    prompts = stages(grid, print)[0].jobs[0].prompts
    _, vision = asked(grid)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder).eval()
    policy = kvbench.policy("adakv:window=4")
    counts = []
    for prompt in prompts:
        with engine(model):
            prefix, _ = ModelRunner(model, Silent(), vision).prefill(prompt.context_ids, policy.needs, prompt.media)
            (cache,) = prefix.compress([Compression(policy, Budget.parse(0.3), "context", 0)])
        counts.append(torch.stack([k[0].sum(-1) for k in cache.kept() if k is not None]))
    mean = torch.stack(counts).double().mean(0).flatten().tolist()
    assert found.table["entries"].tolist() == pytest.approx(mean)
    assert set(found.table["compressions"]) == {2}
