"""KVzip keeps what a slow loop over the attention of replays keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.budget import Budget
from kvbench.engine import replay
from kvbench.engine.driver import engine
from kvbench.engine.prefix import Compression, Prefix
from kvbench.errors import UserError
from kvbench.spelling import policy

from . import oracles as o
from .drawing import llama, padded, tokens
from .test_models import layers_of

LENGTHS, LEAD = (45, 31), 8


@contextmanager
def hidden_states(model: Any) -> Iterator[list[Tensor]]:
    """What enters the attention of every layer."""
    seen: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["hidden_states"][0]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def received(model: Any, ids: Tensor, chunk: int, sinks: int, plus: bool) -> list[np.ndarray]:
    """Largest attention by layer, `[H, T]`: the text, and then a chunk of it, in one forward."""
    length = ids.shape[1]
    out = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        again = ids[:, max(0, start - LEAD) : end]
        with hidden_states(model) as hidden:
            layers = layers_of(model, torch.cat([ids, again], 1))
        first = min(sinks, start)
        for i, layer in enumerate(layers):
            if start == 0:
                out.append(np.zeros((layer.heads, length)))
            for q in range(length, layer.tokens):
                keys = [*range(first), *range(start, end), *range(length, q + 1)]
                for g in range(layer.q.shape[0]):
                    h = g // layer.group
                    logits = [layer.q[g, q] @ layer.k[h, t] / math.sqrt(layer.dim) for t in keys]
                    weights = np.exp(np.array(logits) - max(logits))
                    weights = weights / weights.sum()
                    for t, weight in zip(keys, weights, strict=True):
                        if not start <= t < end:
                            continue
                        if plus:
                            out_norm = float(np.linalg.norm(layer.v[h, t] @ layer.w_o[g]))
                            weight = weight * out_norm / float(hidden[i][q].double().norm())
                        out[i][h, t] = max(out[i][h, t], weight)
    return out


def ranked(worth: np.ndarray, sinks: int, level: str) -> o.Ranked:
    heads, length = worth.shape
    if level == "head":
        worth = np.repeat(worth.max(1, keepdims=True), length, 1)
    classes = [o.SINK if t < sinks else o.FREE for t in range(length)]
    return o.Ranked([[float(x) for x in row] for row in worth], [classes] * heads)


def kept(model: Any, spec: str, budget: int) -> list[list[list[list[int]]]]:
    ids, mask = padded(tokens(LENGTHS))
    layers = kvbench.kept(model, ids, spec, budget, mask)
    return [
        [
            [head.nonzero()[:, 0].sub(max(LENGTHS) - t).tolist() for head in layer[r]]
            for layer in layers
            if layer is not None
        ]
        for r, t in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize(
    ("group", "chunk", "sinks", "plus", "level"),
    [
        (1, 20, 4, False, "pair"),
        (2, 2048, 4, False, "head"),
        (4, 17, 2, True, "pair"),
        (2, 13, 0, True, "head"),
    ],
)
def test_kept_sets_agree_with_the_oracle(group: int, chunk: int, sinks: int, plus: bool, level: str) -> None:
    model: Any = llama(group)
    rows = [row[None] for row in tokens(LENGTHS)]
    worth = [received(model, ids, chunk, sinks, plus) for ids in rows]
    spec = f"kvzip:replay={chunk}:sinks={sinks}:plus={plus}:level={level}"
    for allocate, shares in (("global", o.global_shares), ("uniform", o.uniform)):
        for budget in (1, 7, 20, 31):
            got = kept(model, f"{spec}:allocate={allocate}", budget)
            for r, of_row in enumerate(worth):
                layers = [ranked(x, sinks, level) for x in of_row]
                counts = shares(layers, budget)
                expected = [
                    [sorted(o.order_head(x, h)[:n]) for h, n in enumerate(own)]
                    for x, own in zip(layers, counts, strict=True)
                ]
                assert got[r] == expected, (allocate, budget, r)


def compressions(*specs: str) -> list[Compression]:
    return [Compression(policy(s), Budget.parse("7"), "context", 0) for s in specs]


def test_one_replay_serves_all_cells_and_each_books_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = llama(2), tokens([40])[0][None]
    ran = []
    replayed = replay._replayed
    monkeypatch.setattr(replay, "_replayed", lambda *args: ran.append(1) or replayed(*args))
    cells = compressions("kvzip", "snapkv", "kvzip:allocate=uniform", "kvzip:plus=true")
    with engine(model):
        prefix = Prefix(model, frozenset().union(*(c.policy.needs for c in cells)))
        prefix.extend(ids)
        made = prefix.compress(cells)
        assert len(ran) == 2, "one plain, and one with norms"
        cost = prefix._replays
        assert cost > 0
        assert all(made[i].seconds >= cost for i in (0, 2, 3))
        longer = prefix.fork()
        longer.extend(ids[:, :5])
        longer.compress(cells)
        assert len(ran) == 4, "the question makes another context"
        assert [c.get_seq_length() for c in (prefix.cache, longer.cache)] == [40, 45]


def test_images_and_embeddings_are_refused_in_one_line() -> None:
    model: Any = llama(2)
    ids = tokens([20])[0][None]
    with kvbench.attach(model, "kvzip", 5) as cache:
        embeddings = model.get_input_embeddings()(ids)
        with pytest.raises(UserError, match="a replay needs token ids"):
            model(inputs_embeds=embeddings, past_key_values=cache)


@torch.no_grad()
def test_tokens_that_were_not_replayed_are_protected_later() -> None:
    model: Any = llama(2)
    ids = tokens([60])[0][None]
    with kvbench.attach(model, "kvzip:buffer=1", 12, moment="decode") as cache:
        model(ids[:, :40], past_key_values=cache)
        for i in range(40, 48):
            model(ids[:, i : i + 1], past_key_values=cache)
        for layer in cache.kept():
            assert layer is not None
            assert bool(layer[..., 40:48].all())
