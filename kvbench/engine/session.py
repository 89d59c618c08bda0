"""`kvbench.attach` and `kvbench.kept`: eviction in any model's own forward and `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvbench.budget import Budget
from kvbench.engine.attachment import Forward, Step
from kvbench.engine.block_quantizers import check_quantizer
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decide import Cut
from kvbench.engine.draw import row_seeds
from kvbench.engine.driver import Driver, Watch, forward, start_observers
from kvbench.engine.evict import (
    compress_cache,
    pack_layer,
    read_few,
    record_counts,
    restore,
    start_upkeep,
)
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import decoder_of, model_info, visual_ids
from kvbench.engine.pruning import pruning_of, watching
from kvbench.engine.replay import ReplayCache, observe_replays
from kvbench.engine.upkeep import first_budget
from kvbench.engine.vision import Pixels
from kvbench.errors import UserError
from kvbench.moments import LATER, Moment
from kvbench.plugin import Policy
from kvbench.spelling import policy as make_policy


class AttachedCache(RaggedCache):
    """The cache that `kvbench.attach` yields; it compresses itself.

    Args:
        model: The attached model.
        policy: Chooses the entries.
        budget: How many it keeps.
        moment: When the cache is cut; see `attach`.
        auto: Whether to compress the cache when the first forward ends.
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
        self.model, self.info = model, model_info(model)
        self.policy, self.budget, self.moment = policy, budget, moment
        self.auto, self.seed = auto, seed
        self.closed = False
        self._start()

    def _start(self) -> None:
        start_observers(self, self.policy.needs, self.info)
        self.pruning = pruning_of(self.policy, self.budget)
        self.upkeep = None
        self.first_cut: Cut | None = None
        self.compressing = self.in_forward = False

    def reset(self) -> None:
        """Empty the cache for another sequence."""
        super().reset()
        self._start()

    def compress(self) -> None:
        """Cut the cache back to its budget now.

        With `compress="manual"` this ends the prefill. At moment `turns` call it before every new
        turn; the budget is a share of the tokens seen so far.

        Raises:
            ValueError: Nothing was prefilled, or the cache is compressed already.
        """
        if self.closed:
            raise ValueError("use this cache only inside its kvbench.attach(...) block")
        if self.valid is None:
            raise ValueError("nothing to compress: run the model on the cache first")
        if self.packed and self.moment != "turns":
            raise ValueError("the cache is compressed already")
        if not self.packed:
            observe_replays(self.model, self, self.info)
            compress_cache(self.prefill_cut(), self)
            self.end_prefill()
        else:
            allowed = self._allowed()
            read_few(self, self.policy, self.info, allowed)
            if self.upkeep is not None:
                self.upkeep.budget = allowed
                restore(self, range(self.batch))
        self.turns = [[*row, self.get_seq_length()] for row in self.turns or [[]] * self.batch]

    def _allowed(self) -> list[int]:
        """Mean entries per (layer, head) that the budget allows of the tokens seen so far."""
        seen = zip(self.lengths().tolist(), self.visual_tokens(), strict=True)
        return [self.budget.per_head(n, v) for n, v in seen]

    def close(self) -> None:
        """Make the cache unusable."""
        self.closed = True
        for layer in self.ragged:
            layer.closed = True

    def ready(self) -> None:
        """Refuse a forward after a failed one: the layers may be half compressed."""
        if self.in_forward:
            raise ValueError("an earlier forward on this cache failed; call cache.reset()")

    def prefill_cut(self) -> Cut:
        """The compression of the prefill."""
        if self.first_cut is None:
            lengths = self.lengths().tolist()
            # Between turns `compress` is only called when there is something to cut.
            moment = "context" if self.moment == "turns" else self.moment
            budget = [
                first_budget(self.policy, self.budget, moment, n, visual_tokens=v)
                for n, v in zip(lengths, self.visual_tokens(), strict=True)
            ]
            seeds = row_seeds(self, self.seed)
            self.first_cut = Cut(self.policy, self, self.info, self.moment, budget, seeds)
        return self.first_cut

    def end_prefill(self) -> None:
        """Free what only the prefill needed, and start the state between cuts."""
        cut, limit = self.prefill_cut(), self.budget.absolute
        self.first_cut = self.ids = None
        share = self._allowed() if self.policy.read is not None else cut.budget
        start_upkeep(cut, self, share if limit is None else [limit] * self.batch)


class _AttachDriver(Driver):
    """Compresses one attached cache when its first forward ends.

    A layer is compressed at once if its policy needs no other layer: the full K/V of all layers
    never exist together.
    """

    def __init__(self, model: nn.Module, cache: AttachedCache, watch: Watch | None = None) -> None:
        super().__init__(model, watch)
        self.cache = cache

    def before(self, cache: RaggedCache, forward: Forward) -> None:
        """Prepare a forward; refuse any other cache."""
        if isinstance(cache, ReplayCache):
            super().before(cache, forward)
            return
        if cache is not self.cache:
            raise ValueError("use the cache that this kvbench.attach(...) block yields")
        self.cache.in_forward = True
        packed = any(layer.packed for layer in cache.ragged)
        self.cache.compressing = self.cache.auto and not packed
        super().before(cache, forward)

    def dense_layer(self, cache: RaggedCache, layer: RaggedLayer, step: Step) -> None:
        """Compress a layer as soon as it can be decided."""
        if not self.cache.compressing:
            return
        cut, pruning = self.cache.prefill_cut(), self.cache.pruning
        if pruning is not None and pruning.layer:
            return  # the first layers are seen before it is known which tokens are pruned
        if cut.at_once and not cut.keeps_all:
            decision = cut.layer(cut.view(layer, step.index))
            pack_layer(cut, step.index, layer, layer, decision)

    def after(self, cache: RaggedCache, forward: Forward) -> None:
        """Compress the cache if this forward was its prefill."""
        super().after(cache, forward)
        if isinstance(cache, ReplayCache):
            return
        if self.cache.compressing:
            cut = self.cache.prefill_cut()
            if cache.packed:
                record_counts([cut], cache)
            else:
                observe_replays(self.model, cache, cut.info)
                compress_cache(cut, cache)
            self.cache.end_prefill()
        self.cache.in_forward = False


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
    """Evict from a model's cache, or read little of it, in the model's own forward and `generate`.

    The first forward on the cache is the context. The cache is compressed when that forward ends,
    so its own logits see the full context. Later calls append: `model(tail, past_key_values=cache,
    attention_mask=<all columns>)` or `model.generate(<context + question>, past_key_values=cache)`.
    `generate(prompt)` alone compresses the prompt. With `compress="manual"` the prefill can come in
    chunks, and `cache.compress()` ends it (`auto` would compress only the first chunk). Batches
    must be padded on the left.

    Args:
        model: A causal language model of a supported family, in evaluation mode.
        policy: A policy or its spelling, as `"snapkv:window=64"`.
        budget: `"0.2"`, `0.2` (the fraction kept), `512` (tokens) or `"full"`.
        moment: `context`: compress once. `decode`: an absolute budget holds during generation;
            the cache is cut when the policy's buffer beyond the budget is full. `chunked`: an
            absolute budget is restored after every forward of more than one token (for policies
            that treat the last chunk differently, set `cache.upkeep.final = False` while more
            chunks will come). `turns`: compress whenever `cache.compress()` is called, which
            belongs before every new turn.
        compress: `auto` or `manual`.
        seed: Seed of policies that draw noise.

    Yields:
        The cache. It is unusable after the block.

    Raises:
        ValueError: Unknown policy, budget out of range, a nested attachment, beam search.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(f"seed {seed!r} is not an integer")
    chosen, limit = make_policy(policy), Budget.parse(budget)
    with _attached(model, chosen, limit, moment, compress, seed) as cache:
        yield cache


@contextmanager
def _attached(
    model: nn.Module,
    chosen: Policy,
    limit: Budget,
    moment: Moment = "context",
    compress: Literal["auto", "manual"] = "auto",
    seed: int = 0,
    watch: Watch | None = None,
) -> Iterator[AttachedCache]:
    """`attach` with a watch on every layer of every forward."""
    if moment not in ("context", *LATER):
        raise UserError(f"unknown moment {moment!r}; attach takes context, {', '.join(LATER)}")
    if compress not in ("auto", "manual"):
        raise UserError(f"unknown compress={compress!r}; use auto or manual")
    if moment in ("decode", "chunked") and limit.absolute is None and chosen.has_budget:
        raise UserError(f"moment {moment} needs a budget in tokens such as 512, not {limit}")
    check_quantizer(chosen)
    auto = compress == "auto" and moment != "turns"
    cache = AttachedCache(model, chosen, limit, moment, auto, seed)
    try:
        with (
            watching(model, cache.pruning) as cache.tower,
            _AttachDriver(model, cache, watch).running(),
        ):
            yield cache
    finally:
        cache.close()


def _check_ids(input_ids: Tensor) -> None:
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        raise UserError("input_ids must be an integer tensor [batch, tokens]")


@torch.no_grad()
def kept(
    model: nn.Module,
    input_ids: Tensor,
    policy: str | Policy,
    budget: str | int | float | Budget,
    attention_mask: Tensor | None = None,
    *,
    seed: int = 0,
    pixels: Pixels | None = None,
) -> list[Tensor | None]:
    """Tell which context entries a policy keeps.

    Args:
        model: A causal language model.
        input_ids: The context, `[B, T]`, padded on the left.
        policy: A policy or its spelling.
        budget: As in `attach`.
        attention_mask: `[B, T]`; None: no padding.
        seed: Seed of policies that draw noise.
        pixels: What the model's forward takes for the images and videos of the context, as its
            processor makes it: `pixel_values`, `image_grid_thw` and others.

    Returns:
        For every layer of the model, bool `[B, H, T]` on `input_ids.device`, False for padding;
        None for sliding-window layers.

    Raises:
        ValueError: As `attach`; or the context shows images and there are no pixels.
    """
    _check_ids(input_ids)
    visual = torch.tensor(visual_ids(model), dtype=torch.int64, device=input_ids.device)
    if not pixels and len(visual) and bool(torch.isin(input_ids, visual).any()):
        raise UserError(
            "the context has tokens of images or videos; give pixels, the processor's other outputs"
        )
    with attach(model, policy, budget, seed=seed) as cache:
        if pixels:
            forward(model, cache, input_ids, attention_mask, pixels=pixels)
        else:
            arguments: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
            decoder_of(model)(input_ids=input_ids, attention_mask=attention_mask, **arguments)
        return [None if m is None else m.to(input_ids.device) for m in cache.kept()]


@torch.no_grad()
def entries_read(
    model: nn.Module,
    input_ids: Tensor,
    policy: str | Policy,
    budget: str | int | float | Budget,
    attention_mask: Tensor | None = None,
    *,
    seed: int = 0,
) -> list[Tensor | None]:
    """Tell which entries the first generated token reads, its own included.

    Args:
        model: A causal language model.
        input_ids: The context, `[B, T]`, padded on the left.
        policy: A policy with a reader, or its spelling.
        budget: As in `attach`.
        attention_mask: `[B, T]`; None: no padding.
        seed: Seed of policies that draw noise.

    Returns:
        For every layer of the model, bool `[B, H, T + 1]` on `input_ids.device`, False for padding;
        None for sliding-window layers.

    Raises:
        ValueError: As `attach`, or the policy has no reader.
    """
    chosen = make_policy(policy)
    if chosen.read is None:
        raise UserError(f"{chosen} reads all that it holds; use kvbench.kept to see what that is")
    _check_ids(input_ids)
    masks: dict[int, Tensor] = {}

    def watch(forward: Forward, layer: RaggedLayer, step: Step) -> None:
        if step.read:
            rows = [F.pad(m[:, 0], (forward.first + 1 - m.shape[-1], 0)) for m in step.read]
            masks[step.index] = torch.stack(rows).to(input_ids.device)

    with _attached(model, chosen, Budget.parse(budget), seed=seed, watch=watch) as cache:
        ids, mask = input_ids, attention_mask
        for _ in range(2):  # the context, then the first token of the answer
            arguments: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
            logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=1, **arguments).logits
            ids = logits[:, -1:].argmax(-1)
            mask = None if mask is None else F.pad(mask, (0, 1), value=1)
    found = iter([masks[index] for index in sorted(masks)])
    return [next(found) if isinstance(x, RaggedLayer) else None for x in cache.layers]
