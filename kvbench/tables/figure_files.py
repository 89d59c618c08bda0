"""Formats and files of figures, for modules that draw none: this needs no matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMATS: Mapping[str, Mapping[str, Any]] = {
    "pdf": {"metadata": {"CreationDate": None}},
    "png": {"dpi": 200},
    "svg": {"metadata": {"Date": None}},
}
"""File formats of figures and how they are saved, without dates, so that files are reproducible."""
DEFAULT_FORMATS = ("png", "svg")


@dataclass(frozen=True)
class SavedFigure:
    """A figure that was written to files.

    Attributes:
        title: Title of the figure.
        paths: Its files, one per format.
        task: Task of the figure; empty if it covers several.
    """

    title: str
    paths: list[Path]
    task: str = ""
