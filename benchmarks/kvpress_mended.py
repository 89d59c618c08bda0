"""Presses without what the rows of `kvpress_agreement` give as a reason to keep other entries.

Each does otherwise than its press exactly what the row says, so kvbench must keep the same entries,
and merge the same keys and values, as it. Runs in kvpress' environment.
"""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction
from typing import Any
from unittest import mock

import kvpress
import torch
import torch.nn.functional as F
from kvpress.utils import compute_n_kept

CLOSE = 1e-5
"""Numbers that differ by less may be in another order on the other side."""

Draws = dict[str, Any]
"""What kvbench has drawn for a cell: `noise` and `merging` `[L, H, T]`, and Gaussian matrices."""


def largest_remainder(real: list[Fraction], total: int) -> list[int]:
    """Round down, and add one where most was cut off, the earlier of equals first."""
    whole = [math.floor(x) for x in real]
    order = sorted(range(len(real)), key=lambda i: (whole[i] - real[i], i))
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole


def last_attention(module: Any, hidden_states: Any, keys: Any, kwargs: Any) -> torch.Tensor:
    """Attention of the newest token to all tokens, itself included, `[1, H_q, T]`."""
    past = kvpress.SnapKVPress.compute_window_attention(module, hidden_states, keys, 1, kwargs["position_embeddings"])[
        :, :, 0
    ]
    return torch.cat([past, 1 - past.sum(-1, keepdim=True)], -1)


class Drawn(kvpress.RandomPress):
    """Random eviction by kvbench's noise."""

    noise: Any = None

    def score(self, module: Any, *more: Any) -> Any:
        """The noise of the layer."""
        return torch.from_numpy(self.noise[module.layer_idx])[None]


def projected(press: Any, matrices: Any) -> Any:
    """A press whose random projections are kvbench's, float32 `[L, H, d, sketch]`."""
    original = press.score

    def score(module: Any, *more: Any) -> Any:
        own = torch.from_numpy(matrices[module.layer_idx])[None]
        with mock.patch("torch.randn", return_value=own):
            return original(module, *more)

    press.score = score
    return press


class Unforced(kvpress.TOVAPress):
    """TOVA whose newest token stays only if its own attention is large enough."""

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        """Score with the newest token's attention to itself."""
        mean = last_attention(module, hidden_states, keys, kwargs).mean(1, keepdim=True)
        return mean.repeat(1, keys.shape[1], 1)


class Counted(kvpress.FinchPress):
    """FINCH in which a query at position `q` counts `q + 1` times."""

    def score(self, *arguments: Any) -> Any:
        """Count every query once more."""
        weighted = super().score(*arguments)
        self.normalize_scores = False
        once = super().score(*arguments)
        self.normalize_scores = True
        return weighted + once


class QuestionFirst(Counted):
    """FINCH by chunks that share what the question leaves, in proportion to their sizes."""

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        """Keep as many entries as the press does."""
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        tokens, size = keys.shape[2], self.chunk_length
        starts = range(0, tokens, size)
        total = sum(compute_n_kept(min(size, tokens - i), self.compression_ratio) for i in starts)
        free, left = tokens - self.window_size, total - self.window_size
        own = [max(0, min(free, i + size) - i) for i in starts]
        quota = largest_remainder([Fraction(left * x, free) for x in own], left)
        parts = [torch.arange(free, tokens).expand(1, keys.shape[1], -1)]
        for start, x, n in zip(starts, own, quota, strict=True):
            parts.append(start + scores[:, :, start : start + x].topk(n, dim=-1).indices)
        index = torch.cat(parts, -1).sort(-1).values
        keys = kvpress.KeyRerotationPress.rerotate_keys(module, index, keys)
        return keys, values.gather(2, index[..., None].expand_as(keys))


class WindowFirst(kvpress.PyramidKVPress):
    """PyramidKV whose layers first keep their window; the pyramid divides the rest."""

    def get_layer_budget(self, module: Any, q_len: int) -> int:
        """Entries of a layer; those of all layers sum to the budget."""
        layers, window = module.config.num_hidden_layers, self.window_size
        budget = compute_n_kept(q_len, self.compression_ratio)
        inner = budget - window
        if inner <= 0 or q_len < 2 * inner or layers == 1:
            return int(budget)
        most = min(2 * inner - Fraction(inner, self.beta), Fraction(q_len - window))
        step = (2 * most - 2 * inner) / (layers - 1)
        real = [most - i * step + window for i in range(layers)]
        return largest_remainder(real, layers * budget)[module.layer_idx]


class SeesItself(kvpress.SimLayerKVPress):
    """SimLayerKV that measures what it keeps, the newest token's own attention included."""

    def is_lazy(self, module: Any, hidden_states: Any, keys: Any, position_embeddings: Any) -> bool:
        """Whether the attention exceeds the threshold."""
        kwargs = {"position_embeddings": position_embeddings}
        mean = last_attention(module, hidden_states, keys, kwargs).mean((0, 1))
        near = mean[: self.n_initial].sum() + mean[-(self.n_recent - self.n_last) :].sum()
        return bool(near.item() > self.lazy_threshold)


class WindowApart(kvpress.ChunkKVPress):
    """ChunkKV that keeps the window by itself; the newest tokens of the last chunk that it reaches.

    A chunk counts by the mean of its tokens before the window.
    """

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, *more: Any) -> Any:
        """Keep as many entries as the press does."""
        count = super().compress(module, hidden_states, keys, values, *more)[0].shape[2]
        tokens, size = keys.shape[2], self.chunk_length
        free = tokens - self.press.window_size
        score = self.press.score(module, hidden_states, keys, values, *more)[0, :, :free].sum(0)
        mean = [float(part.double().mean()) for part in score.split(size)]
        order = sorted(range(free), key=lambda i: (-mean[i // size], -i))
        index = torch.tensor(sorted([*reversed(range(free, tokens)), *order][:count]))
        return keys[:, :, index], values[:, :, index]


class Anchored(kvpress.KeyDiffPress):
    """KeyDiff that compares keys with a given mean key."""

    anchor: Any = None

    def score(self, module: Any, hidden_states: Any, keys: Any, *more: Any) -> Any:
        """Minus the cosine to the mean key."""
        return -F.cosine_similarity(keys, self.anchor, dim=-1)


class WholeContext(kvpress.ChunkPress):
    """KeyDiff by chunks whose keys are compared with the mean key of the whole context."""

    def compress(self, module: Any, hidden_states: Any, keys: Any, *more: Any) -> Any:
        """Compress with the context's mean key."""
        self.press.anchor = F.normalize(keys, dim=-1).mean(2, keepdim=True)
        return super().compress(module, hidden_states, keys, *more)


class InOrder(kvpress.SnapKVPress):
    """SnapKV for decoding: queries at their own positions, and entries that stay in order."""

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        """Score with the positions of all tokens of the window instead of the newest one's."""
        place = kwargs["position_ids"] - torch.arange(self.window_size - 1, -1, -1)
        turned = {"position_embeddings": module.rotary_emb(hidden_states, place)}
        return super().score(module, hidden_states, keys, values, attentions, kwargs | turned)

    def compress(self, module: Any, hidden_states: Any, keys: Any, *more: Any) -> Any:
        """Keep the order of the text instead of that of the scores."""
        left, values = super().compress(module, hidden_states, keys, *more)
        same = (left[:, :, :, None] == keys[:, :, None]).all(-1)
        order = same.int().argmax(-1).argsort(-1)[..., None].expand_as(left)
        return left.gather(2, order), values.gather(2, order)


class Averaging(kvpress.MergingPress):
    """D2O's merging: keys and values, weights by similarity, where it reaches the mean similarity.

    `places` notes the positions of what every layer keeps, `[H, n]`, and `close` the (layer, head)
    pairs in which rounding decides what is merged, or where.
    """

    def __init__(self, press: Any) -> None:
        super().__init__(press)
        self.places: list[torch.Tensor] = []
        self.close: set[tuple[int, int]] = set()

    def merge(self, keys: Any, values: Any, indices: Any) -> Any:
        """Merge what is evicted, head by head."""
        self.places.append(indices[0])
        both = torch.cat([keys, values], -1)[0].double()
        for head, kept in enumerate(indices[0].sort(-1, descending=True).values):
            key = keys[0, head].double()
            gone = torch.tensor(sorted(set(range(len(key))) - set(kept.tolist())))
            if not len(gone):
                continue
            unit = F.normalize(key, dim=-1)
            similarity = unit[gone] @ unit[kept].T
            nearest, target = similarity.max(-1)
            best = similarity.topk(min(2, len(kept)), dim=-1).values
            if min((best[:, 0] - best[:, -1]).min(), (nearest - nearest.mean()).abs().min()) < CLOSE:
                self.close.add((len(self.places) - 1, head))
            go = nearest >= nearest.mean()
            rows = both[head].clone()
            for slot, own in enumerate(kept.tolist()):
                weight = nearest[go & (target == slot)].exp()
                into = rows[gone[go & (target == slot)]]
                if len(into):
                    above = math.e * rows[own] + (weight[:, None] * into).sum(0)
                    both[head, own] = above / (math.e + weight.sum())
        merged = both.to(keys.dtype)[None]
        return merged.split([keys.shape[-1], values.shape[-1]], -1)


class OwnHeads(kvpress.CAMPress):
    """CaM in which every head evicts for itself, merging as `kvbench_policies.cam` says.

    All queries count, those of the prompt as well. What came since the last cut is merged, into the
    kept ones among the next `merge_budget` tokens, and compared with the mean of all of these. The
    draws are kvbench's. `places` notes the positions of what every layer holds, `[H, n]`, and
    `close` the (layer, head) pairs in which rounding decides what is evicted or merged.
    """

    def __init__(self, *arguments: Any, draws: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.draws = draws
        self.places: dict[int, torch.Tensor] = {}
        self.seen: dict[int, int] = defaultdict(int)
        self.close: set[tuple[int, int]] = set()

    def forward_hook(self, module: Any, inputs: Any, kwargs: Any, output: Any) -> Any:
        """Count the prompt's attention, which the press leaves out."""
        found = super().forward_hook(module, inputs, kwargs, output)
        if kwargs["hidden_states"].shape[1] > 1:
            heads = kwargs["past_key_values"].layers[module.layer_idx].keys.shape[1]
            total = self._aggregate_attention_per_kv_head(output[1], heads).sum(2)
            self._running_attn_sum[module.layer_idx] = total
        return found

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        """Merge and evict, head by head."""
        layer, held = module.layer_idx, keys.shape[2]
        place = self.places.get(layer, torch.zeros(keys.shape[1], 0, dtype=torch.long))
        seen = self.seen[layer]
        new = torch.arange(seen, seen + held - place.shape[1]).expand(keys.shape[1], -1)
        place = torch.cat([place, new], 1)
        score = self.base_press.score(module, hidden_states, keys, values, None, kwargs)
        index = score.topk(self.target_size, dim=-1).indices.sort(-1).values
        ordered = score[0].sort(-1, descending=True).values
        gap = (ordered[:, self.target_size - 1] - ordered[:, self.target_size]) / ordered.abs().amax(1)
        self.close |= {(layer, head) for head in (gap < CLOSE).nonzero()[:, 0].tolist()}
        merged = values.clone()
        for head, stays in enumerate(index[0]):
            kept, mass = torch.zeros(held, dtype=torch.bool), attentions[0, head].double()
            kept[stays] = True
            for i in ((~kept) & (place[head] >= seen)).nonzero()[:, 0].tolist():
                behind = place[head] - place[head, i]
                behind = (behind > 0) & (behind <= self.merge_budget)
                if not behind.any():
                    continue
                draw = self.draws[layer, head, int(place[head, i])]
                chance = float(mass[i] / mass[behind].mean())
                if abs(draw - chance) < CLOSE:
                    self.close.add((layer, head))
                if draw < chance:
                    merged[0, head, behind & kept] += values[0, head, i] / self.merge_budget
        self.places[layer], self.seen[layer] = place.gather(1, index[0]), int(place.max()) + 1
        self._running_attn_sum[layer] = attentions.gather(2, index)
        wide = index[..., None].expand(-1, -1, -1, keys.shape[-1])
        return keys.gather(2, wide), merged.gather(2, wide)
