"""All tables and figures of the papers: the recipe, layout or reason of each."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.papers.layouts.from_papers import published_layouts
from kvbench.papers.published.results import paper
from kvbench.papers.recipes.reading import left_out, place_of, recipes


@dataclass(frozen=True)
class PaperItem:
    """A table or figure of a paper.

    Attributes:
        item: "table 1" or "figure 4".
        title: Content of the item, in our words; "" if it has neither a recipe nor published results.
        recipe: Name of its recipe, or "".
        layout: Name of its layout in `kvbench table --layout`, or "".
        reason: Why it has no recipe, or "".
    """

    item: str
    title: str
    recipe: str
    layout: str
    reason: str


def paper_items(paper_name: str) -> list[PaperItem]:
    """Return the tables and figures of a paper, tables first.

    Raises:
        UserError: There is no such paper.
    """
    tables = paper(paper_name).tables
    recipe_by_item = {one.item: one for one in recipes().values() if one.paper == paper_name}
    reason_by_item = {one.item: one.reason for one in left_out() if one.paper == paper_name}
    layout_by_item = {
        f"table {layout.table.number}": layout_name
        for layout_name, layout in published_layouts().items()
        if layout.paper == paper_name
    }
    items = []
    for item in {**recipe_by_item, **reason_by_item}:
        found = recipe_by_item.get(item)
        table = tables.get(item.removeprefix("table "))
        items.append(
            PaperItem(
                item,
                found.title if found is not None else table.title if table is not None else "",
                found.name if found is not None else "",
                layout_by_item.get(item, ""),
                reason_by_item.get(item, ""),
            )
        )
    return sorted(items, key=lambda one: place_of(paper_name, one.item))
