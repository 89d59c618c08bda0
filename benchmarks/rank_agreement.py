"""Do two models rank the policies alike? Spearman's rank correlation between two runs.

    python -m benchmarks.rank_agreement results/on-reference results/smollm2

For every moment and budget that both runs have, the policies of both are ranked by their mean over
the tasks of both. The interval draws the contexts of every task again, separately in the two runs,
and ranks anew; ties share their mean rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

import kvbench
from kvbench.stats import Floats

DRAWS = 2000


@dataclass(frozen=True)
class Scores:
    """Scores of the policies of a run at one moment and budget, `[policies, contexts]` by task."""

    by_task: dict[str, Floats]

    @classmethod
    def of(cls, samples: pd.DataFrame, policies: Sequence[str]) -> Scores:
        """Read them; contexts that a policy has not answered are left out."""
        wide = samples.pivot_table("score", "policy", ["task", "context_id"]).loc[list(policies)]
        wide = wide.dropna(axis=1)
        return cls(
            {
                str(task): part.to_numpy()
                for task, part in wide.T.groupby("task", sort=True)
                for part in [part.T]
            }
        )

    def means(self, random: np.random.Generator | None = None) -> Floats:
        """The mean over tasks of every policy; with `random`, of contexts drawn again."""
        of_tasks = []
        for scores in self.by_task.values():
            n = scores.shape[1]
            chosen = np.arange(n) if random is None else random.integers(0, n, n)
            of_tasks.append(scores[:, chosen].mean(1))
        return np.mean(of_tasks, axis=0)


def correlation(a: Floats, b: Floats) -> float:
    """Spearman's rank correlation; NaN if one of the two does not vary."""
    ranks = pd.DataFrame({"a": a, "b": b}).rank()
    return float(ranks["a"].corr(ranks["b"]))


def agreement(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Rank correlations of two runs.

    Args:
        first, second: Frames of `samples.parquet`.

    Returns:
        A row per (moment, budget) with `policies`, `rho`, `lo` and `hi`.
    """
    frames = [f[(f["policy"] != "full") & f["score"].notna()] for f in (first, second)]
    tasks = set(frames[0]["task"]) & set(frames[1]["task"])
    frames = [f[f["task"].isin(tasks)] for f in frames]
    keys = ["moment", "budget"]
    both = sorted(set.intersection(*(set(map(tuple, f[keys].to_numpy())) for f in frames)))
    rows = []
    for moment, budget in both:
        parts = [f[(f["moment"] == moment) & (f["budget"] == budget)] for f in frames]
        policies = sorted(set(parts[0]["policy"]) & set(parts[1]["policy"]))
        one, two = (Scores.of(part, policies) for part in parts)
        random = np.random.default_rng(0)
        drawn = [correlation(one.means(random), two.means(random)) for _ in range(DRAWS)]
        lo, hi = np.nanquantile(drawn, [0.025, 0.975])
        rho = correlation(one.means(), two.means())
        rows.append((moment, budget, len(policies), rho, lo, hi))
    return pd.DataFrame(rows, columns=[*keys, "policies", "rho", "lo", "hi"])


def main() -> None:
    """Print the correlations of two run folders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN")
    frames = [kvbench.load(run)[1] for run in parser.parse_args().runs]
    table = Table("moment", "budget", "policies", "rho", "95% interval")
    for row in agreement(*frames).itertuples():
        interval = f"{row.lo:+.2f} to {row.hi:+.2f}"
        table.add_row(row.moment, row.budget, str(row.policies), f"{row.rho:+.2f}", interval)
    Console().print(table)


if __name__ == "__main__":
    main()
