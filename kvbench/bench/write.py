"""From a benchmark to files: tables, figures and what was measured where."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from kvbench.analysis.write import Done, prepared, write_files
from kvbench.bench.compare import summarize
from kvbench.bench.figures import draw_bench
from kvbench.bench.measure import run_bench
from kvbench.bench.settings import Bench
from kvbench.bench.tables import bench_tables
from kvbench.errors import UserError
from kvbench.files import digest_of
from kvbench.progress import Reporter
from kvbench.report.text import counted


def write_bench(
    bench: Bench, out: Path | None, reporter: Reporter, *, command: str = "kvbench bench"
) -> Done:
    """Measure, and write `bench.parquet` (every repeat), `summary.parquet` and figures.

    Args:
        bench: What to measure.
        out: The folder; None: `results/bench-HASH`.
        reporter: Told of the progress.
        command: What the summary says that made it.

    Raises:
        UserError: Something is unknown or out of range, or nothing could be measured.
    """
    bench.settings()
    path = prepared(out or Path("results") / f"bench-{digest_of(asdict(bench))}")
    frame = run_bench(bench, reporter)
    failed = {
        f"{row.policy} {row.budget} at context {row.context}, batch {row.batch}": str(row.error)
        for row in frame[frame["error"] != ""].itertuples()
    }
    if len(failed) and (frame["error"] != "").all():
        raise UserError(f"nothing could be measured: {next(iter(failed.values()))}")
    summary = summarize(frame)
    tables = list(bench_tables(summary, bench.model))
    device = str(frame["device"].iloc[0])
    threads = int(frame["threads"].iloc[0])
    where = counted(threads, "CPU thread") if device == "cpu" else device
    notes = [
        f"On {where}, {frame['dtype'].iloc[0]}; {bench.repeats} repeats in random order, prompts "
        "of random tokens. The first token includes prefill and compression. Peak memory is of "
        + ("the process, with the model." if device == "cpu" else "the GPU, with the model."),
        *[f"{name} failed: {reason}" for name, reason in failed.items()],
    ]
    return write_files(
        path,
        "kvbench bench",
        {**asdict(bench), "device": device, "threads": threads},
        {"bench": frame, "summary": summary},
        tables,
        notes,
        draw_bench(summary, bench.model, path / "figures"),
        command,
        failed,
    )
