"""The definition, slowly: loops in float64, and transformers' eager attention with masked entries.

Nothing of `kvbench.analysis` or of kvbench's attention is used here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

Floats = np.ndarray[Any, np.dtype[np.float64]]


def attention_weights(
    query: Floats,
    key: Floats,
    scale: float,
    seen: Sequence[int],
    cap: float | None = None,
    sink: float = -math.inf,
) -> Floats:
    """Softmax attention of one query on the entries in `seen`, 0 elsewhere, with a soft cap and a sink's logit."""
    logits = {i: float(np.dot(query, key[i])) * scale for i in seen}
    if cap is not None:
        logits = {i: cap * math.tanh(x / cap) for i, x in logits.items()}
    top = max([sink, *logits.values()]) if logits else 0.0
    total = math.exp(sink - top) + sum(math.exp(x - top) for x in logits.values())
    out = np.zeros(len(key))
    for i, x in logits.items():
        out[i] = math.exp(x - top) / total
    return out


def projected(weights: Floats, value: Floats, weight: Floats) -> Floats:
    """`A V W_O` of one head, entry by entry."""
    out = np.zeros(weight.shape[1])
    for i, a in enumerate(weights):
        out += a * (value[i] @ weight)
    return out


def one_head(
    a: Floats,
    a_kept: Floats,
    value: Floats,
    weight: Floats,
    kept: Sequence[int],
    stage1: Sequence[int],
    sink: float = 0.0,
) -> dict[str, float]:
    """All numbers of one query head, term by term as the paper writes them.

    Args:
        a: Attention over all entries.
        a_kept: Attention over what is kept.
        value: `[n, d]`.
        weight: `[d, d_model]`.
        kept: Entries in N.
        stage1: Entries in N', part of `kept`.
        sink: Attention of the head's sink, an entry with value 0 that N and N' both have.
    """
    n = len(a)
    norm = [float(np.abs(value[i] @ weight).sum()) for i in range(n)]
    change = projected(a, value, weight) - projected(a_kept, value, weight)
    c = sum(a[i] * norm[i] for i in range(n))
    mass = sink + sum(a[i] for i in kept)
    sigma = sink + sum(a[i] for i in stage1)
    second = [i for i in kept if i not in set(stage1)]
    bound1 = c - (2 - 1 / mass) * sum(a[i] * norm[i] for i in kept)
    rest = c - (2 - 1 / sigma) * sum(a[i] * norm[i] for i in stage1)
    bound2 = rest - (2 - 1 / sigma) * sum(a[i] * norm[i] for i in second)
    bound3 = rest - min(norm) * (2 - 1 / sigma) * sum(a[i] for i in second)
    return {
        "l1": float(np.abs(change).sum()),
        "output": float(np.abs(projected(a, value, weight)).sum()),
        "entries": len(kept),
        "stage1": len(stage1),
        "mass": mass,
        "stage1_mass": sigma,
        "top_mass": sink + sum(sorted(a, reverse=True)[: len(stage1)]),
        "bound1": bound1,
        "bound2": bound2,
        "bound3": bound3,
    }


class Eager:
    """A model in float64 with eager attention, from which entries can be hidden head by head."""

    def __init__(self, folder: str) -> None:
        self.model = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
            .eval()
            .requires_grad_(False)
        )
        self.layers = [layer.self_attn for layer in self.model.model.layers]
        self.group = self.model.config.num_attention_heads // self.model.config.num_key_value_heads

    def weight(self, layer: int, head: int) -> Floats:
        """Output projection of one query head, `[d, d_model]`."""
        d = self.model.config.head_dim
        whole = self.layers[layer].o_proj.weight
        return whole[:, head * d : (head + 1) * d].T.numpy()

    @contextmanager
    def watched(self, kept: Sequence[Tensor] | None) -> Iterator[dict[int, Tensor]]:
        """Hide what is not kept (by layer bool `[H, columns]`); note the blocks' last outputs."""
        out: dict[int, Tensor] = {}
        handles = []

        def hide(index: int, args: Any, kwargs: dict[str, Any]) -> Any:
            if kept is None:
                return None
            mask = kwargs["attention_mask"]
            more = mask.shape[-1] - kept[index].shape[-1]
            seen = torch.nn.functional.pad(kept[index], (0, more), value=True)
            seen = seen.repeat_interleave(self.group, 0)[None, :, None]
            hidden = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
            return args, {**kwargs, "attention_mask": hidden}

        for index, module in enumerate(self.layers):
            handles += [
                module.register_forward_pre_hook(lambda m, a, k, i=index: hide(i, a, k), with_kwargs=True),
                module.register_forward_hook(lambda m, a, o, i=index: out.__setitem__(i, o[0][0, -1])),
            ]
        try:
            yield out
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def run(
        self, chunks: Sequence[Sequence[int]], kept: Sequence[Tensor] | None = None, since: int = 1
    ) -> tuple[Any, DynamicCache, dict[int, Tensor]]:
        """Run chunks one after the other; entries are hidden from chunk `since` on."""
        cache = DynamicCache(config=self.model.config)
        last: Any = None
        columns = 0
        for i, ids in enumerate(chunks):
            columns += len(ids)
            with self.watched(kept if i >= since else None) as out:
                last = self.model(
                    input_ids=torch.tensor([list(ids)]),
                    attention_mask=torch.ones(1, columns, dtype=torch.long),
                    past_key_values=cache,
                    use_cache=True,
                    output_attentions=True,
                )
        return last, cache, out
