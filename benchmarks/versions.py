"""Does a version of kvbench cost more than an older one? Both run the same grids in turn.

    git worktree add --detach ../old COMMIT
    pip install --no-deps --target ../old-installed ../old
    python -m benchmarks.versions ../old-installed [--case grid,decode] [--rounds 5]

Each version runs in a process of its own, with the packages of this environment and one thread.
A case is a whole `kvbench.run`, from plan to tables, in CPU seconds; each process runs it once before it counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_NEEDLES = {"task": "niah_single_1,niah_single_2,niah_single_3,niah_multikey_1", "samples": 8}
_GRID = {"policy": "streaming_llm,snapkv,h2o,keydiff,adakv,criticalkv", "budget": "0.1,0.2,0.3,0.4,0.5"}
_FOUR = {"policy": "snapkv,h2o,keydiff,trimkv", "budget": "0.2,0.4", "samples": 8}
_SMOLLM2 = {"model": "smollm2", "task": "niah_single_2", "samples": 2}

CASES: dict[str, dict[str, Any]] = {
    "full": {**_NEEDLES, "policy": "full", "samples": 16},
    "grid": {**_NEEDLES, **_GRID},
    "question": {**_NEEDLES, **_GRID, "moment": "question"},
    "decode": {
        **_FOUR,
        "policy": "streaming_llm,snapkv,h2o,tova,rkv,trimkv,dbtrimkv",
        "budget": "32,64",
        "task": "longgen_list",
        "moment": "decode",
    },
    "chunked": {**_NEEDLES, **_FOUR, "moment": "chunked:256"},
    "turns": {**_FOUR, "task": "dialogue", "moment": "turns"},
    "quantised": {**_NEEDLES, "policy": "snapkv:bits=4,h2o:bits=4,keydiff:bits=2", "budget": "0.2,0.4"},
    "merged": {**_NEEDLES, "policy": "d2o,cam", "budget": "0.2,0.4"},
    "vision": {**_FOUR, "model": "reference-vl", "task": "shapes_dialogue", "length": 256, "moment": "turns"},
    "smollm2-full": {**_SMOLLM2, "policy": "full", "samples": 4},
    "smollm2": {**_SMOLLM2, **_GRID},
}
"""Settings of a grid by the name of the case; otherwise the reference model answers contexts of 1024 tokens."""


def serve() -> None:
    """Run a case for each line of standard input; print its CPU seconds."""
    import torch

    import kvbench

    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        settings = {"model": "reference", "length": 1024, "dtype": "float32", "device": "cpu", **CASES[line.strip()]}
        with tempfile.TemporaryDirectory() as out:
            began = time.process_time()
            run = kvbench.run({**settings, "out": f"{out}/run"}, progress=False)
            seconds = time.process_time() - began
        print(json.dumps({"seconds": seconds, "failed": len(run.failed)}), flush=True)


class Version:
    """A version in a process of its own.

    Args:
        installed: Folder that it is installed in; empty for the version of this environment.
    """

    def __init__(self, installed: str) -> None:
        self.process = subprocess.Popen(
            # -P: transformers would take kernels.py, beside this script, for a package that it can use.
            [sys.executable, "-P", str(Path(__file__).absolute()), installed, "--serve"],
            cwd=installed or None,  # kvbench looks for plugins in the working directory, too
            env={**os.environ, "PYTHONPATH": installed, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a version ended; its last lines say why")
        return line

    def seconds(self, case: str) -> float:
        """Return the CPU seconds of a case."""
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        found = json.loads(self._line())
        if found["failed"]:
            raise SystemExit(f"{found['failed']} cells of {case} failed")
        return float(found["seconds"])


def main() -> None:
    """Print CPU seconds of both versions, and the ratios of their pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", help="folder that the older version is installed in")
    parser.add_argument("--case", default=",".join(CASES), help="of: " + ", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    if not Path(args.old).is_dir():
        parser.error(f"no folder {args.old}; install the older version into it")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if unknown := sorted({*args.case.split(",")} - {*CASES}):
        parser.error(f"no case {unknown[0]!r}; choose from {', '.join(CASES)}")
    old, new = Version(str(Path(args.old).absolute())), Version("")
    print("| case | old: CPU s | new: CPU s | new to old |\n| --- | --: | --: | --: |", flush=True)
    for case in args.case.split(","):
        for version in (old, new):
            version.seconds(case)
        pairs = [(old.seconds(case), new.seconds(case)) for _ in range(args.rounds)]
        ratios = sorted(after / before for before, after in pairs)
        before, after = (sorted(side)[len(pairs) // 2] for side in zip(*pairs, strict=True))
        found = f"{ratios[len(ratios) // 2]:.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
        print(f"| `{case}` | {before:.2f} | {after:.2f} | {found} |", flush=True)


if __name__ == "__main__":
    main()
