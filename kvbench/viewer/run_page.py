"""The page of one run: written if it is missing or older than the results."""

from __future__ import annotations

from pathlib import Path

from kvbench.files import state_of
from kvbench.progress import Reporter
from kvbench.regression.pairwise import policy_pairs
from kvbench.report.frames import prepare
from kvbench.report.page import NAME, write_page
from kvbench.report.sorted_samples import COLUMNS
from kvbench.runs.file_names import CELLS, SAMPLES
from kvbench.runs.folders import stored_command
from kvbench.runs.load import load_frames, responses_of
from kvbench.tables.text import slug


def run_page(
    run_folder: Path, metric: str | None = None, page_folder: Path | None = None, reporter: Reporter | None = None
) -> Path:
    """Return the path of a run's page, which is written first if it is missing or older than the results.

    Args:
        run_folder: Folder of the run.
        metric: Metric of the scores, as for `kvbench.load`; every metric has its own page.
        page_folder: Folder of the page. Default: `report/` in the run.
        reporter: Progress reporter.

    Raises:
        UserError: The run is unfinished or damaged, lacks the metric, or the page cannot be written.
    """
    page_path = (page_folder or run_folder / "report") / (slug(metric) if metric else "") / NAME
    table_paths = [run_folder / CELLS, run_folder / SAMPLES]
    page_time = page_path.stat().st_mtime_ns if page_path.is_file() else 0
    if all(table_path.is_file() and max(state_of(table_path)[1:3]) < page_time for table_path in table_paths):
        return page_path
    if reporter is not None:
        reporter.busy(f"reading {run_folder}")
    results = prepare(*load_frames(run_folder, COLUMNS, coded=True, metric=metric))
    return write_page(
        results,
        responses_of(run_folder, metric),
        page_path.parent,
        commands=[stored_command(run_folder)],
        reporter=reporter,
        pairs=policy_pairs(results),
    )
