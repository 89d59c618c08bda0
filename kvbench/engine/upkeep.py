"""What goes on after the first compression: observation, and the cuts of the later moments.

At moments `decode`, `chunked` and `turns` a cache is cut more than once, and what a later cut goes
by has to be kept beside the entries from forward to forward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from kvbench.moments import LATER, Moment
from kvbench.view_needs import AttentionMass, ModelInfo, PerToken

if TYPE_CHECKING:
    from kvbench.budget import Budget
    from kvbench.engine.attachment import Forward, Step
    from kvbench.engine.cache import RaggedCache
    from kvbench.engine.decide import Cut
    from kvbench.engine.layer import RaggedLayer
    from kvbench.plugin import Policy


def goes_on(policy: Policy, moment: Moment) -> bool:
    """Whether a cache of this policy may be cut again after its first compression."""
    return moment in LATER and not policy.is_full


def spare(policy: Policy, moment: Moment) -> int:
    """Entries beyond the budget, per (layer, head) on average, at which a row is cut."""
    return max(1, policy.buffer) if moment == "decode" else 1


def tail_of(policy: Policy, budget: Budget, tokens: int) -> int:
    """Tokens of a prompt that a chunked prefill leaves for after its last cut; see `Score.tail`.

    Where the whole prompt fits in the budget nothing is cut and there is no tail; else it leaves at
    least one entry per (layer, head) to the tokens before it.
    """
    allowed = budget.per_head(tokens)
    if policy.score is None or policy.is_full or tokens <= allowed:
        return 0
    return min(policy.score.tail, allowed - 1)


def first_budget(
    policy: Policy,
    budget: Budget,
    moment: Moment,
    tokens: int,
    whole: int | None = None,
    coming: int = 0,
) -> int:
    """Mean entries per (layer, head) that the first compression leaves of a sequence.

    Args:
        policy: The policy.
        budget: Its budget.
        moment: When.
        tokens: What the sequence has seen.
        whole: Tokens of the whole prompt, where these are its first chunk.
        coming: Tokens that come after the last cut, where this is it.
    """
    if policy.is_full or moment == "turns":
        return tokens
    allowed = budget.per_head(whole or tokens) - coming
    return min(allowed, tokens) if tokens >= allowed + spare(policy, moment) else tokens


@dataclass
class Upkeep:
    """The rest of a cache's life after its first compression; all rows have one policy.

    Attributes:
        policy: The policy.
        info: The model.
        moment: `decode`: a row that holds `budget + buffer` entries per (layer, head) is cut back
            when a forward ends; `chunked`: every row beyond its budget is; `turns`: when `cut` is
            called.
        budget: Mean entries per (layer, head) that a cut leaves, for every row.
        seeds: Noise seeds of the rows, int64 `[B]`.
        final: Whether the chunk that comes is the last before its prefill's last cut.
        coming: Tokens that come after that cut.
        peak: Most entries that each row has held at once, over all layers and heads.
        room: Most bytes that were allocated for each row at once, once it has grown.
        seconds: What the cuts took.
    """

    policy: Policy
    info: ModelInfo
    moment: Moment
    budget: list[int]
    seeds: Tensor
    final: bool = True
    coming: int = 0
    peak: list[int] = field(default_factory=list)
    room: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def start(cls, cut: Cut, cache: RaggedCache, budget: list[int]) -> None:
        """Give a cache that was just packed what goes on; free what only its prefill needed.

        Args:
            cut: The first compression.
            cache: What it made.
            budget: Mean entries per (layer, head) that later cuts leave, for every row.
        """
        policy = cut.policy
        if not goes_on(policy, cut.moment):
            cache.observers, cache.token_observers = {}, {}
            return
        held = [cache.live_entries(row) for row in range(cache.batch)]
        cache.upkeep = cls(policy, cut.info, cut.moment, budget, cut.seeds, peak=held)
        mine = policy.needs
        cache.observers = {
            n: o for n, o in cache.observers.items() if n in mine and not n.per_entry
        }
        cache.token_observers = {n: o for n, o in cache.token_observers.items() if n in mine}

    def before(self, forward: Forward) -> None:
        """Prepare one forward on the cache."""
        needs = [n for n in self.policy.needs if isinstance(n, AttentionMass)]
        forward.powers = tuple(sorted({n.power for n in needs}))
        forward.on_layer = self.on_layer

    def on_layer(self, forward: Forward, layer: RaggedLayer, step: Step) -> None:
        """Take in what the attention of one layer saw."""
        from kvbench.engine.decide import Cut
        from kvbench.engine.observing import observe

        cache = forward.cache
        observe(cache, layer, step)
        for need in self.policy.needs:
            if isinstance(need, AttentionMass):
                layer.accumulate(need, step.mass[need.power])
            elif isinstance(need, PerToken):
                new = need.measure(step.index, step.hidden, step.key, step.value, self.info)
                layer.write_new(need, new)
        score = self.policy.score
        if score is not None and score.extras:
            cut = Cut(self.policy, cache, self.info, self.moment, self.budget, self.seeds)
            view = cut.view(layer, step.index)
            score.step(view)
            layer.store_extras(view.extras)

    def after(self, cache: RaggedCache) -> None:
        """Cut what one forward has made due."""
        held = [cache.live_entries(row) for row in range(cache.batch)]
        self.peak = [max(p, h) for p, h in zip(self.peak, held, strict=True)]
        taken = [cache.allocated_bytes(row) for row in range(cache.batch)]
        self.room = [max(p, h) for p, h in zip(self.room or taken, taken, strict=True)]
        heads = self.info.layers * self.info.kv_heads
        if self.moment == "decode":
            least = heads * spare(self.policy, self.moment)
            due = [r for r, h in enumerate(held) if h >= heads * self.budget[r] + least]
            if due:
                self.cut(cache, due)
        elif self.moment == "chunked":
            self.restore(cache, range(cache.batch))

    def restore(self, cache: RaggedCache, rows: Iterable[int]) -> None:
        """Cut those of the rows that hold more than their budget."""
        heads = self.info.layers * self.info.kv_heads
        due = [row for row in rows if cache.live_entries(row) > heads * self.budget[row]]
        if due:
            self.cut(cache, due)

    def cut(self, cache: RaggedCache, rows: Sequence[int]) -> None:
        """Cut rows back to their budgets.

        Raises:
            BudgetError: The policy did not meet its budget to the entry.
        """
        from kvbench.engine.decide import Cut, now
        from kvbench.engine.evict import cut_back

        began = now(self.seeds.device)
        # On a CPU every row is cut alone, so that its bits do not depend on its company.
        apart = cache.valid is not None and cache.valid.device.type == "cpu"
        groups = [[row] for row in rows] if apart else self._alike(cache, rows)
        cut_back(
            [
                Cut(
                    self.policy,
                    cache,
                    self.info,
                    self.moment,
                    [self.budget[r] for r in group],
                    self.seeds,
                    rows=group,
                    final=self.final,
                    coming=self.coming,
                )
                for group in groups
            ],
            cache,
        )
        self.seconds += now(self.seeds.device) - began

    def _alike(self, cache: RaggedCache, rows: Sequence[int]) -> list[list[int]]:
        """Rows that were cut before, and rows that were not: a merger's state has begun, or not."""
        state = cache.ragged[0].state
        begun = [r for r in rows if state and state[r]]
        fresh = [r for r in rows if not (state and state[r])]
        return [group for group in (begun, fresh) if group]

    def fork(self) -> Self:
        """Give an upkeep that may go on alone."""
        other = copy.copy(self)
        other.budget, other.peak, other.room = [*self.budget], [*self.peak], [*self.room]
        return other

    @classmethod
    def stack(cls, parts: Sequence[Upkeep]) -> Upkeep:
        """Put the rows of several side by side; they have one policy and moment."""
        out = copy.copy(parts[0])
        out.budget = [b for p in parts for b in p.budget]
        out.peak = [n for p in parts for n in p.peak]
        out.room = []
        out.seeds = torch.cat([p.seeds for p in parts])
        out.seconds = 0.0
        return out

    def take(self, rows: Sequence[int]) -> Upkeep:
        """Give the upkeep of some rows."""
        out = copy.copy(self)
        out.budget = [self.budget[r] for r in rows]
        out.peak = [self.peak[r] for r in rows]
        out.room = [self.room[r] for r in rows] if self.room else []
        out.seeds = self.seeds[torch.tensor(rows, device=self.seeds.device)]
        return out
