"""Named models distributed as separate PyPI packages."""
