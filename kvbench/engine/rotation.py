"""How the layers of a model rotate queries and keys by position, measured on its own code.

Families differ: some pair neighbouring channels, some rotate backwards, some leave layers without positions. If all
tokens enter attention with the same hidden state, queries and keys that are turned back correctly do not change from
token to token, whatever the layers before have computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvbench.errors import UserError, first_lines, out_of_memory
from kvbench.view.rope import turn_back

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, float32 `[n, r]` each."""
Embed = Callable[[Tensor], Angles]
"""Returns the cosines and sines that the model's embedding has for positions `[n]`."""
Form = Callable[[Embed, Tensor], Angles]
"""Returns the cosines and sines with which `turn` rotates as a layer does, at positions `[n]`."""

_TOKENS, _SKIPPED = 32, 4
"""Tokens that are run, and the first of them, which a convolution of keys makes differ."""

_LIMIT, _HALF_LIMIT = 1e-3, 5e-2
"""Largest change of a pair of channels, relative to its norm, in float32 and in shorter dtypes.

Correct forms stay below 1e-5 and 3e-2; in a wrong one, a pair changes by about 1.
"""

_NAME = "kvbench_rotation"


def _unturned(embed: Embed, position: Tensor) -> Angles:
    ones = torch.ones(len(position), 2, device=position.device)
    return ones, torch.zeros_like(ones)


def _plain(embed: Embed, position: Tensor) -> Angles:
    return embed(position)


def _repeated(embed: Embed, position: Tensor) -> Angles:
    cos, sin = embed(position)
    return cos.repeat(1, 2), sin.repeat(1, 2)


def _backwards(embed: Embed, position: Tensor) -> Angles:
    cos, sin = embed(position)
    return cos, -sin


_FORMS: tuple[Form, ...] = (_unturned, _plain, _repeated, _backwards)
_MEASURED: WeakKeyDictionary[nn.Module, list[Form | None]] = WeakKeyDictionary()
_RECORDED: dict[nn.Module, tuple[Tensor, Tensor]] = {}
"""Queries and keys of the measurement in progress, by attention module."""


def rotation_forms(
    decoder: Any, modules: Sequence[nn.Module], embed: Callable[[int, Tensor], Angles]
) -> list[Form | None]:
    """Return how every full-attention layer rotates; None if `turn` cannot. Every model is measured once.

    Args:
        decoder: The text decoder, also inside a forward of it.
        modules: The attention modules of its full-attention layers.
        embed: Returns the cosines and sines of a layer, an index among these, at positions `[n]`.

    Raises:
        UserError: The decoder cannot be run.
    """
    if decoder not in _MEASURED:
        recorded = _run(decoder, modules)
        _MEASURED[decoder] = [
            _form_of(*recorded[module], partial(embed, layer)) if module in recorded else None
            for layer, module in enumerate(modules)
        ]
    return _MEASURED[decoder]


def _form_of(query: Tensor, key: Tensor, embed: Embed) -> Form | None:
    limit = _LIMIT if key.dtype in (torch.float32, torch.float64) else _HALF_LIMIT
    query, key = query.float(), key.float()
    query = query / query.norm(dim=-1, keepdim=True)  # some families scale queries by position, too
    for form in _FORMS:
        if _is_undone(key, form, embed, limit) and _is_undone(query, form, embed, limit):
            return form
    return None


def _is_undone(states: Tensor, form: Form, embed: Embed, limit: float) -> bool:
    """Return whether a form turns queries or keys `[1, H, n, d]` of equal hidden states back to equal ones."""
    try:
        angles = form(embed, torch.arange(states.shape[2], device=states.device))
        turned = turn_back(states, *angles)[:, :, _SKIPPED:]
        pairs = angles[0].shape[-1] // 2
        norms, changes = _pair_norms(turned[:, :, :1], pairs), _pair_norms(turned - turned[:, :, :1], pairs)
    except Exception as error:  # the embedding of an unknown family can raise or return anything
        if out_of_memory(error):
            raise
        return False
    # Channels near 0 differ by rounding alone.
    floor = 1e-2 * norms.square().mean(-1, keepdim=True).sqrt()
    return bool((floor > 0).all() and (changes <= limit * norms.maximum(floor)).all())


def _pair_norms(states: Tensor, pairs: int) -> Tensor:
    """Return the norms of the pairs of channels that `turn` rotates together, and of the channels that it does not."""
    first, second, rest = states.split([pairs, pairs, states.shape[-1] - 2 * pairs], -1)
    return torch.cat([torch.hypot(first, second), rest.abs()], -1)


@torch.no_grad()
def _run(decoder: Any, modules: Sequence[nn.Module]) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """Return the queries and keys `[1, H, n, d]` of modules whose tokens all have the same hidden state.

    The model runs without kvbench's hooks, because `Attachment` may have another forward in progress.
    """
    token_ids = torch.arange(_TOKENS, device=next(decoder.parameters()).device)[None]
    hooks = [own for module in decoder.modules() for own in (module._forward_pre_hooks, module._forward_hooks)]
    saved_hooks = [dict(own) for own in hooks]
    previous_attention = decoder.config._attn_implementation
    for own, saved in zip(hooks, saved_hooks, strict=True):
        for hook_id in [hook_id for hook_id, hook in saved.items() if _is_ours(hook)]:
            del own[hook_id]
    handles = [module.register_forward_pre_hook(_repeat_last, with_kwargs=True) for module in modules]
    try:
        decoder.set_attn_implementation(_NAME)
        decoder(input_ids=token_ids, use_cache=False)
        return dict(_RECORDED)
    except Exception as error:  # the code of an unknown family can raise anything
        if out_of_memory(error):
            raise
        reason = f"cannot be run to see how it rotates keys, which the policy reads: {first_lines(error)}"
        raise UserError(f"{type(decoder).__name__} {reason}") from error
    finally:
        _RECORDED.clear()
        for handle in handles:
            handle.remove()
        for own, saved in zip(hooks, saved_hooks, strict=True):
            everything = {**saved, **own}  # in the order of before; transformers may have added some
            own.clear()
            own.update(everything)
        decoder.set_attn_implementation(previous_attention)


def _is_ours(hook: Any) -> bool:
    """Return whether kvbench installed a hook; those of others may move tensors between devices."""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).partition(".")[0] == "kvbench"


def _repeat_last(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> Any:
    hidden_states = arguments[0] if arguments else keywords["hidden_states"]
    repeated = hidden_states[:, -1:].expand_as(hidden_states).contiguous()
    return ((repeated, *arguments[1:]), keywords) if arguments else ((), {**keywords, "hidden_states": repeated})


def _record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    _RECORDED[module] = query, key
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(_NAME, _record)
AttentionMaskInterface.register(_NAME, sdpa_mask)
