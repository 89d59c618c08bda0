"""Prunes visual tokens while a prompt is prefilled, before the language model or inside it.

A pruned token is hidden from all others from some layer on, and its entries are evicted when the
cache is compressed. So every other token computes what it would compute if the pruned tokens had
been removed in that layer, with the positions of the whole prompt. The prefill itself does not
become cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvbench.budget import Budget
from kvbench.engine.models import attention_modules, visual_ids
from kvbench.errors import PluginError, UserError
from kvbench.plugin import Policy, Score
from kvbench.view import Pruned, VisualTokens

TOWER = "kvbench_tower"

Call = tuple[Tensor, Tensor, float]


@dataclass(frozen=True)
class Pruning:
    """What a prefill has to prune.

    Attributes:
        score: Chooses the tokens; its `prunes` is not None.
        budget: The budget of the cell: visual tokens get what all text tokens leave of it.
    """

    score: Score
    budget: Budget

    @property
    def layer(self) -> int:
        """The first layer that does not see pruned tokens."""
        assert self.score.prunes is not None
        return self.score.prunes

    def keep(self, length: int, visual_tokens: int) -> int:
        """How many visual tokens of a prompt stay."""
        text = length - visual_tokens
        left = self.budget.per_head(length, visual_tokens) - text
        return max(1, min(left, visual_tokens))


def prunes(policy: Policy) -> bool:
    """Whether a policy prunes visual tokens in the prefill, which no other policy can share."""
    return policy.score is not None and policy.score.prunes is not None


def pruning_of(policy: Policy, budget: Budget) -> Pruning | None:
    """What a policy prunes in a prefill; None if it prunes nothing."""
    if not prunes(policy) or budget.is_full:
        return None
    assert policy.score is not None
    return Pruning(policy.score, budget)


def depth_problem(score: Score, depth: int) -> str:
    """Why a score cannot prune inside a model of `depth` layers; empty if it can."""
    if not score.prunes or score.prunes < depth:
        return ""
    return (
        f"{score.name} drops visual tokens from layer {score.prunes} on, and the model has only "
        f"{depth} layers; use layer={max(1, depth - 1)}"
    )


def prune_embeddings(
    pruning: Pruning, embeddings: Tensor, visual: Tensor, valid: Tensor, tower: TowerFacts | None
) -> tuple[Tensor, Tensor]:
    """Prune before the language model.

    Args:
        pruning: What to prune.
        embeddings: Embeddings of the prompt, `[B, S, D]`.
        visual: Which columns are visual tokens, bool `[B, S]`.
        valid: Which columns are tokens, bool `[B, S]`.
        tower: What the vision tower has seen; None if it was not watched.

    Returns:
        The embeddings, which merging can have changed, and the pruned columns, bool `[B, S]`.
    """
    pruned = torch.zeros_like(visual)
    changed = embeddings
    total = int(visual.sum())
    seen = None if tower is None else tower.tokens(total)
    first = 0
    for row in range(len(visual)):
        own, count = visual[row], int(visual[row].sum())
        here = slice(first, first + count)
        first += count
        if not count:
            continue
        facts: dict[str, Tensor] = {"image": _runs(own)}
        if seen is not None:
            facts = {name: fact[here] for name, fact in seen.items()}
            facts["image"] = facts["image"] - facts["image"][0]
        shown = VisualTokens(
            keep=pruning.keep(int(valid[row].sum()), count),
            feature=embeddings[row, own],
            text=embeddings[row, valid[row] & ~own],
            **facts,
        )
        found = _checked(pruning, shown)
        pruned[row, own] = ~found.keep
        if found.feature is not None:
            if changed is embeddings:
                changed = embeddings.clone()
            changed[row, own] = found.feature.to(embeddings.dtype)
    return changed, pruned


def prune_inside(
    pruning: Pruning,
    query: Tensor,
    key: Tensor,
    hidden: Tensor,
    output: Tensor,
    scale: float,
    visual: Tensor,
    valid: Tensor,
) -> Tensor:
    """Prune inside the language model, from what the layer before has seen and put out.

    Args:
        pruning: What to prune.
        query: Queries after RoPE, `[B, H_q, S, d]`.
        key: Keys after RoPE, `[B, H, S, d]`.
        hidden: Hidden states that enter the attention, `[B, S, D]`.
        output: What the layer puts out, after the final norm, `[B, S, D]`.
        scale: Factor of the attention logits.
        visual: Which columns are visual tokens, bool `[B, S]`.
        valid: Which columns are tokens, bool `[B, S]`.

    Returns:
        The pruned columns, bool `[B, S]`.
    """
    pruned = torch.zeros_like(visual)
    group = query.shape[1] // key.shape[1]
    shared = key.repeat_interleave(group, 1)
    logits = (query[:, :, -1:].float() @ shared.float().transpose(-1, -2)) * scale
    weights = logits.masked_fill(~valid[:, None, None], -torch.inf).softmax(-1)[:, :, 0].mean(1)
    flat = key.transpose(1, 2).flatten(2)
    for row in range(len(visual)):
        own, text = visual[row], valid[row] & ~visual[row]
        if not bool(own.any()):
            continue
        shown = VisualTokens(
            keep=pruning.keep(int(valid[row].sum()), int(own.sum())),
            feature=hidden[row, own],
            text=hidden[row, text],
            image=_runs(own),
            attention=weights[row, own],
            key=flat[row, own],
            text_key=flat[row, text],
            output=output[row, own],
            text_output=output[row, text],
            follows=text.nonzero().flatten() > own.nonzero().max(),
        )
        pruned[row, own] = ~_checked(pruning, shown).keep
    return pruned


def _checked(pruning: Pruning, shown: VisualTokens) -> Pruned:
    found = pruning.score.prune(shown)
    if found.keep.shape != shown.image.shape or int(found.keep.sum()) != shown.keep:
        raise PluginError(
            f"{pruning.score.name} keeps {int(found.keep.sum())} visual tokens instead of "
            f"{shown.keep}"
        )
    return found


def _runs(visual: Tensor) -> Tensor:
    """The number of the image of each visual token: neighbouring tokens are of one image."""
    begins = visual & ~torch.nn.functional.pad(visual, (1, 0))[:-1]
    return (begins.long().cumsum(-1) - 1)[visual]


# --- the vision tower -----------------------------------------------------------------------------


@dataclass
class TowerFacts:
    """What a vision tower has seen in two layers: the last useful one, and the last of all.

    Attributes:
        modules: Their attentions, which can be the same.
        classed: Whether the first token of an image is a class token.
        merged: Patches that make one token of the language model.
        calls: Queries, keys and scale of every call of each layer, `[images, heads, patches, d]`.
    """

    modules: tuple[nn.Module, nn.Module]
    classed: bool
    merged: int
    calls: tuple[list[Call], list[Call]] = field(default_factory=lambda: ([], []))

    def note(self, module: nn.Module, call: Call) -> None:
        """Remember a call if it is of a watched layer."""
        for watched, calls in zip(self.modules, self.calls, strict=True):
            if watched is module:
                calls.append(call)

    def tokens(self, count: int) -> dict[str, Tensor]:
        """Facts about all visual tokens, by their names in `VisualTokens`.

        The calls are forgotten: they belong to one prefill.

        Raises:
            UserError: The tower makes another number of tokens than `count`.
        """
        (useful, last), self.calls = self.calls, ([], [])
        rows: dict[str, list[Tensor]] = {}
        for query, key, scale in _images(useful):
            flat = key.transpose(0, 1).flatten(1)
            weights = (self._asking(query) @ key.transpose(-1, -2) * scale).softmax(-1).mean((0, 1))
            self._add(rows, salience=weights, patch_key=flat, head_key=key.mean(0))
            image = rows.setdefault("image", [])
            image.append(torch.full_like(rows["salience"][-1], len(image), dtype=torch.int64))
        for query, key, _ in _images(last):
            flat, asking = key.transpose(0, 1).flatten(1), query.transpose(0, 1).flatten(1)
            logits = self._asking(asking) @ flat.T * flat.shape[-1] ** -0.5
            self._add(rows, last_salience=logits.softmax(-1).mean(0), last_key=flat)
        made = sum(map(len, rows.get("salience", [])))
        if made != count:
            raise UserError(
                f"the vision tower makes {made} tokens and the prompt has {count}: a policy that "
                "reads its attention does not know this model; use divprune, fastv or dart"
            )
        return {name: torch.cat(parts) for name, parts in rows.items()}

    def _asking(self, query: Tensor) -> Tensor:
        """The queries `[..., patches, d]` whose attention counts."""
        return query[..., :1, :] if self.classed else query

    def _add(self, rows: dict[str, list[Tensor]], **facts: Tensor) -> None:
        """Add facts about the patches of an image, as facts about its tokens."""
        for name, fact in facts.items():
            patches = fact[1:] if self.classed else fact
            merged = patches.view(-1, self.merged, *patches.shape[1:]).mean(1)
            rows.setdefault(name, []).append(merged)


def _images(calls: list[Call]) -> Iterator[Call]:
    """Queries and keys of every image, `[heads, patches, d]`, and the scale."""
    for query, key, scale in calls:
        for q, k in zip(query.float(), key.float(), strict=True):
            yield q, k, scale


_WATCHED: list[TowerFacts] = []


def _tower_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **options: Any
) -> Any:
    """Attention as `sdpa`, which shows its queries and keys to whoever watches this layer."""
    mask = options.pop("attention_mask", mask)
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    for facts in _WATCHED:
        facts.note(module, (query, key, scale))
    return sdpa_attention_forward(module, query, key, value, mask, **options)


AttentionInterface.register(TOWER, _tower_attention)


@contextmanager
def watching(model: nn.Module, pruning: Pruning | None) -> Iterator[TowerFacts | None]:
    """Watch the vision tower of a model as long as the block lasts, if a pruning reads it.

    Raises:
        UserError: The model lacks the layer that prunes, or the patches of its tower are not in the
            order of the tokens that they make.
    """
    if pruning is not None:
        problem = depth_problem(pruning.score, len(attention_modules(model)))
        if problem:
            raise UserError(problem)
    if pruning is None or not pruning.score.reads_tower or not visual_ids(model):
        yield None
        return
    inner: Any = getattr(model, "model", model)
    config: Any = model.config
    tower = getattr(inner, "visual", None)
    if config.model_type == "qwen2_5_vl":
        raise UserError(
            "a policy that reads the attention of the vision tower does not know Qwen2.5-VL's "
            "windows; use divprune, fastv or dart"
        )
    merge, which = 1, -1
    if tower is None:
        tower = inner.vision_tower
        which = config.vision_feature_layer
        which = which if isinstance(which, int) else which[-1]
    else:
        merge = config.vision_config.spatial_merge_size**2
    attentions = [
        module
        for module in tower.modules()
        if type(module).__name__.endswith("Attention")
        and not isinstance(module, nn.MultiheadAttention)
    ]
    classed = any(name.endswith("class_embedding") for name, _ in tower.named_parameters())
    facts = TowerFacts((attentions[which], attentions[-1]), classed, merge)
    before = tower.config._attn_implementation
    tower.set_attn_implementation(TOWER)
    _WATCHED.append(facts)
    try:
        yield facts
    finally:
        _WATCHED.remove(facts)
        tower.set_attn_implementation(before)
