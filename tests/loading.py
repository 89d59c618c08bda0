"""Loads a task for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark
from kvbench.harness.lm_eval import LmEvalHarness, LmEvalTask
from kvbench.harness.protocol import TaskSettings


def load_task(leaf: str, bench: Benchmark | None, tokenizer: Any, cache: Path, **changes: Any) -> LmEvalTask:
    """A leaf as for a real model: natural language, seed 0, no chat template, no set length.

    Args:
        leaf: Name of the leaf.
        bench: The benchmark that has it; None looks it up.
        tokenizer: The tokenizer.
        cache: Folder for data.
        changes: Other fields of `TaskSettings`.
    """
    usual: dict[str, Any] = {
        "length": 0,
        "samples": 10,
        "seed": 0,
        "tokenizer_id": "test",
        "lexicon": "natural",
        "chat_template": False,
    }
    settings = TaskSettings(**usual | changes, tokenizer=tokenizer, cache_dir=cache)
    return LmEvalHarness().load(leaf, settings, bench)
