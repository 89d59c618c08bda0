"""What memory do the cells of a grid take, and do they stay within `--cache-memory`?

`python -m benchmarks.grid_memory --help`

A grid of six policies at five budgets runs under several limits, twice each: with copies of the entries that every cell
keeps (`KVBENCH_NATIVE=0`), and with cells that read them in the prefill of their context. The peak is all that torch's
allocator gave out at once while responses were generated: caches, and what the prefill, the scores and the decoding
need for themselves, which the limit is not about. Weights are left out.
"""

from __future__ import annotations

import argparse
import os
from unittest import mock

from rich.console import Console
from rich.table import Table

from benchmarks.grid import BUDGETS, POLICIES, TASKS, Ours
from benchmarks.memory import MIB
from benchmarks.wrong_input import refused
from kvbench import native

LIMITS = "4MB,16MB,32MB,64MB,128MB"


@refused()
def main() -> None:
    """Print rows and peak of every limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="reference")
    parser.add_argument("--task", default=TASKS)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=1, help="contexts of every task")
    parser.add_argument("--limits", default=LIMITS, help="values of --cache-memory")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    args = parser.parse_args()
    ours = Ours(args, args.samples)
    table = Table("limit", "rows: copies", "rows: shared", "peak: copies, MiB", "peak: shared, MiB", "ratio")
    for limit in args.limits.split(","):
        rows, peaks = [], []
        for switch in ("0", "1"):
            with mock.patch.dict(os.environ, {native.SWITCH: switch}):
                native.load.cache_clear()
                try:
                    ours.run(args.policies.split(","), args.budgets.split(","), True, limit)
                finally:
                    native.load.cache_clear()
            rows.append(str(ours.rows))
            peaks.append(ours.peak / MIB)
        table.add_row(limit, *rows, *(f"{peak:.1f}" for peak in peaks), f"{peaks[0] / peaks[1]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
