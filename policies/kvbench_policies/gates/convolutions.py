"""LoCoCo's convolutions and their configuration.

Cai, Tian, Wang, Chen: LoCoCo: Dropping In Convolutions for Long Context Compression, ICML 2024, arXiv 2406.05317. Sizes
and initial values are those of the authors' code.
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
"""Maximum number of weights in memory, over all heads: 256 MiB in float32."""


@dataclass(frozen=True, kw_only=True)
class ConvolutionConfig(LearnedConfig):
    """Architecture, base model and training of the convolutions of a model.

    Attributes:
        slots: Output channels, `S`: entries per head that receive merged entries during training.
        kernel_size: Odd kernel width, in entries.
        keep_rate: Fraction of a head's kept entries that stay unchanged; the others receive merged entries.
        mix: Initial weight of the convolution in a merged entry.
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
        """Return the configuration for a model, with the sizes of the authors' code.

        Raises:
            UserError: An attribute is out of range.
        """
        return cls(**{**shapes_of(model), "base_model": model.name, **changes})


class MergeConvolutions(nn.Module):
    """One convolution per full-attention layer, shared by the heads of the layer.

    It runs over the entries of a head, with key and value concatenated as channels. Weights are initialised from a
    standard normal distribution, biases as in `torch.nn.Conv1d`.

    Args:
        config: Architecture; parameters are initialised from torch's global generator.
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
        """Return weighted means over the entries of a head, one per output channel.

        The weights are `softmax(relu(conv(entries)))` over the entries.

        Args:
            layer: Index among the full-attention layers.
            entries: Packed entries, zero-padded, `[R, E, 2d]`.
            real_mask: Entries that exist, bool `[R, E]`.

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
        # Not -inf, which gives NaN (also in the gradient) for a head without entries.
        logits = logits.masked_fill(~real_mask[:, None], torch.finfo(logits.dtype).min)
        means: Tensor = logits.softmax(-1) @ entries
        return means
