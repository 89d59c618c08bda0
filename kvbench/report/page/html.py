"""Assembly of the page: template, styles, scripts and data in one file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from kvbench.errors import UserError
from kvbench.files import cannot, replacing
from kvbench.progress import Reporter
from kvbench.report.choosing import WITHIN_A_POINT, Aim
from kvbench.report.frames import Results
from kvbench.report.page.answers import Responses
from kvbench.report.page.data import payload

NAME = "report.html"

_LIBRARIES = ("vendor/d3.min.js", "vendor/plot.min.js")
_SCRIPTS = ("dom.js", "state.js", "charts.js", "scores.js", "pairs.js", "answers.js", "address.js", "report.js")
"""Scripts in order of their dependencies."""

_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
"""Escapes of characters that could end the data element or begin a comment in it."""


def write_page(
    results: Results,
    responses: Responses,
    folder: Path,
    aim: Aim = WITHIN_A_POINT,
    *,
    commands: Sequence[str] = (),
    reporter: Reporter | None = None,
    pairs: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the report of one or several runs as an HTML page, and return its path.

    The same results give the same bytes.

    Args:
        results: The results, with samples.
        responses: Loads the responses of some samples; for a large run, only the first ones.
        folder: Folder for `report.html`, created if needed.
        aim: Initial requirements for the choice of a setting.
        commands: Commands that made the runs.
        reporter: Progress reporter, told of every question once they take seconds.
        pairs: Comparisons of all pairs of policies, as `kvbench.regression.pairwise.policy_pairs` returns.

    Raises:
        UserError: The page cannot be written.
    """
    page_path = folder / NAME
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"cannot write {page_path}: {folder} is a file, not a folder")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("write", error.filename or folder, error) from None
    page_text = page(payload(results, responses, aim, commands, reporter, pairs))
    with replacing(page_path) as partial_path:
        partial_path.write_text(page_text, encoding="utf-8", newline="\n")
    return page_path


def page(page_data: Mapping[str, Any]) -> str:
    """Return the report as text, from JSON-serialisable data."""
    return assemble(page_data, asset("report.html"), asset("report.css"), [asset(name) for name in _SCRIPTS])


def assemble(
    page_data: Mapping[str, Any],
    template: str,
    style: str,
    own_scripts: Sequence[str],
    libraries: Sequence[str] = _LIBRARIES,
) -> str:
    """Return a page as text: a template with data, styles, libraries and scripts.

    Its content security policy forbids loading anything, and running any script except the page's own, listed by
    digest. Even injected markup could not run code.

    Args:
        page_data: JSON-serialisable data.
        template: HTML with the fields `{{policy}}`, `{{style}}`, `{{data}}` and `{{scripts}}`.
        style: Style sheet.
        own_scripts: Scripts in order of their dependencies, which share their names.
        libraries: File names of the libraries that they need.
    """
    scripts = [asset(library_name) for library_name in libraries]
    scripts.append('"use strict";\n' + "\n".join(own_scripts))
    template_parts = {
        "policy": _policy(scripts),
        "style": style,
        "data": embedded(page_data),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    # A single pass over the template, so that placeholders within a part are not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: template_parts[match[1]], template)


def embedded(data: object) -> str:
    """Return JSON that is safe within a `script` element, for any texts.

    Raises:
        ValueError: A number is not finite.
    """
    json_text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return json_text.translate(_UNSAFE)


def _policy(scripts: list[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    script_sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    # Plot sets inline styles, which cannot load anything, because all other sources are 'none'.
    return (
        f"default-src 'none'; script-src {script_sources}; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def asset(file_name: str) -> str:
    """Return a file of the page: a template, styles or a script."""
    return (resources.files(__package__) / file_name).read_text(encoding="utf-8")
