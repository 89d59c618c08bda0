"""`kvbench tune` from flags to a winner: the search, the held-out comparison, tables, figure, summary and a grid."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from kvbench.analysis.common import make_grid
from kvbench.analysis.output import AnalysisOutput, Findings, prepare_output, write_all
from kvbench.errors import UserError
from kvbench.files import replacing
from kvbench.moments import MOMENTS
from kvbench.named import resolve_model
from kvbench.progress import Reporter, duration
from kvbench.regression import show_policies
from kvbench.report.figure_flags import DEFAULT_FLAGS, FigureFlags
from kvbench.report.figure_options import FigureOptions
from kvbench.runs.file_names import GRID
from kvbench.runs.grid import Grid
from kvbench.runs.schema import LOG_KL
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.outputs import plain_text
from kvbench.tables.plot_style import COLUMN, GREY, lay_out_figure, marker_options, plot_style, save
from kvbench.tables.table import Column, Name, Table, TableRow
from kvbench.tables.text import counted, short
from kvbench.tuning.held_out import HeldOut, compare_held_out
from kvbench.tuning.options import BY_KL, BY_SCORE, TuneOptions
from kvbench.tuning.search import Found, SettingScore, search
from kvbench.tuning.space import search_space

SAMPLES = 27
"""Default number of samples per task in the last rung."""

WINNER = "winner.yaml"
DEFAULT_SECONDS = 30 * 60
_SHOWN = 10
_NAMED, _TUNED = (GREY, "o"), ("#0072b2", "D")
"""Colour and marker of registered policies and of settings in the figure."""
_BEST: dict[str, Any] = {"color": GREY, "linewidth": 0.8}
"""Line of the best score so far."""


def write_tuning(
    grid_options: Mapping[str, Any],
    reporter: Reporter,
    *,
    options: TuneOptions,
    figures: FigureFlags = DEFAULT_FLAGS,
    command: str = "kvbench tune",
) -> AnalysisOutput:
    """Search for a setting, compare it on held-out samples, and write everything.

    Args:
        grid_options: Grid options without policies, in the format of `Grid.from_dict`.
        reporter: Progress reporter.
        options: Options of the search.
        figures: Options of the figure.
        command: Command shown in the summary.

    Raises:
        UserError: A value is unknown or out of range, the output is not writable or holds something else, or every
            setting failed.
    """
    values = {"samples": SAMPLES, **grid_options, "full": False, "repeats": 1}
    grid = make_grid({**values, "policies": "random"}, MOMENTS)
    if len(grid.models) > 1:
        raise UserError("--model: a search is for one model; start one search for each")
    space = search_space(resolve_model(grid.models[0]), options.restricted, with_files=options.with_files)
    settings = options.to_dict()
    # Another time or number of settings or of held-out samples continues a search.
    lasting_settings = {name: value for name, value in settings.items() if name not in ("time", "trials", "held_out")}
    if grid.out:
        _check_folder(Path(grid.out), grid, lasting_settings)
    folder, figure_settings = prepare_output(grid, "tune", figures, lasting_settings)
    seconds = options.time if options.time is not None or options.trials is not None else DEFAULT_SECONDS
    run_values = {name: value for name, value in values.items() if name not in ("samples", "out", "policy", "policies")}
    found = search(
        run_values,
        space,
        folder,
        reporter,
        samples=grid.samples,
        round_size=options.round_size,
        trials=options.trials,
        seconds=seconds,
        seed=grid.seed,
        by=options.by,
    )
    result = compare_held_out(run_values, found, grid.samples + options.held_out, folder, reporter)
    tables = [_ranking(found, grid), *_comparison_tables(result)]
    notes = [*_conclusion(result, folder), *_notes(found, grid, options)]
    figure_paths = _draw(found, folder / "figures" / "search", figure_settings)
    frame = pd.DataFrame([outcome._asdict() for outcome in found.outcomes])
    findings = Findings({"search": frame}, tables, notes, figure_paths, {}, ("search",))
    output = write_all(folder, grid, {"analysis": "tune", **settings, "policies": []}, findings, command)
    winner_path = folder / WINNER
    with replacing(winner_path) as partial_path:
        partial_path.write_text(_winning_grid(grid, result), encoding="utf-8")
    summary_path, *other_files = output.files
    return replace(output, files=[summary_path, winner_path, *other_files])


def _check_folder(folder: Path, grid: Grid, lasting_settings: Mapping[str, Any]) -> None:
    """Refuse a folder whose files the search would replace; `prepare_output` refuses one with a run.

    Raises:
        UserError: The folder holds another analysis or another search.
    """
    try:
        record = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    except OSError:  # a search that was stopped has only its rungs
        record = {"analysis": "tune"}
    except ValueError:
        record = {}
    if record.get("analysis") != "tune":
        raise UserError(f"--out {folder} holds another analysis; choose another folder")
    grid_path = folder / "rungs" / "1-1" / GRID
    if not grid_path.exists():
        return
    differing = grid.differs(Grid.from_yaml(grid_path, {"policies": grid.policies}))
    differing += [name for name, value in lasting_settings.items() if record.get(name, value) != value]
    if differing:
        names = ", ".join(name.replace("_", "-") for name in differing)
        raise UserError(f"{folder} holds another search, with other {names}; choose another --out")


def _ranking(found: Found, grid: Grid) -> Table:
    ranked = found.ranked()
    shown = ranked[:_SHOWN]
    if not any(outcome.is_named for outcome in shown):
        shown.append(next(outcome for outcome in ranked if outcome.is_named))
    columns = []
    if found.by != BY_KL:
        columns.append((Column("score", _score_kind(ranked), better="higher"), [each.score for each in shown]))
    if found.by != BY_SCORE:
        columns.append((Column(LOG_KL, NumberFormat.NUMBER, better="lower"), [each.log_kl for each in shown]))
    rows = tuple(
        TableRow((Name(outcome.policy), "named" if outcome.is_named else f"round {outcome.round}", *values))
        for outcome, *values in zip(shown, *(column_values for _, column_values in columns), strict=True)
    )
    title = f"best of {counted(len({outcome.policy for outcome in found.outcomes}), 'setting')} in the search"
    note = f"Means over the {grid.samples} samples per task that chose them, so they are too good for the best ones."
    return Table(title, (Column("policy"), Column("from"), *(column for column, _ in columns)), rows, (note,))


def _score_kind(outcomes: list[SettingScore]) -> NumberFormat:
    unit_scaled = all(0 <= outcome.score <= 1 for outcome in outcomes)
    return NumberFormat.POINTS if unit_scaled else NumberFormat.NUMBER


def _pair(result: HeldOut) -> show_policies.PolicyPair:
    assert result.winner is not None
    return show_policies.PolicyPair(result.named, result.winner)


def _comparison_tables(result: HeldOut) -> list[Table]:
    return show_policies.tables(result.comparisons, _pair(result)) if result.comparisons else []


def _conclusion(result: HeldOut, folder: Path) -> list[str]:
    """Return whether the gain is real, and how to run the better policy."""
    run_best = f"use --policy {result.best}, or kvbench run --config {folder / WINNER}."
    sentences = [plain_text(show_policies.sentence(each, _pair(result))) for each in result.comparisons]
    if result.winner is None:
        verdict = "No setting of the search has a score"
    elif result.gains:
        verdict = "The gain is real"
    else:
        verdict = f"A gain of --policy {result.winner} is not shown on held-out samples. The safe choice"
    return [*sentences, f"{verdict}: {run_best}"]


def _notes(found: Found, grid: Grid, options: TuneOptions) -> list[str]:
    rounds = max(outcome.round for outcome in found.outcomes)
    spent = max(outcome.seconds for outcome in found.outcomes)
    tuned = {outcome.policy for outcome in found.outcomes if not outcome.is_named}
    named = {outcome.policy for outcome in found.outcomes if outcome.is_named}
    repeated = found.trials - len(tuned)
    known = f" ({repeated} repeat another or are a named policy)" if repeated else ""
    lines = [
        f"{counted(found.trials, 'setting')}{known} in {counted(rounds, 'round')}, and {len(named)} named policies: "
        f"{duration(spent)} of search with {counted(grid.samples, 'sample')} per task, "
        f"then {counted(options.held_out, 'held-out sample')} per task."
    ]
    if found.left_out:
        policy, reason = next(iter(found.left_out.items()))
        lines.append(f"{counted(len(found.left_out), 'setting')} failed, such as {policy}: {short(reason, 160)}")
    return lines


def _winning_grid(grid: Grid, result: HeldOut) -> str:
    """Return the YAML of a grid with the better policy, as `kvbench run --config` takes it."""
    warning = (
        f"# The first {counted(grid.samples, 'sample')} per task chose this policy, so its score on them is too good.\n"
        f"# summary.md has its score on other samples; generated tasks have new ones with --seed {grid.seed + 1}.\n"
    )
    default = asdict(Grid.from_dict({"policies": "random", "tasks": list(grid.tasks)}))
    values = {**grid.to_dict(), "policies": [result.best], "full": True}
    kept = {name: value for name, value in values.items() if name != "out" and (value != _plain(default[name]))}
    return warning + yaml.safe_dump({"policies": [result.best], "tasks": list(grid.tasks), **kept}, sort_keys=False)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _draw(found: Found, stem: Path, options: FigureOptions) -> list[Path]:
    """Draw the scores with all samples by round, and the best one so far; by KL alone, the KL divergences."""
    is_score = found.by != BY_KL
    factor = 100 if is_score and _score_kind(found.ranked()) is NumberFormat.POINTS else 1
    best_of = max if is_score else min

    def value_of(outcome: SettingScore) -> float:
        return outcome.score * factor if is_score else outcome.log_kl

    all_samples = max(outcome.samples for outcome in found.outcomes)
    named_points, tuned_points = (marker_options(style, linestyle="none") for style in (_NAMED, _TUNED))
    with plot_style():
        layout = lay_out_figure(
            1,
            1,
            title="search for a setting" if options.has_title else "",
            width=options.width or COLUMN,
            panel_height=1.8,
            x_label="round",
            y_label="mean score" if is_score else "mean log(KL + 0.001)",
            labels=("named policies", "settings of the search", "best so far"),
            handles=(*(Line2D([], [], **points) for points in (named_points, tuned_points)), Line2D([], [], **_BEST)),
        )
        axes = layout.axes[0, 0]
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        final = [outcome for outcome in found.outcomes if outcome.samples == all_samples]
        # Side by side, because many have the same score.
        for style, is_named, shift in ((named_points, True, -0.08), (tuned_points, False, 0.08)):
            points = [outcome for outcome in final if outcome.is_named is is_named]
            axes.plot(
                [outcome.round + shift for outcome in points],
                [value_of(outcome) for outcome in points],
                **style,
            )
        rounds = sorted({outcome.round for outcome in final})
        best = [best_of(value_of(outcome) for outcome in final if outcome.round <= number) for number in rounds]
        axes.set_xlim(rounds[0] - 0.5, rounds[-1] + 0.5)
        axes.step(rounds, best, where="post", **_BEST)
    return save(layout.figure, stem, options.formats)
