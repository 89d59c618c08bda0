"""lmms-eval's own loop with its own model class, for comparisons: `huggingface`, on the weights of a folder in float32.

That class of lmms-eval 0.7.3 does not run with transformers 5 as it is: it always loads bfloat16 and no language head,
and it passes lists of videos and audio that the processor refuses even if they are empty. Both are put right from
outside; its prompts, its batches, its calls of `generate` and its decoding are untouched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForImageTextToText

from kvbench.harness.lmms_eval import prepare


def stock_model(folder: Path, batch_size: int = 1) -> Any:
    """Return a model of lmms-eval's class `huggingface`."""
    prepare()
    from lmms_eval.models.chat import huggingface

    class Auto:
        @staticmethod
        def from_pretrained(pretrained: str, **_: Any) -> Any:
            return AutoModelForImageTextToText.from_pretrained(pretrained, dtype=torch.float32)

    with mock.patch.object(huggingface, "AutoModel", Auto):
        model = huggingface.Huggingface(str(folder), device="cpu", device_map="cpu", batch_size=batch_size)
    model.processor = _Processor(model.processor)
    return model


class _Processor:
    """A processor that is not passed empty lists of media."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._processor(**{name: value for name, value in inputs.items() if value != []})
