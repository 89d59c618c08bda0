"""`kvbench compare` and `kvbench compare-policies`. Heavy modules are imported inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli import complete
from kvbench.cli.options import (
    AsJson,
    BudgetFilter,
    Labels,
    LengthFilter,
    Metric,
    ModelFilter,
    MomentFilter,
    SeedFilter,
    TaskFilter,
    option,
    split_names,
)
from kvbench.cli.screen import FAILED, MISUSE, OK, complain, print_json, say, show
from kvbench.errors import UserError
from kvbench.files import write_whole
from kvbench.runs.options import FLAG, OUTPUT
from kvbench.tables.outputs import Format

LIMITS = "Limits"

Alpha = Annotated[
    float,
    option(
        LIMITS,
        "P",
        "Probability of a false alarm over the whole comparison. Default: 0.05.",
        show_default=False,
    ),
]


def compare(
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE", help="Folder of the reference run.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the new run.")],
    max_drop: Annotated[
        float,
        option(
            LIMITS,
            "POINTS",
            "Allowed drop of a score in points, 0 to 100 (percent of the baseline for scores outside "
            "[0, 1]). Default: 1.",
            show_default=False,
        ),
    ] = 1.0,
    alpha: Alpha = 0.05,
    metric: Metric = None,
    markdown: Annotated[Path | None, option(OUTPUT, "FILE", "Also write Markdown, for a CI summary.")] = None,
    junit: Annotated[Path | None, option(OUTPUT, "FILE", "Also write JUnit XML, one test case per cell.")] = None,
    quiet: Annotated[bool, option(OUTPUT, FLAG, "Print only failures.", "--quiet")] = False,
    as_json: AsJson = False,
) -> None:
    """Fail if a run's scores are significantly below those of a baseline.

    Exit codes: 0, no cell dropped significantly by more than the limit; 1, a cell did; 2, a cell of the baseline could
    not be compared, or the input is invalid.
    """
    from kvbench.regression import show as wording
    from kvbench.regression.compare import compare as compare_runs
    from kvbench.regression.pairs import COLUMNS
    from kvbench.regression.show import junit as junit_xml
    from kvbench.runs.integrity import differing_machines
    from kvbench.runs.load import load_frames
    from kvbench.tables.outputs import plain_text

    run_frames = [load_frames(run_folder, COLUMNS, coded=True, metric=metric) for run_folder in (baseline, run)]
    machines = differing_machines(baseline, run)
    comparison = compare_runs(*run_frames, max_drop=max_drop, alpha=alpha, machines=machines)
    exit_code = FAILED if comparison.failed else OK if comparison.complete else MISUSE
    if markdown is not None:
        markdown_text = wording.markdown_page(comparison, str(baseline), str(run))
        write_whole(markdown, markdown_text.encode())
    if junit is not None:
        write_whole(junit, junit_xml(comparison, f"kvbench compare {baseline} {run}"))
    if as_json:
        print_json(wording.as_json(comparison, exit_code))
    elif not quiet:
        for result_table in wording.tables(comparison):
            show(result_table)
        for sentence in wording.sentences(comparison):
            say(plain_text(sentence))
        if exit_code == OK:
            say(wording.verdict(comparison))
    if exit_code != OK:
        complain(wording.complaint(comparison))
        raise typer.Exit(exit_code)


def compare_policies(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="Policy to compare with.", autocompletion=complete.policies)
    ],
    policy: Annotated[
        str, typer.Argument(metavar="POLICY", help="The other policy.", autocompletion=complete.policies)
    ],
    alpha: Annotated[
        float,
        option(None, "P", "Probability of a false alarm in a family of tests. Default: 0.05.", show_default=False),
    ] = 0.05,
    labels: Labels = None,
    model: ModelFilter = None,
    budget: BudgetFilter = None,
    task: TaskFilter = None,
    moment: MomentFilter = None,
    length: LengthFilter = None,
    seed: SeedFilter = None,
    metric: Metric = None,
    form: Annotated[
        Format | None,
        option(OUTPUT, "latex|markdown", "Output format. Default: text for the terminal.", "--format"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two policies at the same budgets, with a sentence for a paper.

    Differences are POLICY minus BASE, paired by question, with 95% intervals and p-values corrected by Holm's method.
    """
    from kvbench.regression import policies as comparing
    from kvbench.regression import show_policies as wording
    from kvbench.report.figure_options import parse_labels
    from kvbench.report.filters import filter_cells
    from kvbench.report.frames import prepare
    from kvbench.report.sorted_samples import COLUMNS
    from kvbench.runs.load import load_frames
    from kvbench.tables.outputs import plain_text

    if form not in (None, Format.LATEX, Format.MARKDOWN):
        raise UserError(f"--format {form}: use latex or markdown, or --json for programs")
    if form is not None and as_json:
        raise UserError("--format and --json exclude each other")
    filters = {"model": model, "budget": budget, "task": task, "moment": moment, "length": length, "seed": seed}
    cells, samples = load_frames(runs, COLUMNS, coded=True, metric=metric)
    results = prepare(filter_cells(cells, {name: split_names(values) for name, values in filters.items()}), samples)
    pair = wording.PolicyPair(base, policy, alpha, parse_labels(split_names(labels), results.policies))
    comparisons = comparing.compare_policies(results, base, policy, alpha=alpha)
    if as_json:
        print_json(wording.as_records(comparisons, pair))
    elif form is Format.LATEX:
        print(wording.latex_document(comparisons, pair), end="")
    elif form is Format.MARKDOWN:
        print(wording.markdown_document(comparisons, pair), end="")
    else:
        for result_table in wording.tables(comparisons, pair):
            show(result_table)
        for note in wording.notes(comparisons, pair):
            say(note)
        for comparison in comparisons:
            say(f"\n{plain_text(wording.sentence(comparison, pair))}")
