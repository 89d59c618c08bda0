"""Videos and images of real processors: tokens and logits are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image

from kvbench.benchmark import Medium
from kvbench.engine.driver import engine
from kvbench.engine.loading import load_model, load_processor, load_tokenizer
from kvbench.engine.prefix import Prefix
from kvbench.engine.vision import Vision
from kvbench.errors import UserError
from tests import vision

FRAMES = [Image.new("RGB", (56, 56), (40 * i, 90, 200 - 30 * i)) for i in range(4)]
VIDEO = Medium("video", "v", lambda: list(FRAMES), rate=2.0)
TIMES = {"fps": 2.0, "total_num_frames": 4, "frames_indices": [0, 1, 2, 3]}
IMAGE = Medium("image", "i", lambda: vision.picture("red", (64, 48)))


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A family and the folder of its model."""
    return request.param, vision.save(request.param, tmp_path_factory.mktemp(request.param))


def text(processor: Any, kinds: tuple[str, ...]) -> str:
    content = [{"type": kind} for kind in kinds] + [{"type": "text", "text": "What is it?"}]
    made: str = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return made


@torch.no_grad()
def prefill(folder: str, media: tuple[Medium, ...], prompt: str, seer: Vision) -> Any:
    model = load_model(folder, None, torch.device("cpu"), torch.float32)
    ids = seer.processor.tokenizer(seer.expand(prompt, media), add_special_tokens=False)
    ids = torch.tensor([ids["input_ids"]])
    with engine(model):
        prefix = Prefix(model, frozenset())
        logits = prefix.extend(ids, pixels=seer.pixels(media, torch.device("cpu")))
    return model, ids, logits, prefix


@torch.no_grad()
def test_images_and_videos_are_those_of_the_processor(saved: tuple[str, str]) -> None:
    if not vision.installed("torchvision"):
        pytest.skip("videos need torchvision")
    kind, folder = saved
    processor = load_processor(folder, None, kind, load_tokenizer(folder))
    seer = Vision(processor, folder)
    prompt = text(processor, ("video", "image"))
    model, ids, logits, prefix = prefill(folder, (VIDEO, IMAGE), prompt, seer)
    inputs = processor(
        text=[prompt],
        images=[vision.picture("red", (64, 48))],
        videos=[FRAMES],
        video_metadata=[TIMES],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert torch.equal(ids, inputs["input_ids"])
    assert torch.allclose(logits, model(**inputs).logits[:, -1], atol=2e-5)
    seen = int(((ids == processor.image_token_id) | (ids == processor.video_token_id)).sum())
    assert prefix.cache.visual_tokens() == [seen] and seen > 10
    if kind == "qwen3_vl":  # two frames make one step, in the middle of which is its time
        said = seer.processor.tokenizer.decode(ids[0])
        assert "<0.2 seconds>" in said and "<1.2 seconds>" in said


def test_without_torchvision_images_go_on_and_videos_say_what_is_missing(
    saved: tuple[str, str],
) -> None:
    kind, folder = saved
    seer = Vision(vision.processor(kind), folder)  # a processor that takes images only
    prompt = text(seer.processor, ("image",))
    model, ids, logits, _ = prefill(folder, (IMAGE,), prompt, seer)
    inputs = seer.processor(text=[prompt], images=[vision.picture("red", (64, 48))],
                            return_tensors="pt")  # fmt: skip
    assert torch.equal(ids, inputs["input_ids"])
    with torch.no_grad():
        assert torch.allclose(logits, model(**inputs).logits[:, -1], atol=2e-5)
    with pytest.raises(UserError, match="reads videos only with torchvision"):
        seer.expand(text(seer.processor, ("video",)), (VIDEO,))


def test_placeholders_and_media_must_agree(saved: tuple[str, str]) -> None:
    seer = Vision(vision.processor(saved[0]), saved[1])
    one = text(seer.processor, ("image",))
    for prompt, media in ((one, (IMAGE, IMAGE)), (one + one, (IMAGE,))):
        with pytest.raises(UserError, match="another number of placeholders"):
            seer.expand(prompt, media)
