"""Token gate modules, in float32 and in the log domain.

Retention: Bui, Sharma, Lamba, Mishra, Ying: Cache What Lasts, arXiv 2512.03324, section 5.1; the tied readout: Nguyen,
Cohan, Ying and others: Make Each Token Count, arXiv 2605.09649, section 4.1; retaining heads: LocRet, arXiv 2410.01805;
surrogates of KVzip+: KVzap, arXiv 2601.07891. `beta` itself is never computed, because it loses all precision near 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from kvbench_policies.gates.config import GateConfig


class _Layer(nn.Module):
    """Gate of one layer: `[..., width]` to `[..., out]`.

    Without a hidden layer, `linear2` is applied to the input. Names and order of the layers match the public TRIM-KV
    checkpoints.
    """

    def __init__(self, config: GateConfig, output_dim: int, *, biased: bool, own_bias: bool) -> None:
        # Imported here because transformers takes seconds to load and `kvbench list` does not need it.
        from transformers.activations import ACT2FN

        super().__init__()
        has_mlp = config.gate == "mlp"
        self.linear1 = nn.Linear(config.width, config.hidden_dim, bias=biased) if has_mlp else None
        self.activation = ACT2FN[config.activation] if has_mlp else nn.Identity()
        readout_width = config.hidden_dim if has_mlp else config.width
        self.linear2 = nn.Linear(readout_width, output_dim, bias=biased and not own_bias)
        self.bias = nn.Parameter(torch.full((output_dim,), float(config.bias))) if own_bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.linear1 is not None:
            hidden = self.activation(self.linear1(hidden))
        hidden = self.linear2(hidden)
        return hidden if self.bias is None else hidden + self.bias


class RetentionGates(nn.Module):
    """Token gates of all full-attention layers of a model.

    An untied gate outputs one number per KV head, plus that head's bias. A tied gate outputs `gate_dim` numbers per KV
    head; a readout and a bias shared by all layers and heads reduce them to one. The gates of `locret` have no biases.

    Args:
        config: Architecture; parameters are initialised from torch's global generator.
    """

    def __init__(self, config: GateConfig) -> None:
        super().__init__()
        self.config = config
        has_biases = config.has_biases
        output_dim = config.kv_heads * (config.gate_dim if config.tied else 1)
        self.layers = nn.ModuleList(
            _Layer(config, output_dim, biased=has_biases, own_bias=has_biases and not config.tied)
            for _ in range(config.layers)
        )
        self.readout: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if config.tied:
            init_bound = 1 / math.sqrt(config.gate_dim)
            self.readout = nn.Parameter(torch.empty(config.gate_dim).uniform_(-init_bound, init_bound))
            self.bias = nn.Parameter(torch.tensor(float(config.bias)))

    def forward(
        self,
        layer: int,
        hidden: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        qkv: Tensor | None = None,
    ) -> Tensor:
        """Return the output of a layer's gate for tokens, before any sigmoid.

        Args:
            layer: Index among the full-attention layers.
            hidden: Input of the attention block, after its norm, `[B, n, d_model]`.
            key: Keys after RoPE, `[B, H, n, d]`; used only with `input=kv`.
            value: Values, `[B, H, n, d]`; used only with `input=kv`.
            qkv: `ModelInfo.project(layer, hidden)`, `[B, n, (H_q + 2 H) d]`; used only with `input=qkv`.

            Returns: float32 `[B, H, n]`, regardless of the input dtypes.

            Raises: ValueError: The configured input is missing.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            logits: Tensor = self.layers[layer](self._input(hidden, key, value, qkv).float())
            if self.readout is not None and self.bias is not None:
                logits = logits.unflatten(-1, (self.config.kv_heads, self.config.gate_dim))
                logits = logits @ self.readout + self.bias
            return logits.transpose(1, 2)

    def _input(self, hidden: Tensor, key: Tensor | None, value: Tensor | None, qkv: Tensor | None) -> Tensor:
        if self.config.input == "hidden":
            return hidden
        if self.config.input == "qkv":
            if qkv is None:
                raise ValueError("these gates need qkv")
            return qkv
        if key is None or value is None:
            raise ValueError("these gates need key and value")
        return torch.cat([key, value], 1).transpose(1, 2).flatten(2)

    def log_beta(self, layer: int, hidden: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        """Return the log retention of tokens, `logsigmoid` of `forward`: float32 `[B, H, n]`, 0 or less.

        Arguments as in `forward`.

        Raises:
            ValueError: The gates predict no retention, or their input is missing.
        """
        if not self.config.is_retention:
            raise ValueError(f"gates of {self.config.kind} predict no retention; use `score`")
        return self.score(layer, hidden, key, value)

    def score(
        self,
        layer: int,
        hidden: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        qkv: Tensor | None = None,
    ) -> Tensor:
        """Return the number stored with each entry: log retention, logit or log attention, by kind.

        Arguments as in `forward`.

        Returns:
            float32 `[B, H, n]`.

        Raises:
            ValueError: The gates' input is missing.
        """
        logits: Tensor = self(layer, hidden, key, value, qkv)
        return logsigmoid(logits) if self.config.is_retention else logits
