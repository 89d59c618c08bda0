"""Generic parts: uniform allocation, top-k selection, scores from functions, exact shares."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.moments import LATER
from kvbench.plugin import Allocator, Score, Scored, Scores, Selector, View


def rank_entries(scores: Scores, valid: Tensor) -> Tensor:
    """Order the entries of every head from the most to the least worth keeping.

    Protected entries come first, by class. Within a class the more recent entry comes first, except
    that sinks are ordered from the first position on (position 0 gives way last of them all) and
    entries of class `CHOSEN` by value. Unprotected entries follow by value; ties go to the more
    recent entry, so that the order does not depend on the backend. Invalid entries come last.

    Args:
        scores: Values and protection classes, `[B, H, n]`.
        valid: Which entries exist, bool `[B, H, n]`.

    Returns:
        Rank of every entry, int64 `[B, H, n]`; 0 is kept first.
    """
    n = valid.shape[-1]
    classes = scores.protect.to(torch.int8).masked_fill(~valid, -1).flip(-1)
    value = scores.value.masked_fill(~valid, float("-inf")).flip(-1)
    # Flipped, so that a stable sort leaves the more recent of two equals in front.
    value = value.masked_fill(classes > Scores.CHOSEN, 0.0)
    # Entries stand in the order of their positions; flipped, the first sink has the largest index.
    flipped = torch.arange(n, device=value.device, dtype=torch.float32)
    value = torch.where(classes == Scores.SINK, flipped, value)
    by_value = value.argsort(dim=-1, descending=True, stable=True)
    by_class = classes.gather(-1, by_value).argsort(dim=-1, descending=True, stable=True)
    order = n - 1 - by_value.gather(-1, by_class)
    rank = torch.empty_like(order)
    return rank.scatter_(-1, order, torch.arange(n, device=order.device).expand_as(order))


def order_key(v: View, scores: Scores) -> Tensor:
    """Give every entry one integer that is larger the more it is worth keeping.

    The order is that of `rank_entries`. From the top: 3 bits for the class; 32 bits for the float32
    value (0 where the class alone decides), mapped so that they compare as integers; 28 bits for
    the position, inverted for sinks. No two entries of a head share a key.

    Returns:
        int64 `[B, H, n]`; -1 where there is no entry.
    """
    return entry_key(scores.value, scores.protect, v.position, v.valid)


def entry_key(value: Tensor, protect: Tensor, position: Tensor, valid: Tensor) -> Tensor:
    """`order_key` of values, protection classes, positions and validity, of one shape each."""
    rows = len(value)
    value, protect, position, valid = (_distinct(x) for x in (value, protect, position, valid))
    bits = (value.float() + 0.0).view(torch.int32).long()  # + 0.0: no negative zero
    turned = torch.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits) + (1 << 31)
    classes = protect.long()
    worth = (classes << 32) + turned.masked_fill(classes > Scores.CHOSEN, 0)
    place = torch.where(classes == Scores.SINK, (1 << 28) - 1 - position, position)
    key = ((worth << 28) + place).masked_fill(~valid, -1)
    return key.expand(rows, *key.shape[1:]) if len(key) < rows else key


def _distinct(x: Tensor) -> Tensor:
    """The first row, if all rows are the same memory: budgets that are decided together."""
    return x[:1] if len(x) > 1 and x.stride(0) == 0 else x


def best(key: Tensor, count: Tensor, unique: bool = False) -> Tensor:
    """Mark the `count` largest of every row, ties to the first; what is negative never counts.

    Args:
        key: int64 `[..., m]`.
        count: int64 `[...]`, not more than there are.
        unique: Whether no two keys of a row are equal, as those of `order_key`.

    Returns:
        bool `[..., m]`.
    """
    rows = _distinct(key)
    if key.device.type == "cpu":  # a partial sort; a GPU would have to wait for the number
        most = min(max(int(count.max()), 1), key.shape[-1])
        ordered = rows.topk(most, dim=-1).values
    else:
        ordered = rows.sort(dim=-1, descending=True).values
    ordered = ordered.expand(*key.shape[:-1], -1)
    last = ordered.gather(-1, (count[..., None] - 1).clamp(min=0, max=ordered.shape[-1] - 1))
    if unique:
        return (key >= last) & (key >= 0) & (count[..., None] > 0)
    above, equal = key > last, key == last
    left = count[..., None] - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= left))) & (key >= 0) & (count[..., None] > 0)


@dataclass(frozen=True)
class TopK(Selector):
    """The entries of largest value, protected ones first, ties to the more recent token."""

    name: ClassVar[str] = "topk"

    def select(self, v: View, scores: Scores, share: Tensor) -> Tensor:
        """Choose exactly `share` valid entries per head, bool `[B, H, n]`."""
        return best(order_key(v, scores), share, unique=True)


def spread_evenly(total: Tensor, heads: int) -> Tensor:
    """Spread integer totals evenly, the remainder to the first heads.

    Args:
        total: int64 `[...]`.
        heads: Number of shares.

    Returns:
        int64 `[..., heads]` summing to `total`.
    """
    index = torch.arange(heads, device=total.device)
    return total[..., None] // heads + (index < (total % heads)[..., None])


def portion(count: Tensor, ratio: float, heads: int = 1) -> Tensor:
    """Give `floor(ratio * count / heads)` in exact arithmetic: 0.29 of 100 is 29.

    Args:
        count: int64, any shape.
        ratio: In [0, 1], read as it is written (to six digits where it has more).
        heads: Divides the count.
    """
    exact = Fraction(str(ratio)).limit_denominator(1_000_000)
    return count * exact.numerator // (exact.denominator * heads)


@dataclass(frozen=True)
class Uniform(Allocator):
    """Every KV head of every layer gets the same share."""

    name: ClassVar[str] = "uniform"

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Spread a total over the heads, int64 `[B, len(layers), H]`."""
        first = layers[0].view
        shares = spread_evenly(total, len(layers) * first.model.kv_heads)
        if first.moment in LATER:  # what an earlier cut left may be less than an even share
            held = torch.cat([layer.view.valid.sum(-1) for layer in layers], 1)
            shares = apportion(torch.ones_like(held).double(), total, held)
        return shares.view(-1, len(layers), first.model.kv_heads)


@dataclass(frozen=True)
class FunctionScore(Score):
    """A score that is one function of a `View`; its keyword parameters are the policy's."""

    function: Callable[..., Tensor | Scores]
    keywords: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, function: Callable[..., Tensor | Scores]) -> FunctionScore:
        """Wrap a function.

        Raises:
            UserError: It takes no view, or a further parameter has no default.
        """
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters:
            raise UserError(f"{function.__name__} takes no argument; a score takes a View")
        for p in parameters[1:]:
            if p.default is p.empty:
                raise UserError(f"parameter {p.name} of {function.__name__} needs a default")
        return cls(function, tuple((p.name, p.default) for p in parameters[1:]))

    def parameters(self) -> dict[str, Any]:
        """The function's keyword parameters."""
        return dict(self.keywords)

    def parameter_types(self) -> dict[str, Any]:
        """Types from the annotations, or from the defaults where there is none."""
        hints = typing.get_type_hints(self.function)
        return {k: hints.get(k, type(value)) for k, value in self.keywords}

    def replace(self, **changes: Any) -> Self:
        """Give a copy with other keyword parameters."""
        return type(self)(self.function, tuple({**self.parameters(), **changes}.items()))

    def score(self, v: View) -> Scores | Tensor:
        """Call the function."""
        return self.function(v, **self.parameters())


# --- exact integer shares -------------------------------------------------------------------------


def fill(weight: Tensor, total: Tensor, most: Tensor, least: Tensor | int = 0) -> Tensor:
    """Spread totals in proportion to weights, each share within its bounds, not yet rounded.

    What a bound cuts off or adds goes to the shares that are within their bounds, in proportion to
    their weights (evenly where these are all 0).

    Args:
        weight: float64 `[B, K]`, 0 or more.
        total: int64 `[B]`, between the sums of `least` and `most`.
        most: Upper bounds, int64 `[B, K]`.
        least: Lower bounds, int64 `[B, K]` or one number, at most `most`.

    Returns:
        float64 `[B, K]` summing to `total` (up to rounding).
    """
    high = most.double()
    low = torch.as_tensor(least, device=weight.device).double().expand_as(high)

    def proportional(left: Tensor, fixed: Tensor) -> Tensor:
        free = weight.double().masked_fill(fixed, 0.0)
        nothing = free.sum(-1, keepdim=True) <= 0
        free = torch.where(nothing, (~fixed).double(), free)
        return left * free / free.sum(-1, keepdim=True).clamp(min=1e-300)

    return water_fill(proportional, total, high, torch.minimum(low, high))


def water_fill(
    propose: Callable[[Tensor, Tensor], Tensor], total: Tensor, high: Tensor, low: Tensor
) -> Tensor:
    """Spread totals as proposed; what a bound cuts off or adds is spread over the other shares.

    Args:
        propose: Spreads what is left, float64 `[B, 1]`, over the shares that are not fixed yet,
            bool `[B, K]`.
        total: int64 `[B]`, between the sums of the bounds.
        high: Upper bounds, float64 `[B, K]`.
        low: Lower bounds, float64 `[B, K]`, at most `high`.

    Returns:
        float64 `[B, K]` summing to `total` (up to rounding).
    """
    fixed = torch.zeros_like(high, dtype=torch.bool)
    share = low
    for _ in range(high.shape[-1] + 1):  # every round but the last pins a share to a bound
        left = total.double() - share.masked_fill(~fixed, 0.0).sum(-1)
        part = propose(left[:, None], fixed)
        clipped = torch.minimum(torch.maximum(part, low), high)
        share = torch.where(fixed, share, clipped)
        surplus = (clipped - part).masked_fill(fixed, 0.0).sum(-1, keepdim=True)
        surplus = surplus.masked_fill(surplus.abs() < 1e-9 * total.double()[:, None], 0.0)
        # If lower bounds add more than upper bounds cut off, the lower bounds are final, and vice
        # versa.
        below, above = ~fixed & (part < low), ~fixed & (part > high)
        pinned = torch.where(surplus > 0, below, torch.where(surplus < 0, above, below | above))
        if not bool(pinned.any()):
            break
        fixed = fixed | pinned
    return share


def largest_remainder(real: Tensor, total: Tensor, most: Tensor, least: Tensor | int = 0) -> Tensor:
    """Round shares to integers that sum to the totals and stay within their bounds.

    Args:
        real: float64 `[B, K]`, summing to about `total`, within the bounds.
        total: int64 `[B]`.
        most: As in `fill`.
        least: As in `fill`.

    Returns:
        int64 `[B, K]`; the largest fractions are rounded up, of equal ones the first.
    """
    low = torch.as_tensor(least, device=real.device).long().expand_as(most)
    low = torch.minimum(low, most)
    # A share that is whole but for the last bits of a float stays whole.
    near = real.round()
    real = torch.where((real - near).abs() < 1e-9 * near.abs().clamp(min=1.0), near, real)
    share = torch.minimum(torch.maximum(real.floor().long(), low), most)
    # Fractions that differ by the last bits of a float alone are equal.
    fraction = ((real - share) * 2**30).round()
    order = fraction.argsort(dim=-1, descending=True, stable=True)
    for sign in (1, -1):
        room = ((most - share) if sign > 0 else (share - low)).gather(-1, order)
        if sign < 0:
            order, room = order.flip(-1), room.flip(-1)
        left = (sign * (total - share.sum(-1)))[:, None].clamp(min=0)
        # First one each in the order of the fractions, then whatever room is left.
        one = ((room > 0) & ((room > 0).cumsum(-1) <= left)).long()
        rest = left - one.sum(-1, keepdim=True)
        spare = room - one
        more = torch.minimum(spare, (rest - (spare.cumsum(-1) - spare)).clamp(min=0))
        share = share.scatter_add(-1, order, sign * (one + more))
    return share


def apportion(weight: Tensor, total: Tensor, most: Tensor, least: Tensor | int = 0) -> Tensor:
    """Spread totals over integer shares in proportion to weights, within bounds.

    Args:
        weight: float64 `[B, K]`, 0 or more.
        total: int64 `[B]`, between the sums of `least` and `most`.
        most: Upper bounds, int64 `[B, K]`.
        least: Lower bounds, int64 `[B, K]` or one number.

    Returns:
        int64 `[B, K]` summing to `total`: what a bound cuts off goes to the others in proportion to
        their weights (evenly where these are all 0); rounded by largest remainder, ties to the
        lower index.
    """
    return largest_remainder(fill(weight, total, most, least), total, most, least)
