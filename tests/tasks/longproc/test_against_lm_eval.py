"""Our scores against those of lm-eval's port of LongProc's main branch, on damaged answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from lm_eval.tasks.longproc import metrics as theirs

from kvbench_tasks.longproc.metric import score

FIXTURES = Path(__file__).parent / "fixtures"
SCORERS = {
    "countdown_0.5k": theirs.process_results_countdown,
    "path_traversal_0.5k": theirs.process_results_path_traversal,
    "tom_tracking_0.5k": theirs.process_results_tom_tracking,
    "html_to_tsv_0.5k": theirs.process_results_html_to_tsv,
    "travel_planning_2k": theirs.process_results_travel_planning,
}


def damaged(text: str, rng: random.Random) -> str:
    """The text with up to five places deleted, doubled or overwritten, or its lines in disorder."""
    if rng.random() < 0.2:
        lines = text.split("\n")
        rng.shuffle(lines)
        text = "\n".join(lines)
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        at = rng.randrange(len(text))
        rest = text[at + rng.choice([0, 1, 1, 4]) :]
        text = text[:at] + rng.choice(["", *'0123456789+-*/=\t\n "x.S<>']) + rest
    return text


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORERS)
def test_scores_agree(name: str) -> None:
    rng = random.Random(name)
    found = []
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (FIXTURES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    for row in rows:
        reference, metadata = row["reference_output"], row["metadata"]
        answer = {
            "path_traversal_0.5k": f"<Route>\n{reference}\n</Route>",
            "html_to_tsv_0.5k": f"```tsv\n{reference}```",
        }.get(name, reference)
        given = {"reference_output": reference, "metadata_parsed": json.loads(metadata)}
        doc = {"kind": name.rpartition("_")[0], "outputs": [reference], "metadata": metadata}
        for _ in range(300):
            response = damaged(answer, rng)
            ours = score(doc, [response])["score"]
            assert ours == pytest.approx(SCORERS[name](given, [response])["score"]), response
            found.append(ours)
    assert 0.1 < sum(found) / len(found) < 0.9  # both verdicts have been met
