"""Paul Graham's essays, the haystack of RULER's needles."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from kvbench.benchmark import Source
from kvbench.data.sources import rows
from kvbench.errors import NeedsHub

ESSAYS = Source("baber/paul_graham_essays", split="train", columns=("text",))


@functools.lru_cache(maxsize=2)
def essays(cache_dir: Path) -> tuple[tuple[str, ...], ...]:
    """Return the essays as sentences, each a tuple of words; empty if the hub is not reachable."""
    try:
        records = rows(ESSAYS, cache_dir)
    except NeedsHub:
        return ()
    joined_text = " ".join(" ".join(record["text"] for record in records).split())
    return tuple(tuple(sentence.split()) for sentence in re.split(r"(?<=[.!?]) ", joined_text) if sentence)
