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
from kvbench.regression.pairs import Frames, Pair, Place, pair_cells, pair_with_full
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
            raise UserError(
                f"--cells {quoted(self.cells)} is out of range; use a number from 1 to {MOST}"
            )
        if not self.level / 2:
            raise UserError(f"--alpha {self.alpha:g} is too small; use a number such as 0.05")

    @property
    def level(self) -> float:
        """The level of each of the tests."""
        return self.alpha / self.cells


@dataclass(frozen=True)
class Need:
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

    place: Place
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
class Plan:
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
    run: Frames, goal: Goal, baseline: Frames | None = None, cells: int | None = None
) -> tuple[Goal, list[Need]]:
    """What each cell of a run needs.

    Args:
        run: The run.
        goal: What the comparison must achieve.
        baseline: Differences are those to this run; by default those to the full cache.
        cells: Cells to correct for; by default all whose scores differ.

    Returns:
        The goal with its number of cells, and what each cell needs.

    Raises:
        UserError: The run has nothing to compare with.
    """
    pairs = pair_cells(baseline, run) if baseline else pair_with_full(run)
    pairs = [pair for pair in pairs if pair.responses]
    if not pairs:
        raise UserError(
            "the run and the baseline have no cell in common; use two runs of one grid"
            if baseline
            else "the run has no full cache to compare with; run the same grid without --no-full"
        )
    differing = max(1, sum(pair.differs for pair in pairs))
    goal = replace(goal, cells=differing if cells is None else cells)
    unit = unit_tasks(pairs)
    return goal, [_need(pair, goal, unit=unit[pair.place.task]) for pair in pairs]


def assume(
    goal: Goal,
    rate: float,
    discordance: float | None = None,
    questions: int = 1,
    icc: float = 1.0,
) -> Plan:
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
        raise UserError(
            f"--questions-per-context {quoted(questions)} is out of range; use a number from 1 to "
            f"{MOST}"
        )
    if not 0 <= icc <= 1:
        raise UserError(f"--icc {icc:g} is out of range; use a number from 0 to 1")
    drop = goal.drop * POINT
    if drop > rate:
        raise UserError(f"a --rate of {rate:g} cannot drop by {goal.drop:g} points")
    after = rate - drop
    if discordance is None:
        discordance = rate * (1 - after) + after * (1 - rate)
    # Lost and gained answers: lost + gained = discordance, lost - gained = drop, and no more is
    # lost than was right, no more gained than was wrong.
    most = min(2 * rate - drop, 2 * (1 - rate) + drop)
    if not drop - 1e-12 <= discordance <= most + 1e-12:
        raise UserError(
            f"--discordance {discordance:g} contradicts a drop of {goal.drop:g} points from --rate "
            f"{rate:g}; use a number from {drop:g} to {most:g}"
        )
    effect = 1 + (questions - 1) * icc
    sd = math.sqrt(max(0.0, discordance - drop * drop) * effect / questions)
    contexts = contexts_needed(sd, drop, goal, unit=True)
    return Plan(contexts, questions, discordance, effect, sd)


def contexts_needed(sd: float, drop: float, goal: Goal, *, unit: bool) -> int:
    """The number of contexts with which a drop is significant with the wanted probability.

    Args:
        sd: Standard deviation of a context's mean difference.
        drop: The drop, in the scores' unit.
        goal: Level and power.
        unit: Whether scores are in [0, 1], so that differences are in [-1, 1]. Then `sd` is at
            least what the drop itself brings about by losing whole contexts.
    """
    if unit:
        sd = max(sd, math.sqrt(drop * max(0.0, 1 - drop)))
    bound = -stats.normal_quantile(goal.level / 2) * math.hypot(sd, drop)
    bound += stats.normal_quantile(goal.power) * sd
    # n * drop >= bound * sqrt(n) + step, solved for sqrt(n).
    root = (bound + math.sqrt(bound * bound + 4 * drop * unit)) / (2 * drop)
    many = math.ceil(min(float(MOST), root * root))
    least = least_contexts(goal.level)
    if not unit:
        return max(many, least)
    # At least this share of contexts gets worse: |d| >= d * d for differences in [-1, 1].
    worse = min(1.0, (sd * sd + drop * drop + drop) / 2)
    while many < MOST and _at_least(least, many, worse) < goal.power:
        many += max(1, many // 100)
    return max(many, least)


def _need(pair: Pair, goal: Goal, *, unit: bool) -> Need:
    totals, sizes = pair.gaps
    contexts = len(sizes)
    sd = stats.clustered_se(totals, sizes) * math.sqrt(contexts) if contexts > 1 else math.nan
    if math.isnan(sd):
        raise UserError(
            f"{pair.place.task}, {pair.place.policy} at {pair.place.budget} has one context, which "
            "says nothing about the spread; run more samples"
        )
    gaps = pair.shared.after - pair.shared.before
    independent = float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps))
    effect = (sd / math.sqrt(contexts) / independent) ** 2 if independent > 0 else math.nan
    scale = 1.0 if unit else abs(pair.shared.level)
    drop = goal.drop * POINT * scale
    return Need(
        pair.place,
        unit,
        contexts,
        pair.shared.samples,
        sd,
        effect,
        contexts_needed(sd, drop, goal, unit=unit) if drop > 0 else MOST,
        smallest_seen(sd, contexts, goal, unit=unit),
    )


def smallest_seen(sd: float, contexts: int, goal: Goal, *, unit: bool) -> float:
    """The smallest drop that a number of contexts sees, to a thousandth; infinite if none.

    Args:
        sd: Standard deviation of a context's mean difference.
        contexts: The number of contexts.
        goal: Level and power.
        unit: Whether scores are in [0, 1].
    """
    high = 1.0 if unit else 1e6 * max(sd, 1e-12)
    if contexts_needed(sd, high, goal, unit=unit) > contexts:
        return math.inf
    low = 0.0
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if contexts_needed(sd, middle, goal, unit=unit) > contexts:
            low = middle
        else:
            high = middle
    return high


def _at_least(least: int, trials: int, share: float) -> float:
    """Probability of `least` or more successes in a number of trials."""
    if share >= 1:
        return float(trials >= least)
    logs = (
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        + k * math.log(share) + (trials - k) * math.log1p(-share)
        for k in range(min(least, trials + 1))
    )  # fmt: skip
    return 1.0 - math.fsum(map(math.exp, logs))
