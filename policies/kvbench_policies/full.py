"""The full cache: nothing is evicted."""

from __future__ import annotations

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy

FULL = Policy(
    name="full",
    score=None,
    allocate=Uniform(),
    select=TopK(),
    summary="keeps everything; the reference for all other policies",
    moments=("context", "question", "decode", "chunked", "turns"),
    cost="nothing",
)
