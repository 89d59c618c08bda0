"""The prompts of a task are read one at a time, and are the same each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.runs.grid import Grid
from kvbench.runs.planning import plan
from kvbench.runs.prompts import Prompts


def planned(folder: Path, rows: int, words: int, **changes: Any) -> Prompts:
    file = folder / f"own{rows}.jsonl"
    with file.open("w") as out:
        for i in range(rows):
            row = {"context": f"key {i} {'stone ' * words}", "question": "Key?", "answers": ["a"]}
            out.write(json.dumps(row | {"max_new_tokens": 2}) + "\n")
    given = {"tasks": str(file), "policies": "full", "samples": rows, "repeats": 1}
    (stage,) = plan(Grid.from_dict(given | changes), print).stages
    return stage.jobs[0].prompts


def test_every_reading_gives_the_same_prompts(tmp_path: Path) -> None:
    prompts = planned(tmp_path, 6, 30)
    assert [*prompts] == [prompts[i] for i in range(6)] == prompts[:]
    assert [*prompts.part([4, 1])] == [prompts[4], prompts[1]]
    lengths = [(len(p.context_ids), len(p.question_ids)) for p in prompts]
    assert prompts.lengths() == lengths and prompts.part([4, 1]).lengths() == [
        lengths[4],
        lengths[1],
    ]
    assert prompts.longest == max(len(p.ids) for p in prompts)
    assert prompts.limit == 2 and not prompts.shows and not prompts.dialogues
    assert all(p.request.context.startswith(f"key {i} ") for i, p in enumerate(prompts))


def test_repeats_follow_each_other(tmp_path: Path) -> None:
    prompts = planned(tmp_path, 3, 5, repeats=2, temperature=0.5)
    assert [(p.request.doc_id, p.repeat) for p in prompts] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip


MEASURE = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_prompts import planned
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
planned(Path(sys.argv[2]), 5, 400)
before = peak()
prompts = planned(Path(sys.argv[2]), int(sys.argv[3]), 400)
assert len(prompts) == int(sys.argv[3])
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kB on Linux")
@pytest.mark.slow
def test_planning_takes_little_more_than_the_data_once(tmp_path: Path) -> None:
    """12,000 contexts of 2.4 kB: 29 MB of text, whose token ids alone would take 170 MB."""
    command = [sys.executable, "-c", MEASURE, str(Path(__file__).parent), str(tmp_path), "12000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert int(done.stdout.splitlines()[-1]) < 130e6


def test_prompts_of_unknown_words_are_reported(tmp_path: Path) -> None:
    said: list[str] = []
    own = tmp_path / "own.jsonl"
    own.write_text(
        json.dumps({"context": "Zymurgists ferment barley malt", "question": "Who?", "answers": ["z"]}) + "\n"
    )
    plan(Grid(policies="snapkv", tasks=[str(own)], out=str(tmp_path / "run")), said.append)
    assert any("of the prompts' tokens are words that the model does not know" in line for line in said)
    said.clear()
    plan(Grid(policies="snapkv", tasks=["vt"], samples=2, out=str(tmp_path / "other")), said.append)
    assert not any("know" in line for line in said)
