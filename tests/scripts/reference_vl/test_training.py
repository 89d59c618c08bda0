"""What training changes in the model leaves its results alone, and a run can be continued."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2VLForConditionalGeneration

from kvbench.reference_vl import dialogues
from kvbench.reference_vl.dialogues import DialogueSettings
from kvbench.reference_vl.words import IDS, IMAGE
from scripts.reference_vl.curriculum import CURRICULUM, Feed, Stage
from scripts.reference_vl.evaluate import Masking, Reader, policies
from scripts.reference_vl.model import model_config, save_model
from scripts.reference_vl.train import Trainee, draw_batch, train

FEED = Feed(DialogueSettings(images=(2, 3), filler=(0, 4), questions=2))


@pytest.fixture
def model() -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(0)
    return Qwen2VLForConditionalGeneration(model_config()).eval()


@torch.no_grad()
def test_training_sees_the_logits_of_the_stock_model(
    model: Qwen2VLForConditionalGeneration,
) -> None:
    batch = draw_batch(FEED, 500, 0, 0)
    order = torch.argsort(batch.order)
    patches = torch.cat([p.view(-1, 4, 1176) for p in batch.patches.values()])[order]
    sizes = [
        [1, 2 * picture.side, 2 * picture.side]
        for n in range(len(batch.ids))
        for picture in dialogues.pictures(dialogues.vqa(FEED.settings, 2**31, n).exchanges())
    ]
    stock = model(
        input_ids=batch.ids,
        pixel_values=patches.flatten(0, 1),
        image_grid_thw=torch.tensor(sizes),
        mm_token_type_ids=(batch.ids == IDS[IMAGE]).int(),
    ).logits.flatten(0, 1)
    ids = batch.ids.flatten()
    right = stock[batch.answers - 1].argmax(-1) == ids[batch.answers]
    loss = torch.nn.functional.cross_entropy(stock[batch.answers - 1], ids[batch.answers])
    early = torch.nn.functional.cross_entropy(stock[batch.answers - 2], ids[batch.answers])
    end = torch.nn.functional.cross_entropy(stock[batch.answers], torch.full_like(batch.answers, IDS["<end>"]))
    losses, _, hits = Trainee(model).losses(batch)
    torch.testing.assert_close(losses, loss + 0.5 * early + 0.1 * end, rtol=0, atol=1e-4)
    assert hits.tolist() == right.tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_stopped_run_continues_to_the_same_weights(tmp_path: Path) -> None:
    stages = (Stage("short", 10**6, (FEED,), batch=300),)
    whole = train(tmp_path / "whole", stages, max_steps=3)
    train(tmp_path / "parts", stages, max_steps=2)
    parts = train(tmp_path / "parts", stages, max_steps=3)
    expected, actual = (load_file(each / "model.safetensors") for each in (whole, parts))
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-6)
    with (tmp_path / "parts" / "train_log.csv").open() as log:
        assert [row["step"] for row in csv.DictReader(log)] == ["2", "3"]


def test_stages_draw_batches_of_their_size() -> None:
    for stage in CURRICULUM:
        for feed in stage.feeds:
            batch = draw_batch(feed, stage.batch, 1, 7)
            assert 0.5 * stage.batch < batch.ids.numel() <= stage.batch


@torch.no_grad()
def test_masks_hide_what_is_not_kept(model: Qwen2VLForConditionalGeneration, tmp_path: Path) -> None:
    save_model(tmp_path, model)
    reader = Reader(tmp_path)
    sample = dialogues.dialogue(dataclasses.replace(FEED.settings, turns=(2, 2)), 1, 0)
    case = reader.case(sample.asked(1))
    assert case.inputs["input_ids"].shape[1] == case.context + len(sample.turns[1].questions[0].words) + 1
    full = model(**case.inputs).logits[0, -1]
    masking = Masking(model)
    for name, score in policies(0).items():
        assert masking.answer(case, score, 1.0) == int(full.argmax()), name
    kept: list[int] = []

    def first(q: torch.Tensor, k: torch.Tensor, context: int, case: object) -> torch.Tensor:
        kept.append(context)
        return -torch.arange(context).float().expand(1, k.shape[1], -1)

    masking.answer(case, first, 0.1)
    assert kept == [case.context] * 5
