"""Paired comparison of policies' perturbations, and tightness of the bounds, with intervals.

Comparisons are paired (the same query of the same head with each policy's kept entries) and bootstrapped over contexts
(see `kvbench.stats`). With fewer than `stats.FEW` contexts, a percentile bootstrap is overconfident: fractions then get
Wilson's interval on the number of contexts, and other values get none.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvbench.analysis.scopes import Row, distinct_values, scopes
from kvbench.stats import FEW, Floats, resampled, summary, wilson

TOLERANCE = 1e-5
"""Relative excess of l1 over a bound that counts as rounding, not as a violation."""


def matrix(cell_rows: pd.DataFrame, column: str = "l1") -> tuple[Floats, list[str]]:
    """Return a column of one cell by question and head.

    Args:
        cell_rows: The cell's rows in the table of heads.
        column: Column name.

    Returns:
        `[questions, layers * heads]`, questions sorted by id, and the context of each question.
    """
    index_columns = ["sample_id", "question_id", "context_id"]
    labelled = cell_rows.assign(
        **{id_column: cell_rows[id_column].astype(str) for id_column in ("sample_id", "context_id")}
    )
    pivoted = labelled.pivot(index=index_columns, columns=["layer", "head"], values=column).sort_index()
    pivoted = pivoted.sort_index(axis=1)
    return pivoted.to_numpy(dtype=np.float64), [str(context) for _, _, context in pivoted.index]


def pairs(heads: pd.DataFrame) -> pd.DataFrame:
    """Compare all pairs of policies at every budget.

    Args:
        heads: The table of heads.

    Returns:
        A row per model, task, length, moment, budget and pair, in which `against` is the policy named first in the run.
        `heads_won` is the fraction of heads whose l1, averaged over questions, is smaller with `policy`, `queries_won`
        the fraction of (question, head) pairs; ties count half. `change` is the relative change of the mean l1 from
        `against` to `policy`. Each has `_lo` and `_hi`.
    """
    pair_rows: list[Row] = []
    for scope, scope_rows in scopes(heads):
        for budget in distinct_values(scope_rows, "budget"):
            budget_rows = scope_rows[scope_rows["budget"] == budget]
            matrices = {
                policy_name: matrix(budget_rows[budget_rows["policy"] == policy_name])
                for policy_name in distinct_values(budget_rows, "policy")
            }
            for against, policy in combinations(matrices, 2):
                (policy_l1, contexts), (against_l1, _) = matrices[policy], matrices[against]
                pair_labels = {"budget": budget, "policy": policy, "against": against}
                pair_rows.append({**scope, **pair_labels, **compare_policies(policy_l1, against_l1, contexts)})
    return pd.DataFrame(pair_rows)


def compare_policies(policy_l1: Floats, against_l1: Floats, contexts: list[str]) -> Row:
    """Compare two policies' l1, `[questions, heads]` each, over the same questions."""
    query_wins = summary(_wins(policy_l1, against_l1).mean(1), contexts)
    context_ids, context_index = np.unique(np.asarray(contexts), return_inverse=True)
    context_sums = np.zeros((2, len(context_ids), policy_l1.shape[1]))
    np.add.at(context_sums[0], context_index, policy_l1)
    np.add.at(context_sums[1], context_index, against_l1)
    head_wins = float(_wins(policy_l1.mean(0), against_l1.mean(0)).mean())
    change = _ratio(policy_l1.mean(), against_l1.mean())
    wins_low, wins_high, change_low, change_high = 0.0, 1.0, -math.inf, math.inf
    if len(context_ids) < FEW:
        wins_low, wins_high = wilson(head_wins, len(context_ids))
    else:
        resampled_wins = resampled(
            lambda weights: np.array([_wins(*(draw @ context_sums)).mean() for draw in weights]),
            len(context_ids),
        )
        # The fraction of heads is not a mean over contexts: near ties, its bootstrap draws are one-sided.
        wins_low, wins_high = np.quantile(resampled_wins, [0.025, 0.975])
        wins_low, wins_high = min(float(wins_low), head_wins), max(float(wins_high), head_wins)
        resampled_totals = resampled(lambda weights: weights @ context_sums.sum(2).T, len(context_ids))
        changes = [_ratio(policy_total, against_total) for policy_total, against_total in resampled_totals]
        if np.isfinite(changes).all():
            change_low, change_high = (float(quantile) for quantile in np.quantile(changes, [0.025, 0.975]))
    return {
        "heads_won": head_wins, "heads_won_lo": wins_low, "heads_won_hi": wins_high,
        "queries_won": query_wins.mean,
        "queries_won_lo": query_wins.lo, "queries_won_hi": query_wins.hi,
        "change": change, "change_lo": change_low, "change_hi": change_high,
        "heads": policy_l1.shape[1], "questions": len(policy_l1), "contexts": len(context_ids),
    }  # fmt: skip


def _wins(a: Floats, b: Floats) -> Floats:
    return np.asarray((a < b) + 0.5 * (a == b), dtype=np.float64)


def _ratio(a: float, b: float) -> float:
    """Return the relative change from b to a; 0 from 0 to 0."""
    if b == 0:
        return 0.0 if a == 0 else math.inf
    return float(a / b) - 1.0


def cells(heads: pd.DataFrame) -> pd.DataFrame:
    """Summarise perturbation, assumption and bounds of every policy and budget.

    Args:
        heads: The table of heads.

    Returns:
        A row per model, task, length, moment, policy and budget: `l1` (mean over heads, layers and questions, with
            `l1_lo`, `l1_hi`), `relative` (mean l1 over mean L1 norm of the output), `assumption` (share of (question,
            head) pairs with `stage1_mass > 0.5`, with its interval), `assumption_top` (the same for `top_mass`),
            `mass`, and for each bound its mean `bound` (over the rows of `tightness`; `bound_ratio` is that of bound 2
            over that of bound 3), `tightness` (mean bound over mean l1 in the rows where the assumption holds; for
            bound 1 in all rows if stage 1 is unknown) and `violations` (rows with l1 above it: of all rows for bound 1,
            of those where the assumption holds for bounds 2 and 3). Unknown numbers are NaN.
    """
    table_rows: list[Row] = []
    for scope, scope_rows in scopes(heads):
        for policy in distinct_values(scope_rows, "policy"):
            for budget in distinct_values(scope_rows, "budget"):
                cell_rows = scope_rows[(scope_rows["policy"] == policy) & (scope_rows["budget"] == budget)]
                if len(cell_rows):
                    table_rows.append({**scope, "policy": policy, "budget": budget, **_cell(cell_rows)})
    return pd.DataFrame(table_rows)


def _cell(cell_rows: pd.DataFrame) -> Row:
    l1_matrix, contexts = matrix(cell_rows)
    l1_estimate = _estimate(l1_matrix.mean(1), contexts)
    measures: Row = {"l1": l1_estimate[0], "l1_lo": l1_estimate[1], "l1_hi": l1_estimate[2]}
    measures["relative"] = float(cell_rows["l1"].mean() / cell_rows["output"].mean())
    measures["mass"] = float(cell_rows["mass"].mean())
    stage1_known = cell_rows["stage1_mass"].notna().to_numpy()
    assumption_holds = (cell_rows["stage1_mass"] > 0.5).to_numpy()
    measures |= {"assumption": math.nan, "assumption_lo": math.nan, "assumption_hi": math.nan}
    measures["assumption_top"] = math.nan
    if stage1_known.all():
        holding_shares = matrix(cell_rows.assign(holds=assumption_holds), "holds")[0].mean(1)
        assumption = summary(holding_shares, contexts)
        measures |= {
            "assumption": assumption.mean,
            "assumption_lo": assumption.lo,
            "assumption_hi": assumption.hi,
        }
        measures["assumption_top"] = float((cell_rows["top_mass"] > 0.5).mean())
    for bound_index in (1, 2, 3):
        # Bound 1 needs no assumption, but bounds are comparable only on the same rows.
        bound_rows = cell_rows[assumption_holds] if stage1_known.all() or bound_index > 1 else cell_rows
        bound_values, true_l1 = bound_rows[f"bound{bound_index}"], bound_rows["l1"]
        measures[f"bound{bound_index}"] = float(bound_values.mean())
        measures[f"tightness{bound_index}"] = (
            float(bound_values.mean() / true_l1.mean()) if true_l1.sum() > 0 else math.nan
        )
        bound_rows = cell_rows if bound_index == 1 else bound_rows
        measures[f"violations{bound_index}"] = int(violated(bound_rows["l1"], bound_rows[f"bound{bound_index}"]).sum())
    measures["bound_ratio"] = measures["bound2"] / measures["bound3"] if measures["bound3"] else math.nan
    measures |= {
        "rows": len(cell_rows),
        "questions": len(l1_matrix),
        "contexts": len(set(contexts)),
    }
    return measures


def violated(l1: npt.ArrayLike, bound: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return where l1 exceeds a bound by more than rounding; a NaN bound is never violated."""
    true_l1, limits = np.asarray(l1, dtype=np.float64), np.asarray(bound, dtype=np.float64)
    return np.asarray(true_l1 > limits + TOLERANCE * np.abs(limits) + 1e-12)


def curve(layers: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the mean of a column per layer, with its interval.

    Returns:
        A row per model, task, length, moment, policy, budget and layer with `mean`, `lo`, `hi`.
    """
    curve_rows: list[Row] = []
    key_columns = ["policy", "budget", "layer"]
    for scope, scope_rows in scopes(layers):
        for key_values, layer_rows in scope_rows.groupby(key_columns, sort=False, observed=True):
            if layer_rows[column].isna().any():
                continue
            interval = _estimate(layer_rows[column].to_numpy(), list(layer_rows["context_id"].astype(str)))
            estimate = dict(zip(("mean", "lo", "hi"), interval, strict=True))
            curve_rows.append({**scope, **dict(zip(key_columns, key_values, strict=True)), **estimate})
    return pd.DataFrame(curve_rows)


def _estimate(values: Floats, contexts: list[str]) -> tuple[float, float, float]:
    """Return mean and interval of values that are not fractions; infinite below `FEW` contexts."""
    if len(set(contexts)) < FEW:
        return float(values.mean()), -math.inf, math.inf
    # Shifted above 1 and back, because kvbench.stats treats values in [0, 1] as fractions.
    estimate = summary(values + 2.0, contexts)
    return estimate.mean - 2.0, estimate.lo - 2.0, estimate.hi - 2.0
