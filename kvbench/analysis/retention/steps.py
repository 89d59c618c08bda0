"""Which entries are held at every step: the cache of a policy followed through a text.

An evicted entry never comes back, so one number describes each entry: the first step after which it
is not held. (Bui and others, arXiv 2512.03324, equation 1: `alpha_ti >= alpha_(t+1)i`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.analysis.common import Bench, held
from kvbench.benchmark import Medium
from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import forward
from kvbench.engine.prefix import Compression, Prefix
from kvbench.engine.upkeep import spare
from kvbench.errors import BudgetError
from kvbench.plugin import Policy


@dataclass(frozen=True)
class Trace:
    """What one policy held of one text.

    Attributes:
        gone: Step after which an entry is no longer held, int32 `[L, H, T]`; `T` if it is held to
            the end. Step `t` ends when token `t` has passed the model and the cache has been cut.
        budget: Entries per layer and KV head, on average, that a cut leaves.
        cuts: How often the cache was cut.
    """

    gone: Tensor
    budget: int
    cuts: int

    @property
    def entries(self) -> Tensor:
        """Entries of every KV head at the end of every step, int64 `[L, H, T]`."""
        return entries(self.gone)

    @property
    def held(self) -> Tensor:
        """What is held at the end, bool `[L, H, T]`."""
        return self.gone == self.gone.shape[-1]


def entries(gone: Tensor, counted: Tensor | None = None) -> Tensor:
    """Entries held at the end of every step.

    Args:
        gone: As in `Trace`, `[..., T]`.
        counted: Positions to count, bool `[T]`; None: all.

    Returns:
        Counts, int64 `[..., T]`.
    """
    tokens = gone.shape[-1]
    if counted is None:
        counted = torch.ones(tokens, dtype=torch.bool, device=gone.device)
    shape = (*gone.shape[:-1], tokens + 1)
    left = torch.zeros(shape, dtype=torch.int64, device=gone.device)
    left.scatter_add_(-1, gone.long(), counted.long().expand_as(gone))
    return counted.cumsum(-1) - left[..., :tokens].cumsum(-1)


def held_at(gone: Tensor, rows: Tensor) -> Tensor:
    """Rows of eviction maps, `alpha_ti`.

    Args:
        gone: As in `Trace`, `[..., T]`.
        rows: Which steps `t`, int64 `[R]`.

    Returns:
        Whether entry `i` is held at the end of step `t`, bool `[..., R, T]`.
    """
    at = torch.arange(gone.shape[-1], device=gone.device)
    return (at <= rows[:, None]) & (rows[:, None] < gone[..., None, :])


def passing(
    bench: Bench,
    ids: Sequence[int],
    policy: Policy,
    budget: Budget,
    seed: int,
    advance: Callable[[int], None] = lambda tokens: None,
    media: Sequence[Medium] = (),
    start: int = 1,
) -> Trace:
    """Let a text pass token by token, as if the model were writing it (moment `decode`).

    Args:
        bench: The model.
        ids: The text.
        policy: The policy, which evicts when the budget and its buffer are full, as in any run.
        budget: The budget; a share is a share of this text's tokens.
        seed: Noise seed.
        advance: Told how many tokens have passed.
        media: Images and videos of the text.
        start: Tokens that pass at once, in the beginning: an image cannot pass token by token.
    """
    prefix = bench.prefill(ids[:start], policy.needs, media)
    allowed = budget.per_head(len(ids), prefix.cache.visual_tokens()[0])
    wish = Compression(policy, Budget(tokens=allowed), "decode", seed)
    cache = prefix.compress([wish])[0]
    watch = Watch(cache, len(ids))
    advance(start)
    for token in ids[start:]:
        forward(bench.model, cache, bench.tensor([token]))
        watch.step()
        advance(1)
    return watch.trace(allowed)


def once(
    prefix: Prefix, policy: Policy, budget: Budget, seed: int, context: int, tokens: int
) -> Trace:
    """Compress a context once (moment `context`); all that comes later is kept.

    Args:
        prefix: The context, prefilled.
        policy: The policy that compresses it.
        budget: The budget; a share is a share of the context's tokens.
        seed: Noise seed.
        context: Tokens of the context.
        tokens: Tokens of the whole text.
    """
    cache = prefix.compress([Compression(policy, budget, "context", seed)], 1)[0]
    watch = Watch(cache, tokens)
    return watch.trace(budget.per_head(context, cache.visual_tokens()[0]), tokens)


def idle(policy: Policy, allowed: int, tokens: int) -> bool:
    """Whether a text is too short for anything to be evicted while it passes."""
    return tokens < allowed + spare(policy, "decode")


class Watch:
    """Observes a cache of one sequence after every step.

    Args:
        cache: The cache, just compressed.
        tokens: The most tokens that it will see.

    Attributes:
        cuts: How often it was cut.
    """

    def __init__(self, cache: RaggedCache, tokens: int) -> None:
        layers = cache.ragged
        shape = (len(layers), layers[0].heads, tokens)
        assert cache.valid is not None
        device = cache.valid.device
        self.cache, self.cuts = cache, 0
        self.heads = shape[0] * shape[1]
        self._gone = torch.full(shape, tokens, dtype=torch.int32, device=device)
        self._before = 0
        self._seen = 0
        self.step()

    def step(self) -> None:
        """Record what the newest step has evicted."""
        seen, now = self.cache.get_seq_length(), self.cache.live_entries()
        # Where every head grew by the new tokens nothing went, and the kept sets need no look.
        if now == self._before + self.heads * (seen - self._seen):
            self._before, self._seen = now, seen
            return
        tokens = self._gone.shape[-1]
        kept = torch.stack(held(self.cache))
        known = self._gone[..., :seen]
        if bool((kept & (known < tokens)).any()):
            raise BudgetError("an entry that was evicted is held again")
        known[~kept & (known == tokens)] = seen - 1
        self.cuts += 1
        self._before, self._seen = now, seen

    def trace(self, budget: int, tokens: int | None = None) -> Trace:
        """What was held of the tokens up to now.

        Args:
            budget: As in `Trace`.
            tokens: Count as many tokens as seen; later ones are kept. None: those that the cache
                has seen.
        """
        count = self._seen if tokens is None else tokens
        return Trace(self._gone[..., :count].clamp(max=count).cpu(), budget, self.cuts)
