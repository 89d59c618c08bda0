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
from kvbench.engine.compress import Cut, cut_cache, finish, row_seeds, store
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import decoder_of, model_info
from kvbench.errors import UserError
from kvbench.plugin import ModelInfo, Moment, Policy
from kvbench.spelling import policy as make_policy


def observe(cache: RaggedCache, forward: Forward, layer: RaggedLayer, step: Step) -> None:
    """Show one layer's forward to the cache's observers (dense layers; queries always)."""
    layer.scale = step.scale
    assert cache.valid is not None
    for need, observer in cache.observers.items():
        if layer.packed and need.per_entry:
            continue
        assert layer.key is not None and layer.value is not None
        observer.update(
            step.index, step.query, layer.key, layer.value, step.hidden, cache.valid, step.scale
        )


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
        self._cut: Cut | None = None
        self._start_observers()

    def _start_observers(self) -> None:
        self.observers = {need: need.observer(self.info) for need in self.policy.needs}

    def reset(self) -> None:
        """Empty the cache for another sequence."""
        super().reset()
        self._start_observers()
        self._cut = None

    def compress(self) -> None:
        """Cut the cache back to its budget now (with `compress="manual"`, after the prefill).

        Raises:
            ValueError: Nothing was prefilled, or it is compressed already.
        """
        if self.closed:
            raise ValueError("the cache cannot be used after its attachment has ended")
        if self.valid is None:
            raise ValueError("nothing was prefilled yet")
        if self.packed:
            raise ValueError("the cache is compressed already")
        cut_cache(self._prefill_cut(), self)

    # -- around a forward -------------------------------------------------------------------------
    def before(self, forward: Forward) -> None:
        """Prepare one forward."""
        if self.closed:
            raise ValueError("the cache cannot be used after its attachment has ended")
        self._cut = None
        score = self.policy.score
        decode = self.moment == "decode"
        forward.want_mass = decode and any(n.per_entry for n in self.policy.needs)
        forward.on_layer = lambda layer, step: self._on_layer(forward, layer, step)
        self._first = self.auto and not any(layer.packed for layer in self.ragged)
        self._steps = decode and score is not None

    def _on_layer(self, forward: Forward, layer: RaggedLayer, step: Step) -> None:
        if not layer.packed or self._steps:
            observe(self, forward, layer, step)
        if layer.packed:
            if self._steps and self.policy.score is not None and layer.extras:
                cut = self._decode_cut()
                view = cut.view(layer, step.index, step.mass)
                self.policy.score.step(view)
                rows, live = layer.padded_rows()
                for name, held in view.extras.items():
                    layer.extras[name][rows[live]] = held[live]
        elif self._first:
            cut = self._prefill_cut()
            if cut.by_layer and not self._whole(cut):
                view = cut.view(layer, step.index)
                store(layer, layer, cut.layer(view), view.col)

    def after(self, forward: Forward) -> None:
        """Compress what this forward has made due."""
        if self._first:
            cut = self._prefill_cut()
            if self.packed:
                finish(cut, self)
            else:
                cut_cache(cut, self)
        elif self._steps and self.packed:
            self._cut_back()
        self._cut = None

    def _whole(self, cut: Cut) -> bool:
        return cut.policy.is_full or cut.budget == cut.length.tolist()

    def _prefill_cut(self) -> Cut:
        if self._cut is None:
            lengths = self.lengths().tolist()
            budget = lengths
            if not self.policy.is_full:
                budget = [self.budget.per_head(n) for n in lengths]
            if self.moment == "decode":
                assert self.budget.tokens is not None
                limit = self.budget.tokens + max(1, self.policy.buffer)
                budget = [b if n >= limit else n for b, n in zip(budget, lengths, strict=True)]
            self._cut = self._new_cut(budget)
        return self._cut

    def _new_cut(self, budget: list[int]) -> Cut:
        seeds = row_seeds(self, self.seed)
        return Cut(self.policy, self, self.info, self.moment, budget, seeds)

    def _decode_cut(self) -> Cut:
        if self._cut is None:
            assert self.budget.tokens is not None
            self._cut = self._new_cut([self.budget.tokens] * self.batch)
        return self._cut

    def _cut_back(self) -> None:
        """Cut the sequences that have filled their buffer back to the budget."""
        assert self.budget.tokens is not None
        heads = self.info.layers * self.info.kv_heads
        limit = heads * (self.budget.tokens + max(1, self.policy.buffer))
        due = [row for row in range(self.batch) if self.live_entries(row) >= limit]
        if not due:
            return
        cut = self._decode_cut()
        views = [cut.view(layer, i) for i, layer in enumerate(self.ragged)]
        decisions = [cut.layer(v) for v in views] if cut.by_layer else cut.model(views)
        chosen = torch.zeros(self.batch, 1, 1, dtype=torch.bool, device=cut.length.device)
        chosen[due] = True
        for layer, view, made in zip(self.ragged, views, decisions, strict=True):
            keep = torch.where(chosen, made.keep, view.valid)
            store(layer, layer, made._replace(keep=keep), view.col)
        held = [self.live_entries(row) for row in range(self.batch)]
        cut.check(held, due)
        self.budget_entries, self.held_entries = cut.total, held


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
    `cache.compress()` ends it. Batches are padded on the left.

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
    chosen, limit = make_policy(policy), Budget.parse(budget)
    if moment not in ("context", "decode"):
        raise UserError(f"moment {moment!r}: context or decode would be right for attach")
    if compress not in ("auto", "manual"):
        raise UserError(f"compress={compress!r}: auto or manual would be right")
    if moment == "decode" and limit.tokens is None and not chosen.is_full:
        raise UserError(f"moment decode needs an absolute budget such as 512, not {limit}")
    cache = AttachedCache(model, chosen, limit, moment, compress == "auto", seed)

    def own(other: RaggedCache) -> AttachedCache:
        if not isinstance(other, AttachedCache):
            raise ValueError("use the cache that kvbench.attach gives")
        return other

    def before(other: RaggedCache, forward: Forward) -> None:
        own(other).before(forward)

    def after(other: RaggedCache, forward: Forward) -> None:
        own(other).after(forward)

    try:
        with attached(model, before, after):
            yield cache
    finally:
        cache.closed = True


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
    with attach(model, policy, budget, seed=seed) as cache:
        arguments: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        decoder_of(model)(input_ids=input_ids, attention_mask=attention_mask, **arguments)
        return [None if m is None else m.to(input_ids.device) for m in cache.kept()]
