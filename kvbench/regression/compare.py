"""Regression test between two runs: paired differences per cell, with significance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvbench import stats
from kvbench.errors import UserError
from kvbench.regression import significance
from kvbench.regression.pairs import CellPair, Frames, made_differently, pair_cells
from kvbench.runs.schema import FIDELITY, UNBOUNDED

POINT = 0.01
LEAST_ALPHA = 1e-4


class Outcome(StrEnum):
    """Outcome of a comparison for a cell, the worst first."""

    FAILED = "failed"
    """The score dropped significantly and by more than allowed."""
    NOT_COMPARED = "not compared"
    """The run lacks the cell, has no score for it, or measured something else."""
    UNPROVEN = "not significant"
    """The score dropped by more than allowed, but not significantly."""
    ALLOWED = "within allowance"
    """The score dropped by no more than allowed."""
    IMPROVED = "improved"
    """The score is significantly better."""
    HIGHER = "not worse"
    """The score is better, but not significantly, or the mean is equal although responses differ."""
    SAME = "unchanged"
    """All shared responses are identical."""
    NO_BASELINE = "no baseline"
    """The baseline has no score for the cell."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of a cell in two runs. Scores and change are over their common samples.

    Attributes:
        pair: The two cells.
        outcome: Outcome of the comparison.
        reason: Why the cell was not compared, or an empty string.
        before: Mean score of the baseline.
        after: Mean score of the run.
        change: Paired difference, run minus baseline, with its 95% interval.
        p: Two-sided p-value of the difference.
        p_corrected: The same after Holm's correction for all cells whose scores differ.
        contexts: Number of common contexts.
        allowed: Allowed drop, in the task's own unit.
        visible: Minimum detectable drop of this cell; infinite if no drop can be significant. See `smallest_visible`.
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
    """Comparison of a run with a baseline.

    Attributes:
        cells: A comparison per cell of the baseline, in its order.
        extra: Number of cells of the run that the baseline lacks.
        made: Settings that differ between the compared cells, and between the machines: name to values of baseline and
            run.
        max_drop: Allowed drop in points, or in percent of the baseline's score if a task is not scored in [0, 1].
        alpha: Probability of a false alarm in the whole comparison.
    """

    cells: tuple[Comparison, ...]
    extra: int
    made: dict[str, tuple[str, str]]
    max_drop: float
    alpha: float

    def of(self, *outcomes: Outcome) -> list[Comparison]:
        """Return the cells with one of these outcomes."""
        return [comparison for comparison in self.cells if comparison.outcome in outcomes]

    @property
    def compared(self) -> list[Comparison]:
        """The cells with a score in both runs."""
        return [comparison for comparison in self.cells if comparison.pair.responses]

    @property
    def tested(self) -> int:
        """Number of tests in Holm's correction: cells whose scores differ."""
        return sum(comparison.pair.differs for comparison in self.compared)

    @property
    def failed(self) -> bool:
        """Whether any drop is significant and larger than allowed."""
        return bool(self.of(Outcome.FAILED))

    @property
    def complete(self) -> bool:
        """Whether every cell with a score in the baseline, and at least one, was compared."""
        return bool(self.compared) and not self.of(Outcome.NOT_COMPARED)


def compare(
    baseline: Frames,
    run: Frames,
    *,
    max_drop: float = 1.0,
    alpha: float = 0.05,
    machines: Mapping[str, tuple[str, str]] | None = None,
) -> Regression:
    """Compare the cells of a run with the matching cells of a baseline.

    Cells are paired by `match`, their common responses by sample, question and repeat. The fidelity of the full cache
    to itself is left out, because it differs by rounding errors only. Intervals are from
    `kvbench.stats.paired`, p-values from `significance.sign_p`, corrected for all cells whose scores differ.

    Args:
        baseline: Cells and samples of the baseline.
        run: Cells and samples of the run.
        max_drop: Allowed drop in points if scores are in [0, 1], otherwise in percent of the baseline's score.
        alpha: Level of significance for corrected p-values.
        machines: What differs about their machines; see `kvbench.runs.integrity.differing_machines`.

    Raises:
        UserError: `max_drop` or `alpha` is out of range, or a run measures the same twice.
    """
    if not (math.isfinite(max_drop) and max_drop >= 0):
        raise UserError(f"--max-drop {max_drop:g} is out of range; use points, such as 1.0")
    check_share("--alpha", alpha, minimum=LEAST_ALPHA)
    cell_pairs = [
        pair for pair in pair_cells(baseline, run) if pair.place.policy != "full" or pair.metric not in FIDELITY
    ]
    shared_pairs = [pair for pair in cell_pairs if pair.responses]
    # A cell without differences cannot raise a false alarm, so the correction ignores it.
    differing_pairs = [pair for pair in shared_pairs if pair.differs]
    draw_count = significance.enough_draws(len(differing_pairs), alpha)
    p_values = [significance.sign_p(pair.gaps[0], draws=draw_count) for pair in differing_pairs]
    test_places = [pair.place for pair in differing_pairs]
    tests_by_place = dict(zip(test_places, zip(p_values, significance.holm(p_values), strict=True), strict=True))
    unit_by_task = unit_tasks(shared_pairs)
    comparisons = []
    for pair in cell_pairs:
        if not pair.responses:
            outcome = Outcome.NO_BASELINE if pair.settled else Outcome.NOT_COMPARED
            comparisons.append(Comparison(pair, outcome, pair.problem))
            continue
        # If a cell without differences had dropped, there would be one more test.
        test_level = alpha / (len(tests_by_place) + (pair.place not in tests_by_place))
        unit_scaled, test_result = (
            unit_by_task[pair.place.task],
            tests_by_place.get(pair.place, (1.0, 1.0)),
        )
        comparisons.append(_compared(pair, test_result, max_drop, alpha, test_level, unit_scaled))
    settings = {**made_differently(baseline[0], run[0]), **(machines or {})}
    extra_count = len(set(run[0]["match"]) - set(baseline[0]["match"]))
    return Regression(tuple(comparisons), extra_count, settings, max_drop, alpha)


def check_share(option: str, value: float, minimum: float = 0.0) -> None:
    """Validate the range of a probability.

    Raises:
        UserError: It is not between 0 and 1, or below the minimum; the message names the option.
    """
    if not (0 < value < 1 and value >= minimum):
        raise UserError(f"{option} {value:g} is out of range; use a number between {minimum:g} and 1")


def smallest_visible(pair: CellPair, alpha: float, *, unit_scaled: bool) -> float:
    """Return the minimum detectable drop of a pair: significant whichever contexts it affects.

    A drop is hardest to detect if it is concentrated in few contexts, because a test needs a minimum number of contexts
    that got worse. For scores in [0, 1], the minimum is a loss from 1 to 0 in that number of contexts. If other scores
    differ, the drop must also exceed their noise, by `z_score` standard errors.

    Args:
        pair: The two cells, with common samples.
        alpha: The level, corrected for the number of cells.
        unit_scaled: Whether scores are in [0, 1].

    Returns:
        The drop; infinite if too few contexts can get worse, NaN if scores are unbounded and nothing differs, so that
        the noise is unknown.
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
    # A drop is bounded by the total score, whose loss affects enough contexts.
    return float(np.fmax(min(full_loss, losable_totals.sum() / context_sizes.sum()), noise_drop))


def unit_tasks(cell_pairs: Sequence[CellPair]) -> dict[str, bool]:
    """Return by task whether all scores lie in [0, 1]."""
    unit_by_task: dict[str, bool] = {}
    for pair in cell_pairs:
        is_unit = pair.shared.unit and pair.metric not in UNBOUNDED
        unit_by_task[pair.place.task] = unit_by_task.get(pair.place.task, True) and is_unit
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
    slack = 1e-9  # a drop equal to the allowed one passes
    if gain > -slack:
        return Outcome.IMPROVED if significant else Outcome.HIGHER
    if gain >= -allowed_drop - slack:
        return Outcome.ALLOWED
    return Outcome.FAILED if significant else Outcome.UNPROVEN
