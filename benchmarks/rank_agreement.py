"""Do two models rank the policies alike? Spearman's rank correlation between two runs.

    python -m benchmarks.rank_agreement results/on-reference results/smollm2

For every moment and budget that both runs have, the policies of both are ranked by their mean over
the tasks of both. The interval draws the contexts of every task again, separately in the two runs,
and ranks anew. Tied policies share their mean rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

import kvbench
from kvbench.stats import Floats

DRAWS = 2000


def drawn_means(samples: pd.DataFrame, policies: Sequence[str], seed: int) -> Floats:
    """Means over tasks, `[1 + DRAWS, policies]`: of all contexts first, then of those drawn."""
    random = np.random.default_rng(seed)
    of_tasks = []
    for _, part in samples.groupby("task", sort=True):
        wide = part.pivot_table("score", "context_id", "policy")[list(policies)].dropna()
        n = len(wide)
        counts = random.multinomial(n, [1 / n] * n, size=DRAWS)
        of_tasks.append(np.vstack([np.ones(n), counts]) @ wide.to_numpy() / n)
    means: Floats = np.mean(of_tasks, axis=0)
    return means


def correlations(a: Floats, b: Floats) -> Floats:
    """Spearman's rank correlation of each pair of rows; NaN if one of the two does not vary."""
    x, y = (pd.DataFrame(m).rank(axis=1).to_numpy() for m in (a, b))
    x, y = (m - m.mean(1, keepdims=True) for m in (x, y))
    with np.errstate(invalid="ignore"):
        found: Floats = (x * y).sum(1) / np.sqrt((x**2).sum(1) * (y**2).sum(1))
    return found


def agreement(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Rank correlations of two runs.

    Args:
        first, second: Frames of `samples.parquet`.

    Returns:
        A row per (moment, budget) with `policies`, `rho`, `lo` and `hi`.
    """
    tasks = set(first["task"]) & set(second["task"])
    frames = [
        f[(f["policy"] != "full") & f["score"].notna() & f["task"].isin(tasks)]
        for f in (first, second)
    ]
    keys = ["moment", "budget"]
    rows = []
    for place in sorted(
        set.intersection(*(set(zip(f[keys[0]], f[keys[1]], strict=True)) for f in frames))
    ):
        parts = [f[(f["moment"] == place[0]) & (f["budget"] == place[1])] for f in frames]
        policies = sorted(set(parts[0]["policy"]) & set(parts[1]["policy"]))
        means = [drawn_means(part, policies, seed) for seed, part in enumerate(parts)]
        rho = correlations(*means)
        lo, hi = np.nanquantile(rho[1:], [0.025, 0.975])
        rows.append((*place, len(policies), rho[0], lo, hi))
    return pd.DataFrame(rows, columns=[*keys, "policies", "rho", "lo", "hi"])


def main() -> None:
    """Print the correlations of two run folders."""
    parser = argparse.ArgumentParser(description="Do two models rank the policies alike?")
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN")
    first, second = (kvbench.load(run)[1] for run in parser.parse_args().runs)
    table = Table("moment", "budget", "policies", "rho", "95% interval")
    for row in agreement(first, second).itertuples():
        interval = f"{row.lo:+.2f} to {row.hi:+.2f}"
        table.add_row(row.moment, row.budget, str(row.policies), f"{row.rho:+.2f}", interval)
    Console().print(table)


if __name__ == "__main__":
    main()
