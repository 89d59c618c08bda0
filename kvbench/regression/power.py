"""How many contexts a comparison needs to see a drop, and which drop it sees with those it has.

The test is `significance.sign_p`. For many contexts the sum of the differences is normal: with
their own variance under a drop, and around 0 with their mean square under the test's exchanges. For
one 0/1 score per context this is Connor's formula for McNemar's test (Connor 1987, Biometrics 43,
207). The test is also discrete. Where scores are in [0, 1], the sum must therefore exceed its bound
by a whole context (the continuity correction), and enough contexts must get worse at all, with the
wanted probability, for p to be below alpha.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from kvbench import stats
from kvbench.errors import UserError, quoted
from kvbench.regression.compare import POINT, check_share, unit_tasks
from kvbench.regression.pairs import CellLabel, CellPair, Frames, pair_cells, pair_with_full
from kvbench.regression.significance import least_contexts

MOST = 10**9
"""More contexts than this are not counted."""


@dataclass(frozen=True)
class Goal:
    """What a comparison must achieve.

    Attributes:
        drop: The drop to see, in points; percent of the baseline where scores have no bounds.
        power: The probability to see it.
        alpha: The chance of a false alarm in the whole comparison.
        cells: Cells that are tested; alpha is divided by them, as Holm's first step does.
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
        """The level of each of the tests."""
        return self.alpha / self.cells


@dataclass(frozen=True)
class SampleNeed:
    """What a cell needs, judged by the differences that it shows.

    Attributes:
        place: The cell.
        unit: Whether scores are in [0, 1].
        contexts: Contexts that were compared.
        samples: Samples that were compared; several may share a context.
        sd: Standard deviation of a context's mean difference.
        design_effect: By how much sharing contexts raises the variance of the mean over that of
            independent responses; NaN if nothing differs.
        needed: Contexts that see the drop.
        seen: The smallest drop that the contexts compared see, in the task's own unit.
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
    """What assumptions need.

    Attributes:
        contexts: Contexts that see the drop.
        questions: Questions about each.
        discordance: Share of answers that are right in one run and wrong in the other.
        design_effect: By how much sharing contexts raises the variance.
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
    """What each cell of a run needs.

    Args:
        run: The run.
        goal: What the comparison must achieve.
        baseline: Differences are those to this run; by default those to the full cache.
        cell_count: Cells to correct for; by default all whose scores differ.

    Returns:
        The goal with its number of cells, and what each cell needs.

    Raises:
        UserError: The run has nothing to compare with.
    """
    cell_pairs = pair_cells(baseline, run) if baseline else pair_with_full(run)
    cell_pairs = [pair for pair in cell_pairs if pair.responses]
    if not cell_pairs:
        raise UserError(
            "the run and the baseline have no cell in common; use two runs of one grid"
            if baseline
            else "the run has no full cache to compare with; run the same grid without --no-full"
        )
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
    """What a comparison of right and wrong answers needs, from assumptions.

    Args:
        goal: What the comparison must achieve.
        rate: Share of the baseline's answers that are right.
        discordance: Share of answers that are right in one run and wrong in the other. Without it
            the two runs are taken to err independently of each other, which is the worst case.
        questions: Questions about each context.
        icc: Correlation of the differences within a context: 0, questions are independent; 1, more
            questions about a context add nothing.

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
    # Lost and gained answers: lost + gained = discordance, lost - gained = drop, and no more is
    # lost than was right, no more gained than was wrong.
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
    """The number of contexts with which a drop is significant with the wanted probability.

    Args:
        sd: Standard deviation of a context's mean difference.
        score_drop: The drop, in the scores' unit.
        goal: Level and power.
        unit_scaled: Whether scores are in [0, 1], so that differences are in [-1, 1]. Then `sd` is
            at least what the drop itself brings about by losing whole contexts.
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
    # At least this share of contexts gets worse: |d| >= d * d for differences in [-1, 1].
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
            f"{pair.place.task}, {pair.place.policy} at {pair.place.budget} has one context, which "
            "says nothing about the spread; run more samples"
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
    """The smallest drop that a number of contexts sees, to a thousandth; infinite if none.

    Args:
        sd: Standard deviation of a context's mean difference.
        context_count: The number of contexts.
        goal: Level and power.
        unit_scaled: Whether scores are in [0, 1].
    """
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
    """Probability of `min_successes` or more successes in a number of trials."""
    if rate >= 1:
        return float(trials >= min_successes)
    log_terms = (
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        + k * math.log(rate) + (trials - k) * math.log1p(-rate)
        for k in range(min(min_successes, trials + 1))
    )  # fmt: skip
    return 1.0 - math.fsum(map(math.exp, log_terms))
