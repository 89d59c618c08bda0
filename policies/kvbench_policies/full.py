"""The full cache: nothing is evicted."""

from __future__ import annotations

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy

FULL = Policy(
    name="full",
    score=None,
    allocate=Uniform(),
    select=TopK(),
    summary="keeps everything: the reference that the others are compared with",
    moments=("context", "question", "decode", "chunked", "turns"),
    cost="nothing",
)
