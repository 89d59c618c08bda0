"""How well few contexts rank policies, by score and by fidelity: `python -m scripts.rank_correlation RUN TABLE`.

RUN has fidelity, and TABLE is a run of the same policies, budgets and tasks on more samples. From RUN, n contexts are
drawn many times, and the policies' means over them are correlated (Spearman) with their scores in TABLE on the contexts
that RUN does not have.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pandas as pd

from kvbench.runs.load import load_frames
from kvbench.stats import Floats

DRAWS = 500
COUNTS = (1, 2, 4, 8, 12, 24, 84)
METRICS = {"task score": None, "kl": "kl", "log_kl": "log_kl", "agreement": "agreement", "nll_diff": "nll_diff"}
_COLUMNS = ("cell", "task", "policy", "budget", "moment", "sample_id", "score")


def rank_correlations(run: Path, table: Path, *, without: Collection[str] = (), draws: int = DRAWS) -> pd.DataFrame:
    """Return mean and 10th percentile of Spearman's correlation, by budget, metric and number of contexts.

    Args:
        without: Policies to leave out, such as those that read another head profile in the two runs.
    """
    rows = []
    samples = {label: _compressed(load_frames(run, _COLUMNS, metric=metric)) for label, metric in METRICS.items()}
    reference = _compressed(load_frames(table, _COLUMNS))
    drawn_contexts = set(zip(samples["task score"]["task"], samples["task score"]["sample_id"], strict=True))
    is_drawn = [key in drawn_contexts for key in zip(reference["task"], reference["sample_id"], strict=True)]
    reference = reference[~np.array(is_drawn) & reference["task"].isin(set(samples["task score"]["task"]))]
    for budget in dict.fromkeys(samples["task score"]["budget"]):
        for label, frame in samples.items():
            wide = frame[frame["budget"] == budget].pivot_table("score", ["task", "sample_id"], "policy")
            truth = reference[reference["budget"] == budget].pivot_table("score", "task", "policy").mean()
            policies = [policy for policy in wide.columns if policy in truth.index and policy not in without]
            sign = 1.0 if label in ("task score", "agreement") else -1.0
            for count in (count for count in COUNTS if count <= len(wide)):
                values = sign * wide[policies].to_numpy(dtype=np.float64)
                correlations = _drawn(values, truth[policies].to_numpy(dtype=np.float64), count, draws)
                mean, low = float(np.mean(correlations)), float(np.quantile(correlations, 0.1))
                rows.append((budget, len(policies), label, count, mean, low))
    return pd.DataFrame(rows, columns=["budget", "policies", "metric", "contexts", "mean", "p10"])


def _compressed(frames: tuple[pd.DataFrame, pd.DataFrame]) -> pd.DataFrame:
    """Return the samples of policies that evict before the question and do not see the answer."""
    cells, samples = frames
    is_compared = (cells["policy"] != "full") & ~cells["informed"] & (cells["moment"] == "context")
    return samples[samples["cell"].isin(cells.loc[is_compared, "cell"])]


def _drawn(values: Floats, truth: Floats, count: int, draws: int) -> Floats:
    """Return Spearman's correlation of the policies' means over drawn contexts with their true scores, for each draw.

    Args:
        values: `[contexts, policies]`, larger is better.
        truth: `[policies]`.
    """
    generator = np.random.default_rng(0)
    true_ranks = pd.Series(truth).rank()
    correlations = []
    for _ in range(draws):
        means = values[generator.choice(len(values), count, replace=False)].mean(0)
        if np.ptp(means) > 0:  # a draw on which all policies are equal ranks nothing
            correlations.append(pd.Series(means).rank().corr(true_ranks))
        else:
            correlations.append(0.0)
    return np.array(correlations)


def main() -> None:
    """Print the correlations as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("table", type=Path)
    parser.add_argument("--without", default="", help="policies to leave out, with commas")
    arguments = parser.parse_args()
    found = rank_correlations(arguments.run, arguments.table, without=arguments.without.split(","))
    for (budget, policy_count), rows in found.groupby(["budget", "policies"], sort=False):
        counts = list(dict.fromkeys(rows["contexts"]))
        print(f"| {budget}, {policy_count} policies | {' | '.join(f'n = {count}' for count in counts)} |")
        print("| --- |" + " --: |" * len(counts))
        for label, metric_rows in rows.groupby("metric", sort=False):
            texts = [f"{row.mean:.2f} ({row.p10:.2f})" for row in metric_rows.itertuples(index=False)]
            print(f"| {label} | {' | '.join(texts)} |")


if __name__ == "__main__":
    main()
