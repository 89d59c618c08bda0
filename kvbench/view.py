"""What a part of a policy is shown: one layer at one moment.

Re-exported by `kvbench.plugin`, the page that a plugin author reads. `B` sequences, `H` KV heads,
`H_q` query heads, `n` entries shown, `d` head dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvbench.moments import Moment
from kvbench.view_needs import ModelInfo, Need, Queries


class View:
    """One layer at one moment, the rows that belong to one policy.

    Entries stand in the order of their columns, so the last valid one is the newest.

    Attributes:
        layer: Index among the full-attention layers, `0 <= layer < model.layers`.
        moment: When the cache is compressed.
        length: Tokens that the sequence has seen, padding not counted, int64 `[B]`.
        col: Logical column of every entry, int64 `[B, H, n]` (padding counts: see `position`).
        position: Logical position of every entry, int64 `[B, H, n]`: the first token has 0, the
            newest has `length - 1`, whatever was evicted between.
        valid: Which entries exist, bool `[B, H, n]`.
        key: Keys after RoPE, `[B, H, n, d]`.
        value: Values, `[B, H, n, d]`.
        obs: What was observed, by `Need`. A plugin's own per-entry needs are there when a prefill
            is cut, not at a later cut: what must last goes into the extras. `AttentionMass`,
            `Queries` and `Surprisal` go on and are there at every cut.
        extras: Per-entry state of the policy by name, `[B, H, n]`; a score may assign to it.
        turns_ago: How many turns before the newest an entry came, int64 `[B, H, n]`; 0 everywhere
            except at moment `turns`.
        final: Whether this is the last cut of a prefill that comes in chunks.
        coming: Tokens of the prompt that are prefilled after that last cut (`Score.tail`).
        model: The model's shapes and its output projections.
        scale: Factor of the attention logits.
        seed: Noise seed of every row, int64 `[B]`, from the run's seed and the context's tokens.
    """

    def __init__(
        self,
        *,
        layer: int,
        moment: Moment,
        length: Tensor,
        col: Tensor,
        position: Tensor,
        valid: Tensor,
        key: Tensor,
        value: Tensor,
        obs: Mapping[Need, Tensor],
        extras: dict[str, Tensor],
        model: ModelInfo,
        scale: float,
        seed: Tensor,
        budget: Tensor,
        turns_ago: Tensor | None = None,
        final: bool = True,
        coming: int = 0,
    ) -> None:
        self.layer = layer
        self.moment: Moment = moment
        self.length = length
        self.col = col
        self.position = position
        self.valid = valid
        self.key = key
        self.value = value
        self.obs = obs
        self.extras = extras
        self.model = model
        self.scale = scale
        self.seed = seed
        self._budget = budget
        self.read_budget = False
        self.turns_ago = torch.zeros_like(position) if turns_ago is None else turns_ago
        self.final = final
        self.coming = coming

    @property
    def budget(self) -> Tensor:
        """Mean entries per (layer, KV head), `b`, int64 `[B]`.

        A score that reads it is computed anew for every budget; one that does not is shared.
        """
        self.read_budget = True
        return self._budget

    @property
    def age(self) -> Tensor:
        """`t - i`: how far behind the newest token every entry lies, int64 `[B, H, n]`."""
        return self.length[:, None, None] - 1 - self.position

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(B, H, n)`."""
        b, h, n = self.valid.shape
        return b, h, n

    def grouped(self, per_query_head: Tensor, how: str = "mean") -> Tensor:
        """Reduce a tensor `[B, H_q, ...]` over the query heads of each KV head to `[B, H, ...]`.

        Args:
            per_query_head: One value per query head on axis 1.
            how: `mean`, `max` or `sum` over the group.
        """
        x: Tensor = per_query_head.unflatten(1, (self.model.kv_heads, self.model.group))
        if how == "max":
            return x.amax(2)
        return x.sum(2) if how == "sum" else x.mean(2)

    def window_attention(self, window: int) -> Tensor:
        """Attention of the last `window` queries on the entries, causal among themselves.

        Softmax in float32 over all entries shown. Rows of the window that do not exist (a sequence
        shorter than it) are zero.

        Returns:
            float32 `[B, H_q, window, n]`.
        """
        q = self.obs[Queries(window)].float()
        b, h, n = self.shape
        q = q.unflatten(1, (h, self.model.group)).flatten(2, 3)
        logits = (q @ self.key.float().transpose(-1, -2)) * self.scale
        logits = logits.view(b, h, self.model.group, -1, n)
        behind = torch.arange(window - 1, -1, -1, device=q.device)
        seen = (self.age[:, :, None, :] >= behind[:, None]) & self.valid[:, :, None, :]
        logits = logits.masked_fill(~seen[:, :, None], float("-inf"))
        real = (behind < self.length[:, None])[:, None, None, :, None]
        attention = torch.softmax(logits, -1).nan_to_num(0.0) * real
        return attention.flatten(1, 2)

    def noise(self, stream: int = 0) -> Tensor:
        """Uniform noise in [0, 1), float32 `[B, H, n]`; streams are independent of each other.

        Fixed by (seed, context, layer, head, position). It comes from a counter and not from a
        generator, so it depends neither on the batch nor on the order in which cells run.
        """
        h = self.valid.shape[1]
        head = torch.arange(h, device=self.col.device)[None, :, None]
        x = self.seed[:, None, None] + 0x9E3779B1 * (self.layer * 1024 + head) + self.position
        x = x + 0x51ED2705 * stream
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = x & 0xFFFFFFFF
            x = (x ^ (x >> shift)) * factor
        x = x & 0xFFFFFFFF
        x = x ^ (x >> 16)
        return (x >> 8).to(torch.float32) / float(1 << 24)
