"""Tiny vision-language models with random weights, their processors, and tiny images.

Nothing here needs torchvision: the processors take images only, prepared by Pillow.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvbench.engine.vision import images_only
from kvbench.harness.harnesses import HARNESSES
from kvbench.harness.protocol import TaskSettings

if TYPE_CHECKING:
    from kvbench.benchmark import Benchmark
    from kvbench.harness.protocol import LoadedTask

KINDS = ("qwen2_vl", "qwen3_vl", "llava")
WRAPPERS = ("qwen3_5", "mistral3", "internvl", "gemma4")
"""Further kinds."""
NEED_TORCHVISION = ("internvl", "gemma4", "mistral3")
"""Kinds whose processors need torchvision."""

SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> <image>"
).split()
MISTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
INTERNVL = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}

QWEN_TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen2-VL's: placeholders where the images are."""

LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}"
    "{% endfor %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ c['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""As LLaVA-1.5's: all images of a message before its text; messages must be lists of parts."""

PART_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% else %}PLACEHOLDER{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Mistral's and InternVL's: a placeholder for each image, in its place."""

_PATCH = {"qwen2_vl": 14, "qwen3_vl": 16, "qwen3_5": 16, "llava": 14}
GEMMA = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}


def installed(*packages: str) -> bool:
    """Whether optional packages are there."""
    return all(importlib.util.find_spec(package) is not None for package in packages)


def picture(color: str = "red", size: tuple[int, int] = (64, 48)) -> Image.Image:
    """A plain image."""
    return Image.new("RGB", size, color)


def encoded(image: Image.Image | None = None, kind: str = "PNG") -> dict[str, str]:
    """An image as the rows of a hub table have it."""
    content = io.BytesIO()
    (image or picture()).save(content, kind)
    return {"bytes": base64.b64encode(content.getvalue()).decode(), "path": f"x.{kind.lower()}"}


def load_task(leaf: str, bench: Benchmark, cache: Path, kind: str = "qwen2_vl", **changes: Any) -> LoadedTask:
    """A leaf as for a vision-language model; `changes` are other fields of `TaskSettings`."""
    usual: dict[str, Any] = {
        "length": 0,
        "samples": 10,
        "seed": 0,
        "tokenizer": processor(kind).tokenizer,
        "tokenizer_id": "tiny",
        "lexicon": "natural",
        "chat_template": True,
        "cache_dir": cache,
        "processor": processor(kind),
    }
    return HARNESSES[bench.harness].load(leaf, TaskSettings(**usual | changes), bench)


def tokenizer(template: str = QWEN_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the placeholders of all kinds of models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=4096,
        chat_template=template,
    )


@functools.cache
def processor(kind: str = "qwen2_vl") -> Any:
    """A processor for images of at most 112 x 112 pixels (Qwen) or of 56 x 56 (LLaVA)."""
    if kind == "mistral3":
        return _pixtral_processor()
    if kind == "internvl":
        return _internvl_processor()
    if kind == "gemma4":
        return _gemma_processor()
    if kind == "llava":
        images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
        return transformers.LlavaProcessor(
            image_processor=images,
            tokenizer=tokenizer(LLAVA_TEMPLATE),
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=LLAVA_TEMPLATE,
        )
    patch = _PATCH[kind]
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=2,
        size={"shortest_edge": 4 * patch * patch, "longest_edge": 64 * patch * patch},
    )
    return images_only(kind, images, tokenizer())


def _pixtral_processor() -> Any:
    """A processor for images of at most 56 x 56 pixels, in patches of 7 that are merged two by two."""
    template = PART_TEMPLATE.replace("PLACEHOLDER", MISTRAL[0])
    words = tokenizer(template)
    words.add_special_tokens({"additional_special_tokens": list(MISTRAL)})
    images = transformers.PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size={"height": 7, "width": 7})
    return transformers.PixtralProcessor(images, words, patch_size=7, spatial_merge_size=2, chat_template=template)


def _internvl_processor() -> Any:
    """A processor for tiles of 28 x 28 pixels, with a whole view where there are several."""
    template = PART_TEMPLATE.replace("PLACEHOLDER", INTERNVL["context_image_token"])
    words = _named_tokens(template, INTERNVL)
    size = {"height": 28, "width": 28}
    return transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, max_patches=3),
        tokenizer=words,
        video_processor=transformers.InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=template,
    )


def _named_tokens(template: str, special: dict[str, str]) -> PreTrainedTokenizerFast:
    """A tokenizer that has special tokens as attributes."""
    words = tokenizer(template)
    words.add_special_tokens({"additional_special_tokens": [*special.values(), "<|video|>"]})
    return PreTrainedTokenizerFast(
        tokenizer_object=words.backend_tokenizer,
        **{k: words.init_kwargs[k] for k in ("eos_token", "pad_token", "padding_side", "model_max_length")},
        chat_template=template,
        extra_special_tokens=special,
    )


def _gemma_processor() -> Any:
    """A processor for images of at most 70 tokens of 3 x 3 patches of 4 x 4 pixels."""
    template = PART_TEMPLATE.replace("PLACEHOLDER", GEMMA["image_token"])
    return transformers.Gemma4Processor(
        feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
        image_processor=transformers.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70),
        tokenizer=_named_tokens(template, GEMMA),
        video_processor=transformers.Gemma4VideoProcessor(patch_size=4, max_soft_tokens=70),
        image_seq_length=70,
        chat_template=template,
    )


def model(kind: str = "qwen2_vl") -> Any:
    """A model of two layers with random weights, the same at every call."""
    words = processor(kind).tokenizer
    ids = dict(zip(SPECIAL, words.convert_tokens_to_ids(SPECIAL), strict=True))
    text: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        build = {"llava": _llava, "mistral3": _mistral, "internvl": _internvl, "gemma4": _gemma}.get(kind, _qwen)
        return build(kind, text, ids).eval()


def _mistral(kind: str, text: dict[str, Any], ids: dict[str, int]) -> Any:
    config = transformers.Mistral3Config(
        vision_config={**_TOWER, "model_type": "pixtral", "image_size": 56, "patch_size": 7},
        text_config={**text, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
        image_token_index=processor(kind).image_token_id,
        spatial_merge_size=2,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def _gemma(kind: str, text: dict[str, Any], ids: dict[str, int]) -> Any:
    """A Gemma 4 with two full layers and two whose image tokens see later ones of their image."""
    special = {
        f"{name}_id": processor(kind).tokenizer.convert_tokens_to_ids(token)
        for name, token in {**GEMMA, "video_token": "<|video|>"}.items()
    }
    config = transformers.Gemma4Config(
        text_config={
            **text,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 16,
            "head_dim": 16,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
        vision_config={**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4},
        audio_config=None,
        **special,
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def _internvl(kind: str, text: dict[str, Any], ids: dict[str, int]) -> Any:
    config = transformers.InternVLConfig(
        vision_config={**_TOWER, "model_type": "internvl_vision", "image_size": 28, "patch_size": 7},
        text_config={**text, "model_type": "qwen2"},
        image_token_id=processor(kind).image_token_id,
        image_seq_length=4,
    )
    return transformers.InternVLForConditionalGeneration(config)


_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def _llava(kind: str, text: dict[str, Any], ids: dict[str, int]) -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        projection_dim=32,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**text),
        image_token_index=ids["<image>"],
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


def _qwen(kind: str, text: dict[str, Any], ids: dict[str, int]) -> Any:
    tokens = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    if kind == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
        config = transformers.Qwen2VLConfig(
            text_config={**text, "rope_parameters": rope},
            vision_config={**vision, "patch_size": 14},
            **tokens,
        )
        return transformers.Qwen2VLForConditionalGeneration(config)
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 16,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    if kind == "qwen3_5":
        del vision["deepstack_visual_indexes"]
        hybrid = {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        }
        rope |= {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
        hybrid_config = transformers.Qwen3_5Config(
            text_config={**text, **hybrid, "head_dim": 16, "rope_parameters": rope}, vision_config=vision, **tokens
        )
        return transformers.Qwen3_5ForConditionalGeneration(hybrid_config)
    config = transformers.Qwen3VLConfig(
        text_config={
            **text,
            "head_dim": 16,
            "rope_parameters": {**rope, "mrope_interleaved": True},
        },
        vision_config=vision,
        **tokens,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def save(kind: str, folder: Path) -> str:
    """Write a model folder, as a user would have it."""
    model(kind).save_pretrained(folder)
    processor(kind).tokenizer.save_pretrained(folder)
    if kind in ("llava", *NEED_TORCHVISION):
        processor(kind).save_pretrained(folder)
    else:  # a processor that was made for images only has a class of its own
        processor(kind).image_processor.save_pretrained(folder)
    return str(folder)
