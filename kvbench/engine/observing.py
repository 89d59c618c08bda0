"""Shows forwards to a cache's observers, and gives what they have observed to a view."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from kvbench.engine.attachment import Forward, Step
from kvbench.engine.cache import RaggedCache
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import head_of
from kvbench.engine.observers import SurprisalObserver
from kvbench.errors import UserError
from kvbench.view_needs import ModelInfo, Need


def start_observers(cache: RaggedCache, needs: frozenset[Need], info: ModelInfo) -> None:
    """Give a cache the observers of what is needed."""
    cache.observers = {n: n.observer(info) for n in needs if not n.of_tokens}
    cache.token_observers = {n: SurprisalObserver() for n in needs if n.of_tokens}


def observe(cache: RaggedCache, layer: RaggedLayer, step: Step) -> None:
    """Show one layer's forward to the cache's observers (per-entry needs: dense layers only).

    An observer may be foreign code: if it raises, the policies that need it fail, and no other.
    """
    layer.scale = step.scale
    assert cache.valid is not None
    valid = cache.valid.to(step.query.device)
    for need, observer in cache.observers.items():
        if need in cache.broken or (layer.packed and need.per_entry):
            continue
        assert layer.key is not None and layer.value is not None
        key, value = (step.key, step.value) if layer.packed else (layer.key, layer.value)
        try:
            observer.update(step.index, step.query, key, value, step.hidden, valid, step.scale)
        except Exception as error:
            cache.broken[need] = error


def observe_tokens(cache: RaggedCache, forward: Forward, head: Callable[[Tensor], Tensor]) -> None:
    """Show a forward that has ended to the observers of tokens."""
    assert cache.valid is not None
    for need, observer in cache.token_observers.items():
        if need in cache.broken:
            continue
        try:
            if forward.ids is None or forward.hidden is None:
                raise UserError("surprisal needs token ids, not embeddings")
            where = forward.hidden.device
            observer.update(forward.ids.to(where), forward.hidden, head, cache.valid.to(where))
        except Exception as error:
            cache.broken[need] = error


def token_watcher(model: nn.Module) -> Callable[[RaggedCache, Forward], None]:
    """What a model's attachment calls when a forward on a cache has ended."""
    head = head_of(model)

    def watch(cache: RaggedCache, forward: Forward) -> None:
        if cache.token_observers:
            observe_tokens(cache, forward, head)

    return watch
