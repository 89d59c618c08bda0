"""Which policy perturbs less, by how much, and how tight the bounds are, with intervals.

Comparisons are paired (the same query of the same head with each policy's kept entries) and
bootstrapped over contexts, as everywhere in kvbench (see `kvbench.stats`). With fewer than
`stats.FEW` contexts a percentile bootstrap is overconfident. Shares then get Wilson's interval on
the number of contexts, and other numbers get none.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvbench.analysis.scopes import Row, names, scopes
from kvbench.stats import FEW, Floats, resampled, summary, wilson

TOLERANCE = 1e-5
"""Relative excess of l1 over a bound that counts as rounding, not as a violation."""


def matrix(part: pd.DataFrame, column: str = "l1") -> tuple[Floats, list[str]]:
    """A column of one cell by question and head.

    Args:
        part: The rows of one cell in the table of heads.
        column: Which numbers.

    Returns:
        `[questions, layers * heads]`, questions sorted by id, and the context of each question.
    """
    index = ["sample_id", "question_id", "context_id"]
    wide = part.assign(**{k: part[k].astype(str) for k in ("sample_id", "context_id")})
    table = wide.pivot(index=index, columns=["layer", "head"], values=column).sort_index()
    table = table.sort_index(axis=1)
    return table.to_numpy(dtype=np.float64), [str(c) for _, _, c in table.index]


def pairs(heads: pd.DataFrame) -> pd.DataFrame:
    """Compare all policies two by two at every budget.

    Args:
        heads: The table of heads.

    Returns:
        A row per model, task, length, moment, budget and pair, in which `against` is the policy
        that the run names first. `heads_won` is the share of heads whose l1, averaged over
        questions, is smaller with `policy`, `queries_won` the share of (question, head) pairs;
        ties count half. `change` is the relative change of the mean l1 from `against` to `policy`.
        Each has `_lo` and `_hi`.
    """
    rows: list[Row] = []
    for where, part in scopes(heads):
        for budget in names(part, "budget"):
            here = part[part["budget"] == budget]
            cells = {p: matrix(here[here["policy"] == p]) for p in names(here, "policy")}
            for against, policy in combinations(cells, 2):
                (a, contexts), (b, _) = cells[policy], cells[against]
                pair = {"budget": budget, "policy": policy, "against": against}
                rows.append({**where, **pair, **compared(a, b, contexts)})
    return pd.DataFrame(rows)


def compared(a: Floats, b: Floats, contexts: list[str]) -> Row:
    """Compare two policies' l1, `[questions, heads]` each, over the same questions."""
    of_queries = summary(_wins(a, b).mean(1), contexts)
    ids, index = np.unique(np.asarray(contexts), return_inverse=True)
    sums = np.zeros((2, len(ids), a.shape[1]))
    np.add.at(sums[0], index, a)
    np.add.at(sums[1], index, b)
    won = float(_wins(a.mean(0), b.mean(0)).mean())
    change = _ratio(a.mean(), b.mean())
    lo, hi, low, high = 0.0, 1.0, -math.inf, math.inf
    if len(ids) < FEW:
        lo, hi = wilson(won, len(ids))
    else:
        drawn = resampled(lambda w: np.array([_wins(*(one @ sums)).mean() for one in w]), len(ids))
        # The share over heads is not a mean over contexts: near ties its draws lie to one side.
        lo, hi = np.quantile(drawn, [0.025, 0.975])
        lo, hi = min(float(lo), won), max(float(hi), won)
        totals = resampled(lambda w: w @ sums.sum(2).T, len(ids))
        ratios = [_ratio(x, y) for x, y in totals]
        if np.isfinite(ratios).all():
            low, high = (float(q) for q in np.quantile(ratios, [0.025, 0.975]))
    return {
        "heads_won": won, "heads_won_lo": lo, "heads_won_hi": hi,
        "queries_won": of_queries.mean,
        "queries_won_lo": of_queries.lo, "queries_won_hi": of_queries.hi,
        "change": change, "change_lo": low, "change_hi": high,
        "heads": a.shape[1], "questions": len(a), "contexts": len(ids),
    }  # fmt: skip


def _wins(a: Floats, b: Floats) -> Floats:
    return np.asarray((a < b) + 0.5 * (a == b), dtype=np.float64)


def _ratio(a: float, b: float) -> float:
    """Relative change from b to a; from 0 to 0 it is 0."""
    if b == 0:
        return 0.0 if a == 0 else math.inf
    return float(a / b) - 1.0


def cells(heads: pd.DataFrame) -> pd.DataFrame:
    """Perturbation, assumption and bounds of every policy and budget.

    Args:
        heads: The table of heads.

    Returns:
        A row per model, task, length, moment, policy and budget: `l1` (mean over heads, layers and
        questions, with `l1_lo`, `l1_hi`), `relative` (mean l1 over mean L1 norm of the output),
        `assumption` (share of (question, head) pairs with `stage1_mass > 0.5`, with its interval),
        `assumption_top` (the same for `top_mass`), `mass`, and for each bound `tightness` (mean
        bound over mean l1 in the rows where the assumption holds; for bound 1 in all rows if stage
        1 is unknown) and `violations` (rows with l1 above it: of all rows for bound 1, of those
        where the assumption holds for bounds 2 and 3). Unknown numbers are NaN.
    """
    rows: list[Row] = []
    for where, part in scopes(heads):
        for policy in names(part, "policy"):
            for budget in names(part, "budget"):
                here = part[(part["policy"] == policy) & (part["budget"] == budget)]
                if len(here):
                    rows.append({**where, "policy": policy, "budget": budget, **_cell(here)})
    return pd.DataFrame(rows)


def _cell(here: pd.DataFrame) -> Row:
    l1, contexts = matrix(here)
    mean = _estimate(l1.mean(1), contexts)
    row: Row = {"l1": mean[0], "l1_lo": mean[1], "l1_hi": mean[2]}
    row["relative"] = float(here["l1"].mean() / here["output"].mean())
    row["mass"] = float(here["mass"].mean())
    known = here["stage1_mass"].notna().to_numpy()
    holds = (here["stage1_mass"] > 0.5).to_numpy()
    row |= {"assumption": math.nan, "assumption_lo": math.nan, "assumption_hi": math.nan}
    row["assumption_top"] = math.nan
    if known.all():
        shares = matrix(here.assign(holds=holds), "holds")[0].mean(1)
        found = summary(shares, contexts)
        row |= {"assumption": found.mean, "assumption_lo": found.lo, "assumption_hi": found.hi}
        row["assumption_top"] = float((here["top_mass"] > 0.5).mean())
    for i in (1, 2, 3):
        # Bound 1 needs no assumption, but bounds can only be compared on the same rows.
        mine = here[holds] if known.all() or i > 1 else here
        bound, true = mine[f"bound{i}"], mine["l1"]
        row[f"tightness{i}"] = float(bound.mean() / true.mean()) if true.sum() > 0 else math.nan
        mine = here if i == 1 else mine
        row[f"violations{i}"] = int(violated(mine["l1"], mine[f"bound{i}"]).sum())
    row |= {"rows": len(here), "questions": len(l1), "contexts": len(set(contexts))}
    return row


def violated(l1: npt.ArrayLike, bound: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Where l1 exceeds a bound by more than rounding; a NaN bound is never violated."""
    true, limit = np.asarray(l1, dtype=np.float64), np.asarray(bound, dtype=np.float64)
    return np.asarray(true > limit + TOLERANCE * np.abs(limit) + 1e-12)


def curve(layers: pd.DataFrame, column: str) -> pd.DataFrame:
    """Mean of a column of the table of layers for each layer, with its interval.

    Returns:
        A row per model, task, length, moment, policy, budget and layer with `mean`, `lo`, `hi`.
    """
    rows: list[Row] = []
    keys = ["policy", "budget", "layer"]
    for where, part in scopes(layers):
        for values, here in part.groupby(keys, sort=False, observed=True):
            if here[column].isna().any():
                continue
            found = _estimate(here[column].to_numpy(), list(here["context_id"].astype(str)))
            estimate = dict(zip(("mean", "lo", "hi"), found, strict=True))
            rows.append({**where, **dict(zip(keys, values, strict=True)), **estimate})
    return pd.DataFrame(rows)


def _estimate(values: Floats, contexts: list[str]) -> tuple[float, float, float]:
    """Mean and interval of numbers that are not shares; infinite below `FEW` contexts."""
    if len(set(contexts)) < FEW:
        return float(values.mean()), -math.inf, math.inf
    # Shifted above 1, where kvbench.stats does not take numbers for shares, and back.
    found = summary(values + 2.0, contexts)
    return found.mean - 2.0, found.lo - 2.0, found.hi - 2.0
