"""Benchmark from settings to tables, figures and summary."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from kvbench import native
from kvbench.analysis.output import AnalysisOutput, Findings, prepare_folder, write_files
from kvbench.analysis.speed.figures import draw_bench
from kvbench.analysis.speed.ratios import bench_tables, summarize
from kvbench.analysis.speed.settings import SpeedSettings
from kvbench.analysis.speed.timing import run_bench
from kvbench.errors import UserError
from kvbench.files import digest_of
from kvbench.progress import Reporter
from kvbench.report.figure_flags import DEFAULT_FLAGS, FigureFlags
from kvbench.report.figure_options import figure_options
from kvbench.tables.numbers import size
from kvbench.tables.text import counted


def write_bench(
    bench: SpeedSettings,
    output_folder: Path | None,
    reporter: Reporter,
    *,
    figures: FigureFlags = DEFAULT_FLAGS,
    command: str = "kvbench bench",
) -> AnalysisOutput:
    """Run the benchmark and write `bench.parquet` (every repeat), `summary.parquet` and figures.

    Args:
        bench: Benchmark settings.
        output_folder: Output folder; None: `results/bench-HASH`.
        reporter: Progress reporter.
        figures: Options of the figures.
        command: Command shown in the summary.

    Raises:
        UserError: A value is unknown or out of range, or nothing could be measured.
    """
    options = figure_options(figures, list(dict.fromkeys(str(setting.policy) for setting in bench.settings())))
    folder = prepare_folder(output_folder or Path("results") / f"bench-{digest_of(asdict(bench))}")
    frame = run_bench(bench, reporter)
    failures = {
        f"{row.policy} {row.budget} at context {row.context}, batch {row.batch_setting}": str(row.error)
        for row in frame[frame["error"] != ""].itertuples()
    }
    if len(failures) and (frame["error"] != "").all():
        raise UserError(f"nothing could be measured: {next(iter(failures.values()))}")
    summary = summarize(frame)
    tables = list(bench_tables(summary))
    device = str(frame["device"].iloc[0])
    threads = int(frame["threads"].iloc[0])
    machine = counted(threads, "CPU thread") if device == "cpu" else device
    if device != "cpu":
        machine = f"{counted(int(frame['device_count'].max()), 'GPU')} ({device})"
    notes = [
        f"On {machine}, {frame['dtype'].iloc[0]}; {counted(bench.repeats, 'repeat')} in random order, prompts "
        "of random tokens. The first token includes prefill and compression. Peak memory is of "
        + ("the process, with the model." if device == "cpu" else "the GPU, with the model."),
        *_moment_notes(bench),
        *[f"{setting_name} failed: {reason}" for setting_name, reason in failures.items()],
    ]
    findings = Findings(
        {"bench": frame, "summary": summary},
        tables,
        notes,
        draw_bench(summary, folder / "figures", options),
        failures,
    )
    record = {**asdict(bench), "device": device, "threads": threads}
    if bench.sizes:
        del record["contexts"], record["generates"]
    if device == "cpu":
        record["cpu_code"] = native.implementation()
    return write_files(folder, "kvbench bench", record, findings, command)


def _moment_notes(bench: SpeedSettings) -> list[str]:
    """Return what the moments and the largest batch mean, as far as they were measured."""
    notes = []
    if "decode" in bench.moments:
        notes.append(
            "At decode, the cache is compressed after the prompt and evicted from again whenever it holds its budget "
            "and the policy's buffer; a fraction is of the prompt."
        )
    if None in bench.batches:
        limit = "the memory of the GPU" if bench.memory is None else size(bench.memory)
        notes.append(
            f"The largest batch is the largest whose peak memory, with the model, stays within {limit} from the prompt "
            "to the last token."
        )
    return notes
