"""Curricula of trainings: stages that follow one another by the tokens seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class _Stage(Protocol):
    @property
    def tokens(self) -> int: ...


S = TypeVar("S", bound=_Stage)


def stage_at(curriculum: Sequence[S], tokens: int) -> tuple[S | None, float]:
    """The stage at `tokens` and the share of it that is done; None after the last stage."""
    for stage in curriculum:
        if tokens < stage.tokens:
            return stage, tokens / stage.tokens
        tokens -= stage.tokens
    return None, 1.0
