"""The tables of the hub that RULER and NIAH read."""

from __future__ import annotations

from kvbench.benchmark import Source

ESSAYS = Source("baber/paul_graham_essays", split="train", columns=("text",))

SQUAD = Source(
    "rajpurkar/squad_v2",
    split="validation",
    columns=("title", "context", "question", "answers"),
)

HOTPOT = Source(
    "hotpotqa/hotpot_qa",
    "distractor",
    "validation",
    columns=("question", "answer", "context"),
)
