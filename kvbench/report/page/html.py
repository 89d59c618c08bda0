"""Puts the page together: template, styles, scripts and data in one file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from kvbench.errors import UserError
from kvbench.files import cannot, replacing
from kvbench.report.choosing import WITHIN_A_POINT, Aim
from kvbench.report.frames import Results
from kvbench.report.page.answers import Responses
from kvbench.report.page.data import payload

NAME = "report.html"

_LIBRARIES = ("vendor/d3.min.js", "vendor/plot.min.js")
_SCRIPTS = ("dom.js", "state.js", "charts.js", "scores.js", "answers.js", "report.js")
"""In the order in which they need each other."""

_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
"""What could end the element that holds the data, or begin a comment in it."""


def write_page(results: Results, responses: Responses, folder: Path, aim: Aim = WITHIN_A_POINT) -> Path:
    """Write the report of one or several runs as a page for a browser.

    The same results give the same bytes.

    Args:
        results: What was run, with its samples.
        responses: Reads the responses that the page shows: of a large run, the first ones.
        folder: Where to write `report.html`; created if needed.
        aim: What a setting is looked for when the page opens.

    Returns:
        The page.

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
    page_text = page(payload(results, responses, aim))
    with replacing(page_path) as partial_path:
        partial_path.write_text(page_text, encoding="utf-8", newline="\n")
    return page_path


def page(page_data: Mapping[str, Any]) -> str:
    """The page as text.

    Its policy (CSP) lets nothing be loaded from anywhere and no script run but the page's own,
    each named by its digest. So even markup that got into the page could run nothing.

    Args:
        page_data: What it shows, as JSON can hold it.
    """
    scripts = [_file(script_name) for script_name in _LIBRARIES]
    scripts.append('"use strict";\n' + "\n".join(map(_file, _SCRIPTS)))
    template_parts = {
        "policy": _policy(scripts),
        "style": _file("report.css"),
        "data": embedded(page_data),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    # In one pass over the template, so that nothing in a part is taken for a place.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: template_parts[match[1]], _file("report.html"))


def embedded(data: object) -> str:
    """JSON that can stand in a `script` element, whatever its texts hold.

    Raises:
        ValueError: A number is not finite.
    """
    json_text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return json_text.translate(_UNSAFE)


def _policy(scripts: list[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    script_sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    # Plot sets inline styles. Styles can load nothing either: every source but these is 'none'.
    return (
        f"default-src 'none'; script-src {script_sources}; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def _file(file_name: str) -> str:
    return (resources.files(__package__) / file_name).read_text(encoding="utf-8")
