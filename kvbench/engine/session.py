"""`kvbench.attach` and `kvbench.kept`: eviction in any model's own forward and `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvbench.budget import Budget
from kvbench.engine.attention import Forward, Step, attached
from kvbench.engine.cache import RaggedCache
from kvbench.engine.compress import Cut, cut_back, cut_cache, finish, row_seeds, store
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import decoder_of, model_info
from kvbench.errors import UserError
from kvbench.plugin import ModelInfo, Moment, Policy
from kvbench.spelling import policy as make_policy


def observe(cache: RaggedCache, layer: RaggedLayer, step: Step) -> None:
    """Show one layer's forward to the cache's observers (dense layers; queries always).

    An observer may be foreign code: if it raises, the policies that need it fail, and no other.
    """
    layer.scale = step.scale
    assert cache.valid is not None
    for need, observer in cache.observers.items():
        if need in cache.broken or (layer.packed and need.per_entry):
            continue
        assert layer.key is not None and layer.value is not None
        key, value = layer.key, layer.value
        try:
            observer.update(
                step.index, step.query, key, value, step.hidden, cache.valid, step.scale
            )
        except Exception as error:
            cache.broken[need] = error


class AttachedCache(RaggedCache):
    """The cache that `kvbench.attach` gives: it compresses itself.

    Args:
        model: The model, attached.
        policy: How entries are chosen.
        budget: How many stay.
        moment: `context`: once, when the first forward ends (`compress="auto"`) or when
            `compress()` is called; `decode`: at every forward's end, back to an absolute budget.
        auto: Whether the first forward is compressed when it ends.
        seed: Noise seed.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        budget: Budget,
        moment: Moment,
        auto: bool,
        seed: int,
    ) -> None:
        super().__init__(decoder_of(model).config)
        self.info: ModelInfo = model_info(model)
        self.policy, self.budget, self.moment = policy, budget, moment
        self.auto, self.seed = auto, seed
        self.closed = False
        self._start()

    def _start(self) -> None:
        self.observers = {need: need.observer(self.info) for need in self.policy.needs}
        self._cut: Cut | None = None
        self._seeds: Tensor | None = None
        self._first = self._steps = self._running = False

    def reset(self) -> None:
        """Empty the cache for another sequence."""
        super().reset()
        self._start()

    def compress(self) -> None:
        """Cut the cache back to its budget now (with `compress="manual"`, after the prefill).

        Raises:
            ValueError: Nothing was prefilled, or it is compressed already.
        """
        if self.closed:
            raise ValueError("this cache can only be used inside its kvbench.attach(...) block")
        if self.valid is None:
            raise ValueError("nothing was prefilled yet")
        if self.packed:
            raise ValueError("the cache is compressed already")
        cut_cache(self._prefill_cut(), self)
        self._done()

    def close(self) -> None:
        """Make the cache unusable."""
        self.closed = True
        for layer in self.ragged:
            layer.closed = True

    # -- around a forward -------------------------------------------------------------------------
    def ready(self) -> None:
        """Refuse a forward after one that has failed: the layers may be half compressed."""
        if self._running:
            raise ValueError("an earlier forward on this cache failed: cache.reset() starts anew")

    def before(self, forward: Forward) -> None:
        """Prepare one forward."""
        self._running = True
        self._steps = self.moment == "decode" and not self.policy.is_full
        forward.want_mass = self._steps and any(n.per_entry for n in self.policy.needs)
        forward.on_layer = self._on_layer
        self._first = self.auto and not any(layer.packed for layer in self.ragged)

    def _on_layer(self, forward: Forward, layer: RaggedLayer, step: Step) -> None:
        if not layer.packed or self._steps:
            observe(self, layer, step)
        if layer.packed:
            if self._steps and self.policy.score is not None and layer.extras:
                if self._cut is None:
                    assert self.budget.tokens is not None
                    self._cut = self._new_cut([self.budget.tokens] * self.batch)
                view = self._cut.view(layer, step.index, step.mass)
                self.policy.score.step(view)
                layer.store_extras(view.extras)
        elif self._first:
            cut = self._prefill_cut()
            if cut.by_layer and not cut.keeps_all:
                decision = cut.layer(cut.view(layer, step.index))
                store(cut, step.index, layer, layer, decision)

    def after(self, forward: Forward) -> None:
        """Compress what this forward has made due."""
        if self._first:
            cut = self._prefill_cut()
            if self.packed:
                finish(cut, self)
            else:
                cut_cache(cut, self)
        elif self._steps and self.packed:
            self._cut_due()
        if self.packed:
            self._done()
        self._cut = None
        self._running = False

    def _done(self) -> None:
        """Free what only the prefill needed."""
        self._cut = None
        self.ids = None
        gone = [n for n in self.observers if n.per_entry or self.moment != "decode"]
        for need in gone:
            del self.observers[need]

    def _prefill_cut(self) -> Cut:
        if self._cut is None:
            lengths = self.lengths().tolist()
            budget = lengths
            if not self.policy.is_full:
                budget = [self.budget.per_head(n) for n in lengths]
            if self.moment == "decode" and not self.policy.is_full:
                due = self._limit()
                budget = [b if n >= due else n for b, n in zip(budget, lengths, strict=True)]
            self._cut = self._new_cut(budget)
        return self._cut

    def _new_cut(self, budget: list[int], rows: list[int] | None = None) -> Cut:
        if self._seeds is None:
            self._seeds = row_seeds(self, self.seed)
        return Cut(self.policy, self, self.info, self.moment, budget, self._seeds, None, rows)

    def _limit(self) -> int:
        """Entries per head, on average, at which a sequence is cut back at decode."""
        assert self.budget.tokens is not None
        return self.budget.tokens + max(1, self.policy.buffer)

    def _cut_due(self) -> None:
        """Cut the sequences that have filled their buffer back to the budget."""
        assert self.budget.tokens is not None
        limit = self._limit() * self.info.layers * self.info.kv_heads
        due = [row for row in range(self.batch) if self.live_entries(row) >= limit]
        if due:
            cut_back(self._new_cut([self.budget.tokens] * len(due), due), self)


@contextmanager
def attach(
    model: nn.Module,
    policy: str | Policy,
    budget: str | int | float | Budget,
    *,
    moment: Literal["context", "decode"] = "context",
    compress: Literal["auto", "manual"] = "auto",
    seed: int = 0,
) -> Iterator[AttachedCache]:
    """Evict from a model's cache in its own forward and `generate`.

    The first forward on the cache is the context; it is compressed when it ends (its own logits see
    the full context). Later calls append: `model(tail, past_key_values=cache, attention_mask=<all
    columns>)` or `model.generate(<context + question>, past_key_values=cache)`. `generate(prompt)`
    alone compresses the prompt. With `compress="manual"` the prefill may come in chunks and
    `cache.compress()` ends it (with `auto` only the first chunk would be compressed). Batches are
    padded on the left.

    Args:
        model: A causal language model of a supported family, in evaluation mode.
        policy: A policy or its spelling, as `"snapkv:window=64"`.
        budget: `"0.2"`, `0.2` (the fraction kept), `512` (tokens) or `"full"`.
        moment: `context`, or `decode`: an absolute budget holds during generation.
        compress: `auto` or `manual`.
        seed: Seed of policies that draw noise.

    Yields:
        The cache. It is unusable after the block.

    Raises:
        ValueError: Unknown policy, budget out of range, a nested attachment, beam search.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(f"seed {seed!r}: a whole number would be right")
    chosen, limit = make_policy(policy), Budget.parse(budget)
    if moment not in ("context", "decode"):
        raise UserError(f"moment {moment!r}: context or decode would be right for attach")
    if compress not in ("auto", "manual"):
        raise UserError(f"compress={compress!r}: auto or manual would be right")
    if moment == "decode" and limit.tokens is None and not chosen.is_full:
        raise UserError(f"moment decode needs an absolute budget such as 512, not {limit}")
    cache = AttachedCache(model, chosen, limit, moment, compress == "auto", seed)

    def own(other: RaggedCache) -> AttachedCache:
        if other is not cache:
            raise ValueError("use the cache that this kvbench.attach gives")
        return cache

    def before(other: RaggedCache, forward: Forward) -> None:
        own(other).before(forward)

    def after(other: RaggedCache, forward: Forward) -> None:
        own(other).after(forward)

    try:
        with attached(model, before, after):
            yield cache
    finally:
        cache.close()


@torch.no_grad()
def kept(
    model: nn.Module,
    input_ids: Tensor,
    policy: str | Policy,
    budget: str | int | float | Budget,
    attention_mask: Tensor | None = None,
    *,
    seed: int = 0,
) -> list[Tensor | None]:
    """Which context entries a policy keeps.

    Args:
        model: A causal language model.
        input_ids: The context, `[B, T]`, padded on the left.
        policy: A policy or its spelling.
        budget: As in `attach`.
        attention_mask: `[B, T]`; None: no padding.
        seed: Seed of policies that draw noise.

    Returns:
        For every layer of the model bool `[B, H, T]` on `input_ids.device`, padding False; None for
        sliding-window layers.

    Raises:
        ValueError: As `attach`.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        raise UserError("input_ids: an integer tensor [batch, tokens] would be right")
    with attach(model, policy, budget, seed=seed) as cache:
        arguments: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        decoder_of(model)(input_ids=input_ids, attention_mask=attention_mask, **arguments)
        return [None if m is None else m.to(input_ids.device) for m in cache.kept()]
