"""Output files of an analysis: tables, settings, figures and a summary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvbench.analysis.summary import summary_text
from kvbench.errors import UserError
from kvbench.files import check_writable, create_folder, replacing
from kvbench.report.figure_flags import FigureFlags
from kvbench.report.figure_options import FigureOptions, figure_options
from kvbench.runs.folders import is_run
from kvbench.runs.grid import Grid
from kvbench.tables.table import Table

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class AnalysisOutput:
    """Output of an analysis.

    Attributes:
        path: Output folder.
        files: All files written, the summary first.
        tables: Tables for the terminal.
        notes: Lines below the tables.
        failed: Reasons of failures by cell id.
    """

    path: Path
    files: list[Path]
    tables: list[Table]
    notes: list[str]
    failed: Mapping[str, str]


def prepare_output(grid: Grid, analysis: str, figures: FigureFlags, *settings: object) -> tuple[Path, FigureOptions]:
    """Return the output folder, which need not exist, and the options of the figures, before any work is done.

    By default, the folder depends on everything that affects the results except `--samples`.

    Args:
        grid: Its output folder is used if set.
        analysis: Name of the analysis.
        figures: Options of the figures as a user gave them.
        settings: Everything else that affects the results.

    Raises:
        UserError: The folder is not writable or holds a run, or an option of the figures is wrong.
    """
    figure_settings = figure_options(figures, [str(policy) for policy in grid.built_policies])
    digest = hashlib.sha256(json.dumps([grid.digest, *settings]).encode()).hexdigest()[:16]
    folder = prepare_folder(Path(grid.out) if grid.out else Path("results") / f"{analysis}-{digest}")
    return folder, figure_settings


def prepare_folder(folder: Path) -> Path:
    """Check a folder before any work is done; it is created when its first file is written.

    Raises:
        UserError: The folder is not writable, or holds a run, whose tables the analysis could overwrite.
    """
    check_writable(folder)
    if is_run(folder):
        raise UserError(f"--out {folder} holds a run; choose another folder")
    return folder


@dataclass(frozen=True)
class Findings:
    """Results of an analysis, ready to be written; the figures exist already.

    Attributes:
        frames: Data frames by file name.
        tables: Tables of the summary.
        notes: Lines below the tables.
        figures: Figure files of the summary.
        failed: Reasons of failures by cell id.
        csv_names: Frames to write also as CSV, if present.
    """

    frames: Mapping[str, pd.DataFrame]
    tables: Sequence[Table]
    notes: Sequence[str]
    figures: Sequence[Path]
    failed: Mapping[str, str]
    csv_names: Collection[str] = ()


def write_all(
    folder: Path, grid: Grid, settings: Mapping[str, Any], findings: Findings, command: str
) -> AnalysisOutput:
    """Write tables, settings and summary of the analysis of a grid.

    Args:
        folder: Output folder.
        grid: The analysed grid.
        settings: Other settings; `analysis` is the analysis' name.
        findings: Results.
        command: Command shown in the summary.

    Raises:
        UserError: A file cannot be written.
    """
    grid_values = {
        option: option_value for option, option_value in grid.to_dict().items() if option not in ("full", "out")
    }
    return write_files(folder, f"kvbench {settings['analysis']}", {**grid_values, **settings}, findings, command)


def write_files(
    folder: Path, heading: str, record: Mapping[str, Any], findings: Findings, command: str
) -> AnalysisOutput:
    """Write tables, settings and summary.

    Args:
        folder: Output folder.
        heading: Heading of the summary.
        record: How all this was made; versions are added.
        findings: Results.
        command: Command shown in the summary.

    Raises:
        UserError: A file cannot be written.
    """
    frames, figures = findings.frames, findings.figures
    create_folder(folder)
    files = [
        _write_csv(frames[frame_name], folder / f"{frame_name}.csv")
        for frame_name in frames
        if frame_name in findings.csv_names
    ]
    files += [write_table(frame, folder / f"{name}.parquet") for name, frame in frames.items()]
    files.append(folder / "settings.json")
    packages = {name: version(name) for name in ("kvbench", "torch", "transformers")}
    with replacing(files[-1]) as temporary_path:
        temporary_path.write_text(json.dumps({**record, "versions": packages}, indent=2) + "\n")
    summary_path = folder / "summary.md"
    markdown = summary_text(heading, command, findings.tables, findings.notes, figures, folder)
    with replacing(summary_path) as temporary_path:
        temporary_path.write_text(markdown, encoding="utf-8")
    return AnalysisOutput(
        folder, [summary_path, *files, *figures], list(findings.tables), list(findings.notes), findings.failed
    )


def write_table(frame: pd.DataFrame, path: Path) -> Path:
    """Write a frame as parquet; text columns are dictionaries."""
    arrow_table = pa.Table.from_pandas(frame.assign(schema=SCHEMA_VERSION), preserve_index=False)
    with replacing(path) as temporary_path:
        pq.write_table(arrow_table, temporary_path, compression="zstd")
    return path


def _write_csv(frame: pd.DataFrame, path: Path) -> Path:
    """Write a frame as CSV."""
    with replacing(path) as temporary_path:
        frame.to_csv(temporary_path, index=False)
    return path


def require_results(results: Sized, failures: Mapping[str, str]) -> None:
    """Refuse to go on if every cell failed.

    Raises:
        UserError: The frame is empty; the first reason is given.
    """
    if not len(results):
        reason = " ".join(next(iter(failures.values()), "no cell was run").split())
        raise UserError(f"nothing to show: all {len(failures)} cells failed: {reason}")
