"""Analysis of causes from a run, or from a grid that is run first, to tables, figures and pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.analysis.causes.diagnosis import RIGHT, WORDING
from kvbench.analysis.causes.figures import draw_causes
from kvbench.analysis.causes.frames import head_rows, intervention_rows, pair_rows, sample_rows
from kvbench.analysis.causes.lost import RunAnswers
from kvbench.analysis.causes.options import CausesOptions
from kvbench.analysis.causes.page import write_pages
from kvbench.analysis.causes.profile import write_profiles
from kvbench.analysis.causes.study import CausesResult, examine_run
from kvbench.analysis.causes.tables import READING, cause_tables, sentences
from kvbench.analysis.choosing import split_commas
from kvbench.analysis.common import make_grid
from kvbench.analysis.output import AnalysisOutput, Findings, prepare_output, require_results, write_all
from kvbench.analysis.summary import notes
from kvbench.errors import UserError
from kvbench.progress import Reporter
from kvbench.report.figure_flags import DEFAULT_FLAGS, FigureFlags
from kvbench.runs.grid import Grid
from kvbench.runs.options import field_of
from kvbench.runs.runner import execute
from kvbench.runs.store import GRID
from kvbench.tables.text import counted

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
        UserError: A value is unknown or out of range, the run cannot be used, nothing is lost, or the output is not
            writable.
    """
    options = CausesOptions() if options is None else options
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
            *sentences(samples, pairs, options.against),
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
        grid = make_grid(given, _MOMENTS)
    else:
        if not (Path(run) / GRID).is_file():
            raise UserError(f"{run} is not a run: it has no {GRID}; name the folder of a kvbench run")
        values = Grid.from_yaml(Path(run) / GRID, {**given, "out": given.get("out")}).to_dict()
        grid = make_grid(values, _MOMENTS)
    if options.against is not None and options.against not in [str(policy) for policy in grid.built_policies]:
        names = ", ".join(map(str, grid.built_policies))
        raise UserError(f"--against {options.against}: the run has no such policy; it has {names}")
    if options.against is not None and grid.has_moment("decode"):
        raise UserError("--against compares caches of the same tokens, which moment decode does not have; leave it out")
    return grid


def _require_lost(result: CausesResult) -> None:
    """Refuse to explain nothing.

    Raises:
        UserError: No policy loses a sample.
    """
    if all(sample.verdict == RIGHT for sample in result.samples):
        count = counted(len(result.samples), "answer")
        raise UserError(f"nothing is lost: all {count} are as good as the full cache's; try a smaller --budget")


def _counts(result: CausesResult) -> list[str]:
    """Return what was left out and how well the masked forward agrees with the run."""
    lost = [sample for sample in result.samples if sample.verdict != RIGHT and sample.diagnosis is not None]
    agreeing = sum(sample.verdict != WORDING for sample in lost)
    caches, seconds = sum(sample.cells for sample in lost), sum(sample.seconds for sample in lost)
    lines = [
        f"The masked forward is wrong as well in {agreeing} of {len(lost)} lost samples; "
        f"{caches} caches took {seconds:.0f} s."
    ]
    if result.stopped:
        questions = len({(sample.cell.task, sample.prompt.request.digest) for sample in result.samples})
        lines.append(f"Stopped after {counted(questions, 'question')}.")
    if result.unanswered:
        lines.append(f"{counted(result.unanswered, 'sample')} that the full cache does not answer left out.")
    if result.differing:
        lines.append(f"The full cache answers {counted(result.differing, 'sample')} with other words than in the run.")
    return lines
