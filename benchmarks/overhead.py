"""What does kvbench cost besides the model? Start-up, scoring and the report.

    python benchmarks/overhead.py [--repeats 5] [--cells 100] [--samples 100] [--markdown]

- Start-up: the commands and imports in new processes. The first one of each reads its files from
  the disk, if the system has not kept them; the others are warm, and their median is given. The
  modules that `python -X importtime` finds slowest, without what they import themselves, are named.
- Scoring and report: as `benchmarks/scale.py` measures them, on so many cells and samples.

`--cells 1000 --samples 1000` is a large run, and takes some minutes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a script, or as a module

from benchmarks.scale import TASKS, Shape, commands, measure, table_lines

FIRST_TOKEN = """
import os, sys
from kvbench.cli.app import main
from kvbench.engine import import_hook

def end_at_the_first_forward(loader, module):
    loader.exec_module(module)
    module.register_module_forward_pre_hook(lambda *_: os._exit(0))

import_hook.at_import("torch.nn.modules.module", end_at_the_first_forward)
sys.argv = ["kvbench", "run", "--policy", "snapkv", "--budget", "0.2", "--task", "niah_single_1", "--samples", "2",
    "--out", sys.argv[1], "--fresh"]
main()
"""
SCRATCH = "SCRATCH"
"""Stands for a folder to write to."""
STARTS = {
    "kvbench run, up to the first token": ["-c", FIRST_TOKEN, SCRATCH],
    "kvbench --help": ["-m", "kvbench", "--help"],
    "kvbench run --help": ["-m", "kvbench", "run", "--help"],
    "kvbench list policies": ["-m", "kvbench", "list", "policies"],
    "import kvbench": ["-c", "import kvbench"],
    "import kvbench; kvbench.load": ["-c", "import kvbench; kvbench.load"],
    "import kvbench; kvbench.run": ["-c", "import kvbench; kvbench.run"],
    "python": ["-c", ""],
}
STEPS = ("plan", "resume", "score", "load", "report", "table", "compare")
NAMED = 4
"""Slow modules that are named."""


def slowest(arguments: list[str]) -> list[tuple[str, float]]:
    """The modules that take longest to import, and their milliseconds."""
    command = [sys.executable, "-X", "importtime", *arguments]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    times = []
    for line in said.splitlines():
        own, _, name = line.removeprefix("import time:").split("|") if "|" in line else ("", "", "")
        if own.strip().isdecimal():
            times.append((name.strip(), int(own) / 1000))
    return sorted(times, key=lambda pair: -pair[1])[:NAMED]


def starts(repeats: int, scratch: str) -> Iterator[tuple[str, ...]]:
    """A row for each start: first and median wall time, CPU time, slowest modules."""
    for name, given in STARTS.items():
        arguments = [scratch if argument == SCRATCH else argument for argument in given]
        costs = [measure(name, [sys.executable, *arguments]) for _ in range(repeats + 1)]
        modules = ", ".join(f"{module} {ms:.0f}" for module, ms in slowest(arguments))
        yield (
            name,
            f"{1000 * costs[0].seconds:.0f}",
            f"{1000 * statistics.median(c.seconds for c in costs[1:]):.0f}",
            f"{1000 * statistics.median(c.cpu for c in costs[1:]):.0f}",
            modules,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cells", type=int, default=100)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = list(starts(given.repeats, scratch))
    head = ("start", "first: ms", "median: ms", "CPU: ms", "slowest modules: ms")
    print("\n".join(table_lines(head, rows, given.markdown)))
    policies = max(1, (given.cells // len(TASKS) - 1) // 9)
    budgets = max(1, (given.cells // len(TASKS) - 1) // policies)
    shape = Shape(policies, budgets, 1, given.samples)
    print(f"\n{shape.cells} cells x {shape.samples} samples, {shape.responses:,} responses\n")
    with tempfile.TemporaryDirectory() as scratch:
        steps = commands(Path(scratch) / "run", shape)
        costs = [measure(step, steps[step]) for step in ("fill", *STEPS)]
    head = ("step", "seconds", "of CPU", "peak memory: MiB")
    rows = [(c.step, f"{c.seconds:.1f}", f"{c.cpu:.1f}", f"{c.memory / 2**20:,.0f}") for c in costs[1:]]
    print("\n".join(table_lines(head, rows, given.markdown)))


if __name__ == "__main__":
    main()
