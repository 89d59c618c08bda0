"""The vision-language reference model: configuration, tokenizer, image settings, and its folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from kvbench.reference_vl import words
from kvbench.reference_vl.words import IDS

PATCH = 14
MERGE = 2
_HIDDEN, _HEADS, _KV_HEADS = 128, 4, 2


def model_config() -> Qwen2VLConfig:
    """The configuration of the shipped model."""
    return Qwen2VLConfig(
        text_config={
            "vocab_size": len(words.VOCABULARY),
            "hidden_size": _HIDDEN,
            "intermediate_size": 384,
            "num_hidden_layers": 5,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _KV_HEADS,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [6, 5, 5],
            },
            "bos_token_id": IDS[words.BOS],
            "eos_token_id": IDS[words.END],
            "pad_token_id": IDS[words.PAD],
        },
        vision_config={
            "depth": 2,
            "embed_dim": 96,
            "hidden_size": _HIDDEN,
            "num_heads": 3,
            "mlp_ratio": 2,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
        },
        image_token_id=IDS[words.IMAGE],
        video_token_id=IDS[words.VIDEO],
        vision_start_token_id=IDS[words.VISION_START],
        vision_end_token_id=IDS[words.VISION_END],
        tie_word_embeddings=True,
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer: one id per word, words separated by white space; special tokens need none.

    The chat template puts ``<bos>`` first, and plain calls add nothing, so that a processor can
    tokenize what the template returns.
    """
    core = Tokenizer(models.WordLevel(vocab=IDS, unk_token=words.UNK))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=words.PAD,
        unk_token=words.UNK,
        bos_token=words.BOS,
        eos_token=words.END,
        model_specific_special_tokens={
            "user_token": words.USER,
            "assistant_token": words.ASSISTANT,
            "vision_bos_token": words.VISION_START,
            "vision_eos_token": words.VISION_END,
            "image_token": words.IMAGE,
            "video_token": words.VIDEO,
        },
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=words.CHAT_TEMPLATE,
    )


def image_settings() -> dict[str, object]:
    """Settings of the image processor: sides that are multiples of 28 pixels stay as they are."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "do_convert_rgb": True,
        "do_resize": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 1280},
    }


def save_model(folder: Path, model: Qwen2VLForConditionalGeneration, dtype: torch.dtype = torch.float32) -> None:
    """Write weights, configuration, tokenizer and image settings for the Auto classes."""
    model.generation_config = GenerationConfig(
        do_sample=False,
        pad_token_id=IDS[words.PAD],
        bos_token_id=IDS[words.BOS],
        eos_token_id=IDS[words.END],
    )
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)
    build_tokenizer().save_pretrained(folder)
    settings = json.dumps(image_settings(), indent=2) + "\n"
    (folder / "preprocessor_config.json").write_text(settings, encoding="utf-8")
