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


def entries(gone: Tensor) -> Tensor:
    """Entries held at the end of every step, int64 `[..., T]`, from `Trace.gone`."""
    tokens = gone.shape[-1]
    shape = (*gone.shape[:-1], tokens + 1)
    left = torch.zeros(shape, dtype=torch.int64, device=gone.device)
    left.scatter_add_(-1, gone.long(), torch.ones_like(gone, dtype=torch.int64))
    seen = torch.arange(1, tokens + 1, device=gone.device)
    return seen - left[..., :tokens].cumsum(-1)


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
    advance: Callable[[], None] = lambda: None,
) -> Trace:
    """Let a text pass token by token, as if the model were writing it (moment `decode`).

    Args:
        bench: The model.
        ids: The text.
        policy: The policy, which evicts when the budget and its buffer are full, as in any run.
        budget: The budget; a share is a share of this text's tokens.
        seed: Noise seed.
        advance: Called after every token.
    """
    allowed = budget.per_head(len(ids))
    prefix = bench.prefill(ids[:1], policy.needs)
    wish = Compression(policy, Budget(tokens=allowed), "decode", seed)
    cache = prefix.compress([wish])[0]
    watch = _Watch(cache, len(ids))
    advance()
    for token in ids[1:]:
        forward(bench.model, cache, bench.tensor([token]))
        watch.step()
        advance()
    return Trace(watch.gone.cpu(), allowed, watch.cuts)


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
    watch = _Watch(cache, tokens)
    return Trace(watch.gone.cpu(), budget.per_head(context), watch.cuts)


def idle(policy: Policy, allowed: int, tokens: int) -> bool:
    """Whether a text is too short for anything to be evicted while it passes."""
    return tokens < allowed + spare(policy, "decode")


class _Watch:
    """Observes a cache of one sequence after every step."""

    def __init__(self, cache: RaggedCache, tokens: int) -> None:
        layers = cache.ragged
        shape = (len(layers), layers[0].heads, tokens)
        assert cache.valid is not None
        device = cache.valid.device
        self.cache, self.cuts = cache, 0
        self.gone = torch.full(shape, tokens, dtype=torch.int32, device=device)
        self.heads = shape[0] * shape[1]
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
        tokens = self.gone.shape[-1]
        kept = torch.stack(held(self.cache))
        known = self.gone[..., :seen]
        if bool((kept & (known < tokens)).any()):
            raise BudgetError("an entry that was evicted is held again")
        known[~kept & (known == tokens)] = seen - 1
        self.cuts += 1
        self._before, self._seen = now, seen
