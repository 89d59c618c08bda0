"""One prefill that serves many cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvbench.budget import Budget
from kvbench.engine.attachment import Forward, Step, attached
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decide import Cut, Shared, now, row_seeds
from kvbench.engine.evict import cut_cache
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import decoder_of, model_info
from kvbench.engine.observing import observe, start_observers, token_watcher
from kvbench.engine.upkeep import Upkeep, first_budget
from kvbench.plugin import ModelInfo, Moment, Need, Policy


@contextmanager
def engine(model: nn.Module) -> Iterator[None]:
    """Put kvbench's attention into a model for as long as prefixes and their caches are used."""
    watch = token_watcher(model)

    def before(cache: RaggedCache, forward: Forward) -> None:
        if cache.upkeep is not None:
            cache.upkeep.before(forward)
        else:
            forward.on_layer = _observe_dense

    def after(cache: RaggedCache, forward: Forward) -> None:
        watch(cache, forward)
        if cache.upkeep is not None:
            cache.upkeep.after(cache)

    with attached(model, before, after):
        yield


def _observe_dense(forward: Forward, layer: RaggedLayer, step: Step) -> None:
    if not layer.packed:
        observe(forward.cache, layer, step)


def forward(
    model: nn.Module,
    cache: RaggedCache,
    ids: Tensor,
    mask: Tensor | None = None,
    last: int | None = None,
) -> Tensor:
    """Run new tokens on a cache.

    Args:
        model: The model, inside `engine`.
        cache: Where they are appended.
        ids: New tokens `[B, n]`, padded on the left.
        mask: Which of the new columns are tokens, `[B, n]`; None: all.
        last: After how many of the last columns logits are wanted.

    Returns:
        Logits after the last token, `[B, vocabulary]`; with `last`, `[B, last, vocabulary]`.
    """
    if mask is not None and cache.valid is not None:
        mask = torch.cat([cache.valid, mask.bool()], 1)
    # Positions, and the mask of what is padded already, are the attachment's to give.
    logits: Tensor = model(
        input_ids=ids,
        attention_mask=None if mask is None else mask.long(),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=last or 1,
    ).logits
    return logits[:, -1] if last is None else logits


@dataclass(frozen=True)
class Request:
    """One cell's wish: compress for this policy and budget at this moment.

    Attributes:
        whole: Tokens of the whole prompt, where the prefix is only its first chunk.
        tail: How many of these come after the last cut, and count in the budget.
    """

    policy: Policy
    budget: Budget
    moment: Moment
    seed: int
    whole: int | None = None
    tail: int = 0


class Prefix:
    """Full K/V and observations of a context, shared by all cells and never changed by them.

    Args:
        model: The model, inside `engine`.
        needs: What the cells' policies need observed.
    """

    def __init__(self, model: nn.Module, needs: Iterable[Need]) -> None:
        self.model = model
        self.info: ModelInfo = model_info(model)
        self.cache = RaggedCache(decoder_of(model).config)
        start_observers(self.cache, frozenset(needs), self.info)
        self.device = next(model.parameters()).device
        self.seconds = 0.0
        self._shared: dict[tuple[int, Moment, bool, int], Shared] = {}

    def extend(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Prefill further tokens `[B, n]`; give the logits after the last, `[B, vocabulary]`."""
        begin = now(ids.device)
        logits = forward(self.model, self.cache, ids, mask)
        self._shared = {}
        self.seconds += now(ids.device) - begin
        return logits

    def fork(self) -> Prefix:
        """Give a prefix that may be extended alone (K/V so far are shared)."""
        other = object.__new__(Prefix)
        other.model, other.info, other.seconds = self.model, self.info, self.seconds
        other.device = self.device
        other.cache = self.cache.fork()
        other._shared = {}
        return other

    def compress(self, cells: Sequence[Request], reserve: int | None = None) -> list[RaggedCache]:
        """Make one packed cache per cell; `cache.seconds` is what it took.

        Scores that cells share are computed once; a score that reads the budget is not shared.

        Args:
            cells: What to make.
            reserve: Rows of room per segment for what will be appended.

        Raises:
            BudgetError: A policy did not meet its budget.
        """
        lengths = self.cache.lengths().tolist()
        out = []
        for cell in cells:
            begin = now(self.device)
            policy, moment = cell.policy, cell.moment
            final = cell.whole is None or cell.whole - cell.tail <= min(lengths)
            coming = cell.tail if final else 0
            wish = (policy, cell.budget, moment)
            budget = [first_budget(*wish, n, cell.whole, coming) for n in lengths]
            seeds = row_seeds(self.cache, cell.seed)
            shared = self._shared.setdefault((cell.seed, moment, final, coming), Shared())
            cut = Cut(
                policy,
                self.cache,
                self.info,
                moment,
                budget,
                seeds,
                shared,
                final=final,
                coming=coming,
            )
            made = self.cache.fork()
            for layer in made.ragged:
                layer.reset()
            cut_cache(cut, made, reserve)
            allowed = [cell.budget.per_head(cell.whole or n) for n in lengths]
            if moment == "decode" and cell.budget.tokens is not None:
                allowed = [cell.budget.tokens] * len(lengths)
            Upkeep.start(cut, made, allowed)
            made.seconds = now(self.device) - begin + cut.saved
            out.append(made)
        return out
