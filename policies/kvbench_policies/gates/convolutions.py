"""LoCoCo's convolutions: what they compute, and their configuration.

Cai, Tian, Wang, Chen: LoCoCo: Dropping In Convolutions for Long Context Compression, ICML 2024,
arXiv 2406.05317. Sizes and initial values are those of the authors' code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from kvbench.errors import UserError
from kvbench.plugin import ModelInfo
from kvbench_policies.gates.config import LearnedConfig, shapes_of

_BLOCK = 1 << 26
"""Number of weights, over all heads, that are held at once: 256 MiB in float32."""


@dataclass(frozen=True, kw_only=True)
class ConvolutionConfig(LearnedConfig):
    """Architecture, base model and training of the convolutions of a model.

    Attributes:
        slots: Output channels, `S`: into how many entries of a head a cut merged in training.
        kernel_size: Width of the kernels in entries; odd.
        keep_rate: Share of a head's entries that are kept as they are; the others are merged into.
        mix: Initial share of the convolution in a merged entry.
    """

    kind: Literal["lococo"] = "lococo"
    slots: int = 256
    kernel_size: int = 21
    keep_rate: float = 0.5
    mix: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind != "lococo":
            raise UserError(f"unknown kind={self.kind}; use lococo")
        self._check_sizes("slots", "kernel_size")
        if self.kernel_size % 2 == 0:
            raise UserError(f"kernel_size={self.kernel_size} is even; use an odd number")
        for field_name in ("keep_rate", "mix"):
            fraction = getattr(self, field_name)
            is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
            if not is_number or not (math.isfinite(fraction) and 0 <= fraction <= 1):
                raise UserError(f"{field_name}={fraction} is invalid; use a number from 0 to 1")

    @classmethod
    def of(cls, model: ModelInfo, **changes: Any) -> Self:
        """Make the configuration for a model, with the sizes of the authors' code.

        Raises:
            UserError: An attribute is out of range.
        """
        return cls(**{**shapes_of(model), "base_model": model.name, **changes})


class MergeConvolutions(nn.Module):
    """One convolution per full-attention layer, shared by the heads of the layer.

    It runs over the entries of a head, whose channels are key and value side by side. Weights are
    drawn from a standard normal distribution and biases as `torch.nn.Conv1d` draws them.

    Args:
        config: The configuration; parameters are drawn from torch's generator.
    """

    def __init__(self, config: ConvolutionConfig) -> None:
        super().__init__()
        self.config = config
        channel_count, kernel_size = 2 * config.head_dim, config.kernel_size
        self.layers = nn.ModuleList(
            nn.Conv1d(channel_count, config.slots, kernel_size, padding=kernel_size // 2) for _ in range(config.layers)
        )
        for convolution in self.layers:
            nn.init.normal_(convolution.weight)  # type: ignore[arg-type]
        self.mix = nn.Parameter(torch.full((config.layers,), float(config.mix)))

    def forward(self, layer: int, entries: Tensor, real_mask: Tensor) -> Tensor:
        """Mean over the entries of a head, one for every channel of the convolution.

        The weights are `softmax(relu(conv(entries)))` over the entries.

        Args:
            layer: Index among the full-attention layers.
            entries: Entries side by side, 0 where there is none, `[R, E, 2d]`.
            real_mask: Which entries exist, bool `[R, E]`.

        Returns:
            float32 `[R, S, 2d]`.
        """
        with torch.autocast(entries.device.type, enabled=False):
            entries = entries.float()
            batch_size = max(1, _BLOCK // (self.config.slots * max(1, entries.shape[1])))
            batches = zip(entries.split(batch_size), real_mask.split(batch_size), strict=True)
            return torch.cat([self._means(layer, entry_batch, mask_batch) for entry_batch, mask_batch in batches])

    def _means(self, layer: int, entries: Tensor, real_mask: Tensor) -> Tensor:
        logits = torch.relu(self.layers[layer](entries.transpose(1, 2)))
        # Not -inf: a head without entries would get NaN, in the gradient as well.
        logits = logits.masked_fill(~real_mask[:, None], torch.finfo(logits.dtype).min)
        means: Tensor = logits.softmax(-1) @ entries
        return means
