"""Samples chosen by the length of their prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.engine.loading import load_tokenizer
from kvbench.errors import LeftOut, UserError
from kvbench.runs.grid import Grid
from kvbench.runs.planning import plan
from kvbench.runs.prompt_lengths import TokenRange, select_by_length


@pytest.mark.parametrize(
    ("spelling", "inside", "outside", "canonical"),
    [
        ("8001-", (8001, 10**7), (0, 8000), "8001-"),
        ("-4096", (0, 4096), (4097,), "-4096"),
        ("40-80", (40, 60, 80), (39, 81), "40-80"),
        ("007-9", (7, 9), (6, 10), "7-9"),
    ],
)
def test_both_ends_of_a_range_belong_to_it(
    spelling: str, inside: tuple[int, ...], outside: tuple[int, ...], canonical: str
) -> None:
    token_range = TokenRange.parse(spelling)
    assert all(count in token_range for count in inside) and not any(count in token_range for count in outside)
    assert str(token_range) == canonical and TokenRange.parse(canonical) == token_range


@pytest.mark.parametrize("spelling", ["", "-", "8000", "80-40", "-0", "a-b", "1-2-3", "1.5-", "9999999999-"])
def test_what_is_no_range_is_one_line(spelling: str) -> None:
    with pytest.raises(UserError, match="use 8001-, -4096 or 4000-8000"):
        Grid.from_dict({"policies": "knorm", "tasks": "vt", "prompt_tokens": spelling or " "})


def test_the_questions_of_a_sample_stay_together() -> None:
    class Asked:
        def __init__(self, sample_id: str, tokens: int) -> None:
            self.sample_id, self.tokens = sample_id, tokens

    asked: list[Any] = [Asked(name, n) for name, n in (("a", 3), ("a", 9), ("b", 5), ("c", 9), ("c", 2), ("d", 30))]
    selected = select_by_length(asked, TokenRange(8, 20), lambda request: request.tokens)  # type: ignore[attr-defined]
    assert [*selected] == selected[:] == [asked[i] for i in (0, 1, 3, 4)] and selected[-1] is asked[4]
    with pytest.raises(LeftOut, match=r"none of its 4 samples has a prompt of 31- tokens; they have 5 to 30"):
        select_by_length(asked, TokenRange(31), lambda request: request.tokens)  # type: ignore[attr-defined]


def test_a_run_has_only_the_samples_of_the_range(tmp_path: Path) -> None:
    texts = [" ".join(["red house"] * count) for count in (5, 40, 10, 60, 20)]
    file = tmp_path / "mine.jsonl"
    rows = [{"context": text, "question": " What?", "answers": "x", "max_new_tokens": 2} for text in texts]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    tokenizer = load_tokenizer("reference")
    counts = [len(tokenizer(text + " What?")["input_ids"]) for text in texts]
    limit = sorted(counts)[2]
    options = {"policies": "knorm", "budgets": "0.5", "models": "reference", "tasks": str(file), "samples": 4}
    said: list[str] = []
    planned = plan(Grid.from_dict({**options, "prompt_tokens": f"{limit}-"}), said.append)
    (job,) = planned.stages[0].jobs
    expected = [index for index, count in enumerate(counts[:4]) if count >= limit]
    assert [prompt.request.doc_id for prompt in job.prompts] == expected == [1, 3]
    assert [request.doc_id for request in job.task.requests] == expected, "scores expect no others"
    assert any("2 of 4 prompts have" in line for line in said)
    everything = Grid.from_dict(options)
    assert (
        "prompt_tokens" not in json.dumps(everything.digest)
        and everything.digest != Grid.from_dict({**options, "prompt_tokens": "1-"}).digest
    )
    with pytest.raises(UserError, match="nothing to run"):
        plan(Grid.from_dict({**options, "prompt_tokens": "5000-"}), said.append)
    assert any("none of its 4 samples has a prompt of 5000- tokens" in line for line in said)
