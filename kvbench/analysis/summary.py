"""Markdown summary of an analysis, and the notes below its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from kvbench.tables.outputs import markdown
from kvbench.tables.table import Table
from kvbench.tables.text import REFERENCE_MODEL, REFERENCE_NOTE, md, short, span

_MOST_FAILED = 12


def summary_text(
    heading: str,
    command: str,
    tables: Sequence[Table],
    notes: Sequence[str],
    figures: Sequence[Path],
    root_folder: Path,
) -> str:
    """Render a summary.

    Args:
        heading: Title.
        command: Command shown in the summary.
        tables: Tables to show.
        notes: Lines below the tables.
        figures: Figure files; of PNG and SVG, the PNG is shown.
        root_folder: Folder that links are relative to.
    """
    blocks = [f"# {md(heading)}", f"Made by {span(command)}."]
    blocks += [markdown(table, level=2) for table in tables]
    blocks.append("\n".join(f"- {md(note)}" for note in notes))
    blocks.append(
        "\n".join(
            f"![{md(path.stem)}]({path.relative_to(root_folder).as_posix()})"
            for path in figures
            if path.suffix == ".png"
        )
    )
    return "\n\n".join(block for block in blocks if block) + "\n"


def notes(frame: pd.DataFrame, failures: Mapping[str, str], reading: Sequence[str] = ()) -> list[str]:
    """Return the notes below the tables.

    Args:
        frame: A table with the column `model`.
        failures: Reasons of failures, by cell id.
        reading: Explanations of the tables.
    """
    note_lines = [*reading]
    if len(frame) and (frame["model"] == REFERENCE_MODEL).any():
        note_lines.append(REFERENCE_NOTE)
    failure_notes = [f"cell {cell} failed: {short(reason, 200)}" for cell, reason in failures.items()]
    note_lines += failure_notes[:_MOST_FAILED]
    return [*note_lines, f"{len(failure_notes)} cells failed"] if len(failure_notes) > _MOST_FAILED else note_lines
