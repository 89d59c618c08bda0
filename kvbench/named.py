"""The page for models with a name of their own: `reference` is one, and a package can add others.

Register a `NamedModel` as an entry point of the group `kvbench.models`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench import registry


@dataclass(frozen=True)
class NamedModel:
    """A model that `--model` knows by name.

    Attributes:
        name: The name.
        summary: One line for `kvbench list models`.
        folder: Returns the folder that transformers can load. Raises `UserError` if the model is
            not installed, with the way to get it.
        lexicon: The lexicon of the prompts that the model can read; see `Benchmark.lexicons`.
        reads: Whether a tokenizer has that lexicon; None if it is "natural".
    """

    name: str
    summary: str
    folder: Callable[[], Path]
    lexicon: str = "natural"
    reads: Callable[[Any], bool] | None = None


def named_models() -> dict[str, NamedModel]:
    """All registered models by name.

    Raises:
        UserError: A package that registers one cannot be imported.
    """
    return {name: registry.get(registry.MODELS, name) for name in registry.names(registry.MODELS)}


def lexicon_of(tokenizer: Any) -> str:
    """The lexicon of the prompts that a tokenizer can read; "natural" unless it has its own."""
    for model in named_models().values():
        if model.reads is not None and model.reads(tokenizer):
            return model.lexicon
    return "natural"
