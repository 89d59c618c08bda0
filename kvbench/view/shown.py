"""The view of one layer that the parts of a policy receive."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvbench import native
from kvbench.errors import BudgetError
from kvbench.moments import Moment
from kvbench.view.needs import ModelInfo, Need, Queries
from kvbench.view.softmax import attention_weights, capped, is_plain


class LayerNeeded(BaseException):
    """A part of a policy has asked which layer it sees while it sees several, or these cannot be shown at once.

    No `Exception`, so that a plugin does not catch it.
    """


class View:
    """One layer at one moment, for the sequences of one policy.

    Entries are in column order, so the last valid one is the newest. The sequences can be those of several layers, one
    layer after the other, as long as no part reads `layer`.

    Attributes:
        moment: When the cache is compressed.
        length: Tokens processed per sequence, without padding, int64 `[B]`.
        col: Logical column of every entry, int64 `[B, H, n]` (padding counts; see `position`).
        position: Logical position of every entry, int64 `[B, H, n]`: 0 for the first token, `length - 1` for the
            newest, regardless of evictions.
        valid: Which entries exist, bool `[B, H, n]`.
        key: Keys after RoPE, `[B, H, n, d]`.
        value: Values, `[B, H, n, d]`.
        obs: Observations by `Need`. The per-entry needs of a plugin are present at the eviction step of a prefill but
            not at later ones; keep lasting state in `extras`. `AttentionMass`, `Queries` and `Surprisal` are
            present at every eviction step.
        extras: Per-entry state of the policy by name, `[B, H, n]`; a score may assign to it.
        turns_ago: Age of every entry in turns, int64 `[B, H, n]`: 0 for the newest turn; 0 everywhere except at
            moment `turns`.
        final: Whether this is the last eviction step of a chunked prefill.
        coming: Tokens of the prompt that are prefilled after that last step (`Score.tail`).
        asked: Tokens of the question, which are the last of every sequence; 0 if the cache holds no question, or
            tokens after it.
        model: Shapes and output projections of the model.
        scale: Scale of the attention logits; see `LogitScale`.
        seed: Noise seed of every sequence, int64 `[B]`, from the run's seed and the context.
        visual: Which entries belong to images and videos, bool `[B, H, n]`; False everywhere in a text model.
        pruned: Which of the visual entries the prefill has pruned, bool `[B, H, n]`; see `VisualTokens`.
    """

    def __init__(
        self,
        *,
        layer: int | Sequence[int],
        moment: Moment,
        length: Tensor,
        col: Tensor,
        position: Tensor,
        valid: Tensor,
        key: Tensor,
        value: Tensor,
        obs: Mapping[Need, Tensor],
        extras: dict[str, Tensor],
        model: ModelInfo,
        scale: float,
        seed: Tensor,
        budget: Tensor,
        turns_ago: Tensor | None = None,
        visual: Tensor | None = None,
        pruned: Tensor | None = None,
        final: bool = True,
        coming: int = 0,
        asked: int = 0,
        window_sums: Callable[[int, tuple[int, ...]], Tensor | None] = lambda window, layers: None,
        share: Callable[[tuple[int, ...], Hashable, Callable[[], Tensor]], Tensor] | None = None,
    ) -> None:
        self._layers = (layer,) if isinstance(layer, int) else (*layer,)
        self.moment: Moment = moment
        self.length = length
        self.col = col
        self.position = position
        self.valid = valid
        self.key = key
        self.value = value
        self.obs = obs
        self.extras = extras
        self.model = model
        self.scale = scale
        self.seed = seed
        self._budget = budget
        self.read_budget = False
        self.turns_ago = torch.zeros_like(position) if turns_ago is None else turns_ago
        self.visual = torch.zeros_like(valid) if visual is None else visual
        self.pruned = torch.zeros_like(valid) if pruned is None else pruned
        self.final = final
        self.coming = coming
        self.asked = asked
        self._window_sums = window_sums
        self._share = share
        self._alone: View | None = None

    @property
    def layer(self) -> int:
        """Index among the full-attention layers, `0 <= layer < model.layers`.

        Raises:
            LayerNeeded: This view has several layers. kvbench catches it and shows them one by one.
        """
        if len(self._layers) > 1:
            raise LayerNeeded
        return self._layers[0]

    def once(self, name: Hashable, make: Callable[[View], Tensor]) -> Tensor:
        """Compute a tensor once for all cells of a prefill; it must not be modified in place.

        Args:
            name: Identifies the tensor, including its parameters.
            make: Computes it from a view, `[B, ...]`. It may depend on the layer's K, V, observations and the model,
                not on scores or budgets.
        """
        if self._alone is not None:
            return self._repeated(self._alone.once(name, make))
        made = partial(self._made, make)
        return made() if self._share is None else self._share(self._layers, name, made)

    def _made(self, make: Callable[[View], Tensor]) -> Tensor:
        """Compute a tensor from this view, or from those of its layers if that asks for the layer."""
        try:
            return make(self)
        except LayerNeeded:
            return torch.cat([make(self.of_layer(layer, sequences)) for layer, sequences in self.places()])

    def share(self, once: Callable[[Hashable, Callable[[], Tensor]], Tensor]) -> None:
        """Set the cache for `View.once`: a function of a name and of what computes the tensor."""
        self._share = lambda layers, name, make: once(name, make)

    def for_budgets(self, budget: Tensor) -> View:
        """Return a view that repeats the sequences of this view, one of each layer, for every budget, int64 `[b]`.

        Tensors are repeated when they are read; those of one layer are not copied. `extras` is zero, as it is before a
        score sets it.
        """
        budget_view, budget_count, layer_count = copy.copy(self), len(budget), len(self._budget)
        for field_name in _BY_SEQUENCE:
            budget_view.__dict__.pop(field_name, None)
        budget_view.obs = {need: repeated(tensor, budget_count) for need, tensor in self.obs.items()}
        budget_view.extras = {
            field_name: tensor.new_zeros(budget_count * layer_count, *tensor.shape[1:])
            for field_name, tensor in self.extras.items()
        }
        budget_view._budget, budget_view.read_budget = budget.repeat_interleave(layer_count), False
        budget_view._alone = self
        return budget_view

    def __getattr__(self, name: str) -> Tensor:
        """Repeat a tensor of a view for several budgets when it is read first."""
        if name not in _BY_SEQUENCE or self._alone is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        tensor = self._repeated(getattr(self._alone, name))
        setattr(self, name, tensor)
        return tensor

    def _repeated(self, of_alone: Tensor) -> Tensor:
        """Repeat a tensor of `_alone` for every budget of this view."""
        assert self._alone is not None
        return repeated(of_alone, len(self._budget) // len(self._alone._budget))

    def places(self) -> Iterator[tuple[int, slice]]:
        """Yield every layer and its sequences: one layer after another, but of several budgets each has all layers."""
        count = len(self._budget) // len(self._layers)
        for position, layer in enumerate(self._layers):
            own = slice(position * count, (position + 1) * count)
            yield layer, own if self._alone is None else slice(position, None, len(self._layers))

    def of_layer(self, layer: int, sequences: slice) -> View:
        """Return a view of one layer, which has these sequences of this view."""
        if self._alone is not None:
            layer_view = self._alone.of_layer(layer, sequences).for_budgets(self._budget[sequences])
            layer_view.extras = {name: tensor[sequences] for name, tensor in self.extras.items()}
            return layer_view
        layer_view = copy.copy(self)
        for field_name in _BY_SEQUENCE:
            setattr(layer_view, field_name, getattr(self, field_name)[sequences])
        layer_view.obs = {need: tensor[sequences] for need, tensor in self.obs.items()}
        layer_view.extras = {name: tensor[sequences] for name, tensor in self.extras.items()}
        layer_view._budget, layer_view._layers = self._budget[sequences], (layer,)
        return layer_view

    def tensors(self) -> list[tuple[object, Tensor]]:
        """Return the tensors that must not be modified in place, by name or need: all but `extras`."""
        named_tensors = [(field_name, getattr(self, field_name)) for field_name in _BY_SEQUENCE]
        return [*named_tensors, ("budget", self._budget), *self.obs.items()]

    @property
    def budget(self) -> Tensor:
        """Mean entries per (layer, KV head), `b`, int64 `[B]`.

        A score that uses it is computed for every budget; any other score is computed once.
        """
        self.read_budget = True
        return self._budget

    @property
    def age(self) -> Tensor:
        """`t - i`: distance of every entry from the newest token, int64 `[B, H, n]`."""
        return self.length[:, None, None] - 1 - self.position

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(B, H, n)`."""
        batch_size, kv_heads, entry_count = self.valid.shape
        return batch_size, kv_heads, entry_count

    def grouped(self, per_query_head: Tensor, how: str = "mean") -> Tensor:
        """Reduce a tensor `[B, H_q, ...]` over the query heads of each KV head to `[B, H, ...]`.

        Args:
            per_query_head: One value per query head on axis 1.
            how: `mean`, `max` or `sum` over the group.
        """
        grouped_heads: Tensor = per_query_head.unflatten(1, (self.model.kv_heads, self.model.group))
        if how == "max":
            return grouped_heads.amax(2)
        return grouped_heads.sum(2) if how == "sum" else grouped_heads.mean(2)

    def window_attention(self, window: int, last: int | None = None) -> Tensor:
        """Return the attention of the last `window` queries to the entries, causal within the window.

        The softmax is in float32 over all entries of the view. If a sequence is shorter than the window, the rows of
        missing queries are zero.

        Args:
            window: Number of observed queries, as in the need `Queries(window)`.
            last: Use only the newest N of them; None uses all.

        Returns:
            float32 `[B, H_q, last, n]`.
        """
        if self._alone is not None:
            return self._repeated(self._alone.window_attention(window, last))
        queries = self._last_queries(window, last).float()
        window = queries.shape[2]
        batch_size, kv_heads, entry_count = self.shape
        queries = queries.unflatten(1, (kv_heads, self.model.group)).flatten(2, 3)
        logits = capped((queries @ self.key.float().transpose(-1, -2)).mul_(self.scale), self.scale)
        logits = logits.view(batch_size, kv_heads, self.model.group, -1, entry_count)
        distances = torch.arange(window - 1, -1, -1, device=queries.device)
        is_hidden = self.age.masked_fill(~self.valid, -1)[:, :, None, :] < distances[:, None]
        logits = logits.masked_fill_(is_hidden[:, :, None], float("-inf"))
        is_query = (distances < self.length[:, None])[:, None, None, :, None]
        attention = attention_weights(logits, self.scale).nan_to_num(0.0) * is_query
        return attention.flatten(1, 2)

    def window_attention_sum(self, window: int, last: int | None = None) -> Tensor:
        """Return the sum of `window_attention` over its queries, float32 `[B, H_q, n]`.

        On a CPU, native code sums the attention of a whole context without writing it to memory; the last 32 queries
        even in the prefill, if a policy of the same prefill needs the sum over all queries.

        Args:
            window: As for `window_attention`.
            last: The same.
        """
        if self._alone is not None:
            return self._repeated(self._alone.window_attention_sum(window, last))
        queries, entry_count = self._last_queries(window, last), self.valid.shape[-1]
        if last is None and (sums := self._window_sums(window, self._layers)) is not None:
            return sums
        is_whole = self.key.is_contiguous() and is_plain(self.scale) and native.can_attend(queries, self.key, self.key)
        if is_whole and bool((self.length == entry_count).all()):
            return native.window_attention_sum(queries, self.key, self.scale)
        return self.window_attention(window, last).sum(2)

    def _last_queries(self, window: int, last: int | None) -> Tensor:
        """Return the observed queries, `[B, H_q, w, d]`, or the newest `last` of them."""
        queries = self.obs[Queries(window)]
        return queries if last is None else queries[:, :, -last:]

    def noise(self, stream: int = 0) -> Tensor:
        """Return uniform noise in [0, 1), float32 `[B, H, n]`; streams are independent of each other.

        The noise is a hash of (seed, context, layer, head, position), not the output of a generator, so it depends
        neither on the batch nor on the order in which cells run.
        """
        if self._alone is not None:
            return self._repeated(self._alone.noise(stream))
        head_indices = torch.arange(self.valid.shape[1], device=self.col.device)[None, :, None]
        layers = torch.tensor(self._layers, device=self.col.device)
        first_heads = 1024 * layers.repeat_interleave(len(self.seed) // len(layers))[:, None, None]
        noise_keys = self.seed[:, None, None] + 0x9E3779B1 * (first_heads + head_indices) + self.position
        return (hashed(noise_keys + 0x51ED2705 * stream) >> 8).to(torch.float32) / float(1 << 24)


def hashed(x: Tensor) -> Tensor:
    """Hash int64 numbers to 32 bits, int64."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x & 0xFFFFFFFF
        x = (x ^ (x >> shift)) * factor
    x = x & 0xFFFFFFFF
    return x ^ (x >> 16)


_BY_SEQUENCE = (
    *("length", "col", "position", "valid", "key", "value", "seed"),
    *("turns_ago", "visual", "pruned"),
)


def repeated(tensor: Tensor, repeat_count: int) -> Tensor:
    """Repeat a tensor along the batch, without copying it if all sequences have the same memory."""
    if len(tensor) == 1 or tensor.stride(0) == 0:
        return tensor[:1].expand(len(tensor) * repeat_count, *tensor.shape[1:])
    return tensor.repeat(repeat_count, *[1] * (tensor.dim() - 1))


@dataclass
class Scores:
    """Scores and protection classes of the entries of one layer.

    Attributes:
        value: Score of each entry, finite float32 `[B, H, n]`; ignored where `valid` is false.
        protect: Entries that are kept before all others, `[B, H, n]`: bool (true means `WINDOW`), or int8 classes (see
            `protect_window` and `protect_sinks`). If the protected entries exceed a head's budget, the lowest class is
            evicted first and, within a class, the oldest entry, with two exceptions: the last sink is evicted first,
            so that position 0 stays longest, and in `CHOSEN`, the class of entries chosen by a first stage, the entry
            with the smallest value is evicted first.
    """

    value: Tensor
    protect: Tensor

    CHOSEN: ClassVar[int] = 1
    WINDOW: ClassVar[int] = 2
    SINK: ClassVar[int] = 3
    NEWEST: ClassVar[int] = 4

    def __post_init__(self) -> None:
        """Convert a mask to classes."""
        if self.protect.dtype == torch.bool:
            self.protect = self.protect.to(torch.int8) * Scores.WINDOW
        elif not self.protect.is_floating_point() and not self.protect.is_complex():
            self.protect = self.protect.clamp(0, Scores.NEWEST).to(torch.int8)


def checked_tensor(
    part: str, result: object, shape: Sequence[int], wanted: str, dtypes: Collection[torch.dtype]
) -> Tensor:
    """Return what a part of a policy returned if it is a tensor of a shape and one of some data types.

    Args:
        part: What returned it, such as `selector`.
        wanted: What it should have returned, such as `bool [B, H, n]`.

    Raises:
        BudgetError: It is something else.
    """
    if not isinstance(result, Tensor):
        raise BudgetError(f"the {part} returned {type(result).__name__}; return {wanted}")
    if list(result.shape) != list(shape):
        raise BudgetError(f"the {part} returned the shape {list(result.shape)}; return {wanted} {list(shape)}")
    if result.dtype not in dtypes:
        raise BudgetError(f"the {part} returned {_kind(result)}; return {wanted}")
    return result


def checked_scores(result: object, v: View) -> Scores:
    """Validate the type, dtype and shape of a score's return value.

    Args:
        result: Return value of the score.
        v: The view that was passed to it.

    Returns:
        The scores; a plain tensor protects no entry.

    Raises:
        BudgetError: The scores are not a floating-point tensor `[B, H, n]`, or the protection
            classes are neither bool nor integers.
    """
    if isinstance(result, Tensor):
        check_floating("the score", result)
        result = Scores(result, protect_nothing(v))
    if not isinstance(result, Scores):
        raise BudgetError(f"the score returned {type(result).__name__}; return a float tensor [B, H, n] or Scores")
    check_floating("the score", result.value)
    if result.protect.dtype != torch.int8:
        raise BudgetError(f"protect is {_kind(result.protect)}; return a bool or integer tensor")
    for field_name, tensor in (("scores", result.value), ("protect", result.protect)):
        if tensor.shape != v.shape:
            raise BudgetError(
                f"the score returned {field_name} of shape {list(tensor.shape)}; return [B, H, n] {list(v.shape)}"
            )
    return result


def check_floating(source_name: str, data: Tensor) -> None:
    """Reject numbers that are not floating-point, because converting them would hide a mistake.

    Raises:
        BudgetError: The numbers are complex, bool or integers.
    """
    if not data.is_floating_point():
        conversion = ".abs()" if data.is_complex() else ".float()"
        raise BudgetError(
            f"{source_name} returned {_kind(data)}, not floating-point; convert it, for example with {conversion}"
        )


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def protect_nothing(v: View) -> Tensor:
    """Return protection classes that protect no entry, int8 `[B, H, n]`."""
    return torch.zeros(v.shape, dtype=torch.int8, device=v.col.device)


def protect_window(v: View, window: int | Tensor) -> Tensor:
    """Protect the last `window` tokens (an int, or int64 `[B]`); the newest is evicted last."""
    window_size = window if isinstance(window, int) else window[:, None, None]
    entry_classes = ((v.age < window_size) & v.valid).to(torch.int8) * Scores.WINDOW
    is_newest = (v.age == 0) & v.valid & (entry_classes > 0)
    return torch.where(is_newest, Scores.NEWEST, entry_classes).to(torch.int8)


def protect_sinks(v: View, sinks: int) -> Tensor:
    """Protect the first `sinks` tokens of every sequence; position 0 is evicted last."""
    return ((v.position < sinks) & v.valid).to(torch.int8) * Scores.SINK


@dataclass(frozen=True)
class Blocks:
    """One layer of one sequence: new queries and the complete blocks of its cache.

    Block `k` holds the entries at positions `k * size` to `(k + 1) * size - 1` of every KV head. Blocks never change,
    because a cache with a reader evicts nothing.

    Attributes:
        layer: Index among the full-attention layers.
        query: New queries after RoPE, grouped by KV head, `[H, G, n, d]`.
        query_position: Positions of the queries, int64 `[n]`.
        key: Keys after RoPE, `[H, K, size, d]`.
        position: Positions of the entries, int64 `[K, size]`.
        model: Shapes and rotary embedding of the model.
    """

    layer: int
    query: Tensor
    query_position: Tensor
    key: Tensor
    position: Tensor
    model: ModelInfo


@dataclass(frozen=True)
class VisualTokens:
    """The visual tokens of one prompt, passed to `Score.prune`.

    `V` visual tokens, `X` text tokens, `D` hidden size of the language model. Pruning takes place either before the
    language model (`Score.prunes` is 0) or inside it; fields of the other case are None.

    Attributes:
        keep: Number of visual tokens to keep, at least 1.
        feature: Input embeddings of the visual tokens, `[V, D]`; inside the language model, the hidden states at the
            input of the attention of the layer before the pruning.
        text: The same for the text tokens, `[X, D]`.
        image: Index of the image or video of each visual token, from 0, int64 `[V]`.
        salience: Attention that each visual token receives in the vision tower, float32 `[V]`: from the class token if
            there is one, otherwise the mean over all patches; mean over heads. Measured in the layer whose output the
            language model receives. None inside the language model.
        patch_key: Keys of that layer, heads concatenated, `[V, d_tower]`. If several patches form one token, this and
            the next fields are means over the patches. None inside the language model.
        head_key: Mean of these keys over heads, `[V, d_tower / heads]`.
        last_salience: Like `salience`, but for the tower's last layer and with one softmax over all heads together,
            scaled by the square root of `d_tower`.
        last_key: Like `patch_key`, but for the tower's last layer.
        attention: Attention from the last token of the prompt in the layer before the pruning, mean over heads,
            float32 `[V]`. None before the language model.
        key: Keys of that layer, heads concatenated, `[V, H d]`. None before the language model.
        text_key: The same for the text tokens, `[X, H d]`. None before the language model.
        output: Output of that layer, after the final norm of the language model, `[V, D]`. None before the language
            model.
        text_output: The same for the text tokens, `[X, D]`. None before the language model.
        follows: Which text tokens come after the last visual token, bool `[X]`. None before the language model.
    """

    keep: int
    feature: Tensor
    text: Tensor
    image: Tensor
    salience: Tensor | None = None
    patch_key: Tensor | None = None
    head_key: Tensor | None = None
    last_salience: Tensor | None = None
    last_key: Tensor | None = None
    attention: Tensor | None = None
    key: Tensor | None = None
    text_key: Tensor | None = None
    output: Tensor | None = None
    text_output: Tensor | None = None
    follows: Tensor | None = None


@dataclass(frozen=True)
class Pruned:
    """Result of pruning visual tokens.

    Attributes:
        keep: Which tokens to keep, bool `[V]`; exactly `VisualTokens.keep` are true.
        feature: Replacement for `VisualTokens.feature`, `[V, D]`; None leaves it unchanged.
    """

    keep: Tensor
    feature: Tensor | None = None
