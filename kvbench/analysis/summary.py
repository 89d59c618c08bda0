"""The summary of an analysis in Markdown, and the notes below its tables."""

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
    """Write a summary.

    Args:
        heading: Its title.
        command: The command that made it.
        tables: Tables.
        notes: Lines below them.
        figures: Files to show; of PNG and SVG the PNG.
        root_folder: The folder that links start from.
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
    """What a reader must know.

    Args:
        frame: A table with the column `model`.
        failures: Why cells failed, by cell id.
        reading: How to read the tables.
    """
    note_lines = [*reading]
    if len(frame) and (frame["model"] == REFERENCE_MODEL).any():
        note_lines.append(REFERENCE_NOTE)
    failure_notes = [f"cell {cell} failed: {short(reason, 200)}" for cell, reason in failures.items()]
    note_lines += failure_notes[:_MOST_FAILED]
    return [*note_lines, f"{len(failure_notes)} cells failed"] if len(failure_notes) > _MOST_FAILED else note_lines
