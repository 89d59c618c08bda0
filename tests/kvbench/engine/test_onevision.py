"""LLaVA-OneVision, InternVL and Gemma 4 with their own processors: tiles of one image, several images, videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from kvbench.benchmark import Medium
from kvbench.engine.driver import engine
from kvbench.engine.loading import load_model, load_processor, load_tokenizer
from kvbench.engine.prefix import Prefix
from kvbench.engine.vision import Vision
from tests import vision

FRAMES = [Image.new("RGB", (40, 40), (40 * i, 0, 0)) for i in range(3)]
MEDIA = {
    "one image": (Medium("image", "a", lambda: vision.picture("red", (64, 30))),),
    "two images": (
        Medium("image", "a", lambda: vision.picture("red", (64, 48))),
        Medium("image", "b", lambda: vision.picture("blue", (40, 90))),
    ),
    "a video": (Medium("video", "v", lambda: list(FRAMES)),),
}


PLACEHOLDERS = {
    "llava_onevision": {"image": "<image>", "video": "<video>"},
    "internvl": {"image": vision.INTERNVL["context_image_token"], "video": vision.INTERNVL["video_token"]},
    "gemma4": {"image": vision.GEMMA["image_token"], "video": "<|video|>"},
}


@pytest.fixture(scope="module", params=PLACEHOLDERS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    if not vision.installed("torchvision"):
        pytest.skip("the processors need torchvision")
    if family in vision.NEED_TORCHVISION:
        return vision.save(family, tmp_path_factory.mktemp(family))
    words = vision.tokenizer(vision.LLAVA_TEMPLATE)
    words.add_special_tokens({"additional_special_tokens": ["<video>"]})
    words.chat_template = vision.LLAVA_TEMPLATE
    image, video = words.convert_tokens_to_ids(["<image>", "<video>"])
    tiles = [[32, 64], [64, 32], [64, 64]]
    config = transformers.LlavaOnevisionConfig(
        vision_config={
            "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
        },
        text_config={
            "model_type": "qwen2", "vocab_size": len(words), "hidden_size": 64,
            "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "initializer_range": 0.15, "eos_token_id": None,
        },
        image_token_index=image, video_token_index=video, image_grid_pinpoints=tiles,
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = transformers.LlavaOnevisionForConditionalGeneration(config)
    size = {"height": 32, "width": 32}
    processor = transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=tiles),
        tokenizer=words,
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=vision.LLAVA_TEMPLATE,
    )
    path: Path = tmp_path_factory.mktemp("onevision")
    model.save_pretrained(path)
    processor.save_pretrained(path)
    words.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("name", MEDIA)
@torch.no_grad()
def test_tokens_and_logits_are_those_of_transformers(name: str, family: str, folder: str) -> None:
    processor = load_processor(folder, None, family, load_tokenizer(folder))
    seer, media = Vision(processor, folder), MEDIA[name]
    prompt = "".join(f"{PLACEHOLDERS[family][medium.kind]}\n" for medium in media) + "what is it?"
    shown = [medium.load() for medium in media]
    given: dict[str, Any] = {"images": shown}
    if name == "a video":
        given = {"videos": shown, "do_sample_frames": False}
    inputs = processor(text=[prompt], return_tensors="pt", **given)
    ids = processor.tokenizer(seer.expand(prompt, media), add_special_tokens=False)["input_ids"]
    assert ids == inputs["input_ids"][0].tolist()
    model = load_model(folder, None, torch.device("cpu"), torch.float32)
    with engine(model):
        prefix = Prefix(model, frozenset())
        pixels = seer.pixels(media, torch.device("cpu"))
        logits = prefix.extend(torch.tensor([ids]), pixels=pixels)
    assert torch.allclose(logits, model(**inputs).logits[:, -1], atol=2e-5)
    assert prefix.cache.visual_tokens()[0] == sum(seer.counts(media)) > 10
