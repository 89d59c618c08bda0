"""The driver: what happens around every forward on a ragged cache.

It observes, decides and evicts for everyone: `kvbench.attach`, prefixes and their cells, head
profiles and analyses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kvbench.engine.attachment import Forward, Step, attached
from kvbench.engine.cache import RaggedCache
from kvbench.engine.evict import after_forward
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import decoder_of, head_of, rotary_model
from kvbench.engine.observers import SurprisalObserver, is_built_in, measured, observer_for
from kvbench.engine.showing import Showing
from kvbench.engine.vision import media_positions
from kvbench.errors import UserError
from kvbench.view import AttentionMass, ModelInfo, Need, PerToken

Watch = Callable[[Forward, RaggedLayer, Step], None]
"""Called with every layer of a forward, after the driver is done with the layer."""


def start_observers(cache: RaggedCache, needs: frozenset[Need], info: ModelInfo) -> None:
    """Give a cache the observers of some needs."""
    cache.observers = {n: observer_for(n, info) for n in needs if not n.of_tokens}
    cache.token_observers = {n: SurprisalObserver() for n in needs if n.of_tokens}


class Driver:
    """Observes, decides and evicts around the forwards of one model.

    Args:
        model: A causal language model of a supported family.
        watch: Looks at every layer of every forward.
    """

    def __init__(self, model: nn.Module, watch: Watch | None = None) -> None:
        self.model = model
        self._watch = watch
        self._head = head_of(model)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Put kvbench's attention into the model for as long as the block lasts."""
        with attached(self.model, self.before, self.after):
            yield

    def before(self, cache: RaggedCache, forward: Forward) -> None:
        """Prepare a forward."""
        if cache.upkeep is not None:
            needs = [n for n in cache.upkeep.policy.needs if isinstance(n, AttentionMass)]
            forward.powers = tuple(sorted({n.power for n in needs}))
        forward.on_layer = self._on_layer

    def after(self, cache: RaggedCache, forward: Forward) -> None:
        """Finish a forward: observe its tokens, and cut what is due."""
        if cache.token_observers:
            _observe_tokens(cache, forward, self._head)
        if cache.upkeep is not None:
            after_forward(cache, forward.n)

    def dense_layer(self, cache: RaggedCache, layer: RaggedLayer, step: Step) -> None:
        """Called when a dense layer was observed. A subclass can compress it at once."""

    def _on_layer(self, forward: Forward, layer: RaggedLayer, step: Step) -> None:
        cache = forward.cache
        if cache.upkeep is not None:
            _observe(cache, layer, step)
            _keep_up(cache, layer, step)
        elif not layer.packed:
            _observe(cache, layer, step)
            self.dense_layer(cache, layer, step)
        if self._watch is not None:
            self._watch(forward, layer, step)


@contextmanager
def engine(model: nn.Module, watch: Watch | None = None) -> Iterator[None]:
    """Put kvbench's attention into a model for as long as prefixes and their caches are used.

    Args:
        model: A causal language model of a supported family.
        watch: Looks at every layer of every forward.
    """
    with Driver(model, watch).running():
        yield


@torch.no_grad()
def check_supported(model: nn.Module) -> None:
    """Refuse a model whose attention kvbench does not implement, by a forward of four tokens.

    For those who run a model with another attention function: kvbench's own refuses by itself.

    Args:
        model: A causal language model, outside `engine`.

    Raises:
        UserError: The contract of `kvbench.engine.contract` does not hold.
    """
    ids = torch.zeros(1, 4, dtype=torch.long, device=next(model.parameters()).device)
    with engine(model):
        forward(model, RaggedCache(decoder_of(model).config), ids)


def left_padded(tokens: Sequence[Sequence[int]], width: int) -> tuple[Tensor, Tensor]:
    """Token ids of several rows and which of them are tokens, `[B, width]` each, on the CPU.

    Args:
        tokens: The tokens of every row, at most `width`.
        width: Columns.
    """
    rows = [[0] * (width - len(row)) + [*row] for row in tokens]
    ids = torch.tensor(rows, dtype=torch.long)
    count = torch.tensor([len(row) for row in tokens])
    return ids, torch.arange(width) >= width - count[:, None]


def forward(
    model: nn.Module,
    cache: RaggedCache,
    ids: Tensor,
    mask: Tensor | None = None,
    last: int | None = None,
    pixels: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Run new tokens on a cache.

    Args:
        model: The model, inside `engine`.
        cache: The cache that the tokens are appended to.
        ids: New tokens `[B, n]`, padded on the left.
        mask: New columns that are tokens, `[B, n]`; None: all.
        last: Return the logits after this many last columns.
        pixels: The media among the tokens; see `kvbench.engine.vision`.

    Returns:
        Logits after the last token, `[B, vocabulary]`; with `last`, `[B, last, vocabulary]`.
    """
    more: dict[str, Tensor] = dict(pixels or {})
    shift: Tensor | None = None
    if rotary_model(model) is not None:
        more["position_ids"], shift = _positions(model, cache, ids, mask, more)
    if mask is not None and cache.valid is not None:
        mask = torch.cat([cache.valid, mask.bool()], 1)
    # The attachment supplies positions and the mask of columns that are already in the cache.
    logits: Tensor = model(
        input_ids=ids,
        attention_mask=None if mask is None else mask.long(),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=last or 1,
        **more,
    ).logits
    if shift is not None:
        cache.shift = shift
    return logits[:, -1] if last is None else logits


def _positions(
    model: nn.Module,
    cache: RaggedCache,
    ids: Tensor,
    mask: Tensor | None,
    pixels: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Positions of new tokens in a model with M-RoPE, and the shift of the cache after them.

    The model itself would use the shift of its last prefill, whatever the cache holds.
    """
    start = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    before = start
    if cache.valid is not None and cache.shift is not None:
        before = cache.shift.to(ids.device)
        start = cache.lengths().to(ids.device) + before
    if pixels:
        position, shift = media_positions(model, ids, mask, pixels)
        return position + start[:, None], before + shift
    if mask is None:
        rank = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    else:
        rank = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return rank + start[:, None], None


def _observe(cache: RaggedCache, layer: RaggedLayer, step: Step) -> None:
    """Show one layer's forward to the cache's observers (per-entry needs: dense layers only).

    An observer can be foreign code. If it raises, the policies that need it fail, and no others.
    """
    layer.scale = step.scale
    assert cache.valid is not None
    valid = cache.valid.to(step.query.device)
    for need, observer in cache.observers.items():
        if need in cache.broken or (layer.packed and need.per_entry):
            continue
        assert layer.key is not None and layer.value is not None
        key, value = (step.key, step.value) if layer.packed else (layer.key, layer.value)
        query, hidden = step.query, step.hidden
        if not is_built_in(need) and not isinstance(need, PerToken):
            # The model goes on with these tensors: a plugin gets copies.
            query, key, value, hidden = (x.clone() for x in (query, key, value, hidden))
            valid = valid.clone()
        with cache.blaming(need):
            observer.update(step.index, query, key, value, hidden, valid, step.scale)


def _observe_tokens(cache: RaggedCache, done: Forward, head: Callable[[Tensor], Tensor]) -> None:
    """Show a finished forward to the observers of tokens."""
    assert cache.valid is not None
    for need, observer in cache.token_observers.items():
        if need in cache.broken:
            continue
        with cache.blaming(need):
            if done.ids is None or done.hidden is None:
                raise UserError("surprisal needs token ids; the forward was given embeddings")
            where = done.hidden.device
            observer.update(done.ids.to(where), done.hidden, head, cache.valid.to(where))


def _keep_up(cache: RaggedCache, layer: RaggedLayer, step: Step) -> None:
    """Update what is stored with the entries of a packed layer that can be cut again."""
    upkeep = cache.upkeep
    assert upkeep is not None
    for need in upkeep.policy.needs:
        if isinstance(need, AttentionMass):
            layer.accumulate(need, step.mass[need.power])
        elif isinstance(need, PerToken):
            own = step.hidden, step.key, step.value
            new = measured(need, step.index, *own, model=upkeep.info)
            layer.write_new(need, new)
    score = upkeep.policy.score
    if score is not None and score.extras:
        u = upkeep
        showing = Showing(u.policy, cache, u.info, u.moment, u.budget, u.seeds)
        view = showing.view(layer, step.index)
        score.step(view)
        showing.untouched()
        layer.store_extras(view.extras)
