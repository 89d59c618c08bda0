"""Scores and protection classes of the entries of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.errors import BudgetError
from kvbench.view.shown import View


@dataclass
class Scores:
    """Scores and protection classes of the entries of one layer.

    Attributes:
        value: Score of each entry, finite float32 `[B, H, n]`; ignored where `valid` is false.
        protect: Entries that are kept before all others, `[B, H, n]`: bool (true means `WINDOW`), or int8 classes (see
            `protect_window` and `protect_sinks`). If the protected entries exceed a head's budget, the lowest class is
            evicted first and, within a class, the oldest entry, with two exceptions: the last sink is evicted first,
            so that position 0 stays longest, and in `CHOSEN`, the class of entries chosen by a first stage, the entry
            with the smallest value is evicted first.
    """

    value: Tensor
    protect: Tensor

    CHOSEN: ClassVar[int] = 1
    WINDOW: ClassVar[int] = 2
    SINK: ClassVar[int] = 3
    NEWEST: ClassVar[int] = 4

    def __post_init__(self) -> None:
        """Convert a mask to classes."""
        if self.protect.dtype == torch.bool:
            self.protect = self.protect.to(torch.int8) * Scores.WINDOW
        elif not self.protect.is_floating_point() and not self.protect.is_complex():
            self.protect = self.protect.clamp(0, Scores.NEWEST).to(torch.int8)


def checked_scores(result: object, v: View) -> Scores:
    """Validate the type, dtype and shape of a score's return value.

    Args:
        result: Return value of the score.
        v: The view that was passed to it.

    Returns:
        The scores; a plain tensor protects no entry.

    Raises:
        BudgetError: The scores are not a floating-point tensor `[B, H, n]`, or the protection
            classes are neither bool nor integers.
    """
    if isinstance(result, Tensor):
        check_floating("the score", result)
        result = Scores(result, protect_nothing(v))
    if not isinstance(result, Scores):
        raise BudgetError(f"the score returned {type(result).__name__}; return a float tensor [B, H, n] or Scores")
    check_floating("the score", result.value)
    if result.protect.dtype != torch.int8:
        raise BudgetError(f"protect is {_kind(result.protect)}; return a bool or integer tensor")
    for field_name, tensor in (("scores", result.value), ("protect", result.protect)):
        if tensor.shape != v.shape:
            raise BudgetError(
                f"the score returned {field_name} of shape {list(tensor.shape)}; return [B, H, n] {list(v.shape)}"
            )
    return result


def check_floating(source_name: str, data: Tensor) -> None:
    """Reject numbers that are not floating-point, because converting them would hide a mistake.

    Raises:
        BudgetError: The numbers are complex, bool or integers.
    """
    if not data.is_floating_point():
        conversion = ".abs()" if data.is_complex() else ".float()"
        raise BudgetError(
            f"{source_name} returned {_kind(data)}, not floating-point; convert it, for example with {conversion}"
        )


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def protect_nothing(v: View) -> Tensor:
    """Return protection classes that protect no entry, int8 `[B, H, n]`."""
    return torch.zeros(v.shape, dtype=torch.int8, device=v.col.device)


def protect_window(v: View, window: int | Tensor) -> Tensor:
    """Protect the last `window` tokens (an int, or int64 `[B]`); the newest is evicted last."""
    window_size = window if isinstance(window, int) else window[:, None, None]
    entry_classes = ((v.age < window_size) & v.valid).to(torch.int8) * Scores.WINDOW
    is_newest = (v.age == 0) & v.valid & (entry_classes > 0)
    return torch.where(is_newest, Scores.NEWEST, entry_classes).to(torch.int8)


def protect_sinks(v: View, sinks: int) -> Tensor:
    """Protect the first `sinks` tokens of every sequence; position 0 is evicted last."""
    return ((v.position < sinks) & v.valid).to(torch.int8) * Scores.SINK
