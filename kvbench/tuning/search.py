"""The search: rounds of settings, each in rungs with more samples for fewer settings.

A round asks a tree-structured Parzen estimator (optuna) for settings. They run on a ninth of the samples, the best
third of them on a third, and the best third of these on all (successive halving: Jamieson and Talwalkar, AISTATS 2016).
A rung is one grid, so all its settings share one prefill per context. The registered policies take part in the first
round. Every rung is a run in a folder of its own: a search that was stopped repeats its questions to the estimator, and
finds the answers there.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from kvbench.errors import UserError
from kvbench.files import replacing
from kvbench.progress import Reporter, duration
from kvbench.runs.grid import Grid
from kvbench.runs.runner import execute
from kvbench.tables.text import counted
from kvbench.tuning.space import Space

REDUCTION = 3
"""One of so many settings goes on to the next rung, with as many times the samples."""

RUNGS = 3

_SECONDS = "seconds.json"
"""File in the folder of a rung: how long it took when it was run."""


class Outcome(NamedTuple):
    """The score of a setting in one rung.

    Attributes:
        policy: Canonical spelling.
        is_named: Whether it is a registered policy.
        round: Number of the round, from 1.
        samples: Samples per task.
        score: Mean score over tasks, budgets, moments and lengths, higher is better; NaN if a cell failed.
        seconds: Seconds of search until the rung was done.
    """

    policy: str
    is_named: bool
    round: int
    samples: int
    score: float
    seconds: float


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Attributes:
        outcomes: All outcomes, in the order in which rungs ended.
        last_rungs: Folders of the runs with the most samples, one per round.
        left_out: Why policies cannot run here, by spelling.
    """

    outcomes: tuple[Outcome, ...]
    last_rungs: tuple[Path, ...]
    left_out: Mapping[str, str]

    def ranked(self) -> list[Outcome]:
        """Return the outcomes with all samples, the best first, once each."""
        all_samples = max(outcome.samples for outcome in self.outcomes)
        final = [outcome for outcome in self.outcomes if outcome.samples == all_samples]
        best_first = sorted(final, key=lambda outcome: (-_finite(outcome.score), not outcome.is_named, outcome.policy))
        once: dict[str, Outcome] = {}
        for outcome in best_first:
            once.setdefault(outcome.policy, outcome)
        return list(once.values())


def rung_samples(samples: int) -> list[int]:
    """Return the samples per task of each rung, ascending; rungs of equal size are one."""
    return sorted({max(1, math.ceil(samples / REDUCTION**power)) for power in range(RUNGS)})


def search(
    grid_values: Mapping[str, Any],
    space: Space,
    folder: Path,
    reporter: Reporter,
    *,
    samples: int,
    round_size: int,
    trials: int | None,
    seconds: float | None,
    seed: int,
) -> Found:
    """Search for the setting with the highest mean score.

    Args:
        grid_values: Options of the grid without policies and samples, in the format of `Grid.from_dict`.
        space: What to combine.
        folder: Folder of all runs.
        reporter: Progress reporter.
        samples: Samples per task of the last rung.
        round_size: Settings of a round.
        trials: Number of settings in all; None: as many as time allows.
        seconds: No round begins that would probably end later; None: no limit. The first round always runs.
        seed: Seed of the estimator.

    Raises:
        UserError: A value of the grid is wrong, or all settings of the first round failed.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=round_size)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    outcomes: list[Outcome] = []
    last_rungs: list[Path] = []
    left_out: dict[str, str] = {}
    spent = longest_round = 0.0
    tried = round_number = 0
    while round_number == 0 or (trials is None or tried < trials):
        if round_number and seconds is not None and spent + longest_round > seconds:
            break
        round_number += 1
        asked = _ask(study, space, round_size if trials is None else min(round_size, trials - tried))
        tried += len(asked)
        spelled = [policy for _, policy in asked]
        named = {str(policy) for policy in space.named}
        candidates = [*(sorted(named) if round_number == 1 else ()), *spelled]
        began = spent
        scores: dict[str, float] = {}
        for rung, rung_size in enumerate(sizes := rung_samples(samples), 1):
            remaining = list(dict.fromkeys(candidates))
            reporter.message(
                f"round {round_number}, rung {rung} of {len(sizes)}: {counted(len(remaining), 'setting')} on "
                f"{counted(rung_size, 'sample')} per task; {duration(spent)} of search so far"
            )
            rung_folder = folder / "rungs" / f"{round_number}-{rung}"
            rung_scores, failures, rung_seconds = _run_rung(grid_values, remaining, rung_size, rung_folder, reporter)
            left_out |= failures
            spent += rung_seconds
            scores |= rung_scores
            outcomes += [
                Outcome(policy, policy in named, round_number, rung_size, rung_scores.get(policy, math.nan), spent)
                for policy in remaining
            ]
            candidates = _promoted(rung_scores, named)
            if not candidates:
                break
        else:
            last_rungs.append(rung_folder)
        if not last_rungs:
            raise UserError(f"all settings failed: {next(iter(left_out.values()), 'no cell was run')}")
        for trial, policy in asked:
            if policy in scores:
                study.tell(trial, scores[policy])
            else:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
        longest_round = max(longest_round, spent - began)
    return Found(tuple(outcomes), tuple(last_rungs), left_out)


def _ask(study: Any, space: Space, count: int) -> list[tuple[Any, str]]:
    """Return trials with the settings that they suggest; a combination that a part refuses counts as failed."""
    from optuna.trial import TrialState

    asked: list[tuple[Any, str]] = []
    while len(asked) < count:
        trial = study.ask()
        try:
            asked.append((trial, space.suggest(trial)))
        except UserError:
            study.tell(trial, state=TrialState.FAIL)
    return asked


def _promoted(scores: Mapping[str, float], named: set[str]) -> list[str]:
    """Return the best third of the tuned settings and of the named policies, so that both have a best one."""
    best_first = sorted(scores, key=lambda policy: (-scores[policy], policy))
    promoted: list[str] = []
    for group in ([policy for policy in best_first if policy in named], [p for p in best_first if p not in named]):
        promoted += group[: math.ceil(len(group) / REDUCTION)]
    return promoted


def _run_rung(
    grid_values: Mapping[str, Any], policies: Sequence[str], samples: int, folder: Path, reporter: Reporter
) -> tuple[dict[str, float], dict[str, str], float]:
    """Run settings, or read a run that is complete; return scores, reasons of failures, and seconds."""
    began = time.monotonic()
    grid = Grid.from_dict({**grid_values, "policies": list(policies), "samples": samples, "out": str(folder)})
    result = execute(grid, reporter)
    scores = mean_scores(result.cells)
    failed = result.cells[result.cells["status"] != "ok"]
    failures = dict(zip(failed["policy"].astype(str), failed["error"].astype(str), strict=True))
    failures |= {policy: reason for policy, reason in result.left_out.items() if policy in policies}
    seconds_file = folder / _SECONDS
    if not seconds_file.exists():
        with replacing(seconds_file) as partial_path:
            partial_path.write_text(json.dumps(time.monotonic() - began), encoding="utf-8")
    return scores, failures, float(json.loads(seconds_file.read_text(encoding="utf-8")))


def mean_scores(cells: pd.DataFrame) -> dict[str, float]:
    """Return the mean score of each policy whose cells all have one; tasks have equal weights, higher is better."""
    rows = cells[cells["policy"] != "full"]
    signs = rows["higher_is_better"].map({True: 1.0, False: -1.0})
    by_policy = (rows["score"].where(rows["status"] == "ok") * signs).groupby(rows["policy"], sort=False)
    means = by_policy.agg(lambda scores: math.nan if scores.isna().any() else scores.mean())
    return {str(policy): float(score) for policy, score in means.items() if math.isfinite(score)}


def _finite(score: float) -> float:
    return score if math.isfinite(score) else -math.inf
