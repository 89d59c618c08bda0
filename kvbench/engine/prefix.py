"""A prefilled prefix that serves many cells."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor, nn

from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decide import EvictionStep
from kvbench.engine.draw import row_seeds
from kvbench.engine.driver import forward, start_observers
from kvbench.engine.evict import compress_cache, compress_together, start_eviction_state
from kvbench.engine.eviction_state import first_budget, goes_on
from kvbench.engine.integrity import Ledger
from kvbench.engine.linear import combine_states
from kvbench.engine.models import decoder_of, model_info
from kvbench.engine.observers import observer_for
from kvbench.engine.pruning import Pruning, watching
from kvbench.engine.replay import UNTOLD, observe_replays
from kvbench.engine.shared import can_share
from kvbench.engine.showing import PrefixCache
from kvbench.engine.threads import now
from kvbench.errors import BudgetError, UserError, out_of_memory
from kvbench.moments import Moment
from kvbench.plugin import AnswerAttention, Policy, Replay
from kvbench.view import ModelInfo, Need

_ANY = Budget.parse("full")
_TOGETHER = 1 << 22
"""Maximum number of scores held at once when a policy decides for several budgets."""

_PACKED = 1 << 24
"""Maximum number of decisions (one byte each) held at once to pack the entries of several policies.

Packing together saves calls, which matters for short contexts and small models.
"""


@dataclass(frozen=True)
class Compression:
    """The compression requested by one cell.

    Attributes:
        policy: Chooses the entries.
        budget: Number of entries to keep.
        moment: When the cache is compressed.
        seed: Noise seed of the run.
        prompt_length: Tokens of the whole prompt, if the prefix is only its first chunk.
        trailing_tokens: Prompt tokens after the last eviction step, counted in the budget.
    """

    policy: Policy
    budget: Budget
    moment: Moment
    seed: int
    prompt_length: int | None = None
    trailing_tokens: int = 0


class Prefix:
    """Full K/V and observations of a context, shared by all cells and never changed by them.

    Args:
        model: The model, inside `engine`.
        needs: Observations required by the cells' policies. Those of what follows are left to `told`.
        pruning: Visual token pruning, for the only cell of this prefix.

    Attributes:
        remake: Prefills the same again. With it, a prefix that a policy has modified in place is
            restored before its next use.
    """

    remake: Callable[[], Prefix] | None = None

    def __init__(self, model: nn.Module, needs: Iterable[Need], pruning: Pruning | None = None) -> None:
        self.model = model
        self.info: ModelInfo = model_info(model)
        self.cache = RaggedCache(decoder_of(model).config)
        start_observers(self.cache, frozenset(need for need in needs if not need.informed), self.info)
        self.cache.pruning = pruning
        self.device = next(model.parameters()).device
        self.seconds = 0.0
        self._forget()

    def _forget(self) -> None:
        """Discard the state shared by the cells."""
        self._ledger = Ledger()
        self._shared: dict[tuple[int, Moment, bool, int], PrefixCache] = {}
        self._seeds: dict[int, Tensor] = {}
        self._replays = 0.0
        self._lent: list[list[tuple[Tensor, Tensor]]] = []  # dense K and V that cells read, by layer

    @property
    def modified_in_place(self) -> bool:
        """Return whether a policy has changed the prefix in place."""
        return self.cache.modified_in_place

    def restore(self) -> None:
        """Prefill again if a policy has modified the prefix in place; cells that read its K and V get the same ones."""
        if self.modified_in_place and self.remake is not None:
            lent = self._lent
            self.__dict__.update(vars(self.remake()) | {"remake": self.remake, "_lent": lent})
            for pairs in lent:
                for (key, value), layer in zip(pairs, self.cache.ragged, strict=True):
                    assert layer.key is not None and layer.value is not None
                    key.copy_(layer.key)
                    value.copy_(layer.value)

    @property
    def is_lent(self) -> bool:
        """Return whether cells read their entries in this prefix."""
        return bool(self._lent)

    def lends_to(self, policy: Policy, moment: Moment) -> bool:
        """Return whether cells of a policy may read their entries in this prefix instead of copies.

        They may if they only select entries and the prefix can be restored. What other cells keep does not matter, so
        that a cell is laid out in the same way whatever is run beside it.
        """
        pairs = self._dense_pairs
        if not pairs or not self._plain(policy, moment) or not can_share(*pairs[0], self.cache.ragged[0].scale):
            return False
        return self.remake is not None or self._has_lent(pairs)

    @property
    def _dense_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return K and V of every layer that has them."""
        return [
            (layer.key, layer.value) for layer in self.cache.ragged if layer.key is not None and layer.value is not None
        ]

    def _has_lent(self, pairs: list[tuple[Tensor, Tensor]]) -> bool:
        """Return whether cells read the K and V that this prefix has now."""
        return bool(self._lent) and self._lent[-1][0][0] is pairs[0][0]

    def _lend(self) -> None:
        """Remember that cells read entries in this prefix."""
        pairs = self._dense_pairs
        if not self._has_lent(pairs):
            self._lent.append(pairs)

    def extend(
        self,
        token_ids: Tensor,
        token_mask: Tensor | None = None,
        pixels: Mapping[str, Tensor] | None = None,
        *,
        question: bool = False,
        logit_count: int | None = None,
        token_count: int | None = None,
    ) -> Tensor:
        """Prefill more tokens `[B, n]`; return the logits after the last, `[B, vocabulary]`.

        Args:
            token_ids: The tokens, padded on the left.
            token_mask: Columns that are tokens, `[B, n]`; None: all.
            pixels: The media among them; see `kvbench.engine.vision.Vision`.
            question: Whether the tokens are the question about the cached context.
            logit_count: Number of last columns to return logits for, `[B, logit_count, vocabulary]`.
            token_count: As for `kvbench.engine.driver.forward`.
        """
        self.restore()
        self.remake = None
        self.cache.asked = token_ids.shape[1] if question else 0
        started = now(token_ids.device)
        with watching(self.model, self.cache.pruning if pixels else None) as self.cache.tower:
            logits = forward(
                self.model, self.cache, token_ids, token_mask, logit_count, pixels, token_count=token_count
            )
        self._forget()
        self.seconds += now(token_ids.device) - started
        return logits

    def told(self, policy: Policy, following: Mapping[str, Tensor]) -> Prefix:
        """Return a copy for a policy that may see what follows; see `RaggedCache.following`.

        It observes what the policy needs. Its informed needs are the only ones that the prefix itself lacks.
        """
        informed_prefix = self.fork()
        cache = informed_prefix.cache
        cache.following = following
        informed_needs = [need for need in policy.needs if need.informed]
        cache.observers = {need: observer for need, observer in cache.observers.items() if need in policy.needs}
        cache.observers |= {need: observer_for(need, self.info) for need in informed_needs}
        return informed_prefix

    def fork(self) -> Prefix:
        """Return a prefix that can be extended independently; it shares the K/V so far."""
        self.restore()
        return self._around(self.cache.fork(), self.seconds)

    @property
    def separable(self) -> bool:
        """Return whether the batch can be split by sequence: all observers must be separable."""
        return self.cache.separable

    def sequence(self, sequence_index: int) -> Prefix:
        """Return the prefix of one sequence of the batch, with its fraction of the seconds."""
        cache, token_counts = self.cache.sequence(sequence_index), self.cache.lengths()
        return self._around(cache, self.seconds * float(token_counts[sequence_index] / token_counts.sum()))

    def _around(self, cache: RaggedCache, seconds: float) -> Prefix:
        """Return a prefix with another cache."""
        new_prefix = copy.copy(self)
        new_prefix.cache, new_prefix.seconds, new_prefix.remake = cache, seconds, None
        new_prefix._forget()
        return new_prefix

    def compress(self, compressions: Sequence[Compression], reserve: int | None = None) -> list[RaggedCache]:
        """Return one packed cache per compression; `cache.seconds` is the compression time.

        A score is computed once for all compressions unless it depends on the budget. Budgets of one policy are decided
        together, and all their entries are packed at once. Caches that only select entries can read them in the K and V
        of this prefix, which then lives until the last of them is freed.

        Args:
            reserve: Free rows behind every segment, for tokens to be appended.

        Raises:
            BudgetError: A policy did not keep exactly its budget, or changed its inputs in place.
        """
        self.restore()
        packed_caches: dict[int, RaggedCache] = {}
        try:
            for groups in self._packings(compressions):
                caches = self._compress(
                    [[compressions[cell_index] for cell_index in group] for group in groups],
                    reserve,
                )
                packed_caches.update(zip(chain.from_iterable(groups), caches, strict=True))
        except (Exception, SystemExit) as error:
            self._check_shared(compressions, error)
            raise
        self._check_shared(compressions)
        return [packed_caches[cell_index] for cell_index in range(len(compressions))]

    def _check_shared(self, compressions: Sequence[Compression], error: BaseException | None = None) -> None:
        """Check that the state shared by the cells is unchanged.

        Args:
            compressions: The compressions since the last check.
            error: Their exception, if any; a modification in place is the more helpful reason.

        Raises:
            BudgetError: A policy modified the state in place.
        """
        if changed_name := self._ledger.changed():
            self.cache.modified_in_place = True
            if error is None or not out_of_memory(error):
                policies = " or ".join(dict.fromkeys(str(compression.policy) for compression in compressions))
                message = f"{policies} changed {changed_name} in place; change a copy instead"
                raise BudgetError(message) from error

    def _packings(self, compressions: Sequence[Compression]) -> list[list[list[int]]]:
        """Group compressions that are packed together; each group is split into joint decisions.

        Returns:
            Indices of compressions, by packing and decision.
        """
        single_packings: list[list[list[int]]] = []
        decision_groups: dict[Hashable, list[int]] = {}
        for cell_index, compression in enumerate(compressions):
            if self._plain(compression.policy, compression.moment):
                decision_groups.setdefault(replace(compression, budget=_ANY), []).append(cell_index)
            else:
                single_packings.append([[cell_index]])
        packings: list[list[list[int]]] = []
        free_groups = 0
        for indices in decision_groups.values():
            policy = compressions[indices[0]].policy
            group_size = self._at_once(policy)
            for group_start in range(0, len(indices), group_size):
                group = indices[group_start : group_start + group_size]
                if not packings or len(group) > free_groups:
                    packings.append([])
                    free_groups = max(1, _PACKED // (self._entries * self.info.layers))
                packings[-1].append(group)
                free_groups -= len(group)
        return [*single_packings, *packings]

    def _plain(self, policy: Policy, moment: Moment) -> bool:
        """Return whether a policy only selects entries and leaves them unchanged."""
        changes_entries = policy.merge is not None or policy.recodes or policy.read is not None
        return self.cache.batch == 1 and not changes_entries and not goes_on(policy, moment)

    @property
    def _entries(self) -> int:
        """Return the entries per layer (tokens x KV heads)."""
        return self.cache.get_seq_length() * self.info.kv_heads

    def _at_once(self, policy: Policy) -> int:
        """Return how many budgets a policy may decide at once: each needs its own scores."""
        if not policy.evicts:
            return 1
        scored_layers = self.info.layers if policy.allocate.scope == "model" else 1
        return max(1, _TOGETHER // (self._entries * scored_layers))

    def _compress(self, groups: Sequence[Sequence[Compression]], reserve: int | None) -> list[RaggedCache]:
        """Run compressions that are packed together; those of a group differ only in budget."""
        replays = [self._replay(group[0].policy) for group in groups]
        started = now(self.device)
        # Read once for all cells, because reading a length makes a GPU wait.
        token_sizes = [*zip(self.cache.lengths().tolist(), self.cache.visual_tokens(), strict=True)]
        eviction_steps = [self._cut(group, token_sizes) for group in groups]
        shares = reserve is not None and all(self.lends_to(group[0].policy, group[0].moment) for group in groups)
        if shares:
            self._lend()
        packed_cache = self.cache.fork()
        for layer in packed_cache.ragged:
            layer.reset()
        decide_seconds = [0.0] * len(eviction_steps)
        if len(eviction_steps) == 1:
            compress_cache(eviction_steps[0], packed_cache, reserve, shares=shares)
        else:
            decide_seconds = compress_together(eviction_steps, packed_cache, reserve, shares=shares)
        caches = self._split(packed_cache) if sum(map(len, groups)) > 1 else [packed_cache]
        cache_iterator = iter(caches)
        for eviction_step, group in zip(eviction_steps, groups, strict=True):
            for compression in group:
                start_eviction_state(eviction_step, next(cache_iterator), _later(compression, token_sizes))
        packing = (now(self.device) - started - sum(decide_seconds)) / len(caches)
        cache_iterator = iter(caches)
        for eviction_step, group, seconds, replay in zip(eviction_steps, groups, decide_seconds, replays, strict=True):
            shared_seconds = eviction_step.shared_seconds + eviction_step.saved + replay
            for _ in group:
                cell_seconds = (seconds - eviction_step.shared_seconds) / len(group)
                next(cache_iterator).seconds = cell_seconds + packing + shared_seconds
        return caches

    def _cut(self, group: Sequence[Compression], token_sizes: Sequence[tuple[int, int]]) -> EvictionStep:
        """Return the eviction step of compressions that differ only in their budget.

        Args:
            token_sizes: Tokens and visual tokens of every sequence.
        """
        compression = group[0]
        is_last_chunk = (
            compression.prompt_length is None
            or compression.prompt_length - compression.trailing_tokens
            <= min(token_count for token_count, _ in token_sizes)
        )
        reserved_tokens = compression.trailing_tokens if is_last_chunk else 0
        return EvictionStep(
            compression.policy,
            self.cache,
            self.info,
            compression.moment,
            [
                first_budget(
                    compression.policy,
                    group_member.budget,
                    compression.moment,
                    token_count,
                    compression.prompt_length,
                    reserved_tokens,
                    visual_count,
                )
                for group_member in group
                for token_count, visual_count in token_sizes
            ],
            self._row_seeds(compression.seed),
            self._shared.setdefault(
                (compression.seed, compression.moment, is_last_chunk, reserved_tokens),
                PrefixCache(self._ledger),
            ),
            final=is_last_chunk,
            coming=reserved_tokens,
        )

    def _replay(self, policy: Policy) -> float:
        """Run the replays if the policy needs one; return their time in seconds, whenever they ran.

        The replays of all cells run together, and each of these cells is charged their full time.
        """
        if not any(isinstance(need, Replay | AnswerAttention) for need in policy.needs):
            return 0.0
        if policy.is_informed and not self.cache.following:
            raise UserError(UNTOLD)
        started = now(self.device)
        if observe_replays(self.model, self.cache, self.info):
            self._replays += now(self.device) - started
        return self._replays

    def _split(self, packed_cache: RaggedCache) -> list[RaggedCache]:
        """Split a cache with one row per budget; the parts share its memory."""
        caches, emptied = [], copy.copy(self.cache)
        emptied.observers, emptied.token_observers = {}, {}  # nothing evicts from these caches again
        entry_counts = zip(packed_cache.budget_entries or (), packed_cache.held_entries or (), strict=True)
        for budget_index, (entry_budget, entry_count) in enumerate(entry_counts):
            budget_cache = emptied.fork(
                combine_states(packed_layer.sequence(budget_index), [dense_layer], lambda states: states[0].clone())
                for packed_layer, dense_layer in zip(packed_cache.ragged, self.cache.ragged, strict=True)
            )
            budget_cache.budget_entries, budget_cache.held_entries = [entry_budget], [entry_count]
            caches.append(budget_cache)
        return caches

    def _row_seeds(self, seed: int) -> Tensor:
        """Return the noise seeds of the sequences."""
        if seed not in self._seeds:
            self._seeds[seed] = row_seeds(self.cache, seed)
            self._ledger.add("seed", self._seeds[seed])
        return self._seeds[seed]


def _later(compression: Compression, token_sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Return the mean entries per (layer, head) after later eviction steps, for every sequence.

    Args:
        token_sizes: Tokens and visual tokens of every sequence.
    """
    is_fixed = compression.moment == "decode" or compression.policy.read is not None
    if is_fixed and compression.budget.absolute is not None:
        return [compression.budget.absolute] * len(token_sizes)
    return [
        compression.budget.per_head(compression.prompt_length or token_count, visual_count)
        for token_count, visual_count in token_sizes
    ]
