"""State shared by the cells of one prefill, and detection of policies that change it in place."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from kvbench.engine.integrity import Ledger
from kvbench.plugin import Score, Scores


class CachedScores(NamedTuple):
    """Scores of one layer that later cells can copy, and their computation time in seconds.

    `flag` holds an error message and whether the error occurred.
    """

    scores: Scores
    extras: dict[str, Tensor]
    seconds: float
    flag: tuple[str, Tensor]


@dataclass
class PrefixCache:
    """State shared by the cells of one prefill.

    Attributes:
        ledger: Checksums of all tensors passed to the cells.
        scores: Scores by (layer, score).
        made: Results of `View.once` and their computation time in seconds, by (layer, name).
    """

    ledger: Ledger
    scores: dict[tuple[int, Score], CachedScores] = field(default_factory=dict)
    made: dict[tuple[int, Hashable], tuple[Tensor, float]] = field(default_factory=dict)


def versions(*tensors: Tensor) -> tuple[int, ...]:
    """Return the write counters of tensors; 0 (unknown) for tensors of inference mode."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


class Changes:
    """The tensors passed to a policy, with their write counters before the call."""

    def __init__(self) -> None:
        self._shown: list[tuple[object, Tensor, int]] = []

    def show(self, tensor_name: object, tensor: Tensor) -> None:
        """Record a tensor before the policy receives it."""
        if not tensor.is_inference():  # such a tensor has no version
            self._shown.append((tensor_name, tensor, tensor._version))

    def forget(self) -> None:
        """Discard all recorded tensors."""
        self._shown.clear()

    def first(self) -> str:
        """Return the name of the first changed tensor, or ""."""
        return next(
            (
                str(tensor_name)
                for tensor_name, tensor, first_version in self._shown
                if tensor._version != first_version
            ),
            "",
        )
