"""A small run on the reference model: seconds, two jobs, six cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.runs.grid import Grid
from kvbench.runs.index import Key
from kvbench.runs.schema import Response
from kvbench.runs.store import RunStore


def small_grid(out: Path, **changes: Any) -> Grid:
    """Two tasks of 256 tokens, the full cache and two policies: 6 responses a sample.

    Only a few responses fit into the memory for caches, so that they come one after the other.
    """
    usual = {
        "policy": "snapkv:window=8,random",
        "budget": "24",
        "task": "niah_single_1,niah_single_2",
        "length": 256,
        "samples": 4,
        "cache_memory": "12MB",
        "out": str(out),
    }
    return Grid.from_dict({**usual, **changes})


def answers(responses: list[Response]) -> dict[Key, Any]:
    """Everything about responses but their times."""
    return {
        r.key: (r.response, r.stop, r.error, r.held_entries, r.kv_bytes_live, r.generated_tokens) for r in responses
    }


def stored(path: Path) -> dict[Key, Any]:
    """`answers` of a run that nobody writes to."""
    with RunStore(path) as store:
        return answers(store.responses())
