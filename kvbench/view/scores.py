"""The ratings of the entries of one layer, and what they protect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.view.shown import View


@dataclass
class Scores:
    """The ratings of the entries of one layer.

    Attributes:
        value: The value of each entry, finite float32 `[B, H, n]`; ignored where `valid` is false.
        protect: Entries that are kept before all others, `[B, H, n]`: bool (true means `WINDOW`),
            or int8 classes, where a higher class gives way later (see `protect_window` and
            `protect_sinks`). If the protected entries do not fit a head's share, the lowest class
            gives way first. Within a class the oldest entry gives way first, with two exceptions.
            Among sinks, the last one gives way first, so that position 0 stays longest. In
            `CHOSEN`, the class of entries chosen by a first stage, the smallest value gives way
            first.
    """

    value: Tensor
    protect: Tensor

    CHOSEN: ClassVar[int] = 1
    WINDOW: ClassVar[int] = 2
    SINK: ClassVar[int] = 3
    NEWEST: ClassVar[int] = 4

    def __post_init__(self) -> None:
        """Turn a mask into classes."""
        if self.protect.dtype == torch.bool:
            self.protect = self.protect.to(torch.int8) * Scores.WINDOW


def protect_nothing(v: View) -> Tensor:
    """Protection classes that protect no entry, int8 `[B, H, n]`."""
    return torch.zeros(v.shape, dtype=torch.int8, device=v.col.device)


def protect_window(v: View, window: int | Tensor) -> Tensor:
    """Protect the last `window` tokens (an int, or int64 `[B]`); the newest gives way last."""
    size = window if isinstance(window, int) else window[:, None, None]
    classes = ((v.age < size) & v.valid).to(torch.int8) * Scores.WINDOW
    newest = (v.age == 0) & v.valid & (classes > 0)
    return torch.where(newest, Scores.NEWEST, classes).to(torch.int8)


def protect_sinks(v: View, sinks: int) -> Tensor:
    """Protect the first `sinks` tokens of every sequence; position 0 gives way last."""
    return ((v.position < sinks) & v.valid).to(torch.int8) * Scores.SINK
