"""`kvbench.attach` and `kvbench.kept`: eviction in any model's own forward and `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvbench.budget import Budget
from kvbench.engine.attachment import Forward, Step
from kvbench.engine.block_quantizers import check_quantizer
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decide import EvictionStep
from kvbench.engine.draw import row_seeds
from kvbench.engine.driver import Driver, Watch, forward, start_observers
from kvbench.engine.evict import (
    compress_cache,
    pack_layer,
    read_few,
    record_counts,
    restore,
    start_eviction_state,
)
from kvbench.engine.eviction_state import first_budget
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import cache_inputs, decoder_of, model_info, visual_ids
from kvbench.engine.pruning import pruning_of, watching
from kvbench.engine.replay import ReplayCache, observe_replays
from kvbench.engine.vision import Pixels
from kvbench.errors import UserError
from kvbench.moments import LATER, Moment
from kvbench.plugin import Policy
from kvbench.spelling import policy as make_policy


class AttachedCache(RaggedCache):
    """The self-compressing cache that `kvbench.attach` yields.

    Args:
        model: The attached model.
        policy: Chooses the entries.
        budget: Number of entries to keep.
        moment: When entries are evicted; see `attach`.
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
        self.eviction_state = None
        self.first_cut: EvictionStep | None = None
        self.compressing = self.in_forward = False

    def reset(self) -> None:
        """Empty the cache for another sequence."""
        super().reset()
        self._start()

    def compress(self) -> None:
        """Compress the cache to its budget now.

        With `compress="manual"` this ends the prefill. At moment `turns`, call it before every new turn; a relative
        budget then refers to the tokens seen so far.

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
            head_budgets = self._allowed()
            read_few(self, self.policy, self.info, head_budgets)
            if self.eviction_state is not None:
                self.eviction_state.budget = head_budgets
                restore(self, range(self.batch))
        self.turns = [[*turn_starts, self.get_seq_length()] for turn_starts in self.turns or [[]] * self.batch]

    def _allowed(self) -> list[int]:
        """Return the mean entries per (layer, head) that the budget allows for the tokens so far."""
        token_sizes = zip(self.lengths().tolist(), self.visual_tokens(), strict=True)
        return [self.budget.per_head(token_count, visual_count) for token_count, visual_count in token_sizes]

    def close(self) -> None:
        """Make the cache unusable."""
        self.closed = True
        for layer in self.ragged:
            layer.closed = True

    def ready(self) -> None:
        """Refuse a forward after a failed one, because the layers may be half compressed."""
        if self.in_forward:
            raise ValueError("an earlier forward on this cache failed; call cache.reset()")

    def prefill_cut(self) -> EvictionStep:
        """Return the eviction step of the prefill."""
        if self.first_cut is None:
            lengths = self.lengths().tolist()
            # Between turns `compress` is only called when there is something to evict.
            moment = "context" if self.moment == "turns" else self.moment
            head_budgets = [
                first_budget(self.policy, self.budget, moment, token_count, visual_tokens=visual_count)
                for token_count, visual_count in zip(lengths, self.visual_tokens(), strict=True)
            ]
            seeds = row_seeds(self, self.seed)
            self.first_cut = EvictionStep(self.policy, self, self.info, self.moment, head_budgets, seeds)
        return self.first_cut

    def end_prefill(self) -> None:
        """Free what only the prefill needed and start the decode-time eviction state."""
        eviction_step, absolute_budget = self.prefill_cut(), self.budget.absolute
        self.first_cut = self.ids = None
        # A fraction at moment `decode` refers to the prompt, even if nothing is evicted from it yet.
        stays = self.policy.read is not None or self.moment == "decode"
        head_budgets = self._allowed() if stays else eviction_step.budget
        start_eviction_state(
            eviction_step,
            self,
            head_budgets if absolute_budget is None else [absolute_budget] * self.batch,
        )


class _AttachDriver(Driver):
    """Compresses one attached cache when its first forward ends.

    A layer is compressed at once if its policy needs no other layer, so the full K/V of all layers never coexist.
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
        is_packed = any(layer.packed for layer in cache.ragged)
        self.cache.compressing = self.cache.auto and not is_packed
        super().before(cache, forward)

    def dense_layer(self, cache: RaggedCache, layer: RaggedLayer, step: Step) -> None:
        """Compress a layer as soon as it can be decided."""
        if not self.cache.compressing:
            return
        eviction_step, pruning = self.cache.prefill_cut(), self.cache.pruning
        if pruning is not None and pruning.layer:
            return  # the first layers run before the pruned tokens are known
        if eviction_step.at_once and not eviction_step.keeps_all:
            decision = eviction_step.layer(eviction_step.view(layer, step.index))
            pack_layer(eviction_step, step.index, layer, layer, decision)

    def after(self, cache: RaggedCache, forward: Forward) -> None:
        """Compress the cache if this forward was its prefill."""
        super().after(cache, forward)
        if isinstance(cache, ReplayCache):
            return
        if self.cache.compressing:
            eviction_step = self.cache.prefill_cut()
            if cache.packed:
                record_counts([eviction_step], cache)
            else:
                observe_replays(self.model, cache, eviction_step.info)
                compress_cache(eviction_step, cache)
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

    The first forward on the cache is the context. The cache is compressed when that forward ends, so its own logits see
    the full context. Later calls append: `model(tail, past_key_values=cache, attention_mask=<all columns>)` or
    `model.generate(<context + question>, past_key_values=cache)`. `generate(prompt)` alone compresses the prompt. With
    `compress="manual"` the prefill can come in chunks, and `cache.compress()` ends it (`auto` would compress only the
    first chunk). Batches must be padded on the left.

    Args:
        model: A causal language model of a supported family, in evaluation mode.
        policy: A policy or its spelling, such as `"snapkv:window=64"`.
        budget: `"0.2"`, `0.2` (the fraction kept), `512` (tokens) or `"full"`.
        moment: `context`: compress once. `decode`: keep a budget during generation (a fraction refers to the prompt);
            evict when the policy's buffer beyond the budget is full. `chunked`: restore an absolute budget after every
            forward of more than one token (for policies that treat the last chunk differently, set
            `cache.eviction_state.final = False` while more chunks follow). `turns`: compress whenever
            `cache.compress()` is called, which belongs before every new turn.
        compress: `auto` or `manual`.
        seed: Seed of policies that draw noise.

    Yields:
        The cache. It is unusable after the block.

    Raises:
        ValueError: Unknown policy, budget out of range, nested attachment, or beam search.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(f"seed {seed!r} is not an integer")
    parsed_policy, parsed_budget = make_policy(policy), Budget.parse(budget)
    with _attached(model, parsed_policy, parsed_budget, moment, compress, seed) as cache:
        yield cache


@contextmanager
def _attached(
    model: nn.Module,
    parsed_policy: Policy,
    parsed_budget: Budget,
    moment: Moment = "context",
    compress: Literal["auto", "manual"] = "auto",
    seed: int = 0,
    watch: Watch | None = None,
) -> Iterator[AttachedCache]:
    """Implement `attach`, with a watch on every layer of every forward."""
    if moment not in ("context", *LATER):
        raise UserError(f"unknown moment {moment!r}; attach takes context, {', '.join(LATER)}")
    if compress not in ("auto", "manual"):
        raise UserError(f"unknown compress={compress!r}; use auto or manual")
    if moment == "chunked" and parsed_budget.absolute is None and parsed_policy.has_budget:
        raise UserError(f"moment chunked needs a budget in tokens such as 512, not {parsed_budget}")
    if moment == "decode" and parsed_budget.is_full and parsed_policy.has_budget:
        raise UserError(f"at budget {parsed_budget}, {parsed_policy} evicts nothing; use the policy full")
    check_quantizer(parsed_policy)
    is_automatic = compress == "auto" and moment != "turns"
    cache = AttachedCache(model, parsed_policy, parsed_budget, moment, is_automatic, seed)
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
    following: Tensor | None = None,
) -> list[Tensor | None]:
    """Return the context entries that a policy keeps.

    Args:
        input_ids: The context, `[B, T]`, padded on the left.
        policy: A policy or its spelling.
        budget: As in `attach`.
        attention_mask: `[B, T]`; None: no padding.
        seed: Seed of policies that draw noise.
        pixels: The processor's outputs for the context's images and videos: `pixel_values`, `image_grid_thw` and
            others.
        following: Question and answer after the context, `[B, n]`, for a policy that sees them (`Policy.is_informed`).

    Returns:
        Per layer of the model, bool `[B, H, T]` on `input_ids.device`, False for padding; None for sliding-window
        layers.

    Raises:
        ValueError: As `attach`, or the context shows images and there are no pixels.
    """
    _check_ids(input_ids)
    visual = torch.tensor(visual_ids(model), dtype=torch.int64, device=input_ids.device)
    if not pixels and len(visual) and bool(torch.isin(input_ids, visual).any()):
        raise UserError("the context has image or video tokens; give pixels, the processor's other outputs")
    with attach(model, policy, budget, seed=seed) as cache:
        if following is not None:
            cache.following = dict.fromkeys(("full", "reference"), following)
        if pixels:
            forward(model, cache, input_ids, attention_mask, pixels=pixels)
        else:
            decoder = decoder_of(model)
            decoder(input_ids=input_ids, attention_mask=attention_mask, **cache_inputs(decoder, cache))
        return [None if layer_mask is None else layer_mask.to(input_ids.device) for layer_mask in cache.kept()]


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
    """Return the entries that the first generated token reads, including its own.

    Args:
        input_ids: The context, `[B, T]`, padded on the left.
        policy: A policy with a reader, or its spelling.
        budget: As in `attach`.
        attention_mask: `[B, T]`; None: no padding.
        seed: Seed of policies that draw noise.

    Returns:
        Per layer of the model, bool `[B, H, T + 1]` on `input_ids.device`, False for padding; None for sliding-window
        layers.

    Raises:
        ValueError: As `attach`, or the policy has no reader.
    """
    parsed_policy = make_policy(policy)
    if parsed_policy.read is None:
        raise UserError(f"{parsed_policy} reads all that it holds; use kvbench.kept to see what that is")
    _check_ids(input_ids)
    layer_masks: dict[int, Tensor] = {}

    def record_masks(forward: Forward, layer: RaggedLayer, step: Step) -> None:
        if step.read:
            padded_masks = [
                F.pad(read_mask[:, 0], (forward.first_column + 1 - read_mask.shape[-1], 0)) for read_mask in step.read
            ]
            layer_masks[step.index] = torch.stack(padded_masks).to(input_ids.device)

    with _attached(model, parsed_policy, Budget.parse(budget), seed=seed, watch=record_masks) as cache:
        token_ids, token_mask = input_ids, attention_mask
        for _ in range(2):  # the context, then the first token of the answer
            inputs = cache_inputs(model, cache)
            logits = model(input_ids=token_ids, attention_mask=token_mask, logits_to_keep=1, **inputs).logits
            token_ids = logits[:, -1:].argmax(-1)
            token_mask = None if token_mask is None else F.pad(token_mask, (0, 1), value=1)
    mask_iterator = iter([layer_masks[layer_index] for layer_index in sorted(layer_masks)])
    return [next(mask_iterator) if isinstance(layer, RaggedLayer) else None for layer in cache.layers]
