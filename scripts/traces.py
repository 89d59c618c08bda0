"""Texts that a model wrote itself, to train gates on: `python -m scripts.traces RUN FILE.jsonl`.

RUN is a run of the full cache. A line of FILE is a prompt with its answer, for `kvbench train gates --data FILE`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from kvbench.runs.grid import Grid
from kvbench.runs.planning import plan
from kvbench.runs.store import RunStore

LEAST = 64
"""Tokens that an answer has at least."""


def traces(run: Path) -> list[str]:
    """Return the prompts of a run with their long answers, in a fixed random order."""
    stages = plan(Grid.from_yaml(run / "grid.yaml"), lambda text: None).stages
    prompts = {
        (cell.cell, prompt.request.sample_id, prompt.request.question_id): prompt.request.context
        + prompt.request.question
        for stage in stages
        for job in stage.jobs
        for cell in job.cells
        for prompt in job.prompts
        if cell.is_full
    }
    with RunStore(run) as store:
        texts = [
            prompts[key] + response.response
            for response in store.responses()
            if (key := (response.cell, response.sample_id, response.question_id)) in prompts
            and response.generated_tokens >= LEAST
        ]
    random.Random(0).shuffle(texts)
    return texts


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    lines = [json.dumps({"text": text}) for text in traces(arguments.run)]
    arguments.file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"wrote {len(lines)} texts to {arguments.file}")


if __name__ == "__main__":
    main()
