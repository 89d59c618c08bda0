"""One prefill that serves many cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decide import Cut, now
from kvbench.engine.draw import row_seeds
from kvbench.engine.driver import forward, start_observers
from kvbench.engine.evict import compress_cache, start_upkeep
from kvbench.engine.models import decoder_of, model_info
from kvbench.engine.pruning import Pruning, watching
from kvbench.engine.replay import observe_replays
from kvbench.engine.shared import Shared
from kvbench.engine.upkeep import first_budget
from kvbench.moments import Moment
from kvbench.plugin import Policy
from kvbench.view import ModelInfo, Need, Replay


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
        self._shared, self._replays = {}, 0.0
        self.seconds += now(ids.device) - begin
        return logits

    def fork(self) -> Prefix:
        """Return a prefix that can be extended on its own; it shares the K/V so far."""
        other = object.__new__(Prefix)
        other.model, other.info, other.seconds = self.model, self.info, self.seconds
        other.device = self.device
        other.cache = self.cache.fork()
        other._shared, other._replays = {}, 0.0
        return other

    def compress(
        self, wanted: Sequence[Compression], reserve: int | None = None
    ) -> list[RaggedCache]:
        """Make one packed cache per compression; `cache.seconds` is the time that it took.

        A score is computed once for all compressions, unless it reads the budget. If a policy
        fails, `spoiled` tells whether it may have changed the prefix.

        Args:
            wanted: The compressions.
            reserve: Free rows behind every segment, for tokens that will be appended.

        Raises:
            BudgetError: A policy did not keep exactly its budget.
        """
        return [self._compress(one, reserve) for one in wanted]

    def _compress(self, wanted: Compression, reserve: int | None) -> RaggedCache:
        replays = self._replay(wanted.policy)
        began = now(self.device)
        lengths, visual = self.cache.lengths().tolist(), self.cache.visual_tokens()
        policy, budget, moment = wanted.policy, wanted.budget, wanted.moment
        final = wanted.whole is None or wanted.whole - wanted.tail <= min(lengths)
        coming = wanted.tail if final else 0
        cut = Cut(
            policy,
            self.cache,
            self.info,
            moment,
            [
                first_budget(policy, budget, moment, n, wanted.whole, coming, v)
                for n, v in zip(lengths, visual, strict=True)
            ],
            row_seeds(self.cache, wanted.seed),
            self._shared.setdefault((wanted.seed, moment, final, coming), Shared()),
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
        later = [
            budget.per_head(wanted.whole or n, v) for n, v in zip(lengths, visual, strict=True)
        ]
        if moment == "decode" and budget.absolute is not None:
            later = [budget.absolute] * len(lengths)
        start_upkeep(cut, made, later)
        made.seconds = now(self.device) - began + cut.saved + replays
        return made

    def _replay(self, policy: Policy) -> float:
        """Make the replays if a policy needs one; return the seconds that they took, at any time.

        All replays that any cell needs are made together and booked with each of these cells.
        """
        if not any(isinstance(need, Replay) for need in policy.needs):
            return 0.0
        began = now(self.device)
        observe_replays(self.model, self.cache, self.info)
        self._replays += now(self.device) - began
        return self._replays
