"""How much faster is a run on Ray workers than in one process? Timed in turn, on this machine.

    python -m benchmarks.ray_speed [--workers 2] [--samples 300] [--rounds 3]

The same command line runs a grid on the reference model in one process and on Ray, alternately,
each in a fresh folder with one thread per process. Both must give the same responses, or nothing is
reported. Two times are taken of each run:

- the whole command, with the start of Python, kvbench, Ray and its workers;
- generation: from the first response in the journal to the last one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.faults import entries

GRID = (
    *("--policy", "snapkv,streaming_llm,h2o,knorm,tova", "--budget", "0.1,0.2,0.4"),
    *("--task", "niah_single_1,niah_single_2,niah_single_3,niah_multikey_1", "--length", "512"),
)


def timed(out: Path, samples: int, *where: str) -> tuple[float, float]:
    """Seconds of the whole command and of its generation."""
    command = [sys.executable, "-m", "kvbench", "run", *GRID, "--samples", str(samples), "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    process = subprocess.Popen([*command, "--out", str(out), *where], env=environment, stdout=subprocess.DEVNULL)
    first = last = began
    size, file = 0, out / "responses.jsonl"
    while process.poll() is None:
        time.sleep(0.02)
        written = file.stat().st_size if file.exists() else 0
        if written > size:
            last = time.perf_counter()
            first = first if size else last
            size = written
    if process.returncode:
        raise SystemExit(f"the run ended with status {process.returncode}")
    return time.perf_counter() - began, last - first


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=300, help="per task")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    on_ray = ("--executor", "ray", "--workers", str(given.workers))
    print("| round | local | Ray | ratio | generation, local | Ray | ratio |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory() as name:
            here, there = Path(name) / "local", Path(name) / "ray"
            local, ray = timed(here, given.samples), timed(there, given.samples, *on_ray)
            if dict(entries(here)) != dict(entries(there)):
                print("the responses differ, so no time is reported")
                return 1
        cells = [f"{a:.1f} s | {b:.1f} s | {a / b:.2f}" for a, b in zip(local, ray, strict=True)]
        print(f"| {number + 1} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
