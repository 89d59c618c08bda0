"""Recipes: the experiment behind a table or figure of a paper, in full and in miniature."""

from kvbench.papers.recipes.recipe import (
    LeftOutItem,
    Recipe,
    left_out,
    missing_parts,
    recipe,
    recipes,
)

__all__ = ["LeftOutItem", "Recipe", "left_out", "missing_parts", "recipe", "recipes"]
