"""The vision-language reference model that ships with kvbench, and the language it was trained on.

A Qwen2-VL model of one to two million parameters, trained from random weights on pictures of
coloured shapes (`pictures`) and questions about them (`dialogues`). With it, KV-cache eviction can
be tried on images and dialogues without a GPU or a download.
`AutoModelForImageTextToText.from_pretrained` loads the folder that `path` returns. The model card
in that folder has its scores.
"""

from __future__ import annotations

from pathlib import Path

NAME = "reference-vl"


def path() -> Path:
    """Return the folder with the model's weights, configuration, tokenizer and image settings."""
    return Path(__file__).resolve().parent / NAME
