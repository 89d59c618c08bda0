"""What do runs of 100,000 to 10 million responses cost? Time and memory of store and report.

    python benchmarks/scale.py [--responses 100000] [--markdown] [--keep FOLDER]

A run folder is filled with synthetic responses by the project's own store: a grid of the reference
model (policies x budgets and the full cache on ten synthetic tasks), planned as `kvbench run` plans
it, in which every cell answers every prompt with the target or with a wrong word. No model runs.
Then every step is run as a user would run it, each in a process of its own:

- `plan`: what `kvbench run` does before it opens the folder. It is part of the next two steps;
- `resume`: `kvbench run --dry-run` reads all responses and finds that none is missing;
- `score`: `kvbench run` reads and scores all responses and writes both tables;
- `load`: `kvbench.load` of the cells and of the scores of all samples;
- `report`, `view`, `table`, `compare`: the commands; `view` writes the page that `report --html`
  writes, and the run is compared with itself;
- `load all`: `kvbench.load` of all columns, which takes gigabytes: only if `--steps` names it.

Memory is the peak RSS of the process, as the kernel counts it. Steps that are named by `--steps`
run on a folder that an earlier call has kept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue",
    "niah_multiquery", "vt", "cwe", "fwe", "niah_depth",
)  # fmt: skip
FIRST_LENGTH, STEP = 128, 32
MIB = 2**20
LARGE = {"policies": 30, "budgets": 10, "models": 5, "tasks": 60, "samples": 500}
"""The grid of a large paper."""
BATCH = 4096
"""Responses that are appended at a time."""
ONLY_NAMED = ("load all",)
"""Steps that a large run may have no memory for."""


@dataclass(frozen=True)
class Shape:
    """The size of a synthetic run.

    Attributes:
        policies: Policies besides the full cache.
        budgets: Budgets of each policy.
        lengths: Lengths of each of the ten tasks.
        samples: Samples of each task and length.
    """

    policies: int = 30
    budgets: int = 10
    lengths: int = 1
    samples: int = 500

    @classmethod
    def of(cls, responses: int, policies: int, budgets: int, samples: int) -> Shape:
        """The shape with about so many responses: fewer samples, or more lengths."""
        answers = (policies * budgets + 1) * len(TASKS)
        lengths = max(1, round(responses / (answers * samples)))
        fitting = max(1, round(responses / (answers * lengths)))
        return cls(policies, budgets, lengths, min(samples, fitting))

    @property
    def cells(self) -> int:
        """Cells of the whole run."""
        return (self.policies * self.budgets + 1) * len(TASKS) * self.lengths

    @property
    def responses(self) -> int:
        """Responses of the whole run."""
        return self.cells * self.samples

    def grid(self, out: Path) -> dict[str, Any]:
        """The grid, as `kvbench run --config` reads it."""
        return {
            "models": ["reference"],
            "policies": [f"snapkv:window={4 + i}" for i in range(self.policies)],
            "budgets": [f"{(i + 1) / (self.budgets + 1):.2f}" for i in range(self.budgets)],
            "tasks": list(TASKS),
            "lengths": [FIRST_LENGTH + STEP * i for i in range(self.lengths)],
            "samples": self.samples,
            "out": str(out),
        }


@dataclass(frozen=True)
class Cost:
    """What a step took.

    Attributes:
        step: Its name.
        seconds: Wall time.
        cpu: Seconds of the processor, which a machine that is shared does not change.
        memory: Peak RSS in bytes.
    """

    step: str
    seconds: float
    cpu: float
    memory: int


# --- the synthetic run ----------------------------------------------------------------------------


def fill(grid: dict[str, Any]) -> None:
    """Fill a run folder with the responses of a grid."""
    from kvbench.runs.grid import Grid
    from kvbench.runs.planning import plan
    from kvbench.runs.store import RunStore

    parsed = Grid.from_dict(grid)
    stages = plan(parsed, lambda _: None).stages
    with RunStore(parsed.path) as store:
        store.save_grid(parsed.to_dict())
        waiting: list[Any] = []
        for number, job in enumerate(job for stage in stages for job in stage.jobs):
            for response in responses(job, np.random.default_rng(number)):
                waiting.append(response)
                if len(waiting) == BATCH:
                    store.append(waiting)
                    waiting = []
        store.append(waiting)


def responses(job: Any, rng: np.random.Generator) -> Iterator[Any]:
    """Responses to all prompts of a job in the order of a run: context by context.

    A cell is right with a probability that grows with its budget, and the same contexts are hard
    for all of them.
    """
    from kvbench.runs.answers import empty

    shares = np.array([1.0 if c.is_full else float(str(c.budget)) for c in job.cells])
    for prompt in job.prompts:
        request, tokens = prompt.request, len(prompt.context_ids)
        hard = rng.random()
        right = rng.random(len(shares)) < 0.95 * shares ** (0.2 + hard)
        seconds = rng.random((len(shares), 2)) / 10
        for i, cell in enumerate(job.cells):
            text = " ".join(request.target if right[i] else request.target[1:])
            held = round(tokens * shares[i]) * 8
            yield replace(
                empty(cell, prompt),
                response=f" {text or 'nothing'}.",
                stop="eos",
                context_tokens=tokens,
                question_tokens=len(prompt.question_ids),
                generated_tokens=len(text.split()) + 2,
                budget_entries=held,
                held_entries=held,
                kv_bytes_live=512 * held,
                kv_bytes_allocated=512 * held + 4096,
                kv_bytes_full=512 * 8 * tokens,
                prefill_s=0.0061,
                compress_s=float(seconds[i, 0]),
                decode_s=float(seconds[i, 1]),
            )


# --- the steps ------------------------------------------------------------------------------------


def commands(folder: Path, shape: Shape) -> dict[str, list[str]]:
    """Every step on the run in a folder, as the command of a process."""
    sizes = [shape.policies, shape.budgets, shape.lengths, shape.samples]
    config = folder / "grid.yaml"
    kvbench = [sys.executable, "-m", "kvbench"]
    columns = "['cell', 'sample_id', 'question_id', 'repeat', 'score']"
    return {
        "fill": [sys.executable, __file__, "--fill", str(folder), *map(str, sizes)],
        "plan": [
            sys.executable,
            "-c",
            "import sys; from kvbench.runs.grid import Grid; "
            "from kvbench.runs.planning import plan; plan(Grid.from_yaml(sys.argv[1]), print)",
            str(config),
        ],
        "resume": [*kvbench, "run", "--config", str(config), "--dry-run"],
        "score": [*kvbench, "run", "--config", str(config), "--quiet"],
        "load": [
            sys.executable,
            "-c",
            f"import sys, kvbench; kvbench.load(sys.argv[1], columns={columns})",
            str(folder),
        ],
        "load all": [
            sys.executable,
            "-c",
            "import sys, kvbench; kvbench.load(sys.argv[1])",
            str(folder),
        ],
        "report": [*kvbench, "report", str(folder), "--quiet"],
        "view": [*kvbench, "view", str(folder), "--no-open"],
        "table": [*kvbench, "table", str(folder)],
        "compare": [*kvbench, "compare", str(folder), str(folder)],
    }


def measure(step: str, command: Sequence[str]) -> Cost:
    """Run a command and take its time and peak memory.

    Raises:
        RuntimeError: It failed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as said:
        start = time.monotonic()
        child = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.monotonic() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            said.seek(0)
            raise RuntimeError(f"{step} failed: {said.read()[-2000:].decode(errors='replace')}")
    return Cost(step, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


# --- what is printed ------------------------------------------------------------------------------


def lines(shape: Shape, folder: Path, costs: Sequence[Cost], markdown: bool) -> Iterator[str]:
    """The costs of the steps, what lies on the disk, and what a large grid would need."""
    count, large = shape.responses, int(np.prod([*LARGE.values()]))
    yield (
        f"{count:,} responses: {shape.cells:,} cells ({shape.policies} policies x {shape.budgets} "
        f"budgets and full, {len(TASKS)} tasks x {shape.lengths} lengths), {shape.samples} samples"
    )
    yield ""
    yield from table_lines(
        ("step", "seconds", "of CPU", "CPU: µs a response", "peak memory: MiB", "large grid: min"),
        [
            (
                c.step,
                f"{c.seconds:.1f}",
                f"{c.cpu:.1f}",
                f"{c.cpu / count * 1e6:.1f}",
                f"{c.memory / MIB:,.0f}",
                f"{c.cpu / count * large / 60:,.0f}",
            )
            for c in costs
        ],
        markdown,
    )
    yield ""
    sizes = {
        name: (folder / name).stat().st_size
        for name in ("responses.jsonl", "samples.parquet", "cells.parquet")
        if (folder / name).exists()
    }
    yield from table_lines(
        ("file", "MiB", "bytes a response", "GiB of a large grid"),
        [
            (name, f"{n / MIB:,.1f}", f"{n / count:.1f}", f"{n / count * large / 2**30:.1f}")
            for name, n in sizes.items()
        ],
        markdown,
    )
    yield ""
    grid = " x ".join(f"{n} {what}" for what, n in LARGE.items())
    yield f"A large grid is {grid} = {large:,} responses; its minutes of CPU are in proportion."


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> Iterator[str]:
    """A table for a terminal or in Markdown, whose first column holds names."""
    if markdown:
        yield f"| {' | '.join(head)} |"
        yield f"| {' | '.join(['---', *['--:'] * (len(head) - 1)])} |"
        yield from (f"| {' | '.join([f'`{row[0]}`', *row[1:]])} |" for row in rows)
        return
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        cells = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *cells])


def main() -> None:
    """Fill a folder, run the steps, and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--responses", type=int, default=100_000)
    parser.add_argument("--policies", type=int, default=30)
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--samples", type=int, default=500, help="at most, of a task and length")
    parser.add_argument("--keep", type=Path, help="a folder that is filled once and stays")
    parser.add_argument("--steps", nargs="+", help="default: all but load all")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--fill", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    shape = Shape.of(given.responses, given.policies, given.budgets, given.samples)
    if given.fill:
        folder, *sizes = given.fill
        fill(Shape(*map(int, sizes)).grid(Path(folder)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch) / "run"
        costs = []
        steps = commands(folder, shape)
        if unknown := sorted({*(given.steps or ())} - {*steps}):
            parser.error(f"no step {unknown[0]!r}; choose from {', '.join(steps)}")
        for step, command in steps.items():
            skipped = step not in given.steps if given.steps else step in ONLY_NAMED
            if folder.exists() if step == "fill" else skipped:
                continue
            costs.append(measure(step, command))
            cost = costs[-1]
            print(
                f"{step}: {cost.seconds:.1f} s, CPU {cost.cpu:.1f} s, {cost.memory / MIB:,.0f} MiB",
                file=sys.stderr,
            )
        print("\n".join(lines(shape, folder, costs, given.markdown)))


if __name__ == "__main__":
    main()
