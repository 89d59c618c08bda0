"""Describe the recipes in docs/recipes.md: `python docs/make_recipes.py`.

With `--check` the page is only compared with them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.papers.published.results import papers
from kvbench.papers.recipes import Recipe, left_out, recipes
from kvbench.papers.recipes.compare import ComparedSetting, compared_settings
from kvbench.papers.recipes.reading import RUN
from kvbench.runs.options import flag_of

PAGE = Path(__file__).parent / "recipes.md"
BEGIN, END = "<!-- begin: make_recipes.py -->\n", "<!-- end: make_recipes.py -->\n"


def block() -> str:
    """What stands between the two marks."""
    lines = []
    for paper, about in papers().items():
        lines += [f"## {about.title}", "", f"arXiv {about.arxiv}", ""]
        for one in recipes().values():
            if one.paper == paper:
                lines += described(one)
        without = [item for item in left_out() if item.paper == paper]
        if without:
            lines += [f"### {paper}: without a recipe", "", "| | why |", "| --- | --- |"]
            lines += [f"| {item.item} | {item.reason} |" for item in without]
            lines.append("")
    return "\n".join(lines)


def described(one: Recipe) -> Iterator[str]:
    """The section of a recipe."""
    yield from (f"### {one.name}", "", f"{one.title}." + f" Also {one.also}." * bool(one.also), "")
    yield from ("| setting | in the paper | in full here | |", "| --- | --- | --- | --- |")
    for compared in compared_settings(one):
        yield row(compared)
    yield ""
    for model, changed in one.miniatures.items():
        yield f"- With `{model}`: {settings(changed)}"
    if one.needs:
        yield f"- First: {', '.join(f'`{command}`' for command in one.needs)}"
    if one.by != RUN:
        yield f"- Made by: `{one.command()}`"
    if one.layout:
        yield f"- Laid out by: `kvbench table RUN {one.layout}`"
    yield from (f"- Lacks: {part}" for part in one.lacks)
    yield "- Differs from the paper:"
    yield from (f"    - {sentence}" for sentence in one.differs)
    yield ""


def row(compared: ComparedSetting) -> str:
    """A setting of the paper beside the recipe's."""
    of_paper = ", ".join(compared.of_paper) or "-"
    of_recipe = ", ".join(f"`{text}`" for text in compared.of_recipe) or "the default"
    return f"| {compared.name} | {of_paper} | {of_recipe} | {compared.verdict} |".replace("*", "\\*")


def settings(grid: Mapping[str, Any]) -> str:
    """Keys and values of a grid in one line."""
    return "; ".join(f"{flag_of(key)} {value(found)}" for key, found in grid.items())


def value(found: Any) -> str:
    """One or several values of a grid."""
    items = found if isinstance(found, list) else [found]
    return ", ".join(f"`{str(item).lower() if item is True else item}`" for item in items)


def page(text: str) -> str:
    """The page with the recipes between its two marks written anew."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE} lacks a line {BEGIN.strip()} or {END.strip()}")
    return f"{before}{BEGIN}{block()}{END}{after}"


def main(arguments: list[str]) -> int:
    """Write the page, or check that it is up to date."""
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if "--check" in arguments:
        if new != old:
            print("docs/recipes.md is out of date; run python docs/make_recipes.py")
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
