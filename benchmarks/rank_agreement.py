"""Do two models rank the policies alike? Spearman's rank correlation between two runs.

    python -m benchmarks.rank_agreement results/on-reference results/smollm2
    python -m benchmarks.rank_agreement results/leaderboard --published kvpress

For every moment and budget that both runs have, the policies of both are ranked by their mean over
the tasks of both. The interval draws the contexts of every task again, separately in the two runs,
and ranks anew. Tied policies share their mean rank.

With `--published`, the second ranking is that of the scores that a paper prints for the same
policies, moments and budgets (`kvbench published`), averaged over whatever it measured. They come
without samples, so the interval is that of the run alone.
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
from benchmarks.wrong_input import refused
from kvbench.papers.published.beside import MOMENTS
from kvbench.papers.published.results import SCORES, Figure, all_figures, paper
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
    frames = [f[(f["policy"] != "full") & f["score"].notna() & f["task"].isin(tasks)] for f in (first, second)]
    keys = ["moment", "budget"]
    rows = []
    for place in sorted(set.intersection(*(set(zip(f[keys[0]], f[keys[1]], strict=True)) for f in frames))):
        parts = [f[(f["moment"] == place[0]) & (f["budget"] == place[1])] for f in frames]
        policies = sorted(set(parts[0]["policy"]) & set(parts[1]["policy"]))
        means = [drawn_means(part, policies, seed) for seed, part in enumerate(parts)]
        rho = correlations(*means)
        lo, hi = np.nanquantile(rho[1:], [0.025, 0.975])
        rows.append((*place, len(policies), rho[0], lo, hi))
    return pd.DataFrame(rows, columns=[*keys, "policies", "rho", "lo", "hi"])


def published_agreement(samples: pd.DataFrame, figures: Sequence[Figure]) -> pd.DataFrame:
    """Rank correlations of a run with published scores.

    Args:
        samples: The frame of `samples.parquet`.
        figures: Published figures; those that are no scores of a policy at a moment do not count.

    Returns:
        As `agreement`.
    """
    scores: dict[tuple[str, str], dict[str, list[float]]] = {}
    for f in figures:
        if f.metric in SCORES and f.policy not in ("", "full") and f.setting in MOMENTS:
            place = scores.setdefault((MOMENTS[f.setting], f.kept), {})
            place.setdefault(f.policy, []).append(f.number)
    rows = []
    for (moment, budget), printed in sorted(scores.items()):
        part = samples[(samples["moment"] == moment) & (samples["budget"] == budget)]
        part = part[part["score"].notna()]
        policies = sorted(set(part["policy"]) & set(printed))
        if len(policies) < 2:
            continue
        means = drawn_means(part, policies, seed=0)
        others = np.array([[np.mean(printed[policy]) for policy in policies]])
        rho = correlations(means, np.repeat(others, len(means), axis=0))
        lo, hi = np.nanquantile(rho[1:], [0.025, 0.975])
        rows.append((moment, budget, len(policies), rho[0], lo, hi))
    return pd.DataFrame(rows, columns=["moment", "budget", "policies", "rho", "lo", "hi"])


@refused()
def main() -> None:
    """Print the correlations of two run folders, or of one with published scores."""
    parser = argparse.ArgumentParser(description="Do two models rank the policies alike?")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--published", metavar="PAPER", help="a name that `kvbench published` lists")
    args = parser.parse_args()
    if len(args.runs) != (1 if args.published else 2):
        parser.error("give two runs, or one run and --published PAPER")
    runs = [kvbench.load(run)[1] for run in args.runs]
    if args.published:
        found = published_agreement(runs[0], [f for f in all_figures() if f.paper == paper(args.published).name])
    else:
        found = agreement(*runs)
    if found.empty:
        raise SystemExit("no moment and budget has two policies of both")
    table = Table("moment", "budget", "policies", "rho", "95% interval")
    for row in found.itertuples():
        interval = f"{row.lo:+.2f} to {row.hi:+.2f}"
        table.add_row(row.moment, row.budget, str(row.policies), f"{row.rho:+.2f}", interval)
    Console().print(table)


if __name__ == "__main__":
    main()
