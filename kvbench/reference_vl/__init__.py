"""The vision-language reference model that ships with kvbench, and the language it was trained on.

A Qwen2-VL model of one to two million parameters, trained from random weights on pictures of coloured shapes
(`pictures`) and questions about them (`dialogues`). It runs KV-cache eviction on images and dialogues without a GPU or
a download. `AutoModelForImageTextToText.from_pretrained` loads the folder that `path` returns. The model card in that
folder lists its scores.
"""

from __future__ import annotations

from pathlib import Path

from kvbench.named import NamedModel, knows_only, shipped
from kvbench.reference_vl.words import VOCABULARY

NAME = "reference-vl"
LEXICON = "shapes"


def path() -> Path:
    """Return the folder with the model's weights, configuration, tokenizer and image settings."""
    return Path(__file__).resolve().parent / NAME


MODEL = NamedModel(
    name=NAME,
    summary="tiny; ships with kvbench and sees pictures of coloured shapes; no network and no GPU",
    folder=shipped(NAME, path()),
    lexicon=LEXICON,
    reads=knows_only(VOCABULARY),
)
