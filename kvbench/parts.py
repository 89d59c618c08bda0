"""Generic parts: uniform allocation, top-k selection, scores from functions, exact integer division of budgets."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from kvbench import native
from kvbench.errors import UserError
from kvbench.moments import LATER
from kvbench.plugin import Allocator, Score, Scored, Scores, Selector, View


def rank_entries(scores: Scores, valid: Tensor) -> Tensor:
    """Rank the entries of every head, the first to keep first.

    Protected entries come first, by class. Within a class, the more recent entry comes first, except that sinks are
    ordered by ascending position (position 0 is evicted last) and entries of class `CHOSEN` by value. Unprotected
    entries follow by value; ties go to the more recent entry, so that the order does not depend on the backend. Invalid
    entries come last.

    Args:
        scores: Values and protection classes, `[B, H, n]`.
        valid: Which entries exist, bool `[B, H, n]`.

    Returns:
        Rank of every entry, int64 `[B, H, n]`; 0 is kept first.
    """
    entry_count = valid.shape[-1]
    entry_classes = scores.protect.to(torch.int8).masked_fill(~valid, -1).flip(-1)
    sort_values = scores.value.masked_fill(~valid, float("-inf")).flip(-1)
    # Flipped, so that a stable sort puts the more recent of two equal entries first.
    sort_values = sort_values.masked_fill(entry_classes > Scores.CHOSEN, 0.0)
    # Entries are ordered by position; flipped, the first sink has the largest index.
    flipped_indices = torch.arange(entry_count, device=sort_values.device, dtype=torch.float32)
    sort_values = torch.where(entry_classes == Scores.SINK, flipped_indices, sort_values)
    value_order = sort_values.argsort(dim=-1, descending=True, stable=True)
    class_order = entry_classes.gather(-1, value_order).argsort(dim=-1, descending=True, stable=True)
    entry_order = entry_count - 1 - value_order.gather(-1, class_order)
    entry_ranks = torch.empty_like(entry_order)
    return entry_ranks.scatter_(
        -1, entry_order, torch.arange(entry_count, device=entry_order.device).expand_as(entry_order)
    )


def order_key(v: View, scores: Scores) -> Tensor:
    """Return one integer per entry that orders entries like `rank_entries`; larger keys are kept first.

    From the top: 3 bits for the class; 32 bits for the float32 value (0 where the class alone decides), mapped so that
    they compare as integers; 28 bits for the position, inverted for sinks. No two entries of a head share a key.

    Returns:
        int64 `[B, H, n]`; -1 where there is no entry.
    """
    return entry_key(scores.value, scores.protect, v.position, v.valid)


def entry_key(value: Tensor, protect: Tensor, position: Tensor, valid: Tensor) -> Tensor:
    """Return `order_key` from values, protection classes, positions and validity, all of one shape."""
    row_count = len(value)
    value, protect, position, valid = (_distinct(tensor) for tensor in (value, protect, position, valid))
    entry_keys = native.entry_keys(value, protect, position, valid)
    if entry_keys is None:
        entry_keys = _entry_keys(value, protect, position, valid)
    return entry_keys.expand(row_count, *entry_keys.shape[1:]) if len(entry_keys) < row_count else entry_keys


def _entry_keys(value: Tensor, protect: Tensor, position: Tensor, valid: Tensor) -> Tensor:
    """Compute `entry_key` with torch, by arithmetic: a CPU's masks and comparisons are slower."""
    if protect.device.type == "cpu" and np.array_equal(protect[1:].numpy(), protect[:-1].numpy()):
        protect = protect[:1]  # a window and sinks, in every row
    value = value.expand(max(map(len, (value, protect, position, valid))), -1, -1)  # for the steps in place
    float_bits = (value.float() + 0.0).view(torch.int32)  # + 0.0: no negative zero
    ordered_bits = (float_bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(float_bits)
    by_class = (protect > Scores.CHOSEN).int()
    ordered_bits.bitwise_and_(by_class - 1).bitwise_or_(by_class << 31)  # the smallest where the class decides
    position_keys = torch.where(protect == Scores.SINK, (1 << 28) - 1 - position, position)
    class_keys = protect.long().bitwise_left_shift_(60) + (position_keys + (1 << 59))  # 1 << 59: values from 0
    entry_keys = ordered_bits.long().bitwise_left_shift_(28).add_(class_keys)
    return entry_keys.bitwise_or_((~valid).long().neg_())


def _distinct(tensor: Tensor) -> Tensor:
    """Return only the first row if all rows share memory, as those of several budgets do."""
    return tensor[:1] if len(tensor) > 1 and tensor.stride(0) == 0 else tensor


def best(key: Tensor, count: Tensor, unique: bool = False) -> Tensor:
    """Mark the `count` largest keys of every row, the first of equal ones; negative keys are never marked.

    Args:
        key: int64 `[..., m]`.
        count: int64 `[...]`, at most the number of non-negative keys.
        unique: Whether the keys of a row are distinct, as those of `order_key` are.

    Returns:
        bool `[..., m]`.
    """
    marked = native.mark_largest(key, count)
    return _best(key, count, unique) if marked is None else marked


def _best(key: Tensor, count: Tensor, unique: bool) -> Tensor:
    """Compute `best` with torch."""
    distinct_keys = _distinct(key)
    if key.device.type == "cpu":  # numpy sorts integers some eight times as fast as torch
        sorted_keys = torch.from_numpy(np.sort(distinct_keys.numpy(), axis=-1))
    else:
        sorted_keys = distinct_keys.sort(dim=-1).values
    last_index = key.shape[-1] - 1
    threshold_index = (last_index + 1 - count[..., None]).clamp(0, last_index)
    threshold = sorted_keys.expand(*key.shape[:-1], -1).gather(-1, threshold_index).clamp_(min=0)
    threshold.masked_fill_(count[..., None] <= 0, torch.iinfo(torch.int64).max)
    if unique:
        return key >= threshold
    above_threshold, at_threshold = key > threshold, key == threshold
    remaining = count[..., None] - above_threshold.sum(-1, keepdim=True)
    return above_threshold | (at_threshold & (at_threshold.cumsum(-1) <= remaining))


@dataclass(frozen=True)
class TopK(Selector):
    """Keeps protected entries, then those of the largest value; ties go to the more recent token."""

    name: ClassVar[str] = "topk"

    def select(self, v: View, scores: Scores, share: Tensor) -> Tensor:
        """Choose exactly `share` valid entries per head, bool `[B, H, n]`."""
        return best(order_key(v, scores), share, unique=True)


def spread_evenly(total: Tensor, heads: int) -> Tensor:
    """Divide integer totals evenly; the first heads get the remainder.

    Args:
        total: int64 `[...]`.
        heads: Number of heads.

    Returns:
        int64 `[..., heads]` summing to `total`.
    """
    head_indices = torch.arange(heads, device=total.device)
    return total[..., None] // heads + (head_indices < (total % heads)[..., None])


def portion(count: Tensor, ratio: float, heads: int = 1) -> Tensor:
    """Return `floor(ratio * count / heads)` in exact arithmetic: 0.29 of 100 is 29.

    Args:
        count: int64, any shape.
        ratio: In [0, 1], taken as its decimal spelling (at most six digits).
        heads: Divides the count.
    """
    exact_ratio = Fraction(str(ratio)).limit_denominator(1_000_000)
    return count * exact_ratio.numerator // (exact_ratio.denominator * heads)


@dataclass(frozen=True)
class Uniform(Allocator):
    """Gives every KV head of every layer the same budget."""

    name: ClassVar[str] = "uniform"

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Divide a total evenly among the heads, int64 `[B, len(layers), H]`."""
        first_view = layers[0].view
        head_shares = spread_evenly(total, len(layers) * first_view.model.kv_heads)
        if first_view.moment in LATER:  # after earlier evictions a head may hold less than its budget
            held_entries = torch.cat([scored_layer.view.valid.sum(-1) for scored_layer in layers], 1)
            if bool((head_shares > held_entries).any()):
                head_shares = apportion(torch.ones_like(held_entries).double(), total, held_entries)
        return head_shares.view(-1, len(layers), first_view.model.kv_heads)


@dataclass(frozen=True)
class FunctionScore(Score):
    """A score computed by a function of a `View`; its keyword parameters become those of the policy."""

    function: Callable[..., Tensor | Scores]
    keywords: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, function: Callable[..., Tensor | Scores]) -> FunctionScore:
        """Wrap a function.

        Raises:
            UserError: The function takes no view, or another parameter has no default.
        """
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters:
            raise UserError(f"{function.__name__} takes no argument; a score takes a View")
        for parameter in parameters[1:]:
            if parameter.default is parameter.empty:
                raise UserError(f"parameter {parameter.name} of {function.__name__} needs a default")
        return cls(function, tuple((parameter.name, parameter.default) for parameter in parameters[1:]))

    def parameters(self) -> dict[str, Any]:
        """Return the function's keyword parameters."""
        return dict(self.keywords)

    def parameter_types(self) -> dict[str, Any]:
        """Return types from the annotations, or from the defaults where there are none."""
        return {keyword: _type_hint(self.function, keyword, type(default)) for keyword, default in self.keywords}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changed keyword parameters."""
        return type(self)(self.function, tuple({**self.parameters(), **changes}.items()))

    def score(self, v: View) -> Scores | Tensor:
        """Call the function."""
        return self.function(v, **self.parameters())


def _type_hint(function: Callable[..., Any], keyword: str, default: Any) -> Any:
    """Return the annotation of a parameter; the default if there is none, or its name exists for type checkers only."""
    if keyword not in function.__annotations__:
        return default
    alone = SimpleNamespace(__annotations__={keyword: function.__annotations__[keyword]})
    try:
        return typing.get_type_hints(alone, function.__globals__)[keyword]
    except NameError:
        return default


# --- exact integer budgets ------------------------------------------------------------------------


def fill(weight: Tensor, total: Tensor, most: Tensor, least: Tensor | int = 0) -> Tensor:
    """Divide totals in proportion to weights, within bounds and without rounding.

    The excess or deficit at a bound is redistributed among the unbounded parts in proportion to their weights (evenly
    if these are all 0).

    Args:
        weight: float64 `[B, K]`, 0 or more.
        total: int64 `[B]`, between the sums of `least` and `most`.
        most: Upper bounds, int64 `[B, K]`.
        least: Lower bounds, int64 `[B, K]` or one number, at most `most`.

    Returns:
        float64 `[B, K]` summing to `total` (up to rounding).
    """
    upper_limits = most.double()
    lower_limits = torch.as_tensor(least, device=weight.device).double().expand_as(upper_limits)

    def proportional(remaining: Tensor, fixed_mask: Tensor) -> Tensor:
        free_weights = weight.double().masked_fill(fixed_mask, 0.0)
        is_weightless = free_weights.sum(-1, keepdim=True) <= 0
        free_weights = torch.where(is_weightless, (~fixed_mask).double(), free_weights)
        return remaining * free_weights / free_weights.sum(-1, keepdim=True).clamp(min=1e-300)

    return water_fill(proportional, total, upper_limits, torch.minimum(lower_limits, upper_limits))


def water_fill(propose: Callable[[Tensor, Tensor], Tensor], total: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Divide totals as proposed; redistribute the excess or deficit at a bound among the other parts.

    Args:
        propose: Takes the remainder, float64 `[B, 1]`, and the parts that are fixed already, bool `[B, K]`; divides the
            remainder among the others.
        total: int64 `[B]`, between the sums of the bounds.
        high: Upper bounds, float64 `[B, K]`.
        low: Lower bounds, float64 `[B, K]`, at most `high`.

    Returns:
        float64 `[B, K]` summing to `total` (up to rounding).
    """
    fixed_mask = torch.zeros_like(high, dtype=torch.bool)
    head_shares = low
    for _ in range(high.shape[-1] + 1):  # every round but the last fixes a part at a bound
        remaining = total.double() - head_shares.masked_fill(~fixed_mask, 0.0).sum(-1)
        proposed = propose(remaining[:, None], fixed_mask)
        clipped_shares = torch.minimum(torch.maximum(proposed, low), high)
        head_shares = torch.where(fixed_mask, head_shares, clipped_shares)
        surplus = (clipped_shares - proposed).masked_fill(fixed_mask, 0.0).sum(-1, keepdim=True)
        surplus = surplus.masked_fill(surplus.abs() < 1e-9 * total.double()[:, None], 0.0)
        # If lower bounds add more than upper bounds remove, the parts at lower bounds are final, and vice versa.
        below_limit, above_limit = ~fixed_mask & (proposed < low), ~fixed_mask & (proposed > high)
        newly_fixed = torch.where(
            surplus > 0,
            below_limit,
            torch.where(surplus < 0, above_limit, below_limit | above_limit),
        )
        if not bool(newly_fixed.any()):
            break
        fixed_mask = fixed_mask | newly_fixed
    return head_shares


def largest_remainder(real: Tensor, total: Tensor, most: Tensor, least: Tensor | int = 0) -> Tensor:
    """Round budgets to integers that sum to the totals and stay within their bounds.

    Args:
        real: float64 `[B, K]`, summing to about `total`, within the bounds.
        total: int64 `[B]`.
        most: As in `fill`.
        least: As in `fill`.

    Returns:
        int64 `[B, K]`; the largest fractions are rounded up, ties to the lower index.
    """
    lower_limits = torch.as_tensor(least, device=real.device).long().expand_as(most)
    lower_limits = torch.minimum(lower_limits, most)
    # Snap to the nearest integer what differs from it only by float rounding.
    nearest_integers = real.round()
    real = torch.where(
        (real - nearest_integers).abs() < 1e-9 * nearest_integers.abs().clamp(min=1.0),
        nearest_integers,
        real,
    )
    head_shares = torch.minimum(torch.maximum(real.floor().long(), lower_limits), most)
    # Treat fractions that differ only by float rounding as equal.
    fractions = ((real - head_shares) * 2**30).round()
    fraction_order = fractions.argsort(dim=-1, descending=True, stable=True)
    for direction in (1, -1):
        headroom = ((most - head_shares) if direction > 0 else (head_shares - lower_limits)).gather(-1, fraction_order)
        if direction < 0:
            fraction_order, headroom = fraction_order.flip(-1), headroom.flip(-1)
        remaining = (direction * (total - head_shares.sum(-1)))[:, None].clamp(min=0)
        # First one each in the order of the fractions, then fill the remaining room.
        single_entries = ((headroom > 0) & ((headroom > 0).cumsum(-1) <= remaining)).long()
        unassigned = remaining - single_entries.sum(-1, keepdim=True)
        spare_room = headroom - single_entries
        extra_entries = torch.minimum(spare_room, (unassigned - (spare_room.cumsum(-1) - spare_room)).clamp(min=0))
        head_shares = head_shares.scatter_add(-1, fraction_order, direction * (single_entries + extra_entries))
    return head_shares


def apportion(weight: Tensor, total: Tensor, most: Tensor, least: Tensor | int = 0) -> Tensor:
    """Divide totals into integers in proportion to weights, within bounds.

    Args:
        weight: float64 `[B, K]`, 0 or more.
        total: int64 `[B]`, between the sums of `least` and `most`.
        most: Upper bounds, int64 `[B, K]`.
        least: Lower bounds, int64 `[B, K]` or one number.

    Returns:
        int64 `[B, K]` summing to `total`: `fill`, rounded by largest remainder, ties to the lower index.
    """
    return largest_remainder(fill(weight, total, most, least), total, most, least)
