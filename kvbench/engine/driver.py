"""The driver of observation and eviction around every forward on a ragged cache.

It serves `kvbench.attach`, prefixes and their cells, head profiles and analyses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from kvbench.engine.attachment import Forward, Step, attached
from kvbench.engine.cache import RaggedCache
from kvbench.engine.contract import family_of
from kvbench.engine.encoding import encoding_once
from kvbench.engine.evict import after_forward
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import cache_inputs, decoder_of, head_of, input_names, rotary_model
from kvbench.engine.observers import QueryObserver, SurprisalObserver, is_built_in, measured, observer_for, sums_all
from kvbench.engine.segments import ranks_of_tokens
from kvbench.engine.showing import ViewBuilder
from kvbench.engine.vision import mask_inputs, media_positions
from kvbench.errors import UserError
from kvbench.view import AttentionMass, ModelInfo, Need, PerToken

_ONE_BY_ONE = "_kvbench_one_by_one"
"""Attribute of a model whose tokens enter a cache one by one."""

_LISTENER = "_kvbench_listener"
"""Attribute of a model: a function that is told the tokens of every forward."""

Watch = Callable[[Forward, RaggedLayer, Step], None]
"""Called with every layer of a forward, after the driver has processed it."""


def start_observers(cache: RaggedCache, needs: frozenset[Need], info: ModelInfo) -> None:
    """Give a cache the observers of the required observations."""
    cache.observers = {need: observer_for(need, info) for need in needs if not need.of_tokens}
    cache.token_observers = {need: SurprisalObserver() for need in needs if need.of_tokens}


class Driver:
    """Observes, decides and evicts around the forwards of one model.

    Args:
        model: A causal language model of a supported family.
        watch: Called with every layer of every forward.
    """

    def __init__(self, model: nn.Module, watch: Watch | None = None) -> None:
        self.model = model
        self._watch = watch
        self._head = head_of(model)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Use kvbench's attention in the model within the block."""
        with attached(self.model, self.before, self.after):
            yield

    def before(self, cache: RaggedCache, forward: Forward) -> None:
        """Prepare a forward."""
        if cache.eviction_state is not None:
            summed = {need.power for need in cache.eviction_state.policy.needs if isinstance(need, AttentionMass)}
        else:
            summed = {observer.power for observer in cache.observers.values() if sums_all(observer)}
        forward.powers = tuple(sorted(summed))
        forward.on_layer = self._on_layer

    def after(self, cache: RaggedCache, forward: Forward) -> None:
        """Finish a forward: observe its tokens and run the eviction steps that are due."""
        if cache.token_observers:
            _observe_tokens(cache, forward, self._head)
        if cache.eviction_state is not None:
            after_forward(cache, forward.new_columns)

    def dense_layer(self, cache: RaggedCache, layer: RaggedLayer, step: Step) -> None:
        """Handle a dense layer after its observation. Subclasses can compress it at once."""

    def _on_layer(self, forward: Forward, layer: RaggedLayer, step: Step) -> None:
        cache = forward.cache
        if cache.eviction_state is not None:
            _observe(cache, layer, step)
            _update_entry_state(cache, layer, step)
        elif not layer.packed:
            _observe(cache, layer, step)
            self.dense_layer(cache, layer, step)
        if self._watch is not None:
            self._watch(forward, layer, step)


@contextmanager
def engine(model: nn.Module, watch: Watch | None = None) -> Iterator[None]:
    """Use kvbench's attention in a model while its prefixes and caches are in use.

    Args:
        model: A causal language model of a supported family.
        watch: Called with every layer of every forward.
    """
    with Driver(model, watch).running():
        yield


@torch.no_grad()
def check_supported(model: nn.Module) -> None:
    """Refuse a model whose attention kvbench does not implement, after a trial forward of four tokens.

    Needed only to run a model with another attention function; kvbench's own checks itself.

    Args:
        model: A causal language model, outside `engine`.

    Raises:
        UserError: The contract of `kvbench.engine.contract` does not hold.
    """
    token_ids = torch.zeros(1, 4, dtype=torch.long, device=next(model.parameters()).device)
    with engine(model):
        forward(model, RaggedCache(decoder_of(model).config), token_ids)


def feed_one_by_one(model: nn.Module) -> None:
    """Let new tokens enter a cache of a model one by one, because its own code ignores recurrent states otherwise."""
    model.__dict__[_ONE_BY_ONE] = True


@contextmanager
def listening(model: nn.Module, on_forward: Callable[[int], None]) -> Iterator[None]:
    """Call a function after every forward while the block runs.

    Args:
        model: The model.
        on_forward: Receives the number of tokens that were fed.
    """
    model.__dict__[_LISTENER] = on_forward
    try:
        yield
    finally:
        del model.__dict__[_LISTENER]


def left_padded(token_rows: Sequence[Sequence[int]], width: int) -> tuple[Tensor, Tensor]:
    """Return the token ids of several rows, padded on the left, and their token mask, `[B, width]` each, on the CPU.

    Args:
        token_rows: Tokens of every row, at most `width`.
        width: Number of columns.
    """
    padded_rows = [[0] * (width - len(row_tokens)) + [*row_tokens] for row_tokens in token_rows]
    token_ids = torch.tensor(padded_rows, dtype=torch.long)
    token_counts = torch.tensor([len(row_tokens) for row_tokens in token_rows])
    return token_ids, torch.arange(width) >= width - token_counts[:, None]


def forward(
    model: nn.Module,
    cache: RaggedCache,
    token_ids: Tensor,
    token_mask: Tensor | None = None,
    logit_count: int | None = None,
    pixels: Mapping[str, Tensor] | None = None,
    *,
    token_count: int | None = None,
) -> Tensor:
    """Run new tokens on a cache.

    Args:
        model: The model, inside `engine`.
        cache: The cache to append the tokens to.
        token_ids: New tokens `[B, n]`, padded on the left.
        token_mask: New columns that are tokens, `[B, n]`; None: all.
        logit_count: Number of last columns to return logits for.
        pixels: The media among the tokens; see `kvbench.engine.vision`.
        token_count: Tokens to report to `listening`; None: all of `token_ids`. Counting a mask makes a GPU wait.

    Returns:
        Logits after the last token, `[B, vocabulary]`; with `logit_count`, `[B, logit_count, vocabulary]`.
    """
    if cache.valid is not None and token_ids.shape[1] > 1 and model.__dict__.get(_ONE_BY_ONE):
        if pixels:
            raise UserError(f"{family_of(model)} cannot see images after its first tokens; put them first")
        masks = [None] * token_ids.shape[1] if token_mask is None else token_mask.split(1, 1)
        column_logits = [
            forward(model, cache, column, mask, 1) for column, mask in zip(token_ids.split(1, 1), masks, strict=True)
        ]
        last_logits = torch.cat(column_logits[-(logit_count or 1) :], 1)
        return last_logits[:, -1] if logit_count is None else last_logits
    model_inputs: dict[str, Tensor] = dict(pixels or {})
    position_shift: Tensor | None = None
    if rotary_model(model) is not None:
        model_inputs["position_ids"], position_shift = _positions(model, cache, token_ids, token_mask, model_inputs)
    elif cache.valid is not None and token_mask is None and not cache.padded and "position_ids" in input_names(model):
        # As `generate` does: Bamba counts from 0 in every forward without them.
        start, end = cache.valid.shape[1], cache.valid.shape[1] + token_ids.shape[1]
        model_inputs["position_ids"] = torch.arange(start, end, device=token_ids.device)[None]
    if pixels:
        model_inputs |= mask_inputs(model, token_ids)
    if token_mask is not None and cache.valid is not None:
        token_mask = torch.cat([cache.valid, token_mask.bool()], 1)
    # The attachment supplies positions and the mask of cached columns.
    with encoding_once(model) if pixels else nullcontext():
        logits: Tensor = model(
            input_ids=token_ids,
            attention_mask=None if token_mask is None else token_mask.long(),
            logits_to_keep=logit_count or 1,
            **cache_inputs(model, cache),
            **model_inputs,
        ).logits
    if position_shift is not None:
        cache.shift = position_shift
    if listener := model.__dict__.get(_LISTENER):
        listener(token_ids.numel() if token_count is None else token_count)
    return logits[:, -1] if logit_count is None else logits


def _positions(
    model: nn.Module,
    cache: RaggedCache,
    token_ids: Tensor,
    token_mask: Tensor | None,
    pixels: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Return the M-RoPE positions of new tokens and the position shift of the cache after them.

    The model itself would reuse the shift of its last prefill, regardless of the cache.
    """
    start_positions = torch.zeros(len(token_ids), dtype=torch.int64, device=token_ids.device)
    previous_shift = start_positions
    if cache.valid is not None and cache.shift is not None:
        previous_shift = cache.shift.to(token_ids.device)
        start_positions = cache.lengths().to(token_ids.device) + previous_shift
    if pixels:
        positions, position_shift = media_positions(model, token_ids, token_mask, pixels)
        return positions + start_positions[:, None], previous_shift + position_shift
    if token_mask is None:
        token_ranks = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
    else:
        token_ranks = ranks_of_tokens(token_mask)
    return token_ranks + start_positions[:, None], None


def _observe(cache: RaggedCache, layer: RaggedLayer, step: Step) -> None:
    """Pass one layer's forward to the cache's observers (per-entry needs: dense layers only).

    An observer may be plugin code: if it raises, only the policies that need it fail.
    """
    layer.scale = step.scale
    assert cache.valid is not None
    token_mask = cache.valid.to(step.query.device)
    for need, observer in cache.observers.items():
        if need in cache.broken or (layer.packed and need.per_entry):
            continue
        assert layer.key is not None and layer.value is not None
        key, value = (step.key, step.value) if layer.packed else (layer.key, layer.value)
        query, hidden = step.query, step.hidden
        if not is_built_in(need) and not isinstance(need, PerToken):
            # The model keeps using these tensors, so a plugin gets copies.
            query, key, value, hidden = (tensor.clone() for tensor in (query, key, value, hidden))
            token_mask = token_mask.clone()
        with cache.blaming(need):
            if sums_all(observer) and observer.power in step.attention_sums:
                observer.receive(step.index, step.attention_sums[observer.power])
                continue
            observer.update(step.index, query, key, value, hidden, token_mask, step.scale)
            if isinstance(observer, QueryObserver) and step.window_sums is not None:
                observer.receive(step.index, step.window_sums)


def _observe_tokens(cache: RaggedCache, finished: Forward, output_head: Callable[[Tensor], Tensor]) -> None:
    """Pass a finished forward to the token observers."""
    assert cache.valid is not None
    for need, observer in cache.token_observers.items():
        if need in cache.broken:
            continue
        with cache.blaming(need):
            if finished.ids is None or finished.hidden is None:
                raise UserError("surprisal needs token ids, but the forward was given embeddings")
            device = finished.hidden.device
            observer.update(finished.ids.to(device), finished.hidden, output_head, cache.valid.to(device))


def _update_entry_state(cache: RaggedCache, layer: RaggedLayer, step: Step) -> None:
    """Update the per-entry state of a packed layer that can be evicted from again."""
    eviction_state = cache.eviction_state
    assert eviction_state is not None
    for need in eviction_state.policy.needs:
        if isinstance(need, AttentionMass):
            layer.accumulate(need, step.attention_sums[need.power])
        elif isinstance(need, PerToken):
            layer_inputs = step.hidden, step.key, step.value
            measured_values = measured(need, step.index, *layer_inputs, model=eviction_state.info)
            layer.write_new(need, measured_values)
    score = eviction_state.policy.score
    if score is not None and score.extras:
        decode_state = eviction_state
        view_builder = ViewBuilder(
            decode_state.policy,
            cache,
            decode_state.info,
            decode_state.moment,
            decode_state.budget,
            decode_state.seeds,
        )
        view = view_builder.view(layer, step.index)
        score.step(view)
        view_builder.untouched()
        layer.store_extras(view.extras)
