"""Random layers shown as a `View` without any model, and what the engine does with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engine.observers import ReplayObserver, observer_for
from kvbench.plugin import ModelInfo, Policy, Scored, Scores, View, protect_nothing
from kvbench.view.softmax import LogitScale

from .oracles import Layer


def fixed(rows: int, columns: int) -> Tensor:
    """A random matrix, the same at every call."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / rows**0.5


def rotary(position: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE, `[n, dim]` each."""
    angle = position[:, None] * 10_000.0 ** (-2 * torch.arange(dim // 2, dtype=torch.float64) / dim)
    return angle.cos().float().repeat(1, 2), angle.sin().float().repeat(1, 2)


@dataclass
class Case:
    """Layers of a batch that is padded on the left; row `r` has `lengths[r]` tokens."""

    lengths: list[int]
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    w_o: list[Tensor]
    turns_ago: Tensor | None = None  # int64 [B, n]
    cap: float | None = None
    sinks: Tensor | None = None  # [H_q]

    @property
    def surprisal(self) -> Tensor:
        """Stand-in for the tokens' surprisal, float32 `[B, n]`; the first token has the largest."""
        drawn = self.k[0][:, 0, :, 0].float().abs().masked_fill(~self.valid, 0.0)
        first = self.valid & (self.valid.long().cumsum(-1) == 1)
        return torch.where(first, drawn.amax(-1, keepdim=True), drawn)

    @property
    def info(self) -> ModelInfo:
        heads, query_heads = self.k[0].shape[1], self.q[0].shape[1]
        dim, hidden = self.w_o[0].shape[1:]
        into_qkv = fixed(hidden, (query_heads + 2 * heads) * dim)
        return ModelInfo(
            "test",
            len(self.k),
            heads,
            query_heads,
            dim,
            hidden,
            lambda layer: self.w_o[layer],
            lambda layer, x: (x.float() @ into_qkv).to(x.dtype),
            lambda layer, position: rotary(position, dim),
        )

    def hidden(self, layer: int) -> Tensor:
        """Stand-in for the hidden states, `[B, n, d_model]`, of the layer's own dtype."""
        x = self.k[layer].transpose(1, 2).flatten(2).float()
        return (x @ fixed(x.shape[-1], self.w_o[layer].shape[-1])).to(self.k[layer].dtype)

    @property
    def valid(self) -> Tensor:
        columns = torch.arange(max(self.lengths))
        return columns >= max(self.lengths) - torch.tensor(self.lengths)[:, None]

    def views(self, policy: Policy, budget: Sequence[int]) -> list[View]:
        """Every layer, observed as the policy needs."""
        info, valid = self.info, self.valid
        scale = LogitScale(1 / math.sqrt(info.head_dim), self.cap, self.sinks)
        observers = {need: observer_for(need, info) for need in policy.needs if not need.of_tokens}
        made = []
        for i, (q, k, v) in enumerate(zip(self.q, self.k, self.v, strict=True)):
            for observer in observers.values():
                observer.update(i, q, k, v, self.hidden(i), valid, scale)
                if isinstance(observer, ReplayObserver):  # a stand-in: no model reads the text
                    observer.record({i: k[..., 0].float().abs()})
            obs = {need: observer.read(i) for need, observer in observers.items()}
            for need in policy.needs - set(obs):
                obs[need] = self.surprisal[:, None].expand(k.shape[:3])
            turns = self.turns_ago
            col = torch.arange(valid.shape[1]).expand(k.shape[:3])
            made.append(
                View(
                    layer=i,
                    moment="context",
                    length=torch.tensor(self.lengths),
                    col=col,
                    position=(valid.long().cumsum(-1) - 1)[:, None].expand(k.shape[:3]),
                    valid=valid[:, None].expand(k.shape[:3]),
                    key=k,
                    value=v,
                    obs=obs,
                    extras={},
                    model=info,
                    scale=scale,
                    seed=torch.arange(len(self.lengths)),
                    budget=torch.tensor(list(budget)),
                    turns_ago=None if turns is None else turns[:, None].expand(k.shape[:3]),
                )
            )
        return made

    def keep(self, policy: Policy, budget: Sequence[int]) -> list[Tensor]:
        """What a policy keeps of every layer, bool `[B, H, n]`."""
        return decide(policy, self.views(policy, budget), budget)

    def kept_tokens(self, policy: Policy, budget: Sequence[int], row: int) -> list[list[list[int]]]:
        """Sorted tokens of one sequence, by layer and head, counted from its first token."""
        first = max(self.lengths) - self.lengths[row]
        return [[(head.nonzero()[:, 0] - first).tolist() for head in layer[row]] for layer in self.keep(policy, budget)]

    def row(self, row: int) -> list[Layer]:
        """One sequence without its padding, for an oracle."""
        t = self.lengths[row]
        return [
            Layer(
                *(x[row, :, -t:].double().numpy() for x in (q, k, v)),
                w_o.double().numpy(),
            )
            for q, k, v, w_o in zip(self.q, self.k, self.v, self.w_o, strict=True)
        ]


def random_case(
    lengths: Sequence[int],
    *,
    heads: int = 2,
    group: int = 2,
    layers: int = 2,
    dim: int = 8,
    hidden: int = 12,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A batch whose padding holds large rubbish.

    Every KV head attends more sharply than the one before, so that shares differ and floors bind.
    """
    g = torch.Generator().manual_seed(seed)
    batch, tokens = len(lengths), max(lengths)
    padding = torch.arange(tokens) < tokens - torch.tensor(list(lengths))[:, None]

    sharpness = (3.0 ** torch.arange(heads)).repeat_interleave(group)[:, None, None]

    def draw(n: int, spread: float | Tensor) -> Tensor:
        x = torch.randn(batch, n, tokens, dim, generator=g) * spread
        return x.masked_fill(padding[:, None, :, None], 100.0).to(dtype)

    def weight() -> Tensor:
        return torch.randn(heads * group, dim, hidden, generator=g).to(dtype)

    every = range(layers)
    return Case(
        list(lengths),
        [draw(heads * group, sharpness) for _ in every],
        [draw(heads, 1.0) for _ in every],
        [draw(heads, 1.0) for _ in every],
        [weight() for _ in every],
    )


def decide(policy: Policy, views: list[View], budget: Sequence[int]) -> list[Tensor]:
    """Score, prepare, allocate and select, as the engine does; checks what every part must hold."""
    assert policy.score is not None
    scored = []
    for v in views:
        found = policy.score.score(v)
        scores = found if isinstance(found, Scores) else Scores(found, protect_nothing(v))
        assert scores.value.shape == v.shape
        assert scores.value.dtype == torch.float32
        assert bool((scores.value.isfinite() | ~v.valid).all())
        scores = policy.select.prepare(v, scores)
        assert scores.value.shape == scores.protect.shape == v.shape
        assert bool((scores.value.isfinite() | ~v.valid).all())
        scored.append(Scored(v, scores))
    info, length, mean = views[0].model, views[0].length, torch.tensor(list(budget))
    total = mean * info.layers * info.kv_heads
    if policy.allocate.scope == "model":
        shares = policy.allocate.allocate(scored, total)
    else:
        of_layer = policy.allocate.shares(info, length, mean)
        assert of_layer.sum(1).tolist() == total.tolist()
        shares = torch.cat([policy.allocate.allocate([s], of_layer[:, i]) for i, s in enumerate(scored)], 1)
    assert shares.shape == (len(length), info.layers, info.kv_heads)
    assert shares.sum((1, 2)).tolist() == total.tolist()
    kept = []
    for i, s in enumerate(scored):
        keep = policy.select.select(s.view, s.scores, shares[:, i])
        assert keep.dtype == torch.bool
        assert not bool((keep & ~s.view.valid).any())
        assert torch.equal(keep.sum(-1), shares[:, i])
        kept.append(keep)
    return kept
