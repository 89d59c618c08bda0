"""The search: rounds of settings, each in rungs with more samples for fewer settings.

A round asks a tree-structured Parzen estimator (optuna) for settings. They run on a ninth of the samples, the best
third of them on a third, and the best third of these on all (successive halving: Jamieson and Talwalkar, AISTATS 2016).
A rung is one grid, so all its settings share one prefill per context. The registered policies take part in the first
round. Every rung is a run in a folder of its own: a search that was stopped repeats its questions to the estimator, and
finds the answers there. The settings asked first do not depend on `trials`, so more trials complete a round that was
cut, with the same result as a search that had them from the start.
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
from kvbench.runs.file_names import GRID, RESPONSES
from kvbench.runs.grid import Grid
from kvbench.runs.load import load_frames
from kvbench.runs.runner import execute
from kvbench.runs.schema import LOG_KL
from kvbench.tables.text import counted
from kvbench.tuning.options import BY_BOTH, BY_KL, BY_SCORE
from kvbench.tuning.space import Space

REDUCTION = 3
"""One of so many settings goes on to the next rung, with as many times the samples."""

RUNGS = 3

_FAILED = (math.nan, math.nan)
"""Score and log KL of a setting that failed."""

_SECONDS = "seconds.json"
"""File in the folder of a rung: how long it took to run, without later readings."""


class SettingScore(NamedTuple):
    """The score of a setting in one rung.

    Attributes:
        policy: Canonical spelling.
        is_named: Whether it is a registered policy.
        round: Number of the round, from 1.
        samples: Samples per task.
        score: Mean score over tasks, budgets, moments and lengths, higher is better; NaN if a cell failed.
        log_kl: Mean of log(KL + 0.001) to the full cache, lower is better; NaN if a cell failed, or if the search goes
            by the score alone.
        seconds: Seconds of search until the rung was done.
    """

    policy: str
    is_named: bool
    round: int
    samples: int
    score: float
    log_kl: float
    seconds: float


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Attributes:
        outcomes: All outcomes, in the order in which rungs ended.
        last_rungs: Folders of the runs with the most samples, one per round.
        left_out: Why policies cannot run here, by spelling.
        by: What the search goes by: score, KL or both.
        trials: Number of settings that the estimator suggested, repetitions included.
    """

    outcomes: tuple[SettingScore, ...]
    last_rungs: tuple[Path, ...]
    left_out: Mapping[str, str]
    by: str = BY_SCORE
    trials: int = 0

    def ranked(self) -> list[SettingScore]:
        """Return the outcomes with all samples, the best first, once each."""
        all_samples = max(outcome.samples for outcome in self.outcomes)
        final = [outcome for outcome in self.outcomes if outcome.samples == all_samples]
        best_first = sorted(
            final,
            key=lambda outcome: (
                *(-_finite(goal) for goal in _goals(self.by, outcome.score, outcome.log_kl)),
                not outcome.is_named,
                outcome.policy,
            ),
        )
        once: dict[str, SettingScore] = {}
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
    by: str = BY_SCORE,
) -> Found:
    """Search for the setting with the highest mean score, or the lowest KL divergence.

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
        by: What to search for; by both, the estimator learns from score and KL, and KL decides among equal scores.

    Raises:
        UserError: A value of the grid is wrong, or all settings of the first round failed.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=round_size)
    study = optuna.create_study(directions=["maximize"] * len(_goals(by, 0.0, 0.0)), sampler=sampler)
    run_values = grid_values if by == BY_SCORE else {**grid_values, "fidelity": True}
    outcomes: list[SettingScore] = []
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
        goals: dict[str, tuple[float, ...]] = {}
        for rung, rung_size in enumerate(sizes := rung_samples(samples), 1):
            remaining = list(dict.fromkeys(candidates))
            reporter.message(
                f"round {round_number}, rung {rung} of {len(sizes)}: {counted(len(remaining), 'setting')} on "
                f"{counted(rung_size, 'sample')} per task; {duration(spent)} of search so far"
            )
            rung_folder = folder / "rungs" / f"{round_number}-{rung}"
            results, failures, rung_seconds = _run_rung(run_values, remaining, rung_size, rung_folder, reporter)
            left_out |= failures
            spent += rung_seconds
            rung_goals = {policy: _goals(by, *results[policy]) for policy in results}
            goals |= rung_goals
            outcomes += [
                SettingScore(policy, policy in named, round_number, rung_size, *results.get(policy, _FAILED), spent)
                for policy in remaining
            ]
            candidates = _promoted(rung_goals, named)
            if not candidates:
                break
        else:
            last_rungs.append(rung_folder)
        if not last_rungs:
            raise UserError(f"all settings failed: {next(iter(left_out.values()), 'no cell was run')}")
        for trial, policy in asked:
            if policy in goals:
                study.tell(trial, goals[policy])
            else:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
        longest_round = max(longest_round, spent - began)
    return Found(tuple(outcomes), tuple(last_rungs), left_out, by, tried)


def _goals(by: str, score: float, log_kl: float) -> tuple[float, ...]:
    """Return what a search maximises, in the order of its importance."""
    return {BY_SCORE: (score,), BY_KL: (-log_kl,), BY_BOTH: (score, -log_kl)}[by]


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


def _promoted(goals: Mapping[str, tuple[float, ...]], named: set[str]) -> list[str]:
    """Return the best third of the tuned settings and of the named policies, so that both have a best one."""
    best_first = sorted(goals, key=lambda policy: (*(-goal for goal in goals[policy]), policy))
    promoted: list[str] = []
    for group in ([policy for policy in best_first if policy in named], [p for p in best_first if p not in named]):
        promoted += group[: math.ceil(len(group) / REDUCTION)]
    return promoted


def _run_rung(
    grid_values: Mapping[str, Any], policies: Sequence[str], samples: int, folder: Path, reporter: Reporter
) -> tuple[dict[str, tuple[float, float]], dict[str, str], float]:
    """Run settings that the folder lacks; return score and log KL, reasons of failures, and seconds.

    With more trials, other settings may have been promoted. Those in the folder stay there, but have no result.
    """
    began, size_before = time.monotonic(), _size(folder / RESPONSES)
    stored = Grid.from_yaml(folder / GRID).policies if (folder / GRID).exists() else ()
    all_policies = list(dict.fromkeys([*stored, *policies]))
    grid = Grid.from_dict({**grid_values, "policies": all_policies, "samples": samples, "out": str(folder)})
    result = execute(grid, reporter, extend=True)
    cells = result.cells[result.cells["policy"].isin(policies)]
    scores = mean_scores(cells)
    if grid.fidelity:
        divergences = mean_scores(load_frames(folder, metric=LOG_KL)[0])
        results = {
            policy: (scores.get(policy, math.nan), -divergences[policy]) for policy in policies if policy in divergences
        }
    else:
        results = {policy: (score, math.nan) for policy, score in scores.items()}
    failed = cells[cells["status"] != "ok"]
    failures = dict(zip(failed["policy"].astype(str), failed["error"].astype(str), strict=True))
    failures |= {policy: reason for policy, reason in result.left_out.items() if policy in policies}
    seconds_file = folder / _SECONDS
    seconds = float(json.loads(seconds_file.read_text(encoding="utf-8"))) if seconds_file.exists() else 0.0
    if not seconds_file.exists() or _size(folder / RESPONSES) > size_before:  # reading what is there is no search
        seconds += time.monotonic() - began
        with replacing(seconds_file) as partial_path:
            partial_path.write_text(json.dumps(seconds), encoding="utf-8")
    return results, failures, seconds


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def mean_scores(cells: pd.DataFrame) -> dict[str, float]:
    """Return the mean score of each policy whose cells all have one; tasks have equal weights, higher is better."""
    rows = cells[cells["policy"] != "full"]
    signs = rows["higher_is_better"].map({True: 1.0, False: -1.0})
    by_policy = (rows["score"].where(rows["status"] == "ok") * signs).groupby(rows["policy"], sort=False)
    means = by_policy.agg(lambda scores: math.nan if scores.isna().any() else scores.mean())
    return {str(policy): float(score) for policy, score in means.items() if math.isfinite(score)}


def _finite(score: float) -> float:
    return score if math.isfinite(score) else -math.inf
