"""Has a score dropped between two runs? Paired differences, cell by cell, and what they prove."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvbench import stats
from kvbench.errors import UserError
from kvbench.regression import significance
from kvbench.regression.pairs import CellPair, Frames, made_differently, pair_cells

POINT = 0.01
LEAST_ALPHA = 1e-4
_RESOLUTION = 20
"""Draws per 1 / level: enough that the smallest p that can be drawn is far below the level."""


class Outcome(StrEnum):
    """What a comparison says about a cell, the worst first."""

    FAILED = "failed"
    """It dropped by more than is allowed, and the drop is significant."""
    NOT_COMPARED = "not compared"
    """The run lacks it, has no score of it, or has measured something else."""
    UNPROVEN = "not significant"
    """It dropped by more than is allowed, but that may be chance."""
    ALLOWED = "within allowance"
    """It dropped by no more than is allowed."""
    IMPROVED = "improved"
    """It is significantly better."""
    HIGHER = "not worse"
    """It is better, but that may be chance; or responses differ and their mean score does not."""
    SAME = "unchanged"
    """All responses that both runs have are the same."""
    NO_BASELINE = "no baseline"
    """The baseline has no score of it, so there is nothing to compare."""


@dataclass(frozen=True)
class Comparison:
    """A cell in two runs. Scores and change are over the samples that both have.

    Attributes:
        pair: The two cells.
        outcome: What the comparison says.
        reason: Why it was not compared, or an empty string.
        before: Mean score of the baseline.
        after: Mean score of the run.
        change: Paired difference, run minus baseline, with its 95% interval.
        p: Two-sided p-value of the difference.
        p_corrected: The same after Holm's correction for all cells whose scores differ.
        contexts: Contexts that both have.
        allowed: The drop that is allowed, in the task's own unit.
        visible: The smallest drop of this cell that would have been significant; infinite if none
            would have been. See `smallest_visible`.
        unit: Whether the task is scored in [0, 1].
    """

    pair: CellPair
    outcome: Outcome
    reason: str = ""
    before: float = math.nan
    after: float = math.nan
    change: stats.Difference = stats.NO_DIFFERENCE
    p: float = math.nan
    p_corrected: float = math.nan
    contexts: int = 0
    allowed: float = math.nan
    visible: float = math.nan
    unit: bool = True


@dataclass(frozen=True)
class Regression:
    """A run against a baseline.

    Attributes:
        cells: A comparison per cell of the baseline, in its order.
        extra: Cells of the run that the baseline lacks.
        made: What differs in how the compared cells were made: name to baseline and run.
        max_drop: The drop that is allowed: points, or percent of the baseline's score where a task
            is not scored in [0, 1].
        alpha: The chance of a false alarm in the whole comparison.
    """

    cells: tuple[Comparison, ...]
    extra: int
    made: dict[str, tuple[str, str]]
    max_drop: float
    alpha: float

    def of(self, *outcomes: Outcome) -> list[Comparison]:
        """The cells with one of these outcomes."""
        return [comparison for comparison in self.cells if comparison.outcome in outcomes]

    @property
    def compared(self) -> list[Comparison]:
        """The cells that both runs have a score of."""
        return [comparison for comparison in self.cells if comparison.pair.responses]

    @property
    def tested(self) -> int:
        """How many cells p-values are corrected for: those whose scores differ."""
        return sum(comparison.pair.differs for comparison in self.compared)

    @property
    def failed(self) -> bool:
        """Whether a drop is both larger than allowed and significant."""
        return bool(self.of(Outcome.FAILED))

    @property
    def complete(self) -> bool:
        """Whether at least one cell, and every cell that the baseline scores, was compared."""
        return bool(self.compared) and not self.of(Outcome.NOT_COMPARED)


def compare(baseline: Frames, run: Frames, *, max_drop: float = 1.0, alpha: float = 0.05) -> Regression:
    """Compare the cells of a run with those of a baseline that measure the same.

    Cells are paired by `match`, responses by sample, question and repeat, on those that both runs
    have. Intervals are `kvbench.stats.paired`, p-values `significance.sign_p`, corrected for all
    cells whose scores differ.

    Args:
        baseline: Cells and samples of the baseline.
        run: Cells and samples of the run.
        max_drop: The drop that is allowed: points where scores are in [0, 1], otherwise percent of
            the baseline's score.
        alpha: A drop counts if its corrected p-value is below this.

    Raises:
        UserError: `max_drop` or `alpha` is out of range, or a run measures the same twice.
    """
    if not (math.isfinite(max_drop) and max_drop >= 0):
        raise UserError(f"--max-drop {max_drop:g} is out of range; use points, such as 1.0")
    check_share("--alpha", alpha, minimum=LEAST_ALPHA)
    cell_pairs = pair_cells(baseline, run)
    shared_pairs = [pair for pair in cell_pairs if pair.responses]
    # A cell in which nothing differs cannot raise a false alarm, so the correction leaves it out.
    differing_pairs = [pair for pair in shared_pairs if pair.differs]
    draw_count = max(significance.DRAWS, math.ceil(_RESOLUTION * len(differing_pairs) / alpha))
    p_values = [
        significance.sign_p(pair.gaps[0], draws=min(draw_count, significance.MOST_DRAWS)) for pair in differing_pairs
    ]
    test_places = [pair.place for pair in differing_pairs]
    tests_by_place = dict(zip(test_places, zip(p_values, significance.holm(p_values), strict=True), strict=True))
    unit_by_task = unit_tasks(shared_pairs)
    comparisons = []
    for pair in cell_pairs:
        if not pair.responses:
            outcome = Outcome.NO_BASELINE if pair.settled else Outcome.NOT_COMPARED
            comparisons.append(Comparison(pair, outcome, pair.problem))
            continue
        # If a cell in which nothing differs had dropped, there would be one more test.
        test_level = alpha / (len(tests_by_place) + (pair.place not in tests_by_place))
        unit_scaled, test_result = (
            unit_by_task[pair.place.task],
            tests_by_place.get(pair.place, (1.0, 1.0)),
        )
        comparisons.append(_compared(pair, test_result, max_drop, alpha, test_level, unit_scaled))
    extra_count = len(set(run[0]["match"]) - set(baseline[0]["match"]))
    return Regression(tuple(comparisons), extra_count, made_differently(baseline[0], run[0]), max_drop, alpha)


def check_share(option: str, value: float, minimum: float = 0.0) -> None:
    """Refuse a probability that is out of range.

    Raises:
        UserError: It is not between 0 and 1, or below the least; the message names the option.
    """
    if not (0 < value < 1 and value >= minimum):
        raise UserError(f"{option} {value:g} is out of range; use a number between {minimum:g} and 1")


def smallest_visible(pair: CellPair, alpha: float, *, unit_scaled: bool) -> float:
    """The smallest drop that a pair's samples show as significant, wherever it strikes.

    A drop is hardest to see where it strikes few contexts: a test needs a number of contexts that
    all got worse before it can be significant at all. For scores in [0, 1] that number of contexts,
    each lost from 1 to 0, is the drop that shows if nothing else differs. Where other scores do
    differ, the drop must also stand out of their noise: it must be `z_score` standard errors.

    Args:
        pair: The two cells, with samples in common.
        alpha: The level, corrected for the number of cells.
        unit_scaled: Whether scores are in [0, 1].

    Returns:
        The drop; infinite if too few contexts can get worse for any drop to show, NaN if scores
        have no bounds and nothing differs, so that nothing is known of their noise.
    """
    context_totals, context_sizes = pair.gaps
    least_contexts = significance.least_contexts(alpha)
    z_score = stats.normal_quantile(1 - alpha / 2)
    noise_drop = z_score * stats.clustered_se(context_totals, context_sizes) if len(context_sizes) > 1 else math.nan
    if not unit_scaled:
        return math.inf if len(context_sizes) < least_contexts else noise_drop or math.nan
    baseline_scores = pair.shared.before
    losable_totals, _ = stats.by_cluster(
        baseline_scores if pair.higher_is_better else 1 - baseline_scores, pair.shared.contexts
    )
    if np.count_nonzero(losable_totals > 0) < least_contexts:
        return math.inf
    full_loss = float(np.sort(context_sizes)[-least_contexts:].sum() / context_sizes.sum())
    # No drop is larger than what there is to lose, and if all of it is lost, enough contexts are.
    return float(np.fmax(min(full_loss, losable_totals.sum() / context_sizes.sum()), noise_drop))


def unit_tasks(cell_pairs: Sequence[CellPair]) -> dict[str, bool]:
    """Whether all scores of a task lie in [0, 1], by task."""
    unit_by_task: dict[str, bool] = {}
    for pair in cell_pairs:
        unit_by_task[pair.place.task] = unit_by_task.get(pair.place.task, True) and pair.shared.unit
    return unit_by_task


def _compared(
    pair: CellPair,
    test_result: tuple[float, float],
    max_drop: float,
    alpha: float,
    test_level: float,
    unit_scaled: bool,
) -> Comparison:
    shared, (p_value, corrected_p) = pair.shared, test_result
    mean_before = math.fsum(shared.before) / pair.responses
    mean_after = math.fsum(shared.after) / pair.responses
    allowed_drop = max_drop * POINT * (1.0 if unit_scaled else abs(mean_before))
    if shared.same:
        change, outcome = stats.Difference(0.0, 0.0, 0.0, pair.responses), Outcome.SAME
    else:
        change = stats.paired_values(shared.after, shared.before, shared.contexts)
        gain = change.mean if pair.higher_is_better else -change.mean
        outcome = _outcome(gain, allowed_drop, significant=corrected_p < alpha)
    return Comparison(
        pair,
        outcome,
        before=mean_before,
        after=mean_after,
        change=change,
        p=p_value,
        p_corrected=corrected_p,
        contexts=len(pair.gaps[1]),
        allowed=allowed_drop,
        visible=smallest_visible(pair, test_level, unit_scaled=unit_scaled),
        unit=unit_scaled,
    )


def _outcome(gain: float, allowed_drop: float, *, significant: bool) -> Outcome:
    slack = 1e-9  # a drop of exactly what is allowed is allowed
    if gain > -slack:
        return Outcome.IMPROVED if significant else Outcome.HIGHER
    if gain >= -allowed_drop - slack:
        return Outcome.ALLOWED
    return Outcome.FAILED if significant else Outcome.UNPROVEN
