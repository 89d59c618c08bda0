"""The leaderboard as a static site of one file, which needs no network."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from kvbench.files import write_whole
from kvbench.report.page.html import assemble, asset

NAME = "index.html"
_SHARED_SCRIPTS = ("dom.js", "state.js", "charts.js", "scores.js")
"""Scripts of the report's page, in order of their dependencies."""


def write_site(page_data: Mapping[str, Any], folder: Path) -> Path:
    """Write a leaderboard as `index.html`, and return its path; the same data give the same bytes.

    Args:
        page_data: As `leaderboard_data` returns.
        folder: The site, created if needed.

    Raises:
        UserError: The page cannot be written.
    """
    page_path = folder / NAME
    style = asset("report.css") + _own_asset("leaderboard.css")
    scripts = [*map(asset, _SHARED_SCRIPTS), _own_asset("leaderboard.js")]
    page_text = assemble(page_data, _own_asset("leaderboard.html"), style, scripts)
    write_whole(page_path, page_text.encode())
    return page_path


def _own_asset(file_name: str) -> str:
    return (resources.files(__package__) / file_name).read_text(encoding="utf-8")
