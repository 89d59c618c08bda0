"""The oracle's scores are what a plain loop over the stock model's attention weights says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.errors import UserError
from kvbench.plugin import Scores, View
from kvbench_policies.oracle import ORACLE, ReceivedFromAnswer

from . import oracles as o
from .drawing import llama, padded, tokens

LENGTHS, FOLLOWING = (45, 31, 16), 6


@dataclass(frozen=True)
class Watched(ReceivedFromAnswer):
    """The score, which remembers what it returned, by layer."""

    def score(self, v: View) -> Scores:
        scores = super().score(v)
        SEEN[v.layer] = scores.value.clone()
        return scores


SEEN: dict[int, Tensor] = {}


def received(model: Any, ids: Tensor, following: Tensor) -> list[np.ndarray]:
    """Attention by layer, `[H, T]`, that the following tokens pay, of one text in one forward with eager attention."""
    context = ids.shape[1]
    model.set_attn_implementation("eager")
    weights = model(torch.cat([ids, following], 1), output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    heads = model.config.num_key_value_heads
    group = model.config.num_attention_heads // heads
    out = []
    for layer in weights:
        sums = np.zeros((heads, context))
        for head in range(layer.shape[1]):
            for query in range(context, layer.shape[2]):
                for entry in range(context):
                    sums[head // group, entry] += float(layer[0, head, query, entry]) / group
        out.append(sums)
    return out


@pytest.mark.parametrize("group", [1, 2, 4])
@torch.no_grad()
def test_scores_and_kept_sets_agree_with_eager_attention(group: int) -> None:
    model: Any = llama(group)
    rows = tokens(LENGTHS)
    following = torch.stack([row[:FOLLOWING].flip(0) for row in rows])
    worth = [received(model, row[None], following[r : r + 1]) for r, row in enumerate(rows)]
    for rank, (row, alone) in enumerate(zip(rows, worth, strict=True)):
        watched = replace(ORACLE, score=Watched())
        kvbench.kept(model, row[None], watched, 5, following=following[rank : rank + 1])
        for layer, expected in enumerate(alone):
            assert torch.allclose(SEEN[layer][0].double(), torch.from_numpy(expected), atol=1e-5)
    ids, mask = padded(rows)
    for spec, shares in (
        ("oracle", o.head_adaptive),
        ("oracle:allocate=uniform", o.uniform),
        ("oracle:allocate=global", o.global_shares),
    ):
        for budget in (1, 7, 16):
            layers = kvbench.kept(model, ids, spec, budget, mask, following=following)
            for r, length in enumerate(LENGTHS):
                ranked = [o.Ranked(x.tolist(), [[o.FREE] * length] * len(x)) for x in worth[r]]
                counts = shares(ranked, budget)
                for layer, own in enumerate(counts):
                    mask_of_layer = layers[layer]
                    assert mask_of_layer is not None
                    for head, n in enumerate(own):
                        got = mask_of_layer[r, head].nonzero()[:, 0].sub(max(LENGTHS) - length).tolist()
                        assert got == sorted(o.order_head(ranked[layer], head)[:n]), (spec, budget, r)


def test_what_it_needs_is_said_in_one_line() -> None:
    with pytest.raises(UserError, match=r"sees question and answer; use it with kvbench run"):
        kvbench.kept(llama(2), tokens([20])[0][None], "oracle", 5)
    with pytest.raises(ValueError, match="target"):
        kvbench.policy("oracle:target=guess")


def test_only_policies_that_see_the_answer_are_informed() -> None:
    assert kvbench.policy("oracle").is_informed
    assert kvbench.policy("snapkv:score=answer_attention").is_informed
    assert not any(kvbench.policy(name).is_informed for name in ("snapkv", "kvzip", "finch"))
