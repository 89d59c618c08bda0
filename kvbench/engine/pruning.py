"""Pruning of visual tokens during prefill, before the language model or inside it.

A pruned token is hidden from all others from some layer on, and its entries are evicted when the cache is compressed.
Every other token thus computes what it would compute if the pruned tokens had been removed in that layer, with the
positions of the whole prompt. The prefill itself does not become cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from kvbench.view.softmax import attention_weights, capped

TOWER = "kvbench_tower"

Call = tuple[Tensor, Tensor, float]
TowerRows = Mapping[str, Sequence[Tensor]]
"""Facts about visual tokens by their names in `VisualTokens`, one tensor per image."""


@dataclass(frozen=True)
class Pruning:
    """Visual token pruning of a prefill.

    Attributes:
        score: Chooses the tokens; its `prunes` is not None.
        budget: The budget of the cell; visual tokens get what the text tokens leave.
    """

    score: Score
    budget: Budget

    @property
    def layer(self) -> int:
        """Return the first layer that does not see pruned tokens."""
        assert self.score.prunes is not None
        return self.score.prunes

    def keep(self, length: int, visual_tokens: int) -> int:
        """Return the number of visual tokens of a prompt to keep."""
        text_tokens = length - visual_tokens
        visual_budget = self.budget.per_head(length, visual_tokens) - text_tokens
        return max(1, min(visual_budget, visual_tokens))


def prunes(policy: Policy) -> bool:
    """Return whether a policy prunes visual tokens in the prefill, which no other policy can share."""
    return policy.score is not None and policy.score.prunes is not None


def pruning_of(policy: Policy, budget: Budget) -> Pruning | None:
    """Return the pruning of a policy; None if it prunes nothing."""
    if not prunes(policy) or budget.is_full:
        return None
    assert policy.score is not None
    return Pruning(policy.score, budget)


def depth_problem(score: Score, depth: int) -> str:
    """Return why a score cannot prune inside a model of `depth` layers; "" if it can."""
    if not score.prunes or score.prunes < depth:
        return ""
    return (
        f"{score.name} drops visual tokens from layer {score.prunes} on, but the model has only {depth} layers; "
        f"use layer={max(1, depth - 1)}"
    )


def prune_embeddings(
    pruning: Pruning,
    embeddings: Tensor,
    visual_mask: Tensor,
    token_mask: Tensor,
    tower_facts: TowerFacts | None,
) -> tuple[Tensor, Tensor]:
    """Prune before the language model.

    Args:
        embeddings: Embeddings of the prompt, `[B, S, D]`.
        visual_mask: Columns that are visual tokens, bool `[B, S]`.
        token_mask: Columns that are tokens, bool `[B, S]`.
        tower_facts: Observations of the vision tower; None if it was not watched.

    Returns:
        The embeddings, possibly changed by merging, and the pruned columns, bool `[B, S]`.
    """
    pruned = torch.zeros_like(visual_mask)
    merged_embeddings = embeddings
    visual_total = int(visual_mask.sum())
    seen = None if tower_facts is None else tower_facts.tokens(visual_total)
    first_visual = 0
    for sequence_index in range(len(visual_mask)):
        row_visual, visual_count = visual_mask[sequence_index], int(visual_mask[sequence_index].sum())
        visual_slice = slice(first_visual, first_visual + visual_count)
        first_visual += visual_count
        if not visual_count:
            continue
        facts: dict[str, Tensor] = {"image": _runs(row_visual)}
        if seen is not None:
            facts = {name: fact[visual_slice] for name, fact in seen.items()}
            facts["image"] = facts["image"] - facts["image"][0]
        visual_tokens = VisualTokens(
            keep=pruning.keep(int(token_mask[sequence_index].sum()), visual_count),
            feature=embeddings[sequence_index, row_visual],
            text=embeddings[sequence_index, token_mask[sequence_index] & ~row_visual],
            **facts,
        )
        pruned_tokens = _checked(pruning, visual_tokens)
        pruned[sequence_index, row_visual] = ~pruned_tokens.keep
        if pruned_tokens.feature is not None:
            if merged_embeddings is embeddings:
                merged_embeddings = embeddings.clone()
            merged_embeddings[sequence_index, row_visual] = pruned_tokens.feature.to(embeddings.dtype)
    return merged_embeddings, pruned


def prune_inside(
    pruning: Pruning,
    query: Tensor,
    key: Tensor,
    hidden: Tensor,
    output: Tensor,
    scale: float,
    visual_mask: Tensor,
    token_mask: Tensor,
) -> Tensor:
    """Prune inside the language model, from the attention and output of the layer before.

    Args:
        query: Queries after RoPE, `[B, H_q, S, d]`.
        key: Keys after RoPE, `[B, H, S, d]`.
        hidden: Hidden states that enter the attention, `[B, S, D]`.
        output: Output of the layer after the final norm, `[B, S, D]`.
        scale: Scaling factor of the attention logits.
        visual_mask: Columns that are visual tokens, bool `[B, S]`.
        token_mask: Columns that are tokens, bool `[B, S]`.

    Returns:
        The pruned columns, bool `[B, S]`.
    """
    pruned = torch.zeros_like(visual_mask)
    last_query = query[:, :, -1:].float().unflatten(1, (key.shape[1], -1))
    logits = capped(last_query @ key.float()[:, :, None].transpose(-1, -2) * scale, scale)
    logits = logits.masked_fill(~token_mask[:, None, None, None], -torch.inf)
    weights = attention_weights(logits, scale)[:, :, :, 0].mean((1, 2))
    flat_key = key.transpose(1, 2).flatten(2)
    for sequence_index in range(len(visual_mask)):
        row_visual, row_text = visual_mask[sequence_index], token_mask[sequence_index] & ~visual_mask[sequence_index]
        if not bool(row_visual.any()):
            continue
        visual_tokens = VisualTokens(
            keep=pruning.keep(int(token_mask[sequence_index].sum()), int(row_visual.sum())),
            feature=hidden[sequence_index, row_visual],
            text=hidden[sequence_index, row_text],
            image=_runs(row_visual),
            attention=weights[sequence_index, row_visual],
            key=flat_key[sequence_index, row_visual],
            text_key=flat_key[sequence_index, row_text],
            output=output[sequence_index, row_visual],
            text_output=output[sequence_index, row_text],
            follows=row_text.nonzero().flatten() > row_visual.nonzero().max(),
        )
        pruned[sequence_index, row_visual] = ~_checked(pruning, visual_tokens).keep
    return pruned


def _checked(pruning: Pruning, visual_tokens: VisualTokens) -> Pruned:
    pruned_tokens = pruning.score.prune(visual_tokens)
    if pruned_tokens.keep.shape != visual_tokens.image.shape or int(pruned_tokens.keep.sum()) != visual_tokens.keep:
        raise PluginError(
            f"{pruning.score.name} keeps {int(pruned_tokens.keep.sum())} visual tokens instead of {visual_tokens.keep}"
        )
    return pruned_tokens


def _runs(visual_mask: Tensor) -> Tensor:
    """Return the image index of each visual token: neighbouring tokens belong to one image."""
    starts_image = visual_mask & ~torch.nn.functional.pad(visual_mask, (1, 0))[:-1]
    return (starts_image.long().cumsum(-1) - 1)[visual_mask]


# --- the vision tower -----------------------------------------------------------------------------


@dataclass
class TowerFacts:
    """Observations of two vision tower layers: the last useful one and the last of all.

    Attributes:
        modules: Their attention modules, which can be the same.
        classed: Whether the first token of an image is a class token.
        merged: Patches per token of the language model.
        calls: Queries, keys and scale of every call of each layer, `[images, heads, patches, d]`.
        rows: What is known of the images so far.
    """

    modules: tuple[nn.Module, nn.Module]
    classed: bool
    merged: int
    calls: tuple[list[Call], list[Call]] = field(default_factory=lambda: ([], []))
    rows: dict[str, list[Tensor]] = field(default_factory=dict)

    def note(self, module: nn.Module, call: Call) -> None:
        """Record a call of a watched layer."""
        for watched, calls in zip(self.modules, self.calls, strict=True):
            if watched is module:
                calls.append(call)

    def read_calls(self) -> TowerRows:
        """Return facts about the images of the recorded calls, which are discarded."""
        (useful, last), self.calls = self.calls, ([], [])
        rows: dict[str, list[Tensor]] = {}
        for query, key, scale in _images(useful):
            flat_key = key.transpose(0, 1).flatten(1)
            weights = (self._asking(query) @ key.transpose(-1, -2) * scale).softmax(-1).mean((0, 1))
            self._append(rows, salience=weights, patch_key=flat_key, head_key=key.mean(0))
        for query, key, _ in _images(last):
            flat_key, asking = key.transpose(0, 1).flatten(1), query.transpose(0, 1).flatten(1)
            logits = self._asking(asking) @ flat_key.T * flat_key.shape[-1] ** -0.5
            self._append(rows, last_salience=logits.softmax(-1).mean(0), last_key=flat_key)
        return rows

    def add(self, rows: TowerRows) -> None:
        """Add facts about further images, from `read_calls`."""
        for name, parts in rows.items():
            self.rows.setdefault(name, []).extend(parts)

    def tokens(self, count: int) -> dict[str, Tensor]:
        """Return facts about all visual tokens, by their names in `VisualTokens`.

        They are discarded, because they belong to one prefill.

        Raises:
            UserError: The number of the tower's tokens differs from `count`.
        """
        self.add(self.read_calls())
        rows, self.rows = self.rows, {}
        images = rows.get("salience", [])
        total = sum(map(len, images))
        if total != count:
            raise UserError(
                f"the vision tower produces {total} tokens but the prompt has {count}: a policy that reads its "
                "attention does not support this model; use divprune, fastv or dart"
            )
        facts = {name: torch.cat(parts) for name, parts in rows.items()}
        indices = [torch.full_like(image, index, dtype=torch.int64) for index, image in enumerate(images)]
        return facts | ({"image": torch.cat(indices)} if indices else {})

    def _asking(self, query: Tensor) -> Tensor:
        """Return the queries `[..., patches, d]` whose attention counts."""
        return query[..., :1, :] if self.classed else query

    def _append(self, rows: dict[str, list[Tensor]], **facts: Tensor) -> None:
        """Add facts about the patches of an image, as facts about its tokens."""
        for name, fact in facts.items():
            patches = fact[1:] if self.classed else fact
            merged = patches.view(-1, self.merged, *patches.shape[1:]).mean(1)
            rows.setdefault(name, []).append(merged)


def _images(calls: list[Call]) -> Iterator[Call]:
    """Yield the queries and keys of every image, `[heads, patches, d]`, and the scale."""
    for query, key, scale in calls:
        for q, k in zip(query.float(), key.float(), strict=True):
            yield q, k, scale


_UNREADABLE_TOWERS = {
    "qwen2_5_vl": "Qwen2.5-VL's windows",
    "pixtral": "Pixtral's joint sequence of all images",
    "gemma4": "Gemma 4's averaged patches",
}
"""What cannot be read, by the `model_type` of the model or of its tower."""

_WATCHED: list[TowerFacts] = []


def watched_tower() -> TowerFacts | None:
    """Return the observations of the vision tower that is being watched; None if there is none."""
    return _WATCHED[-1] if _WATCHED else None


def _tower_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **options: Any
) -> Any:
    """Compute attention as `sdpa`, passing queries and keys to a watcher of this layer."""
    mask = options.pop("attention_mask", mask)
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    for facts in _WATCHED:
        facts.note(module, (query, key, scale))
    return sdpa_attention_forward(module, query, key, value, mask, **options)


AttentionInterface.register(TOWER, _tower_attention)


@contextmanager
def watching(model: nn.Module, pruning: Pruning | None) -> Iterator[TowerFacts | None]:
    """Watch the vision tower of a model within the block, if the pruning reads it.

    Raises:
        UserError: The model lacks the layer that prunes, or the tower's patches are not in the order of their tokens.
    """
    if pruning is not None:
        problem = depth_problem(pruning.score, len(attention_modules(model)))
        if problem:
            raise UserError(problem)
    if pruning is None or not pruning.score.reads_tower or not visual_ids(model):
        yield None
        return
    inner_model: Any = getattr(model, "model", model)
    config: Any = model.config
    tower = getattr(inner_model, "visual", None)
    model_types = (config.model_type, config.vision_config.model_type)
    unreadable = next(filter(None, map(_UNREADABLE_TOWERS.get, model_types)), None)
    if unreadable is None and tower is None and not hasattr(config, "vision_feature_layer"):
        unreadable = config.model_type
    if unreadable is not None:
        raise UserError(
            f"a policy that reads the attention of the vision tower does not support {unreadable}; "
            "use divprune, fastv or dart"
        )
    merged_patches, layer_index = 1, -1
    if tower is None:
        tower = inner_model.vision_tower
        layer_index = config.vision_feature_layer
        layer_index = layer_index if isinstance(layer_index, int) else layer_index[-1]
    else:
        merged_patches = config.vision_config.spatial_merge_size**2
    attention_layers = [
        module
        for module in tower.modules()
        if type(module).__name__.endswith("Attention") and not isinstance(module, nn.MultiheadAttention)
    ]
    has_class_token = any(parameter_name.endswith("class_embedding") for parameter_name, _ in tower.named_parameters())
    facts = TowerFacts((attention_layers[layer_index], attention_layers[-1]), has_class_token, merged_patches)
    previous_attention = tower.config._attn_implementation
    tower.set_attn_implementation(TOWER)
    _WATCHED.append(facts)
    try:
        yield facts
    finally:
        _WATCHED.remove(facts)
        tower.set_attn_implementation(previous_attention)
