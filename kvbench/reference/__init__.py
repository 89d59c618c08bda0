"""The reference model that ships with kvbench.

A Qwen3 model of about one million parameters, trained from random weights on the small language of
`kvbench.reference.grammar`. It runs KV-cache eviction methods in seconds on a laptop, without a download.
`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load the folder that `path` returns. The
model card in that folder lists its scores and the comparisons it supports.
"""

from __future__ import annotations

from pathlib import Path

from kvbench.named import NamedModel, knows_only, shipped
from kvbench.reference.grammar import VOCABULARY

NAME = "reference-1"


def path() -> Path:
    """Return the folder with the model's weights, configuration and tokenizer."""
    return Path(__file__).resolve().parent / NAME


def versioned(model: str) -> str:
    """Return the name by which artifacts know a model: `reference` stands for its current version."""
    return NAME if model == MODEL.name else model


MODEL = NamedModel(
    name="reference",
    summary="ships with kvbench, needs no network and no GPU; its scores are about policies only",
    folder=shipped("the reference model", path()),
    lexicon="reference",
    reads=knows_only(VOCABULARY),
)
