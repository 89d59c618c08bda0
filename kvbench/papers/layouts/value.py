"""Values of table cells that are derived from scores."""

from __future__ import annotations

from enum import StrEnum


class Value(StrEnum):
    """Value of a cell, derived from a mean of scores."""

    SCORE = "score"
    """The mean itself."""
    DIFF = "diff"
    """Difference from the full cache."""
    RELATIVE = "relative"
    """Change from the full cache, as a fraction of the full cache's score."""
    LOSS = "loss"
    """Loss: the relative change with the opposite sign."""
    KV = "kv"
    """Bytes held, as a fraction of the full cache's, each a mean over tasks."""
