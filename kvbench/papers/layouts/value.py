"""What the cells of a table show of a score."""

from __future__ import annotations

from enum import StrEnum


class Value(StrEnum):
    """What a cell shows of a mean of scores."""

    SCORE = "score"
    """The mean itself."""
    DIFF = "diff"
    """Its difference to the full cache."""
    RELATIVE = "relative"
    """Its change from the full cache, as a share of the full cache's score."""
    LOSS = "loss"
    """The same with the opposite sign: what is lost."""
    KV = "kv"
    """The bytes that the cache holds, as a share of the full cache's; a mean over tasks."""
