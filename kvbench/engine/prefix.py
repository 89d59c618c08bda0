"""One prefill that serves many cells."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor, nn

from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.clock import now
from kvbench.engine.decide import Cut
from kvbench.engine.draw import row_seeds
from kvbench.engine.driver import forward, start_observers
from kvbench.engine.evict import compress_cache, compress_together, start_upkeep
from kvbench.engine.integrity import Ledger
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import decoder_of, model_info
from kvbench.engine.pruning import Pruning, watching
from kvbench.engine.replay import observe_replays
from kvbench.engine.shared import Shared
from kvbench.engine.upkeep import first_budget, goes_on
from kvbench.errors import BudgetError, out_of_memory
from kvbench.moments import Moment
from kvbench.plugin import Policy, Replay
from kvbench.view import ModelInfo, Need

_ANY = Budget.parse("full")
_TOGETHER = 1 << 22
"""Most scores that are held at once when a policy decides for several budgets."""

_PACKED = 1 << 24
"""Most decisions, one a byte, that are held at once to pack what several policies keep.

Packing together saves calls, which count where contexts and models are small.
"""


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
        self._forget()

    def _forget(self) -> None:
        """Forget what the cells share."""
        self._ledger = Ledger()
        self._shared: dict[tuple[int, Moment, bool, int], Shared] = {}
        self._seeds: dict[int, Tensor] = {}
        self._replays = 0.0

    @property
    def spoiled(self) -> bool:
        """Whether a policy has changed the prefix in place."""
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
        self._forget()
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
        other._forget()
        return other

    def compress(
        self, wanted: Sequence[Compression], reserve: int | None = None
    ) -> list[RaggedCache]:
        """Make one packed cache per compression; `cache.seconds` is the time that it took.

        A score is computed once for all compressions, unless it reads the budget. Budgets of one
        policy are decided together, and what all of them keep is packed in one go. If a policy
        fails, `spoiled` tells whether it has changed the prefix.

        Args:
            wanted: The compressions.
            reserve: Free rows behind every segment, for tokens that will be appended.

        Raises:
            BudgetError: A policy did not keep exactly its budget, or changed what it was shown.
        """
        made: dict[int, RaggedCache] = {}
        try:
            for groups in self._packings(wanted):
                caches = self._compress([[wanted[i] for i in group] for group in groups], reserve)
                made.update(zip(chain.from_iterable(groups), caches, strict=True))
        except (Exception, SystemExit) as error:
            self._check_shared(wanted, error)
            raise
        self._check_shared(wanted)
        return [made[i] for i in range(len(wanted))]

    def _check_shared(
        self, wanted: Sequence[Compression], error: BaseException | None = None
    ) -> None:
        """Check that what the cells share is as it was.

        Args:
            wanted: The compressions since the last check.
            error: What they have raised; a change is the more helpful reason.

        Raises:
            BudgetError: A policy changed it.
        """
        if name := self._ledger.changed():
            self.cache.spoiled = True
            if error is None or not out_of_memory(error):
                policies = " or ".join(dict.fromkeys(str(one.policy) for one in wanted))
                text = f"{policies} changed {name} in place; change a copy instead"
                raise BudgetError(text) from error

    def _packings(self, wanted: Sequence[Compression]) -> list[list[list[int]]]:
        """Group compressions that are packed together; groups of them are decided together.

        Returns:
            For every packing, for every decision, the indices of its compressions.
        """
        alone: list[list[list[int]]] = []
        groups: dict[Hashable, list[int]] = {}
        for i, one in enumerate(wanted):
            if self._plain(one):
                groups.setdefault(replace(one, budget=_ANY), []).append(i)
            else:
                alone.append([[i]])
        packings: list[list[list[int]]] = []
        room = 0
        for indices in groups.values():
            policy = wanted[indices[0]].policy
            most = self._at_once(policy)
            for start in range(0, len(indices), most):
                group = indices[start : start + most]
                if not packings or len(group) > room:
                    packings.append([])
                    room = max(1, _PACKED // (self._entries * self.info.layers))
                packings[-1].append(group)
                room -= len(group)
        return [*alone, *packings]

    def _plain(self, one: Compression) -> bool:
        """Whether a compression leaves a choice of the entries as they are, and nothing else."""
        policy = one.policy
        changes = policy.merge is not None or policy.recodes or policy.read is not None
        return self.cache.batch == 1 and not changes and not goes_on(policy, one.moment)

    @property
    def _entries(self) -> int:
        """Entries of a layer."""
        return self.cache.get_seq_length() * self.info.kv_heads

    def _at_once(self, policy: Policy) -> int:
        """For how many budgets a policy may decide together: each needs scores of its own."""
        if not policy.evicts:
            return 1
        scored = self.info.layers if policy.allocate.scope == "model" else 1
        return max(1, _TOGETHER // (self._entries * scored))

    def _compress(
        self, groups: Sequence[Sequence[Compression]], reserve: int | None
    ) -> list[RaggedCache]:
        """Carry out compressions that are packed together; those of a group differ in budget."""
        replays = [self._replay(group[0].policy) for group in groups]
        began = now(self.device)
        # Read once for all cells: reading a length makes a GPU wait.
        sizes = [*zip(self.cache.lengths().tolist(), self.cache.visual_tokens(), strict=True)]
        cuts = [self._cut(group, sizes) for group in groups]
        made = self.cache.fork()
        for layer in made.ragged:
            layer.reset()
        decided = [0.0] * len(cuts)
        if len(cuts) == 1:
            compress_cache(cuts[0], made, reserve)
        else:
            decided = compress_together(cuts, made, reserve)
        caches = self._split(made) if sum(map(len, groups)) > 1 else [made]
        left = iter(caches)
        for cut, group in zip(cuts, groups, strict=True):
            for one in group:
                start_upkeep(cut, next(left), _later(one, sizes))
        packing = (now(self.device) - began - sum(decided)) / len(caches)
        left = iter(caches)
        for cut, group, seconds, replay in zip(cuts, groups, decided, replays, strict=True):
            shared = cut.shared_seconds + cut.saved + replay
            for _ in group:
                own = (seconds - cut.shared_seconds) / len(group)
                next(left).seconds = own + packing + shared
        return caches

    def _cut(self, group: Sequence[Compression], sizes: Sequence[tuple[int, int]]) -> Cut:
        """The decision about compressions that differ in their budget only.

        Args:
            group: The compressions.
            sizes: Tokens and visual tokens of every sequence.
        """
        one = group[0]
        final = one.whole is None or one.whole - one.tail <= min(n for n, _ in sizes)
        coming = one.tail if final else 0
        return Cut(
            one.policy,
            self.cache,
            self.info,
            one.moment,
            [
                first_budget(one.policy, each.budget, one.moment, n, one.whole, coming, v)
                for each in group
                for n, v in sizes
            ],
            self._row_seeds(one.seed),
            self._shared.setdefault((one.seed, one.moment, final, coming), Shared(self._ledger)),
            final=final,
            coming=coming,
        )

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
            self._ledger.add("seed", self._seeds[seed])
        return self._seeds[seed]


def _later(one: Compression, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Mean entries per (layer, head) that cuts after the first one leave every sequence.

    Args:
        one: The compression.
        sizes: Tokens and visual tokens of every sequence.
    """
    fixed = one.moment == "decode" or one.policy.read is not None
    if fixed and one.budget.absolute is not None:
        return [one.budget.absolute] * len(sizes)
    return [one.budget.per_head(one.whole or n, v) for n, v in sizes]
