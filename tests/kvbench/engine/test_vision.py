"""Images in the prefill: eviction equals masking, over two turns that both show images."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

import kvbench
from benchmarks.family_models import FAMILIES as FAMILY_MODELS
from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import engine, forward
from kvbench.engine.implementations import FLASH, SDPA, choose_attention
from kvbench.engine.models import decoder_of, reading_modules
from kvbench.engine.prefix import Compression, Prefix
from kvbench.engine.vision import media_positions
from kvbench.errors import UserError

from .conftest import _KEPT, SIZE

IMAGE, VIDEO, START, END = 120, 121, 122, 123
TEXT = {k: v for k, v in SIZE.items() if k != "attn_implementation"}
QWEN = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_onevision", "qwen3_5", "mistral3", "internvl",
            "gemma4", "gemma4_vision")  # fmt: skip
HYBRID: dict[str, Any] = {
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@dataclass(frozen=True)
class Family:
    """A random model, the tokens that one of its images takes, and a maker of pixels."""

    model: Any
    tokens: int
    pixels: Callable[[Tensor], dict[str, Tensor]]


@functools.cache
def build(name: str) -> Family:
    torch.manual_seed(3)
    if name.startswith("qwen"):
        return _qwen(name)
    if name == "mistral3":
        return _mistral()
    if name == "internvl":
        return _internvl()
    if name.startswith("gemma4"):
        return _gemma("vision" if name == "gemma4_vision" else None)
    text = {**TEXT, "model_type": "llama" if name == "llava" else "qwen2"}
    if name == "llava":
        config: Any = transformers.LlavaConfig(
            vision_config={**CLIP, "model_type": "clip_vision_model"},
            text_config=text,
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        )
        model: Any = transformers.LlavaForConditionalGeneration(config)
        return Family(_ready(model), 16, lambda noise: {"pixel_values": noise[:, 0]})
    config = transformers.LlavaOnevisionConfig(
        vision_config={**CLIP, "model_type": "siglip_vision_model"},
        text_config=text,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[32, 32]],
        vision_feature_layer=-1,
    )
    model = transformers.LlavaOnevisionForConditionalGeneration(config)

    def tiles(noise: Tensor) -> dict[str, Tensor]:
        # Several images are not cut into tiles: one view, and a token for the line end.
        return {
            "pixel_values": noise[:, :1],
            "image_sizes": torch.full((len(noise), 2), 32),
            "batch_num_images": torch.tensor([len(noise)]),
        }

    return Family(_ready(model), 17, tiles)


def _qwen(name: str) -> Family:
    text: dict[str, Any] = {**TEXT, "rope_parameters": ROPE}
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "in_channels": 3}
    if name == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        config: Any = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **QWEN)
        model: Any = transformers.Qwen2VLForConditionalGeneration(config)
    elif name == "qwen2_5_vl":
        vision |= {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **QWEN)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    elif name == "qwen3_5":
        vision |= {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "num_position_embeddings": 64}
        text |= {**HYBRID, "head_dim": 16, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}
        config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **QWEN)
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    else:
        vision |= {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        text |= {"head_dim": 8}
        config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN)
        model = transformers.Qwen3VLForConditionalGeneration(config)

    def patches(noise: Tensor) -> dict[str, Tensor]:
        grid = torch.tensor([[1, 6, 4]] * len(noise))  # 2 x 3 merged tokens, not square
        rows = noise.flatten(1)[:, : 24 * 96].reshape(-1, 96)
        return {"pixel_values": rows, "image_grid_thw": grid}

    return Family(_ready(model), 6, patches)


def _mistral() -> Family:
    config = transformers.Mistral3Config(
        vision_config={**CLIP, "model_type": "pixtral", "patch_size": 4},
        text_config={**TEXT, "model_type": "mistral", "head_dim": 8, "sliding_window": None},
        image_token_index=IMAGE,
        spatial_merge_size=2,
    )
    model = transformers.Mistral3ForConditionalGeneration(config)

    def cropped(noise: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": noise[:, 0], "image_sizes": torch.tensor([[24, 16]] * len(noise))}  # padded to a square

    return Family(_ready(model), 6, cropped)


def _internvl() -> Family:
    config = transformers.InternVLConfig(
        vision_config={**CLIP, "model_type": "internvl_vision"},
        text_config={**TEXT, "model_type": "qwen2"},
        image_token_id=IMAGE,
        image_seq_length=4,
    )
    model = transformers.InternVLForConditionalGeneration(config)
    return Family(_ready(model), 8, lambda noise: {"pixel_values": noise[:, :2].flatten(0, 1)})  # two tiles


def _gemma(bidirectional: str | None) -> Family:
    """A Gemma 4 like the larger models, whose image tokens see later ones, or like the smaller ones.

    Those share keys and values among layers, and have embeddings for each layer.
    """
    layer_types = ["sliding_attention", "full_attention"] * (2 if bidirectional else 3)
    small = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
    config = transformers.Gemma4Config(
        text_config={
            **TEXT,
            "num_hidden_layers": len(layer_types),
            "layer_types": layer_types,
            "sliding_window": 16,
            "head_dim": 16,
            "global_head_dim": 16,
            **({"hidden_size_per_layer_input": 0} if bidirectional else small),
            "use_bidirectional_attention": bidirectional,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 64,
        },
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    model = transformers.Gemma4ForConditionalGeneration(config)

    def patches(noise: Tensor) -> dict[str, Tensor]:
        places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(-1)
        rows = noise.flatten(1)[:, : 36 * 48].reshape(len(noise), 36, 48)
        return {"pixel_values": rows, "image_position_ids": places.expand(len(noise), -1, -1)}

    return Family(_ready(model), 4, patches)  # 3 x 3 patches make a token


def _ready(model: Any) -> Any:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)


def turn(family: Family, pads: list[int], images: int, seed: int) -> tuple[Tensor, Tensor, Any]:
    """Ids and mask of a turn that shows images in every row, and the pixels of all rows."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for pad in pads:
        row = [0] * pad
        for _ in range(images):
            row += torch.randint(1, 110, (4,), generator=g).tolist()
            row += [START, *[IMAGE] * family.tokens, END]
        rest = torch.randint(1, 110, (9 + max(pads) - pad,), generator=g).tolist()
        rows.append(row + rest)
    ids = torch.tensor(rows)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    noise = torch.randn(len(pads) * images, 3, 3, 32, 32, generator=g)
    return ids, mask, family.pixels(noise) if images else {}


def oracle_run(model: Any, chunks: list[tuple[Tensor, Any]], mask: Tensor, kept: list[Any]) -> list[Tensor]:
    """Logits of every chunk on transformers' own cache with evicted entries at -inf.

    Positions are those that the model gives all chunks together, which is not how kvbench finds
    them.
    """
    whole = torch.cat([ids for ids, _ in chunks], 1)
    pixels: dict[str, Tensor] = {}
    for _, part in chunks:
        for name, value in part.items():
            pixels[name] = torch.cat([pixels[name], value]) if name in pixels else value
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    if hasattr(model.model, "get_rope_index"):
        position = _interleaved_positions(model, chunks, whole, mask)
    cache = DynamicCache(config=decoder_of(model).config)
    decoder = decoder_of(model)
    decoder.set_attn_implementation("oracle")
    out, first = [], 0
    try:
        for (ids, part), held in zip(chunks, kept, strict=True):
            _KEPT.clear()
            _KEPT.update({i: k for i, k in enumerate(held or []) if k is not None})
            for source, reader in reading_modules(model):
                if source in _KEPT:
                    _KEPT[int(reader.layer_idx)] = _KEPT[source]  # type: ignore[arg-type]
            last = first + ids.shape[1]
            if part and getattr(decoder.config, "use_bidirectional_attention", None):
                part = {**part, "mm_token_type_ids": (ids == IMAGE).int()}
            out.append(
                model(
                    input_ids=ids,
                    attention_mask=mask[:, :last],
                    position_ids=position[..., first:last],
                    past_key_values=cache,
                    **part,
                ).logits
            )
            first = last
    finally:
        decoder.set_attn_implementation("sdpa")
        _KEPT.clear()
    return out


def _interleaved_positions(model: Any, chunks: Any, whole: Tensor, mask: Tensor) -> Tensor:
    """Positions of all chunks in one call for each row, with the row's own images in order."""
    rows = []
    for row in range(len(whole)):
        grids = []
        for ids, part in chunks:
            if "image_grid_thw" in part:
                each = len(part["image_grid_thw"]) // len(ids)
                grids.append(part["image_grid_thw"][row * each : (row + 1) * each])
        kinds = (whole[row : row + 1] == IMAGE).int()
        position, _ = model.model.get_rope_index(
            whole[row : row + 1],
            mm_token_type_ids=kinds,
            image_grid_thw=torch.cat(grids),
            attention_mask=mask[row : row + 1],
        )
        rows.append(position)
    return torch.cat(rows, 1)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("policy", ["random", "random:allocate=global"])
@torch.no_grad()
def test_eviction_equals_masking_over_two_turns_with_images(name: str, policy: str) -> None:
    family = build(name)
    ids, mask, pixels = turn(family, [0, 5], images=2, seed=0)
    # Padding between tokens would change a recurrent state, or be in a sliding window.
    more_images = 0 if name == "gemma4_vision" else 2  # must be in the first forward
    more_pads = [0, 0 if name == "qwen3_5" or name.startswith("gemma4") else 3]
    more, more_mask, more_pixels = turn(family, more_pads, images=more_images, seed=1)
    last = torch.randint(1, 110, (2, 1), generator=torch.Generator().manual_seed(2))
    wish = Compression(kvbench.policy(policy), Budget.parse(0.3), "context", 0)
    with engine(family.model):
        prefix = Prefix(family.model, wish.policy.needs)
        first = prefix.extend(ids, mask, pixels)
        (cache,) = prefix.compress([wish])
        kept = cache.kept()
        second = forward(family.model, cache, more, more_mask, pixels=more_pixels)
        third = forward(family.model, cache, last)
    whole = torch.cat([mask, more_mask, torch.ones_like(last)], 1)
    chunks: list[tuple[Tensor, Any]] = [(ids, pixels), (more, more_pixels), (last, {})]
    masked = oracle_run(family.model, chunks, whole, [None, kept, kept])
    for ours, theirs in zip((first, second, third), masked, strict=True):
        assert (ours - theirs[:, -1]).abs().max() < 1e-5 * theirs.abs().max()
    unmasked = oracle_run(family.model, chunks, whole, [None, None, None])
    assert (second - unmasked[1][:, -1]).abs().max() > 1e-2 * unmasked[1].abs().max()


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_generate_in_an_attachment_equals_masking(name: str) -> None:
    family = build(name)
    ids, mask, pixels = turn(family, [0, 5], images=1, seed=4)
    given = dict(pixels)
    if name.startswith(("qwen", "gemma4")):
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    with kvbench.attach(family.model, "random", 0.4) as cache:
        made = family.model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=4,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **given,
        )
        kept = [None if k is None else k[..., : ids.shape[1]] for k in cache.kept()]
        assert cache.visual is not None and cache.visual[:, : ids.shape[1]].equal(ids == IMAGE)
    answer = made.sequences[:, ids.shape[1] :]
    whole = torch.cat([mask, torch.ones(2, 3, dtype=mask.dtype)], 1)
    chunks: list[tuple[Tensor, Any]] = [(ids, pixels), (answer[:, :3], {})]
    masked = oracle_run(family.model, chunks, whole, [None, kept])
    theirs = torch.cat([masked[0][:, -1:], masked[1]], 1)
    ours = torch.stack(made.logits, 1)
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


@torch.no_grad()
def test_image_tokens_that_see_later_ones_in_full_layers_are_refused() -> None:
    model = next(family for family in FAMILY_MODELS if family.name == "gemma3").build()
    ids = torch.tensor([[5, *[model.config.image_token_id] * 4, 6, 7]])
    pixels = {"pixel_values": torch.zeros(1, 3, 32, 32)}
    message = r"^gemma3_text lets image tokens see later ones, which kvbench does not implement$"
    with engine(model), pytest.raises(UserError, match=message):
        Prefix(model, frozenset()).extend(ids, pixels=pixels)
    with pytest.raises(UserError, match=message), kvbench.attach(model, "random", 0.4) as cache:
        model.generate(
            ids,
            past_key_values=cache,
            token_type_ids=(ids == model.config.image_token_id).int(),
            max_new_tokens=2,
            **pixels,
        )


@torch.no_grad()
def test_image_tokens_of_gemma_4_see_later_ones_in_sliding_layers_of_the_first_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = build("gemma4_vision")
    ids, mask, pixels = turn(family, [0], images=1, seed=9)
    logits = []
    for kind in ("vision", None):
        monkeypatch.setattr(decoder_of(family.model).config, "use_bidirectional_attention", kind)
        with engine(family.model):
            prefix = Prefix(family.model, frozenset())
            logits.append(prefix.extend(ids, mask, pixels))
            if kind == "vision":
                message = r"^gemma4_text cannot see images after its first tokens; put them first$"
                with pytest.raises(UserError, match=message):
                    prefix.extend(ids, mask, pixels)
                choose_attention(family.model, FLASH)
                with pytest.raises(UserError, match=r"^FlashAttention 2 does not let image tokens see later ones; u"):
                    Prefix(family.model, frozenset()).extend(ids, mask, pixels)
                choose_attention(family.model, SDPA)
    assert (logits[0] - logits[1]).abs().max() > 1e-2 * logits[0].abs().max()


@torch.no_grad()
def test_a_text_prompt_does_not_use_the_positions_of_an_earlier_image() -> None:
    family = build("qwen2_vl")
    ids = torch.randint(1, 110, (1, 20), generator=torch.Generator().manual_seed(5))
    fresh = family.model(input_ids=ids).logits[:, -1]
    shown, mask, pixels = turn(family, [0], images=1, seed=6)
    family.model.generate(
        shown,
        attention_mask=mask,
        mm_token_type_ids=(shown == IMAGE).int(),
        max_new_tokens=2,
        **pixels,
    )
    assert family.model.model.rope_deltas is not None
    with engine(family.model):
        prefix = Prefix(family.model, frozenset())
        prefix.extend(ids[:, :12])
        later = prefix.extend(ids[:, 12:])
    family.model.model.rope_deltas = None
    assert torch.allclose(later, fresh, atol=1e-5)


@torch.no_grad()
def test_positions_after_an_image_go_on_from_its_longest_side() -> None:
    family = build("qwen2_vl")
    ids, mask, pixels = turn(family, [0], images=1, seed=7)
    position, shift = media_positions(family.model, ids, mask, pixels)
    # 4 words and the start token; 2 x 3 tokens of the image take 3 positions instead of 6.
    assert position[:, 0, 5:11].tolist() == [[5] * 6, [5, 5, 6, 6, 7, 7], [5, 6, 5, 6, 5, 6]]
    assert position[0, 0, 11] == 8 and shift.tolist() == [-3]


@torch.no_grad()
def test_entries_are_counted_by_modality() -> None:
    family = build("qwen3_vl")
    ids, mask, pixels = turn(family, [0, 5], images=2, seed=8)
    wish = Compression(kvbench.policy("random"), Budget.parse(0.3), "context", 0)
    with engine(family.model):
        prefix = Prefix(family.model, frozenset())
        prefix.extend(ids, mask, pixels)
        assert prefix.cache.visual_tokens() == [12, 12]
        (cache,) = prefix.compress([wish])
        twice = RaggedCache.stack([cache, cache])
    for row in range(2):
        marked = (ids[row] == IMAGE)[None].expand(2, -1)
        held = sum(int((k[row] & marked).sum()) for k in cache.kept() if k is not None)
        assert 0 < held == cache.visual_entries(row) == twice.visual_entries(row + 2)
        assert prefix.cache.visual_entries(row) == 12 * 2 * 3


VIDEO_SHAPES = {
    "longer than wide": [(5, 4, 6)],
    "wider than long": [(2, 4, 12)],
    "several videos": [(4, 2, 4), (6, 4, 2)],
    "image, video, image": [(1, 6, 4), (7, 4, 4), (1, 2, 2)],
}
"""Grids of media in patches: time, height, width; time 1 is an image."""


def shown(grids: list[tuple[int, int, int]], seed: int) -> tuple[list[int], dict[str, Tensor]]:
    """The tokens of images and videos with words between them, and their pixels."""
    g = torch.Generator().manual_seed(seed)
    ids, pixels = [], {}
    for t, h, w in grids:
        ids += torch.randint(1, 110, (3,), generator=g).tolist()
        ids += [START, *[VIDEO if t > 1 else IMAGE] * (t * h * w // 4), END]
    for kind, names in (
        (False, ("pixel_values", "image_grid_thw")),
        (True, ("pixel_values_videos", "video_grid_thw")),
    ):
        if own := [grid for grid in grids if (grid[0] > 1) is kind]:
            rows = sum(t * h * w for t, h, w in own)
            pixels[names[0]] = torch.randn(rows, 96, generator=g)
            pixels[names[1]] = torch.tensor(own)
    if "video_grid_thw" in pixels:
        videos = len(pixels["video_grid_thw"])
        pixels["second_per_grid_ts"] = torch.linspace(1.0, 2.0, videos)
    return ids, pixels


def prefilled(family: Family, parts: list[Tensor], masks: list[Tensor], pixels: Any) -> Tensor:
    with engine(family.model):
        prefix = Prefix(family.model, frozenset())
        for i, (ids, mask) in enumerate(zip(parts, masks, strict=True)):
            logits = prefix.extend(ids, mask, pixels if i == 0 else None)
    return logits


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("grids", VIDEO_SHAPES.values(), ids=list(VIDEO_SHAPES))
@torch.no_grad()
def test_a_question_after_videos_has_one_position_wherever_the_context_ends(
    name: str, grids: list[tuple[int, int, int]]
) -> None:
    family = build(name)
    media, pixels = shown(grids, seed=9)
    if name == "qwen2_vl":
        pixels.pop("second_per_grid_ts", None)
    question = torch.randint(1, 110, (9,), generator=torch.Generator().manual_seed(10)).tolist()
    ids = torch.tensor([[0] * 4 + media + question])
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    whole = prefilled(family, [ids], [mask], pixels)
    for cut in (len(question), len(question) + 1):  # before and after the end of the last medium
        parts, masks = ([x[:, :-cut], x[:, -cut:]] for x in (ids, mask))
        apart = prefilled(family, parts, masks, pixels)
        assert (apart - whole).abs().max() < 1e-5 * whole.abs().max()


@torch.no_grad()
def test_text_after_a_video_continues_at_the_maximum_over_the_three_axes() -> None:
    model = build("qwen2_vl").model
    ids, pixels = shown([(5, 4, 6), (2, 4, 12)], seed=11)
    position, shift = media_positions(model, torch.tensor([ids]), None, pixels)
    # 3 words and a start token; 5 x 2 x 3 tokens of which time takes the most positions.
    assert position[:, 0, 4:34].amax(1).tolist() == [8, 5, 6]
    assert position[:, 0, 34].tolist() == [9] * 3
    # Its end, 3 words and a start token; 2 x 2 x 6 tokens of which the width takes the most.
    assert position[:, 0, 39:63].amax(1).tolist() == [15, 15, 19]
    assert position[:, 0, 63].tolist() == [20] * 3
    assert shift.tolist() == [21 - len(ids)]
