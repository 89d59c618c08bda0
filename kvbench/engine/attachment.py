"""Attention over a ragged cache, registered with transformers together with its mask.

No model's forward is copied. A hook on the decoder opens a forward on the cache, a hook on every attention module
passes its cache layer and hidden states, and the attention function receives q, k and v after RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvbench.engine.attend import attend
from kvbench.engine.cache import RaggedCache
from kvbench.engine.channels import reordered
from kvbench.engine.contract import (
    check_attention,
    check_consumed,
    check_image_masks,
    check_keywords,
    check_mask,
    logit_scale,
)
from kvbench.engine.dense import causal_attention, dense_attention
from kvbench.engine.implementations import (
    EAGER,
    FLASH,
    SDPA,
    StockAttention,
    additive,
    chosen_attention,
    register_attention,
    registered_name,
)
from kvbench.engine.latent import absorb, expand_output, is_latent
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.mlp_parts import split_mlps
from kvbench.engine.models import attention_modules, decoder_of, reading_modules, visual_ids
from kvbench.engine.pruning import prune_embeddings, prune_inside
from kvbench.engine.reading import attend_few
from kvbench.engine.segments import NewTokens, ranks_of_tokens
from kvbench.errors import UserError

NAME = "kvbench"


@dataclass
class Forward:
    """One forward of the model on one ragged cache.

    Attributes:
        first_column: Logical column of the first new token.
        new_columns: Number of new columns.
        new_tokens: The tokens among the new columns.
        on_layer: Callback after the attention of a layer. It must not reference the forward: the cycle would keep the
            cache alive.
        powers: Powers of the attention weights whose sums layers return: packed ones always, dense ones if
            `causal_attention` sums them.
        mask: Attention mask of dense layers, built by the first of them.
        blind_mask: The same mask without pruned columns.
        ids: New token ids `[B, n]`; None if embeddings were given.
        hidden: Final hidden states of the new tokens, set when the forward ends.
        pruner: Attention step of the layer before the pruning, until visual tokens are pruned.
        shared_kv: Dense K and V that later layers read, by the id of their cache layer (it may be compressed at once).
    """

    cache: RaggedCache
    first_column: int
    new_columns: int
    new_tokens: NewTokens
    on_layer: Callable[[Forward, RaggedLayer, Step], None] | None = None
    powers: tuple[int, ...] = ()
    mask: Tensor | None = None
    blind_mask: Tensor | None = None
    ids: Tensor | None = None
    hidden: Tensor | None = None
    pruner: Step | None = None
    shared_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass
class Step:
    """Inputs and outputs of one layer's attention in one forward.

    `key` and `value` are those of the new tokens, `[B, H, n, d]`, as the cache stores them; `scale` is a `LogitScale`
    in families with soft caps or sinks; `attention_sums` come from `attend` or `causal_attention`, `window_sums`
    from `causal_attention`, and `read` from `attend_few`.
    """

    index: int
    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor
    scale: float
    attention_sums: Mapping[int, Tensor] = field(default_factory=dict)
    window_sums: Tensor | None = None
    read: Sequence[Tensor] = ()


@dataclass
class _AttentionContext:
    """State passed from the hook on an attention module to the attention function."""

    forward: Forward
    layer: RaggedLayer
    index: int
    hidden: Tensor
    is_reading: bool = False


_ATTACHED: set[int] = set()
_ACTIVE: list[Forward] = []


def _open_forward(
    cache: RaggedCache,
    batch_size: int,
    n: int,
    device: torch.device,
    mask: Any,
    visual_columns: Tensor | None,
) -> Forward:
    """Register the new columns with the cache. Padding must be on the left."""
    start = 0 if cache.valid is None else int(cache.valid.shape[1])
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        raise ValueError("a kvbench cache needs a 2-D attention mask [batch, all columns]")
    if cache.valid is not None and cache.batch != batch_size:
        raise ValueError(f"the cache holds {cache.batch} sequences, the forward has {batch_size}")
    token_mask: Tensor | None = None
    token_counts = [n] * batch_size
    if mask is not None:
        if mask.shape[1] != start + n:
            raise ValueError(
                f"attention_mask has {mask.shape[1]} columns; give all {start + n}: those in the cache and the new ones"
            )
        attended = mask[:, start:].bool()
        token_counts = attended.sum(-1).tolist()
        if min(token_counts) < n:
            if bool((attended[:, :-1] & ~attended[:, 1:]).any()):
                raise ValueError("pad on the left: set padding_side='left'")
            if cache.valid is None and min(token_counts) == 0:
                raise ValueError(f"row {token_counts.index(0)} of the batch has only padding; leave it out")
            token_mask = attended
    full_token_mask = torch.ones(batch_size, n, dtype=torch.bool, device=device) if token_mask is None else token_mask
    if cache.valid is None:
        cache.valid, cache.visual = full_token_mask, visual_columns
        cache.shift = torch.zeros(batch_size, dtype=torch.int64, device=device)
    else:
        cache.valid = torch.cat([cache.valid, full_token_mask], 1)
        if cache.pruned is not None:
            cache.pruned = F.pad(cache.pruned, (0, n))
        both_visual = cache.visual is not None and visual_columns is not None
        cache.visual = torch.cat([cache.visual, visual_columns], 1) if both_visual else None  # type: ignore[list-item]
    cache.padded |= token_mask is not None
    if token_mask is None:
        new_tokens = NewTokens.everywhere(batch_size, n, start, device)
    else:
        new_tokens = NewTokens.where(token_mask, start, token_counts)
    return Forward(cache, start, n, new_tokens)


def kvbench_mask(*args: Any, stock_mask: Callable[..., Tensor | None], **kwargs: Any) -> Tensor | None:
    """Return transformers' mask for sliding-window layers and for forwards without a ragged cache."""
    if _ACTIVE and kwargs.get("local_size") is None:
        check_mask(kwargs.get("config"), kwargs.get("mask_function"))
        return None
    return stock_mask(*args, **kwargs)


def kvbench_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    implementation: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of `query` `[B, H_q, n, d]` after RoPE; the output is `[B, n, H_q, d]`.

    Raises:
        UserError: kvbench does not implement the attention of this model family.
    """
    context: _AttentionContext | None = module.__dict__.get("_kvbench")
    stock = StockAttention(implementation, module, scaling, dropout, kwargs)
    if context is None:
        check_keywords(module, kwargs)
        return stock(query, key, value, attention_mask), None
    scale = logit_scale(query, scaling, kwargs)
    forward, layer = context.forward, context.layer
    if context.is_reading:
        check_attention(module, key, value, attention_mask, kwargs, (key, value))
        return _read_shared(query, context, scale, stock).transpose(1, 2).contiguous(), None
    has_latents = is_latent(module)
    check_attention(module, key, value, attention_mask, kwargs, layer.pending, is_latent=has_latents)
    expanded = None
    if has_latents:
        # Only the first forward of a prefill gets all columns expanded.
        expanded = (query, key, value) if not layer.packed and layer.key is None else None
        query, key, value = absorb(module, query, layer)
    step = Step(context.index, query, key, value, context.hidden, scale)
    if layer.packed:
        layer.append(forward.new_tokens)
        token_mask = forward.new_tokens.mask
        token_mask = None if token_mask is None else token_mask.to(query.device)
        decoded_layer = layer if layer.coding is None else layer.coding.decoded(layer)
        readings = forward.cache.readings
        if readings:
            output, step.read = attend_few(
                query,
                decoded_layer,
                context.index,
                forward.first_column,
                scale,
                readings,
                forward.new_tokens.counts,
            )
        else:
            ordered_query = reordered(query, layer.order)
            output, step.attention_sums = attend(
                ordered_query,
                decoded_layer,
                forward.first_column,
                scale,
                forward.powers,
                token_mask,
            )
        if layer.coding is not None:
            layer.coding.age(layer)
    else:
        dense_kv = layer.extend()
        if getattr(module, "store_full_length_kv", False):
            forward.shared_kv[id(layer)] = dense_kv
        inputs = (query, *dense_kv) if expanded is None else expanded
        # transformers has no attention over latents.
        dense_stock = None if has_latents and expanded is None else stock
        output, step.attention_sums, window_sums = _dense_attention(*inputs, forward, scale, context.index, dense_stock)
        # Views of latents compute attention from these, which rounds in another way.
        step.window_sums = None if has_latents else window_sums
        pruning = forward.cache.pruning
        if pruning is not None and context.index == pruning.layer - 1:
            forward.pruner = step
    if forward.on_layer is not None:
        forward.on_layer(forward, layer, step)
    if has_latents and expanded is None:
        output = expand_output(module, output)
    return output.transpose(1, 2).contiguous(), None


def _read_shared(query: Tensor, context: _AttentionContext, scale: float, stock: StockAttention) -> Tensor:
    """Compute attention of a layer without K and V of its own over those of an earlier layer."""
    forward, layer = context.forward, context.layer
    if id(layer) in forward.shared_kv:
        key, value = (tensor.to(query.device) for tensor in forward.shared_kv[id(layer)])
        return _dense_attention(query, key, value, forward, scale, context.index, stock)[0]
    if forward.cache.readings:
        raise UserError("a policy that reads selected entries does not support layers that share keys and values")
    # transformers may compute only the last columns of these layers.
    skipped_columns = forward.new_columns - query.shape[2]
    token_mask = forward.new_tokens.mask
    token_mask = None if token_mask is None else token_mask[:, skipped_columns:].to(layer.device)
    decoded_layer = layer if layer.coding is None else layer.coding.decoded(layer)
    first_column = forward.first_column + skipped_columns
    near_query = reordered(query.to(layer.device), layer.order)  # the layer may lie on another device
    return attend(near_query, decoded_layer, first_column, scale, (), token_mask)[0].to(query.device)


def _prune_before(forward: Forward, model_inputs: dict[str, Any]) -> dict[str, Any]:
    """Prune visual tokens before the first layer, if the method prunes there."""
    cache = forward.cache
    embeddings = model_inputs.get("inputs_embeds")
    if cache.pruning is None or cache.pruning.layer or forward.first_column or embeddings is None:
        return model_inputs
    if cache.visual is None or not bool(cache.visual.any()):
        return model_inputs
    assert cache.valid is not None
    merged_embeddings, cache.pruned = prune_embeddings(
        cache.pruning, embeddings, cache.visual, cache.valid, cache.tower
    )
    return {**model_inputs, "inputs_embeds": merged_embeddings}


def _prune_between(forward: Forward, output: Tensor) -> None:
    """Prune visual tokens between two layers, from the attention and output of the earlier one."""
    cache, step = forward.cache, forward.pruner
    forward.pruner = None
    if step is None or cache.pruning is None or cache.pruned is not None or forward.first_column:
        return
    if cache.visual is not None:
        assert cache.valid is not None
        device = step.query.device
        masks = (cache.visual.to(device), cache.valid.to(device))
        cache.pruned = prune_inside(
            cache.pruning, step.query, step.key, step.hidden, output.to(device), step.scale, *masks
        )


def _dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    forward: Forward,
    scale: float,
    layer_index: int,
    stock: StockAttention | None,
) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
    """Compute causal attention of the newest queries over all columns of an uncompressed layer.

    What keys receive comes with it, as from `causal_attention`, where that sums it.
    """
    cache = forward.cache
    hides_pruned = cache.pruned is not None and cache.pruning is not None and layer_index >= cache.pruning.layer
    query_count, column_count = query.shape[2], key.shape[2]
    implementation = SDPA if stock is None else stock.implementation
    if stock is not None and implementation == FLASH:
        if hides_pruned:
            raise UserError("FlashAttention 2 cannot hide pruned tokens; use --attn sdpa")
        padding_mask = cache.valid.to(query.device) if cache.padded and cache.valid is not None else None
        return stock(query, key, value, padding_mask).transpose(1, 2), {}, None
    is_plain_causal = not cache.padded and query_count in (1, column_count) and not hides_pruned
    if is_plain_causal and implementation == SDPA:
        if query_count == column_count:
            return causal_attention(query, key, value, scale, forward.powers)
        return dense_attention(query, key, value, None, scale), {}, None
    if forward.mask is None or forward.mask.device != query.device:
        column_indices = torch.arange(column_count, device=query.device)
        self_columns = column_indices[forward.first_column :, None]
        causal_mask = (column_indices <= self_columns)[None, None]
        if forward.cache.padded:
            assert forward.cache.valid is not None
            # A padding query attends to itself: without any key its softmax would be NaN.
            valid_columns = forward.cache.valid.to(query.device)
            causal_mask = (causal_mask & valid_columns[:, None, None]) | (column_indices == self_columns)
        forward.mask = causal_mask
        forward.blind_mask = None
    causal_mask = forward.mask
    if hides_pruned:
        assert cache.pruned is not None
        if forward.blind_mask is None:
            column_indices = torch.arange(column_count, device=query.device)
            self_columns = column_indices == column_indices[forward.first_column :, None]  # a pruned query sees itself
            forward.blind_mask = causal_mask & (~cache.pruned.to(query.device)[:, None, None] | self_columns)
        causal_mask = forward.blind_mask
    query_mask = causal_mask[:, :, -query_count:]
    if stock is not None and implementation == EAGER:
        return stock(query, key, value, additive(query_mask, query.dtype)).transpose(1, 2), {}, None
    return dense_attention(query, key, value, query_mask, scale), {}, None


register_attention(NAME, kvbench_attention, kvbench_mask)


class Attachment:
    """Runs kvbench's attention in a model's text decoder, by hooks that it installs and removes.

    Args:
        model: A causal language model of a supported family.
        before_forward: Called before a forward on a ragged cache.
        after_forward: Called after it.

    Raises:
        ValueError: The model is already attached, or kvbench does not support its attention.
    """

    def __init__(
        self,
        model: nn.Module,
        before_forward: Callable[[RaggedCache, Forward], None],
        after_forward: Callable[[RaggedCache, Forward], None],
    ) -> None:
        self.model, self.decoder = model, decoder_of(model)
        if id(self.decoder) in _ATTACHED:
            raise ValueError("this model is attached already; attachments cannot be nested")
        self._modules, self._readers = attention_modules(model), reading_modules(model)  # refused before it is changed
        self.before_forward, self.after_forward = before_forward, after_forward
        self._visual_ids = torch.tensor(visual_ids(model), dtype=torch.int64)
        self._previous_attention = self.decoder.config._attn_implementation
        if not _ATTACHED:  # what an interrupted forward left behind
            _ACTIVE.clear()
        self._outer_depth = len(_ACTIVE)
        self._active: Forward | None = None  # the forward in progress
        self._token_ids: Tensor | None = None  # of the call in progress: a vision model's decoder gets embeddings
        self._token_mask: Tensor | None = None  # of the call in progress
        self._has_media = False
        self._handles: list[Any] = []

    def install(self) -> None:
        """Install the attention and its hooks."""
        _ATTACHED.add(id(self.decoder))
        self._handles += split_mlps(self.decoder)
        output_head = getattr(self.model, "get_output_embeddings", lambda: None)()
        if isinstance(output_head, nn.Module):
            self._handles.append(output_head.register_forward_pre_hook(_make_contiguous))
        self.decoder.set_attn_implementation(registered_name(NAME, self.model))
        if self.model is not self.decoder:
            self._handles.append(self.model.register_forward_pre_hook(self._record_tokens, with_kwargs=True))
        self._handles += [
            self.decoder.register_forward_pre_hook(self._open_forward, with_kwargs=True),
            self.decoder.register_forward_hook(self._close_forward, with_kwargs=True, always_call=True),
        ]
        if len(self._visual_ids):
            self._handles += [
                layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True) for layer in self.decoder.layers
            ]
        for layer_index, module in self._modules:
            enter_attention = partial(self._enter_attention, layer_index)
            self._handles += [
                module.register_forward_pre_hook(enter_attention, with_kwargs=True),
                module.register_forward_hook(_leave_attention, with_kwargs=True, always_call=True),
            ]
        for layer_id, module in self._readers:
            enter_reading = partial(self._enter_reading, layer_id)
            self._handles += [
                module.register_forward_pre_hook(enter_reading, with_kwargs=True),
                module.register_forward_hook(_leave_attention, with_kwargs=True, always_call=True),
            ]

    def remove(self) -> None:
        """Restore the model."""
        for handle in self._handles:
            handle.remove()
        for _, module in (*self._modules, *self._readers):
            module.__dict__.pop("_kvbench", None)
        del _ACTIVE[self._outer_depth :]
        self.decoder.set_attn_implementation(self._previous_attention)
        _ATTACHED.discard(id(self.decoder))

    def _record_tokens(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        del _ACTIVE[self._outer_depth :]  # as in `_open_forward`: some models make masks before their decoder runs
        self._token_ids = keywords.get("input_ids", arguments[0] if arguments else None)
        self._token_mask = keywords.get("attention_mask")
        # `generate` runs the vision tower before the model.
        has_features = any((keywords.get("mm_encoder_outputs") or {}).values())
        self._has_media = has_features or any(
            name.startswith("pixel_values") and pixels is not None for name, pixels in keywords.items()
        )

    def _open_forward(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> Any:
        # A forward interrupted by Ctrl-C leaves this state behind, because torch then runs no hooks.
        self._active = None
        del _ACTIVE[self._outer_depth :]
        # The keyword depends on the version of transformers and of the model's code.
        cache = next((given for given in (*keywords.values(), *arguments) if isinstance(given, RaggedCache)), None)
        if cache is None:
            return None
        cache.ready()
        image_masks = None
        if isinstance(keywords.get("attention_mask"), dict):  # Gemma 3 and 4 make their masks before the decoder
            if self._has_media and check_image_masks(module, is_first=cache.valid is None):
                if chosen_attention(self.model) == FLASH:
                    raise UserError("FlashAttention 2 does not let image tokens see later ones; use --attn sdpa")
                image_masks = {**keywords["attention_mask"], "full_attention": None}
            keywords = {**keywords, "attention_mask": self._token_mask}
        token_ids = keywords.get("input_ids", arguments[0] if arguments else None)
        model_input = token_ids if token_ids is not None else keywords["inputs_embeds"]
        if token_ids is None and self._token_ids is not None:
            token_ids = self._token_ids if self._token_ids.shape == model_input.shape[:2] else None
        self._token_ids = None
        if model_input.dim() < 2 or model_input.shape[0] == 0 or model_input.shape[1] == 0:
            raise ValueError(f"the input has shape {list(model_input.shape)}; give [batch, tokens]")
        visual_mask = None
        if len(self._visual_ids) and token_ids is not None:
            visual_mask = torch.isin(token_ids, self._visual_ids.to(token_ids.device))
        batch_size, new_columns = model_input.shape[:2]
        forward = _open_forward(
            cache,
            batch_size,
            new_columns,
            model_input.device,
            keywords.get("attention_mask"),
            visual_mask,
        )
        forward.ids = token_ids
        if token_ids is None:
            cache.ids = None
        elif cache.ids is not None:
            cache.ids.append(token_ids)
        _ACTIVE.append(forward)
        self._active = forward
        self.before_forward(cache, forward)
        keywords = _prune_before(forward, keywords)
        if cache.padded and keywords.get("position_ids") is None:
            # The model would count padding columns by default, unlike a later `generate`.
            assert cache.valid is not None
            position_ids = ranks_of_tokens(cache.valid)[:, forward.first_column :]
            keywords = {**keywords, "position_ids": position_ids}
        if cache.padded and keywords.get("attention_mask") is None:
            # Sliding-window layers of transformers do not know about earlier padding.
            assert cache.valid is not None
            keywords = {**keywords, "attention_mask": cache.valid.long()}
        if image_masks is not None:
            keywords = {**keywords, "attention_mask": image_masks}
        return arguments, keywords

    def _close_forward(self, module: nn.Module, arguments: Any, keywords: dict[str, Any], outputs: Any) -> None:
        forward, self._active = self._active, None
        del _ACTIVE[self._outer_depth :]
        if forward is not None and outputs is not None:
            forward.hidden = getattr(outputs, "last_hidden_state", None)
            self.after_forward(forward.cache, forward)

    def _enter_layer(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        if self._active is not None and self._active.pruner is not None:
            output: Tensor = keywords["hidden_states"] if "hidden_states" in keywords else arguments[0]
            _prune_between(self._active, self.decoder.norm(output))

    def _enter_attention(self, layer_index: int, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        layer = None
        if self._active is not None:
            layer = self._active.cache.layers[int(module.layer_idx)]  # type: ignore[arg-type]
        if self._active is None or not isinstance(layer, RaggedLayer):
            module.__dict__["_kvbench"] = None
            return
        hidden_states: Tensor = keywords["hidden_states"] if "hidden_states" in keywords else arguments[0]
        module.__dict__["_kvbench"] = _AttentionContext(self._active, layer, layer_index, hidden_states)

    def _enter_reading(self, layer_id: int, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        context = None
        if self._active is not None:
            layer = self._active.cache.layers[layer_id]
            assert isinstance(layer, RaggedLayer)
            layer_index = self._active.cache.ragged.index(layer)
            hidden_states: Tensor = keywords["hidden_states"] if "hidden_states" in keywords else arguments[0]
            context = _AttentionContext(self._active, layer, layer_index, hidden_states, is_reading=True)
        module.__dict__["_kvbench"] = context


def _leave_attention(module: nn.Module, arguments: Any, keywords: dict[str, Any], outputs: Any) -> None:
    context: _AttentionContext | None = module.__dict__.get("_kvbench")
    module.__dict__["_kvbench"] = None
    if context is not None and outputs is not None:  # None: the module raised
        check_consumed(module, context.layer.pending)


def _make_contiguous(module: nn.Module, arguments: Any) -> Any:
    # A slice of several rows is not contiguous, and its product would copy the head once per row.
    return (arguments[0].contiguous(), *arguments[1:]) if arguments else None


@contextmanager
def attached(
    model: nn.Module,
    before_forward: Callable[[RaggedCache, Forward], None],
    after_forward: Callable[[RaggedCache, Forward], None],
) -> Iterator[None]:
    """Install kvbench's attention in a model; restore everything on exit. See `Attachment`."""
    attachment = Attachment(model, before_forward, after_forward)
    try:
        attachment.install()
        yield
    finally:
        attachment.remove()
