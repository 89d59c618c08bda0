"""Analysis of causes from a run, or from a grid that is run first, to tables, figures and pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.analysis.causes.diagnosis import ELSEWHERE, RIGHT
from kvbench.analysis.causes.figures import draw_causes
from kvbench.analysis.causes.frames import head_rows, intervention_rows, pair_rows, sample_rows
from kvbench.analysis.causes.lost import RunAnswers
from kvbench.analysis.causes.options import SEARCH, CausesOptions
from kvbench.analysis.causes.page import write_pages
from kvbench.analysis.causes.profile import write_profiles
from kvbench.analysis.causes.study import CausesResult, examine_run
from kvbench.analysis.causes.tables import READING, cause_tables, sentences
from kvbench.analysis.choosing import split_commas
from kvbench.analysis.common import make_grid
from kvbench.analysis.output import (
    AnalysisOutput,
    Findings,
    prepare_output,
    require_results,
    write_all,
)
from kvbench.analysis.scopes import scopes
from kvbench.analysis.summary import notes
from kvbench.errors import UserError
from kvbench.progress import Reporter
from kvbench.report.figure_flags import DEFAULT_FLAGS, FigureFlags
from kvbench.runs.file_names import GRID
from kvbench.runs.grid import Grid
from kvbench.runs.options import field_of, flag_of
from kvbench.runs.runner import execute
from kvbench.spelling import policy as kvbench_policy
from kvbench.tables.text import counted

_FREE = {"policies", "budgets", "moments", "tasks", "samples", "device", "device_map", "dtype", "attn", "out"}
"""Options that select cells and samples of a run, or say where and how it is computed again."""
_MOMENTS = ("context", "question", "decode")
PAGES = "samples"
"""Folder of the pages, in the output folder."""
_RUN = "run"
"""Folder of the run, in the output folder, if no run was given."""


def write_causes(
    grid_options: Mapping[str, Any],
    reporter: Reporter,
    *,
    run: str | None = None,
    options: CausesOptions | None = None,
    figures: FigureFlags = DEFAULT_FLAGS,
    command: str = "kvbench analyze causes",
) -> AnalysisOutput:
    """Find the causes of lost samples and write `samples`, `interventions`, `heads` and `pairs.parquet`.

    Args:
        grid_options: Grid options, in the format of `Grid.from_dict`; with `run`, those that restrict it.
        reporter: Progress reporter.
        run: Folder of a run with the full cache; None runs the grid first.
        options: Options of the analysis.
        figures: Options of the figures.
        command: Command shown in the summary.

    Raises:
        UserError: A value is unknown or out of range, the run cannot be used or has another value of an option, nothing
            is lost, or the output is not writable or holds a run.
    """
    options = CausesOptions() if options is None else options
    if options.against is not None:
        options = replace(options, against=str(kvbench_policy(options.against)))
    grid = _run_grid(grid_options, options, run)
    settings = {"run": run, "against": options.against, "evidence": options.evidence, "units": options.units}
    folder, figure_settings = prepare_output(grid, "causes", figures, *settings.values())
    if run is None:
        source = folder / _RUN
        execute(Grid.from_dict({**_given(grid_options, options), "full": True, "out": str(source)}), reporter)
    else:
        source = Path(run)
    result = examine_run(grid, RunAnswers(source), options, reporter)
    require_results(result.samples, result.failed or {"": "the full cache answers none of the samples"})
    _require_lost(result)
    frames = {
        "samples": sample_rows(result),
        "interventions": intervention_rows(result),
        "heads": head_rows(result),
        "pairs": pair_rows(result),
    }
    samples, heads, pairs = frames["samples"], frames["heads"], frames["pairs"]
    drawn = draw_causes(result, samples, heads, folder / "figures", figure_settings)
    profile_paths = write_profiles(result, grid.seed, folder)
    findings = Findings(
        frames,
        list(cause_tables(samples, heads, pairs, options.against)),
        [
            *sentences(samples, pairs, options.against, figure_settings.label),
            *_hints(samples, options),
            *_counts(result),
            *(
                f"{path}: how often each head is needed. Any score can share the budget by it: "
                f"compactor:allocate=head_profile:pool_share=0.2:profile={path}."
                for path in profile_paths
            ),
            *notes(samples, result.failed, READING),
        ],
        drawn,
        result.failed,
        csv_names=("samples",),
    )
    output = write_all(folder, grid, {"analysis": "analyze causes", **settings}, findings, command)
    output.files.extend(write_pages(result, folder / PAGES))
    output.files.extend(profile_paths)
    return output


def _given(grid_options: Mapping[str, Any], options: CausesOptions) -> dict[str, Any]:
    """Return the grid options with the policy to compare with among the policies."""
    given = {field_of(name): value for name, value in grid_options.items()}
    if options.against is not None and "policies" in given:
        named = given["policies"] if isinstance(given["policies"], list) else [given["policies"]]
        given["policies"] = split_commas([*named, options.against])
    return given


def _run_grid(grid_options: Mapping[str, Any], options: CausesOptions, run: str | None) -> Grid:
    """Return the grid to examine.

    Raises:
        UserError: The run has no grid, or a moment or policy cannot be examined.
    """
    given = _given(grid_options, options)
    if run is None:
        grid = make_grid(given, _MOMENTS, codes=True)
    else:
        if not (Path(run) / GRID).is_file():
            raise UserError(f"{run} is not a run: it has no {GRID}; name the folder of a kvbench run")
        grid = Grid.from_yaml(Path(run) / GRID, {**given, "out": given.get("out")})
        _require_same(Grid.from_yaml(Path(run) / GRID), grid, given)
        grid = make_grid(grid.to_dict(), _MOMENTS, codes=True)
    names = list(map(str, grid.built_policies))
    if options.against is not None and options.against not in names:
        raise UserError(f"--against {options.against}: the run has no such policy; it has {', '.join(names)}")
    if [options.against] == names:
        raise UserError(f"--against {options.against} is the only policy; add another one with --policy")
    if options.against is not None and grid.has_moment("decode"):
        raise UserError("--against compares caches of the same tokens, which moment decode does not have; leave it out")
    return grid


def _require_same(run_grid: Grid, grid: Grid, given: Mapping[str, Any]) -> None:
    """Refuse options that do not fit the recorded answers.

    Raises:
        UserError: The run has another value; both are named.
    """
    for name in sorted(given.keys() - _FREE):
        recorded, requested = getattr(run_grid, name), getattr(grid, name)
        is_selected = name in ("models", "lengths") and set(requested) <= set(recorded)
        if requested != recorded and not is_selected:
            flag = flag_of(name).replace("_", "-")
            raise UserError(f"--{flag} {_shown(requested)}: the run has {_shown(recorded)}; leave it out")


def _shown(value: Any) -> str:
    """Return the value of an option for a message."""
    if value is None:
        return "the default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _require_lost(result: CausesResult) -> None:
    """Refuse to explain nothing.

    Raises:
        UserError: No policy loses a sample.
    """
    if all(sample.verdict == RIGHT for sample in result.samples):
        count = counted(len(result.samples), "answer")
        raise UserError(f"nothing to explain: of {count}, none is lost; try a smaller --budget")


def _hints(samples: pd.DataFrame, options: CausesOptions) -> list[str]:
    """Return the advice to search if the evidence explains less than half of the lost samples of a table."""
    lost = samples[samples["verdict"] != RIGHT]
    if options.evidence != SEARCH and any((rows["verdict"] == ELSEWHERE).mean() >= 0.5 for _, rows in scopes(lost)):
        return ["Most lost answers depend on other entries than the evidence: try --evidence search."]
    return []


def _counts(result: CausesResult) -> list[str]:
    """Return what was left out and how well the masked forward agrees with the run."""
    lost = [sample for sample in result.samples if sample.diagnosis is not None]
    outcomes = [sample.diagnosis.outcomes for sample in lost if sample.diagnosis is not None]
    reproduced = sum(not found.get("own", found["mask"]).right for found in outcomes)
    caches, seconds = sum(sample.cells for sample in lost), sum(sample.seconds for sample in lost)
    lines = [
        "Check: with what the policy keeps of the full cache's prefill, and after the full cache's own words, the "
        f"answer is wrong again in {reproduced} of {len(lost)} lost samples. {caches} caches took "
        f"{seconds:.0f} s."
    ]
    if result.stopped:
        questions = len({(sample.cell.task, sample.prompt.request.digest) for sample in result.samples})
        lines.append(f"Stopped after {counted(questions, 'question')}.")
    if result.missing:
        lines.append(f"The run has no answer to {counted(result.missing, 'sample')} of those that --samples asks for.")
    if result.unanswered:
        lines.append(f"{counted(result.unanswered, 'sample')} that the full cache does not answer left out.")
    if result.differing:
        lines.append(f"The full cache answers {counted(result.differing, 'sample')} with other words than in the run.")
    return lines
