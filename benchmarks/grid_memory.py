"""Does a grid stay within `--cache-memory`? `python -m benchmarks.grid_memory --help`.

A grid of six policies at five budgets runs under several limits. The peak is all that torch's
allocator gave out at once while responses were generated: caches, and what the prefill, the scores
and the decoding need for themselves, which the limit is not about. Weights are left out.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from benchmarks.grid import BUDGETS, POLICIES, TASKS, Ours
from benchmarks.memory import MIB

LIMITS = "4MB,16MB,32MB,64MB,128MB"


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
    table = Table("limit", "rows of a batch", "peak: MiB")
    for limit in args.limits.split(","):
        ours.run(args.policies.split(","), args.budgets.split(","), True, limit)
        table.add_row(limit, str(ours.rows), f"{ours.peak / MIB:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
