"""The winner of a search against the best named policy, on samples that the search did not see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import UserError
from kvbench.files import digest_of
from kvbench.progress import Reporter
from kvbench.regression.policies import PolicyComparison, compare_policies
from kvbench.report.frames import prepare
from kvbench.runs.grid import Grid
from kvbench.runs.load import load_frames
from kvbench.runs.runner import execute
from kvbench.runs.schema import LOG_KL
from kvbench.tuning.options import BY_KL, BY_SCORE
from kvbench.tuning.search import Found


@dataclass(frozen=True)
class HeldOut:
    """Comparison on held-out samples.

    Attributes:
        winner: The best setting of the search that is no registered policy; None if no such setting has a score.
        named: The best registered policy of the search.
        comparisons: Winner minus named policy, one per benchmark and length; empty without a winner.
        run: Folder of the run with both policies and the full cache; None without a winner.
    """

    winner: str | None
    named: str
    comparisons: tuple[PolicyComparison, ...]
    run: Path | None

    @property
    def best(self) -> str:
        """Return the policy to use: the winner if it gains, otherwise the named policy."""
        return self.winner if self.winner is not None and self.gains else self.named

    @property
    def gains(self) -> bool:
        """Return whether the winner is better than the named policy beyond doubt, on every benchmark and length."""
        return bool(self.comparisons) and all(
            comparison.overall.is_decided(0.05) and (comparison.overall.change.mean > 0) == comparison.higher_is_better
            for comparison in self.comparisons
        )


def compare_held_out(
    grid_values: Mapping[str, Any], found: Found, samples: int, folder: Path, reporter: Reporter
) -> HeldOut:
    """Run the best setting and the best registered policy, and compare them on the samples after those of the search.

    They are compared by KL if the search went by KL alone, and by the score otherwise.

    Args:
        grid_values: As for `search`.
        found: Result of the search.
        samples: Samples per task in the search and held out together.
        folder: Folder of the search; the run is in `held_out`, in a folder for the two policies.
        reporter: Progress reporter.

    Raises:
        UserError: The tasks have no more samples than the search used.
    """
    ranked = found.ranked()
    named = next(outcome.policy for outcome in ranked if outcome.is_named)
    winner = next((outcome.policy for outcome in ranked if not outcome.is_named), None)
    if winner is None:
        return HeldOut(None, named, (), None)
    run_folder = folder / "held_out" / digest_of([winner, named])
    reporter.message(f"held-out samples: {winner} against {named}")
    values = {**grid_values, "policies": [winner, named], "samples": samples, "full": True, "out": str(run_folder)}
    if found.by != BY_SCORE:
        values["fidelity"] = True
    execute(Grid.from_dict(values), reporter)
    seen_contexts = set(load_frames(found.last_rungs, ["cell", "context_id"])[1]["context_id"])
    cells, all_samples = load_frames(run_folder, metric=LOG_KL if found.by == BY_KL else None)
    unseen = all_samples[~all_samples["context_id"].isin(seen_contexts)]
    if not len(unseen):
        raise UserError("the tasks have no samples beyond those of the search; use fewer --samples, or other tasks")
    return HeldOut(winner, named, tuple(compare_policies(prepare(cells, unseen), named, winner)), run_folder)
