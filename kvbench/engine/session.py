"""`kvbench.attach` and `kvbench.kept`: eviction in any model's own forward and `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvbench.budget import Budget
from kvbench.engine.attachment import Forward, Step, attached
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decide import Cut, row_seeds
from kvbench.engine.evict import cut_cache, finish, store
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import decoder_of, model_info
from kvbench.engine.observing import observe, start_observers, token_watcher
from kvbench.engine.upkeep import Upkeep, first_budget
from kvbench.errors import UserError
from kvbench.moments import LATER, Moment
from kvbench.plugin import ModelInfo, Policy
from kvbench.spelling import policy as make_policy


class AttachedCache(RaggedCache):
    """The cache that `kvbench.attach` gives: it compresses itself.

    Args:
        model: The model, attached.
        policy: How entries are chosen.
        budget: How many stay.
        moment: When it is cut, see `attach`.
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
        start_observers(self, self.policy.needs, self.info)
        self.upkeep = None
        self._cut: Cut | None = None
        self._first = self._running = False

    def reset(self) -> None:
        """Empty the cache for another sequence."""
        super().reset()
        self._start()

    def compress(self) -> None:
        """Cut the cache back to its budget now.

        With `compress="manual"` this ends the prefill. At moment `turns` it is called before every
        new turn, as often as there are turns; the budget is of the tokens seen so far.

        Raises:
            ValueError: Nothing was prefilled, or it is compressed already.
        """
        if self.closed:
            raise ValueError("this cache can only be used inside its kvbench.attach(...) block")
        if self.valid is None:
            raise ValueError("nothing was prefilled yet")
        if self.packed and self.moment != "turns":
            raise ValueError("the cache is compressed already")
        if not self.packed:
            cut_cache(self._prefill_cut(), self)
            self._done()
        elif self.upkeep is not None:
            self.upkeep.budget = [self.budget.per_head(n) for n in self.lengths().tolist()]
            self.upkeep.restore(self, range(self.batch))
        self.turns = [[*row, self.get_seq_length()] for row in self.turns or [[]] * self.batch]

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
        if self.upkeep is not None:
            self.upkeep.before(forward)
        else:
            forward.on_layer = self._on_layer
        self._first = self.auto and not any(layer.packed for layer in self.ragged)

    def _on_layer(self, forward: Forward, layer: RaggedLayer, step: Step) -> None:
        if layer.packed:
            return
        observe(self, layer, step)
        if self._first:
            cut = self._prefill_cut()
            if cut.at_once and not cut.keeps_all:
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
            self._done()
        elif self.upkeep is not None and (self.moment == "decode" or forward.n > 1):
            self.upkeep.after(self)
        self._running = False

    def _done(self) -> None:
        """Free what only the prefill needed, and start what goes on."""
        cut, limit = self._prefill_cut(), self.budget.tokens
        self._cut = self.ids = None
        Upkeep.start(cut, self, cut.budget if limit is None else [limit] * self.batch)

    def _prefill_cut(self) -> Cut:
        if self._cut is None:
            lengths = self.lengths().tolist()
            # Between turns `compress` is only called when there is something to cut.
            moment = "context" if self.moment == "turns" else self.moment
            budget = [first_budget(self.policy, self.budget, moment, n) for n in lengths]
            seeds = row_seeds(self, self.seed)
            self._cut = Cut(self.policy, self, self.info, self.moment, budget, seeds)
        return self._cut


@contextmanager
def attach(
    model: nn.Module,
    policy: str | Policy,
    budget: str | int | float | Budget,
    *,
    moment: Literal["context", "decode", "chunked", "turns"] = "context",
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
        moment: `context`: once. `decode`: an absolute budget holds during generation; what a head
            holds beyond it is cut when the policy's buffer is full. `chunked`: an absolute budget
            is restored after every forward of more than one token (for policies that treat the last
            chunk apart, say `cache.upkeep.final = False` while more will come). `turns`: whenever
            `cache.compress()` is called, which is before every new turn.
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
    if moment not in ("context", *LATER):
        raise UserError(f"moment {moment!r}: context, {', '.join(LATER)} would be right for attach")
    if compress not in ("auto", "manual"):
        raise UserError(f"compress={compress!r}: auto or manual would be right")
    if moment in ("decode", "chunked") and limit.tokens is None and not chosen.is_full:
        raise UserError(f"moment {moment} needs an absolute budget such as 512, not {limit}")
    auto = compress == "auto" and moment != "turns"
    cache = AttachedCache(model, chosen, limit, moment, auto, seed)
    watch = token_watcher(model)

    def own(other: RaggedCache) -> AttachedCache:
        if other is not cache:
            raise ValueError("use the cache that this kvbench.attach gives")
        return cache

    def before(other: RaggedCache, forward: Forward) -> None:
        own(other).before(forward)

    def after(other: RaggedCache, forward: Forward) -> None:
        watch(other, forward)
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
