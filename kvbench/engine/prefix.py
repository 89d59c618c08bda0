"""One prefill that serves many cells."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.clock import now
from kvbench.engine.decide import Cut
from kvbench.engine.draw import row_seeds
from kvbench.engine.driver import forward, start_observers
from kvbench.engine.evict import compress_cache, start_upkeep
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import decoder_of, model_info
from kvbench.engine.pruning import Pruning, watching
from kvbench.engine.replay import observe_replays
from kvbench.engine.shared import Shared
from kvbench.engine.upkeep import first_budget, goes_on
from kvbench.moments import Moment
from kvbench.plugin import Policy, Replay
from kvbench.view import ModelInfo, Need

_ANY = Budget.parse("full")
_TOGETHER = 1 << 22
"""Most scores that are held at once when a policy decides for several budgets."""


@dataclass(frozen=True)
class Compression:
    """The compression that one cell asks for.

    Attributes:
        policy: Chooses the entries.
        budget: How many it keeps.
        moment: When the cache is compressed.
        seed: Noise seed of the run.
        whole: Tokens of the whole prompt, if the prefix is only its first chunk.
        tail: Tokens of the prompt that come after the last cut; they count in the budget.
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
        needs: Observations that the policies of the cells need.
        pruning: Visual tokens to prune, for the only cell of this prefix.
    """

    def __init__(
        self, model: nn.Module, needs: Iterable[Need], pruning: Pruning | None = None
    ) -> None:
        self.model = model
        self.info: ModelInfo = model_info(model)
        self.cache = RaggedCache(decoder_of(model).config)
        start_observers(self.cache, frozenset(needs), self.info)
        self.cache.pruning = pruning
        self.device = next(model.parameters()).device
        self.seconds = 0.0
        self._shared: dict[tuple[int, Moment, bool, int], Shared] = {}
        self._seeds: dict[int, Tensor] = {}
        self._replays = 0.0

    @property
    def spoiled(self) -> bool:
        """Whether a failed policy may have changed the prefix in place."""
        return self.cache.spoiled

    def extend(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        pixels: Mapping[str, Tensor] | None = None,
        *,
        question: bool = False,
    ) -> Tensor:
        """Prefill more tokens `[B, n]`; return the logits after the last, `[B, vocabulary]`.

        Args:
            ids: The tokens, padded on the left.
            mask: Which of them are tokens, `[B, n]`; None: all.
            pixels: The media among them; see `kvbench.engine.vision.Vision`.
            question: Whether the tokens are the question about what is in the cache.
        """
        self.cache.asked = ids.shape[1] if question else 0
        begin = now(ids.device)
        with watching(self.model, self.cache.pruning if pixels else None) as self.cache.tower:
            logits = forward(self.model, self.cache, ids, mask, pixels=pixels)
        self._shared, self._seeds, self._replays = {}, {}, 0.0
        self.seconds += now(ids.device) - begin
        return logits

    def fork(self) -> Prefix:
        """Return a prefix that can be extended on its own; it shares the K/V so far."""
        return self._around(self.cache.fork(), self.seconds)

    @property
    def separable(self) -> bool:
        """Whether the batch can be split into its sequences: all observers must be separable."""
        return self.cache.separable

    def sequence(self, row: int) -> Prefix:
        """Return the prefix of one sequence of the batch, with its share of the seconds."""
        cache, tokens = self.cache.sequence(row), self.cache.lengths()
        return self._around(cache, self.seconds * float(tokens[row] / tokens.sum()))

    def _around(self, cache: RaggedCache, seconds: float) -> Prefix:
        """A prefix with another cache."""
        other = object.__new__(Prefix)
        other.model, other.info, other.device = self.model, self.info, self.device
        other.cache, other.seconds = cache, seconds
        other._shared, other._seeds, other._replays = {}, {}, 0.0
        return other

    def compress(
        self, wanted: Sequence[Compression], reserve: int | None = None
    ) -> list[RaggedCache]:
        """Make one packed cache per compression; `cache.seconds` is the time that it took.

        A score is computed once for all compressions, unless it reads the budget. Budgets of one
        policy are decided and packed together. If a policy fails, `spoiled` tells whether it may
        have changed the prefix.

        Args:
            wanted: The compressions.
            reserve: Free rows behind every segment, for tokens that will be appended.

        Raises:
            BudgetError: A policy did not keep exactly its budget.
        """
        made: dict[int, RaggedCache] = {}
        for group in self._together(wanted):
            caches = self._compress([wanted[i] for i in group], reserve)
            made.update(zip(group, caches, strict=True))
        return [made[i] for i in range(len(wanted))]

    def _together(self, wanted: Sequence[Compression]) -> list[list[int]]:
        """Group compressions that can be decided together, by their index."""
        groups: dict[Hashable, list[int]] = {}
        for i, one in enumerate(wanted):
            policy = one.policy
            alone = self.cache.batch > 1 or not policy.evicts or policy.merge is not None
            alone = alone or goes_on(policy, one.moment) or policy.recodes
            groups.setdefault(i if alone else replace(one, budget=_ANY), []).append(i)
        parts = []
        for group in groups.values():
            most = self._at_once(wanted[group[0]].policy)
            parts += [group[start : start + most] for start in range(0, len(group), most)]
        return parts

    def _at_once(self, policy: Policy) -> int:
        """For how many budgets a policy may decide together: each needs scores of its own."""
        entries = self.cache.get_seq_length() * self.info.kv_heads
        if policy.allocate.scope == "model":
            entries *= self.info.layers
        return max(1, _TOGETHER // entries)

    def _compress(self, wanted: Sequence[Compression], reserve: int | None) -> list[RaggedCache]:
        """Carry out one compression, or several that differ only in their budget."""
        replays = self._replay(wanted[0].policy)
        began = now(self.device)
        lengths, visual = self.cache.lengths().tolist(), self.cache.visual_tokens()
        one = wanted[0]
        policy, moment = one.policy, one.moment
        final = one.whole is None or one.whole - one.tail <= min(lengths)
        coming = one.tail if final else 0
        cut = Cut(
            policy,
            self.cache,
            self.info,
            moment,
            [
                first_budget(policy, each.budget, moment, n, one.whole, coming, v)
                for each in wanted
                for n, v in zip(lengths, visual, strict=True)
            ],
            self._row_seeds(one.seed),
            self._shared.setdefault((one.seed, moment, final, coming), Shared()),
            final=final,
            coming=coming,
        )
        made = self.cache.fork()
        for layer in made.ragged:
            layer.reset()
        try:
            compress_cache(cut, made, reserve)
        except BaseException:
            cut.note_changes()
            raise
        caches = self._split(made) if cut.spread else [made]
        for each, cache in zip(wanted, caches, strict=True):
            later = [
                each.budget.per_head(one.whole or n, v)
                for n, v in zip(lengths, visual, strict=True)
            ]
            fixed = moment == "decode" or policy.read is not None
            if fixed and each.budget.absolute is not None:
                later = [each.budget.absolute] * len(lengths)
            start_upkeep(cut, cache, later)
        seconds = now(self.device) - began - cut.shared_seconds
        for cache in caches:
            cache.seconds = seconds / len(caches) + cut.shared_seconds + cut.saved + replays
        return caches

    def _replay(self, policy: Policy) -> float:
        """Make the replays if a policy needs one; return the seconds that they took, at any time.

        All replays that any cell needs are made together and booked with each of these cells.
        """
        if not any(isinstance(need, Replay) for need in policy.needs):
            return 0.0
        began = now(self.device)
        if observe_replays(self.model, self.cache, self.info):
            self._replays += now(self.device) - began
        return self._replays

    def _split(self, made: RaggedCache) -> list[RaggedCache]:
        """Part a cache with a row for every budget; the parts share its memory."""
        caches = []
        counts = zip(made.budget_entries or (), made.held_entries or (), strict=True)
        for row, (budget, held) in enumerate(counts):
            one = self.cache.fork()
            packed = iter([layer.sequence(row) for layer in made.ragged])
            one.layers = [next(packed) if isinstance(x, RaggedLayer) else x for x in one.layers]
            one.budget_entries, one.held_entries = [budget], [held]
            caches.append(one)
        return caches

    def _row_seeds(self, seed: int) -> Tensor:
        """Noise seeds of the sequences."""
        if seed not in self._seeds:
            self._seeds[seed] = row_seeds(self.cache, seed)
        return self._seeds[seed]
