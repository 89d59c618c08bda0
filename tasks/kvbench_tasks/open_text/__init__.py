"""Open prompts about texts that ship: summarise, continue, explain. They have no reference answers. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import FIDELITY, Benchmark, Doc

TEXTS = Path(__file__).parent / "texts"

QUESTIONS = {
    "open_summary": "Summarise the text above in three sentences.",
    "open_explain": "Explain to a child what the text above is about, and why it matters.",
}
"""What follows a text, by task."""

LEAD = 12
"""Words at the end of a part of a text that are its question in `open_continue`: they are never evicted."""

PART = 0.75
"""Fraction of a text that is continued."""


def docs(leaf: str, **_: Any) -> list[Doc]:
    """Return a row per text; see `Benchmark.docs`."""
    return [_row(leaf, path) for path in sorted(TEXTS.glob("*.txt"))]


def _row(leaf: str, path: Path) -> Doc:
    text = path.read_text(encoding="utf-8").strip()
    row = {"outputs": [], "extra": {"text": path.stem}}
    if leaf in QUESTIONS:
        return {**row, "context": f"{text}\n\n", "question": QUESTIONS[leaf]}
    words = text.split(" ")
    end = int(PART * len(words))
    return {**row, "context": " ".join(words[: end - LEAD]), "question": " " + " ".join(words[end - LEAD : end])}


BENCHMARK = Benchmark(
    name="open_text",
    leaves=("open_summary", "open_continue", "open_explain"),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Summarise, continue and explain texts that ship; scored by fidelity to the full cache",
    source="ours (kvbench)",
    licence="Apache-2.0",
    metric=FIDELITY,
    sized=False,
    lexicons=("natural",),
    plain=frozenset({"open_continue"}),
)
