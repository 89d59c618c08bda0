"""Replays: the model reads its own context once more, and the attention of that is observed.

A replay runs on a copy of the prefilled cache of one sequence. It is made once per prefill for all
policies that need it, after the prefill and before the first cut.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import forward
from kvbench.engine.models import decoder_of
from kvbench.engine.observers import ReplayObserver
from kvbench.errors import UserError
from kvbench.plugin import Replay
from kvbench.view import ModelInfo

LEAD = 8
"""Tokens before a chunk that are replayed with it, so that the model knows where it is."""

_BLOCK = 1 << 22
"""Most float32 attention weights held at once."""


class ReplayCache(RaggedCache):
    """The cache of a replay: a copy of one sequence."""


@torch.no_grad()
def observe_replays(model: nn.Module, cache: RaggedCache, info: ModelInfo) -> bool:
    """Make the replays that a prefilled cache's observers wait for; return whether any did.

    Args:
        model: The model, inside `engine` or `kvbench.attach`.
        cache: A dense cache.
        info: The model.

    Raises:
        UserError: The token ids of the context are unknown, or it has images.
    """
    made = False
    for need, observer in cache.observers.items():
        if isinstance(need, Replay) and isinstance(observer, ReplayObserver) and observer.stale:
            observer.record(_replayed(model, cache, info, need))
            made = True
    return made


def _replayed(
    model: nn.Module, cache: RaggedCache, info: ModelInfo, need: Replay
) -> dict[int, Tensor]:
    """What every entry received, by layer, float32 `[B, H, S]`; 0 for padding."""
    assert cache.valid is not None
    if cache.ids is None:
        raise UserError("a replay needs token ids; the forward was given embeddings")
    if cache.visual is not None and bool(cache.visual.any()):
        raise UserError("a replay reads text alone; the context has images")
    ids = torch.cat(cache.ids, 1)
    found = {
        i: torch.zeros(*layer.key.shape[:3], device=layer.key.device)
        for i, layer in enumerate(cache.ragged)
        if layer.key is not None
    }
    for row, tokens in enumerate(cache.lengths().tolist()):
        own = _sequence(model, cache, row, tokens)
        first = cache.valid.shape[1] - tokens
        for start, end in _chunks(tokens, need.chunk):
            watch = _Watch(need, info, start, end)
            one = own.fork()
            one.observers[need] = watch
            again = ids[row : row + 1, first + max(0, start - LEAD) : first + end]
            forward(model, one, again)
            for i, whole in found.items():
                whole[row, :, first + start : first + end] = watch.read(i)[0]
    return found


def _chunks(tokens: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, tokens, size):
        yield start, min(start + size, tokens)


def _sequence(model: nn.Module, cache: RaggedCache, row: int, tokens: int) -> ReplayCache:
    """One sequence of a dense cache without its padding, and without what observes it."""
    out = ReplayCache(decoder_of(model).config)
    assert cache.valid is not None
    out.valid = cache.valid[row : row + 1, -tokens:]
    out.shift = None if cache.shift is None else cache.shift[row : row + 1]
    out.layers, out.ids = cache.layers_of(row, tokens), None
    for layer in out.ragged:
        layer.closed = False
    return out


class _Watch(ReplayObserver):
    """Largest attention that the entries of one chunk receive from its replay.

    The softmax is over the sinks, the chunk and the replayed tokens so far, as in the authors'
    code: its cost does not depend on the length of the context.

    Args:
        need: What is observed.
        info: The model.
        start, end: The chunk.
    """

    def __init__(self, need: Replay, info: ModelInfo, start: int, end: int) -> None:
        super().__init__()
        self.need, self.info, self.start, self.end = need, info, start, end

    def update(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden: Tensor,
        valid: Tensor,
        scale: float,
    ) -> None:
        """Observe one forward of one layer; see `kvbench.plugin.Observer`."""
        heads, m = k.shape[1], q.shape[2]
        sinks, chunk = min(self.need.sinks, self.start), slice(self.start, self.end)
        keys = torch.cat([k[:, :, :sinks], k[:, :, chunk], k[:, :, -m:]], 2).float()
        columns = keys.shape[2]
        place = torch.arange(columns, device=q.device) - (columns - m)
        worth = self._value_norm(layer, v[:, :, chunk]) if self.need.norm else None
        best = torch.zeros(1, heads, self.end - self.start, device=q.device)
        step = max(1, _BLOCK // (q.shape[1] * columns))
        for first in range(0, m, step):
            rows = q[:, :, first : first + step].float() * scale
            n = rows.shape[2]
            logits = rows.unflatten(1, (heads, -1)).flatten(2, 3) @ keys.transpose(-1, -2)
            own = torch.arange(first, first + n, device=q.device)
            logits = logits.view(1, heads, -1, n, columns)
            weights = logits.masked_fill_(place > own[:, None], float("-inf")).softmax(-1)
            received = weights[..., sinks : sinks + self.end - self.start]
            if worth is not None:
                length = hidden[:, first : first + n].float().norm(dim=-1)
                received = received * worth[:, :, :, None] / length[:, None, None, :, None]
            best = torch.maximum(best, received.amax((2, 3)))
        self._held[layer] = best

    def _value_norm(self, layer: int, value: Tensor) -> Tensor:
        """`||v W_O||` of every query head's slice of the output projection, `[1, H, G, n]`."""
        weight = self.info.output_weight(layer).float().unflatten(0, (value.shape[1], -1))
        parts = [(value.float() @ w).norm(dim=-1) for w in weight.unbind(1)]
        return torch.stack(parts, 2)
