"""Recipes: the experiments behind tables and figures of papers, full-size and in miniature."""

from kvbench.papers.recipes.items import PaperItem, paper_items
from kvbench.papers.recipes.reading import (
    LeftOutItem,
    Recipe,
    left_out,
    missing_parts,
    recipe,
    recipes,
)

__all__ = ["LeftOutItem", "PaperItem", "Recipe", "left_out", "missing_parts", "paper_items", "recipe", "recipes"]
