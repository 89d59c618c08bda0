"""The reference model that ships with kvbench.

A Qwen3 model of about one million parameters, trained from random weights on the small language of
`kvbench.reference.grammar`. With it, KV-cache eviction methods can be tried in seconds on a laptop,
without a download. `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load
the folder that `path` returns. The model card in that folder has its scores, and says which
comparisons it supports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.errors import UserError
from kvbench.named import NamedModel
from kvbench.reference.grammar import VOCABULARY

NAME = "reference-1"


def path() -> Path:
    """Return the folder with the model's weights, configuration and tokenizer."""
    return Path(__file__).resolve().parent / NAME


def _folder() -> Path:
    if not (path() / "config.json").is_file():
        raise UserError(f"the files of the reference model are missing from {path()}")
    return path()


def _reads(tokenizer: Any) -> bool:
    vocabulary = tokenizer.get_vocab()
    return len(vocabulary) == len(VOCABULARY) and all(word in vocabulary for word in VOCABULARY)


MODEL = NamedModel(
    name="reference",
    summary="ships with kvbench, needs no network and no GPU; its scores are about policies only",
    folder=_folder,
    lexicon="reference",
    reads=_reads,
)
