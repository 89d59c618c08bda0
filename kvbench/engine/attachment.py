"""Attention over a ragged cache, registered with transformers together with its mask.

No model's forward is copied. A hook on the decoder opens a forward on the cache, a hook on every
attention module passes its cache layer and hidden states, and the attention function receives q, k
and v after RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvbench.engine.attend import attend
from kvbench.engine.cache import RaggedCache
from kvbench.engine.channels import reordered
from kvbench.engine.contract import check_attention, check_consumed, check_keywords, check_mask
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import attention_modules, decoder_of, visual_ids
from kvbench.engine.pruning import prune_embeddings, prune_inside
from kvbench.engine.reading import attend_few

NAME = "kvbench"


@dataclass
class Forward:
    """One forward of the model on one ragged cache.

    Attributes:
        cache: The cache.
        first: Logical column of the first new token.
        n: New columns.
        valid: New columns that are tokens, bool `[B, n]`; None: all.
        rank: Index of each column among its row's new tokens, int64 `[B, n]`.
        added: Number of new tokens in each row, on the CPU.
        on_layer: Called after the attention of a layer. It must not hold the forward: a reference
            cycle would keep the cache alive after its use.
        powers: Powers of the attention weights whose sums packed layers return.
        mask: The attention mask of dense layers; the first of them makes it.
        blind_mask: The same without pruned columns.
        ids: New token ids `[B, n]`; None if embeddings were given.
        hidden: Final hidden states of the new tokens, set when the forward ends.
        pruner: What the layer before the pruning saw, until visual tokens are pruned.
    """

    cache: RaggedCache
    first: int
    n: int
    valid: Tensor | None
    rank: Tensor
    added: list[int]
    on_layer: Callable[[Forward, RaggedLayer, Step], None] | None = None
    powers: tuple[int, ...] = ()
    mask: Tensor | None = None
    blind_mask: Tensor | None = None
    ids: Tensor | None = None
    hidden: Tensor | None = None
    pruner: Step | None = None


@dataclass
class Step:
    """What the attention of one layer saw in one forward.

    `key` and `value` are those of the new tokens, `[B, H, n, d]`; `mass` is as `attend` returns it,
    `read` as `attend_few`.
    """

    index: int
    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor
    scale: float
    mass: Mapping[int, Tensor] = field(default_factory=dict)
    read: Sequence[Tensor] = ()


@dataclass
class _Hooked:
    """What the hook on an attention module passes to the attention function."""

    forward: Forward
    layer: RaggedLayer
    index: int
    hidden: Tensor


@dataclass
class Attachment:
    """A model with our attention.

    Attributes:
        active: The forward that is running.
        tokens: Token ids of the call that is running: a decoder that sees images is given
            embeddings instead.
        handles: The hooks to remove.
    """

    active: Forward | None = None
    tokens: Tensor | None = None
    handles: list[Any] = field(default_factory=list)


_ATTACHED: set[int] = set()
_ACTIVE: list[Forward] = []


def _open(
    cache: RaggedCache, rows: int, n: int, device: torch.device, mask: Any, visual: Tensor | None
) -> Forward:
    """Register the new columns with the cache. Padding must be on the left."""
    first = 0 if cache.valid is None else int(cache.valid.shape[1])
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        raise ValueError("a kvbench cache needs a 2-D attention mask [batch, all columns]")
    if cache.valid is not None and cache.batch != rows:
        raise ValueError(f"the cache holds {cache.batch} sequences, the forward has {rows}")
    valid: Tensor | None = None
    added = [n] * rows
    if mask is not None:
        if mask.shape[1] != first + n:
            raise ValueError(
                f"attention_mask has {mask.shape[1]} columns; give all {first + n}: those in the "
                "cache and the new ones"
            )
        new = mask[:, first:].bool()
        added = new.sum(-1).tolist()
        if min(added) < n:
            if bool((new[:, :-1] & ~new[:, 1:]).any()):
                raise ValueError("pad on the left: set padding_side='left'")
            if cache.valid is None and min(added) == 0:
                raise ValueError(f"row {added.index(0)} of the batch has only padding")
            valid = new
    new_valid = torch.ones(rows, n, dtype=torch.bool, device=device) if valid is None else valid
    if cache.valid is None:
        cache.valid, cache.visual = new_valid, visual
        cache.shift = torch.zeros(rows, dtype=torch.int64, device=device)
    else:
        cache.valid = torch.cat([cache.valid, new_valid], 1)
        if cache.pruned is not None:
            cache.pruned = F.pad(cache.pruned, (0, n))
        joint = cache.visual is not None and visual is not None
        cache.visual = torch.cat([cache.visual, visual], 1) if joint else None  # type: ignore[list-item]
    cache.padded |= valid is not None
    rank = torch.arange(n, device=device).expand(rows, n)
    if valid is not None:
        rank = (valid.long().cumsum(-1) - 1).clamp(min=0)
    return Forward(cache, first, n, valid, rank, added)


def kvbench_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of transformers for sliding-window layers and forwards without a ragged cache."""
    if _ACTIVE and kwargs.get("local_size") is None:
        check_mask(kwargs.get("config"), kwargs.get("mask_function"))
        return None
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def kvbench_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: `query` `[B, H_q, n, d]` after RoPE, output `[B, n, H_q, d]`.

    Raises:
        UserError: The attention of this family does what kvbench does not implement.
    """
    hooked: _Hooked | None = module.__dict__.get("_kvbench")
    if hooked is None:
        check_keywords(module, kwargs)
        out: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return out
    forward, layer = hooked.forward, hooked.layer
    check_attention(module, key, value, attention_mask, kwargs, layer.pending)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    step = Step(hooked.index, query, key, value, hooked.hidden, scale)
    if layer.packed:
        valid = None if forward.valid is None else forward.valid.to(query.device)
        layer.append(forward.rank.to(query.device), valid, forward.added, forward.first)
        held = layer if layer.coding is None else layer.coding.decoded(layer)
        few = forward.cache.readings
        if few:
            result, step.read = attend_few(
                query, held, hooked.index, forward.first, scale, few, forward.added
            )
        else:
            asking = reordered(query, layer.order)
            result, step.mass = attend(asking, held, forward.first, scale, forward.powers, valid)
        if layer.coding is not None:
            layer.coding.age(layer)
    else:
        result = _dense(query, layer, forward, scale, hooked.index)
        pruning = forward.cache.pruning
        if pruning is not None and hooked.index == pruning.layer - 1:
            forward.pruner = step
    if forward.on_layer is not None:
        forward.on_layer(forward, layer, step)
    return result.transpose(1, 2).contiguous(), None


def _prune_before(forward: Forward, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Prune visual tokens before the first layer, if that is where they are pruned."""
    cache = forward.cache
    embeddings = kwargs.get("inputs_embeds")
    if cache.pruning is None or cache.pruning.layer or forward.first or embeddings is None:
        return kwargs
    if cache.visual is None or not bool(cache.visual.any()):
        return kwargs
    assert cache.valid is not None
    changed, cache.pruned = prune_embeddings(
        cache.pruning, embeddings, cache.visual, cache.valid, cache.tower
    )
    return {**kwargs, "inputs_embeds": changed}


def _prune_between(forward: Forward, output: Tensor) -> None:
    """Prune visual tokens before a layer, from what the layer before it saw and put out."""
    cache, step = forward.cache, forward.pruner
    forward.pruner = None
    if step is None or cache.pruning is None or cache.pruned is not None or forward.first:
        return
    if cache.visual is not None:
        assert cache.valid is not None
        where = step.query.device
        seen = (cache.visual.to(where), cache.valid.to(where))
        cache.pruned = prune_inside(
            cache.pruning, step.query, step.key, step.hidden, output.to(where), step.scale, *seen
        )


def _dense(query: Tensor, layer: RaggedLayer, forward: Forward, scale: float, index: int) -> Tensor:
    """Causal attention of new queries over all columns of an uncompressed layer."""
    cache = forward.cache
    blind = cache.pruned is not None and cache.pruning is not None and index >= cache.pruning.layer
    key, value = layer.extend()
    group = query.shape[1] // key.shape[1]
    n, columns = query.shape[2], key.shape[2]
    plain = not cache.padded and n in (1, columns) and not blind
    # Without a mask a GPU kernel shares K and V within a group; otherwise they are repeated.
    shared = plain and query.device.type == "cuda"
    if group > 1 and not shared:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    if plain:
        causal = n > 1
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale, enable_gqa=shared
        )
    if forward.mask is None or forward.mask.device != query.device:
        column = torch.arange(columns, device=query.device)
        own = column[forward.first :, None]
        mask = (column <= own)[None, None]
        if forward.cache.padded:
            assert forward.cache.valid is not None
            # A padding query sees itself: without any key its softmax would be NaN.
            seen = forward.cache.valid.to(query.device)
            mask = (mask & seen[:, None, None]) | (column == own)
        forward.mask = mask
        forward.blind_mask = None
    mask = forward.mask
    if blind:
        assert cache.pruned is not None
        if forward.blind_mask is None:
            column = torch.arange(columns, device=query.device)
            own = column == column[forward.first :, None]  # a pruned query sees itself
            forward.blind_mask = mask & (~cache.pruned.to(query.device)[:, None, None] | own)
        mask = forward.blind_mask
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


AttentionInterface.register(NAME, kvbench_attention)
AttentionMaskInterface.register(NAME, kvbench_mask)


@contextmanager
def attached(
    model: nn.Module,
    before: Callable[[RaggedCache, Forward], None],
    after: Callable[[RaggedCache, Forward], None],
) -> Iterator[None]:
    """Put our attention into the model's text decoder; restore everything on exit.

    Args:
        model: A causal language model of a supported family.
        before: Called before a forward on a ragged cache.
        after: Called after it.

    Raises:
        ValueError: The model is attached already.
    """
    decoder = decoder_of(model)
    if id(decoder) in _ATTACHED:
        raise ValueError("this model is attached already; attachments cannot be nested")
    old = decoder.config._attn_implementation
    visual = torch.tensor(visual_ids(model), dtype=torch.int64)
    state = Attachment()
    depth = len(_ACTIVE)

    def calling(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        state.tokens = kwargs.get("input_ids", args[0] if args else None)

    def opening(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        # Clean up after a forward that ended in Ctrl-C, when torch runs no hooks.
        state.active = None
        del _ACTIVE[depth:]
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, RaggedCache):
            return None
        cache.ready()
        tokens = kwargs.get("input_ids", args[0] if args else None)
        given = tokens if tokens is not None else kwargs["inputs_embeds"]
        if tokens is None and state.tokens is not None:
            tokens = state.tokens if state.tokens.shape == given.shape[:2] else None
        state.tokens = None
        if given.dim() < 2 or given.shape[0] == 0 or given.shape[1] == 0:
            raise ValueError(f"the input has shape {list(given.shape)}; give [batch, tokens]")
        seen_as = None
        if len(visual) and tokens is not None:
            seen_as = torch.isin(tokens, visual.to(tokens.device))
        rows, n = given.shape[:2]
        forward = _open(cache, rows, n, given.device, kwargs.get("attention_mask"), seen_as)
        forward.ids = tokens
        if tokens is None:
            cache.ids = None
        elif cache.ids is not None:
            cache.ids.append(tokens)
        _ACTIVE.append(forward)
        state.active = forward
        before(cache, forward)
        kwargs = _prune_before(forward, kwargs)
        if cache.padded and kwargs.get("position_ids") is None:
            # By default the model would count padding columns, and a later `generate` would not.
            assert cache.valid is not None
            position = (cache.valid.long().cumsum(-1) - 1).clamp(min=0)[:, forward.first :]
            kwargs = {**kwargs, "position_ids": position}
        if cache.padded and kwargs.get("attention_mask") is None:
            # transformers' sliding-window layers do not know about earlier padding.
            assert cache.valid is not None
            kwargs = {**kwargs, "attention_mask": cache.valid.long()}
        return args, kwargs

    def closing(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        forward, state.active = state.active, None
        del _ACTIVE[depth:]
        if forward is not None and out is not None:
            forward.hidden = getattr(out, "last_hidden_state", None)
            after(forward.cache, forward)

    def entering(index: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        layer = None
        if state.active is not None:
            layer = state.active.cache.layers[int(module.layer_idx)]  # type: ignore[arg-type]
        if state.active is None or not isinstance(layer, RaggedLayer):
            module.__dict__["_kvbench"] = None
            return
        hidden: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        module.__dict__["_kvbench"] = _Hooked(state.active, layer, index, hidden)

    def arriving(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if state.active is not None and state.active.pruner is not None:
            output: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            _prune_between(state.active, decoder.norm(output))

    def leaving(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        hooked: _Hooked | None = module.__dict__.get("_kvbench")
        module.__dict__["_kvbench"] = None
        if hooked is not None and out is not None:  # None: the module raised
            check_consumed(module, hooked.layer.pending)

    def heading(module: nn.Module, args: Any) -> Any:
        # A slice of several rows is not contiguous: its product would copy the head once per row.
        return (args[0].contiguous(), *args[1:]) if args else None

    _ATTACHED.add(id(decoder))
    try:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if isinstance(head, nn.Module):
            state.handles.append(head.register_forward_pre_hook(heading))
        decoder.set_attn_implementation(NAME)
        if model is not decoder:
            state.handles.append(model.register_forward_pre_hook(calling, with_kwargs=True))
        state.handles += [
            decoder.register_forward_pre_hook(opening, with_kwargs=True),
            decoder.register_forward_hook(closing, with_kwargs=True, always_call=True),
        ]
        if len(visual):
            state.handles += [
                layer.register_forward_pre_hook(arriving, with_kwargs=True)
                for layer in decoder.layers
            ]
        for index, module in attention_modules(model):
            state.handles += [
                module.register_forward_pre_hook(
                    lambda m, a, k, i=index: entering(i, m, a, k), with_kwargs=True
                ),
                module.register_forward_hook(leaving, with_kwargs=True, always_call=True),
            ]
        yield
    finally:
        for handle in state.handles:
            handle.remove()
        for _, module in attention_modules(model):
            module.__dict__.pop("_kvbench", None)
        del _ACTIVE[depth:]
        decoder.set_attn_implementation(old)
        _ATTACHED.discard(id(decoder))
