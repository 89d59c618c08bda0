"""Power analysis: the number of contexts needed to detect a drop, and the minimum detectable drop.

The test is `significance.sign_p`. For many contexts, the sum of the differences is approximately normal: with their own
variance under a drop, and around 0 with their mean square under the null hypothesis. For one 0/1 score per context this
is Connor's formula for McNemar's test (Connor 1987, Biometrics 43, 207). The test is also discrete. If scores are in
[0, 1], the sum must therefore exceed its bound by a whole context (the continuity correction), and enough contexts must
get worse, with the requested probability, for p to be below alpha.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import numpy as np

from kvbench import stats
from kvbench.errors import UserError, quoted
from kvbench.regression.compare import POINT, check_share, unit_tasks
from kvbench.regression.pairs import CellLabel, CellPair, Frames, pair_cells, pair_with_full
from kvbench.regression.significance import least_contexts
from kvbench.runs.schema import FIDELITY

MOST = 10**9
"""Upper limit of the number of contexts."""


@dataclass(frozen=True)
class Goal:
    """Requirements of a comparison.

    Attributes:
        drop: Drop to detect, in points; in percent of the baseline if scores are unbounded.
        power: Probability of detecting it.
        alpha: Probability of a false alarm in the whole comparison.
        cells: Number of tested cells; alpha is divided by it, as in Holm's first step.
    """

    drop: float = 2.0
    power: float = 0.8
    alpha: float = 0.05
    cells: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.drop) and self.drop > 0):
            raise UserError(f"--drop {self.drop:g} is out of range; use points, such as 2")
        check_share("--power", self.power)
        check_share("--alpha", self.alpha)
        if not 1 <= self.cells <= MOST:
            raise UserError(f"--cells {quoted(self.cells)} is out of range; use a number from 1 to {MOST}")
        if not self.level / 2:
            raise UserError(f"--alpha {self.alpha:g} is too small; use a number such as 0.05")

    @property
    def level(self) -> float:
        """Level of each test."""
        return self.alpha / self.cells


@dataclass(frozen=True)
class SampleNeed:
    """Required sample size of a cell, estimated from its differences.

    Attributes:
        place: The cell.
        unit: Whether scores are in [0, 1].
        contexts: Number of compared contexts.
        samples: Number of compared samples; several may share a context.
        sd: Standard deviation of a context's mean difference.
        design_effect: Variance of the mean relative to that of independent responses, raised by shared contexts; NaN
            if nothing differs.
        needed: Contexts needed to detect the drop.
        seen: Minimum detectable drop of the compared contexts, in the task's own unit.
    """

    place: CellLabel
    unit: bool
    contexts: int
    samples: int
    sd: float
    design_effect: float
    needed: int
    seen: float

    @property
    def needed_samples(self) -> int:
        """`needed` as a number of samples, for `kvbench run --samples`."""
        return math.ceil(self.needed * self.samples / self.contexts)


@dataclass(frozen=True)
class PowerPlan:
    """Required sample size under assumptions.

    Attributes:
        contexts: Contexts needed to detect the drop.
        questions: Questions per context.
        discordance: Fraction of answers that are correct in one run and wrong in the other.
        design_effect: Factor by which shared contexts raise the variance.
        sd: Standard deviation of a context's mean difference.
    """

    contexts: int
    questions: int
    discordance: float
    design_effect: float
    sd: float


def needs(
    run: Frames, goal: Goal, baseline: Frames | None = None, cell_count: int | None = None
) -> tuple[Goal, list[SampleNeed]]:
    """Return the required sample size of every cell of a run.

    Args:
        run: The run.
        goal: Requirements of the comparison.
        baseline: Run to compare with; by default the full cache.
        cell_count: Number of cells to correct for; by default all whose scores differ.

    Returns:
        The goal with its number of cells, and the required sample size of every cell.

    Raises:
        UserError: The run has nothing to compare with, or only metrics of fidelity.
    """
    cell_pairs = pair_cells(baseline, run) if baseline else pair_with_full(run)
    cell_pairs = [pair for pair in cell_pairs if pair.responses]
    if not cell_pairs:
        raise UserError(
            "the run and the baseline have no common cells; use two runs of one grid"
            if baseline
            else "the run has no full cache to compare with; run the same grid without --no-full"
        )
    if left_out := [pair for pair in cell_pairs if pair.metric in FIDELITY]:
        tasks = ", ".join(dict.fromkeys(pair.place.task for pair in left_out))
        reason = f"power plans for scores; {tasks}: {left_out[0].metric} is relative to the full cache and has no drop"
        cell_pairs = [pair for pair in cell_pairs if pair.metric not in FIDELITY]
        if not cell_pairs:
            raise UserError(reason)
        warnings.warn(f"left out: {reason}", stacklevel=1)
    differing_count = max(1, sum(pair.differs for pair in cell_pairs))
    goal = replace(goal, cells=differing_count if cell_count is None else cell_count)
    unit_by_task = unit_tasks(cell_pairs)
    return goal, [_need(pair, goal, unit_scaled=unit_by_task[pair.place.task]) for pair in cell_pairs]


def assume(
    goal: Goal,
    rate: float,
    discordance: float | None = None,
    questions: int = 1,
    icc: float = 1.0,
) -> PowerPlan:
    """Return the required sample size for 0/1 scores, from assumptions.

    Args:
        goal: Requirements of the comparison.
        rate: Fraction of the baseline's answers that are correct.
        discordance: Fraction of answers that are correct in one run and wrong in the other. By default, errors of the
            two runs are assumed to be independent, which is the worst case.
        questions: Questions per context.
        icc: Correlation of the differences within a context: 0 if questions are independent, 1 if more questions per
            context add nothing.

    Raises:
        UserError: A number is out of range, or the numbers contradict each other.
    """
    check_share("--rate", rate)
    if not 1 <= questions <= MOST:
        raise UserError(f"--questions-per-context {quoted(questions)} is out of range; use a number from 1 to {MOST}")
    if not 0 <= icc <= 1:
        raise UserError(f"--icc {icc:g} is out of range; use a number from 0 to 1")
    score_drop = goal.drop * POINT
    if score_drop > rate:
        raise UserError(f"a --rate of {rate:g} cannot drop by {goal.drop:g} points")
    rate_after = rate - score_drop
    if discordance is None:
        discordance = rate * (1 - rate_after) + rate_after * (1 - rate)
    # lost + gained = discordance and lost - gained = drop, with lost <= correct and gained <= wrong answers.
    max_discordance = min(2 * rate - score_drop, 2 * (1 - rate) + score_drop)
    if not score_drop - 1e-12 <= discordance <= max_discordance + 1e-12:
        raise UserError(
            f"--discordance {discordance:g} contradicts a drop of {goal.drop:g} points from --rate "
            f"{rate:g}; use a number from {score_drop:g} to {max_discordance:g}"
        )
    design_effect = 1 + (questions - 1) * icc
    sd = math.sqrt(max(0.0, discordance - score_drop * score_drop) * design_effect / questions)
    context_count = contexts_needed(sd, score_drop, goal, unit_scaled=True)
    return PowerPlan(context_count, questions, discordance, design_effect, sd)


def contexts_needed(sd: float, score_drop: float, goal: Goal, *, unit_scaled: bool) -> int:
    """Return the number of contexts with which a drop is significant with the requested probability.

    Args:
        sd: Standard deviation of a context's mean difference.
        score_drop: The drop, in the unit of the scores.
        goal: Level and power.
        unit_scaled: Whether scores are in [0, 1], so that differences are in [-1, 1]. `sd` is then at least that of a
            drop which loses whole contexts.
    """
    if unit_scaled:
        sd = max(sd, math.sqrt(score_drop * max(0.0, 1 - score_drop)))
    normal_bound = -stats.normal_quantile(goal.level / 2) * math.hypot(sd, score_drop)
    normal_bound += stats.normal_quantile(goal.power) * sd
    # n * score_drop >= normal_bound * sqrt(n) + step, solved for sqrt(n).
    root_count = (normal_bound + math.sqrt(normal_bound * normal_bound + 4 * score_drop * unit_scaled)) / (
        2 * score_drop
    )
    context_count = math.ceil(min(float(MOST), root_count * root_count))
    min_contexts = least_contexts(goal.level)
    if not unit_scaled:
        return max(context_count, min_contexts)
    # Lower bound of the fraction of contexts that get worse: |d| >= d * d for differences in [-1, 1].
    worse_share = min(1.0, (sd * sd + score_drop * score_drop + score_drop) / 2)
    while context_count < MOST and _at_least(min_contexts, context_count, worse_share) < goal.power:
        context_count += max(1, context_count // 100)
    return max(context_count, min_contexts)


def _need(pair: CellPair, goal: Goal, *, unit_scaled: bool) -> SampleNeed:
    context_totals, context_sizes = pair.gaps
    context_count = len(context_sizes)
    sd = stats.clustered_se(context_totals, context_sizes) * math.sqrt(context_count) if context_count > 1 else math.nan
    if math.isnan(sd):
        raise UserError(
            f"{pair.place.task}, {pair.place.policy} at {pair.place.budget} has one context, too few to estimate the "
            "spread; run more samples"
        )
    differences = pair.shared.after - pair.shared.before
    independent_se = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    design_effect = (sd / math.sqrt(context_count) / independent_se) ** 2 if independent_se > 0 else math.nan
    score_scale = 1.0 if unit_scaled else abs(pair.shared.level)
    score_drop = goal.drop * POINT * score_scale
    return SampleNeed(
        pair.place,
        unit_scaled,
        context_count,
        pair.shared.samples,
        sd,
        design_effect,
        contexts_needed(sd, score_drop, goal, unit_scaled=unit_scaled) if score_drop > 0 else MOST,
        smallest_seen(sd, context_count, goal, unit_scaled=unit_scaled),
    )


def smallest_seen(sd: float, context_count: int, goal: Goal, *, unit_scaled: bool) -> float:
    """Return the minimum detectable drop for a number of contexts (tolerance 0.1%); infinite if there is none."""
    upper_drop = 1.0 if unit_scaled else 1e6 * max(sd, 1e-12)
    if contexts_needed(sd, upper_drop, goal, unit_scaled=unit_scaled) > context_count:
        return math.inf
    lower_drop = 0.0
    while upper_drop - lower_drop > 1e-3 * upper_drop:
        middle_drop = (lower_drop + upper_drop) / 2
        if contexts_needed(sd, middle_drop, goal, unit_scaled=unit_scaled) > context_count:
            lower_drop = middle_drop
        else:
            upper_drop = middle_drop
    return upper_drop


def _at_least(min_successes: int, trials: int, rate: float) -> float:
    """Return the probability of at least `min_successes` successes in `trials` trials."""
    if rate >= 1:
        return float(trials >= min_successes)
    log_terms = (
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        + k * math.log(rate) + (trials - k) * math.log1p(-rate)
        for k in range(min(min_successes, trials + 1))
    )  # fmt: skip
    return 1.0 - math.fsum(map(math.exp, log_terms))
