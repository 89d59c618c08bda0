"""Open prompts: to the character, with texts long enough to be compressed, and only measured with fidelity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import UserError
from kvbench.runs.runner import execute
from kvbench_tasks.open_text import BENCHMARK, TEXTS

from ...kvbench.runs.small import small_grid
from ...loading import load_task

BEES = (TEXTS / "bees.txt").read_text(encoding="utf-8").strip()


def test_prompts_are_the_text_and_what_is_asked(tmp_path: Path, bpe_tokenizer: Any) -> None:
    for leaf, question in (
        ("open_summary", "Summarise the text above in three sentences."),
        ("open_explain", "Explain to a child what the text above is about, and why it matters."),
    ):
        task = load_task(leaf, BENCHMARK, bpe_tokenizer, tmp_path, samples=50, chat_template=True)
        first = task.requests[0]
        assert (len(task.requests), task.metric, first.target, first.max_new_tokens) == (8, "kl", (), 64)
        assert first.context == f"<|bos|><|im_start|>user\n{BEES}\n\n"
        assert first.question == f"{question}<|im_end|>\n<|im_start|>assistant\n"


def test_a_text_is_continued_after_three_quarters_without_a_template(tmp_path: Path, bpe_tokenizer: Any) -> None:
    task = load_task("open_continue", BENCHMARK, bpe_tokenizer, tmp_path, samples=50, chat_template=True)
    first = task.requests[0]
    text = (first.context + first.question).removeprefix("<|bos|>")
    assert BEES.startswith(text)
    assert len(text.split(" ")) == int(0.75 * len(BEES.split(" ")))
    assert len(first.question.split()) == 12


def test_texts_are_several_hundred_tokens_long_and_differ(bpe_tokenizer: Any) -> None:
    texts = [path.read_text(encoding="utf-8") for path in TEXTS.glob("*.txt")]
    assert len(texts) == len({text[:40] for text in texts}) == 8
    assert all(400 < len(text.split()) < 500 for text in texts)


def test_a_run_needs_fidelity_and_scores_by_it(tmp_path: Path, llama_folder: str) -> None:
    settings: Any = {"model": llama_folder, "task": "open_continue", "policy": "knorm", "max_new_tokens": 4}
    settings |= {"samples": 2, "budget": "0.2", "cache_memory": "64MB"}
    with pytest.raises(UserError, match="open_continue has no reference answers; add --fidelity, which needs none"):
        execute(small_grid(tmp_path, **settings))
    cells = execute(small_grid(tmp_path, **settings, fidelity=True)).cells.set_index("policy")
    assert set(cells["status"]) == {"ok"}
    assert cells["score"].to_dict() == cells["kl"].to_dict()
    assert cells.loc["full", "kl"] < 1e-6 < 0.01 < cells.loc["knorm", "kl"]
    assert not cells["higher_is_better"].any()
    assert cells["discriminative"].all()
