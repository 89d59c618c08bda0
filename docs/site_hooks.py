"""Hooks of mkdocs for the site: pages of policies in the navigation, and tables without an empty header."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

POLICY_INDEX = "docs/policies.md"
POLICY_FOLDER = "docs/policies"
PART_PAGES = ("scores", "allocators", "selectors", "mergers", "readers")
"""Pages in the folder that describe parts instead of one policy."""

_EMPTY_HEADER = re.compile(r"<thead>\s*<tr>(?:\s*<th\b[^>]*>\s*</th>)+\s*</tr>\s*</thead>\s*")


def on_config(config: Any) -> Any:
    """Add the pages of policies, which docs/make_site.py writes, to the navigation."""
    config.nav = with_policies(config.nav, Path(config.docs_dir))
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Remove header rows without any text: Markdown has no tables without a header."""
    return _EMPTY_HEADER.sub("", html)


def with_policies(nav: list[Any], pages_folder: Path) -> list[Any]:
    """Return a navigation in which the index of policies is a section with all pages of policies and parts.

    Args:
        nav: `nav` of mkdocs.yml.
        pages_folder: Folder of the collected pages.
    """
    names = sorted(path.stem for path in (pages_folder / POLICY_FOLDER).glob("*.md"))
    names = [*(name for name in PART_PAGES if name in names), *(name for name in names if name not in PART_PAGES)]
    section = [{"All policies": POLICY_INDEX}, *(f"{POLICY_FOLDER}/{name}.md" for name in names)]

    def expanded(item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        ((title, target),) = item.items()
        if isinstance(target, list):
            return {title: [expanded(child) for child in target]}
        return {title: section if target == POLICY_INDEX else target}

    return [expanded(item) for item in nav]
