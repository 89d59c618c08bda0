"""What the cells of one prefill share, and whether a policy has changed it in place."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from kvbench.engine.integrity import Ledger
from kvbench.plugin import Score, Scores


class CachedScores(NamedTuple):
    """Scores of one layer that later cells can copy, and the seconds that they took.

    `flag` says what is wrong with them, and holds whether it is.
    """

    scores: Scores
    extras: dict[str, Tensor]
    seconds: float
    flag: tuple[str, Tensor]


@dataclass
class PrefixCache:
    """What the cells of one prefill share.

    Attributes:
        ledger: Checksums of all tensors that the cells are shown.
        scores: Scores by (layer, score).
        made: What `View.once` has made, and the seconds that it took, by (layer, name).
    """

    ledger: Ledger
    scores: dict[tuple[int, Score], CachedScores] = field(default_factory=dict)
    made: dict[tuple[int, Hashable], tuple[Tensor, float]] = field(default_factory=dict)


def versions(*tensors: Tensor) -> tuple[int, ...]:
    """How often tensors were written to; 0 (unknown) for tensors of inference mode."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


class Changes:
    """The tensors that a policy is shown, and how often each had been written to before."""

    def __init__(self) -> None:
        self._shown: list[tuple[object, Tensor, int]] = []

    def show(self, tensor_name: object, tensor: Tensor) -> None:
        """Note a tensor before the policy sees it."""
        if not tensor.is_inference():  # such a tensor has no version
            self._shown.append((tensor_name, tensor, tensor._version))

    def forget(self) -> None:
        """Forget all tensors."""
        self._shown.clear()

    def first(self) -> str:
        """The name of the first changed tensor, or an empty string."""
        return next(
            (
                str(tensor_name)
                for tensor_name, tensor, first_version in self._shown
                if tensor._version != first_version
            ),
            "",
        )
