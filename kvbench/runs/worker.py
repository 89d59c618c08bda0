"""One model at work: prefill, compress, decode and store. Contexts and dialogues stand on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvbench.benchmark import Medium
from kvbench.decoding import Thinking
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import DecodeRow, Stop, end_tokens
from kvbench.engine.draw import Draw
from kvbench.engine.driver import engine, left_padded
from kvbench.engine.encoding import join_pixels, joins_images
from kvbench.engine.integrity import Weights
from kvbench.engine.loading import load_model
from kvbench.engine.measure import MeasuredText, measure_alone
from kvbench.engine.models import visual_ids
from kvbench.engine.observers import is_built_in
from kvbench.engine.pool import Pool
from kvbench.engine.prefix import Compression, Prefix
from kvbench.engine.pruning import Pruning
from kvbench.engine.threads import thread_budget
from kvbench.engine.vision import Pixels, Vision
from kvbench.errors import BudgetError, PluginError, plugin_call
from kvbench.harness.encode import Branch
from kvbench.moments import LATER
from kvbench.plugin import Policy
from kvbench.progress import Reporter
from kvbench.runs.answers import Prompt, empty, stop_of
from kvbench.runs.batching import Batching
from kvbench.runs.cell import Cell
from kvbench.runs.grid import Grid
from kvbench.runs.index import Key
from kvbench.runs.meter import Meter
from kvbench.runs.planning import Say, Stage
from kvbench.runs.schema import Response
from kvbench.view import Need

_CHANGED = "the policy changed the model's parameter {} in place; change a copy instead"


class ResponseSink(Protocol):
    """Where the responses of a worker go: a `RunStore`, or a channel to the process that has it."""

    def keys(self) -> Container[Key]:
        """The keys of the responses that are not to be generated."""
        ...

    def append(self, responses: Sequence[Response]) -> None:
        """Take responses."""
        ...


@dataclass
class ModelRunner:
    """Prefills and compresses on one model; whatever a policy breaks is restored.

    Args:
        model: The model on its device, inside `engine`.
        reporter: Progress reporter.
        vision: Turns media into tokens and pixels; None for a text model.
        reload: Loads the model again, after a policy has changed its parameters.
        failed: Why cells have failed, by cell; they are not tried again.

    Attributes:
        harmful: Needs whose observers have changed the model's parameters, with the error.
        meter: Counts the forwards and names the phase.
    """

    model: nn.Module
    reporter: Reporter
    vision: Vision | None = None
    reload: Callable[[], nn.Module] | None = None
    failed: dict[str, str] = field(default_factory=dict)
    harmful: dict[Need, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self._weights = Weights(self.model, self.reload)
        self.meter = Meter(self.reporter)

    def tensor(self, token_ids: Sequence[int]) -> Tensor:
        """Token ids on the device, `[1, n]`."""
        return torch.tensor([list(token_ids)], device=self.device)

    def prefill(
        self,
        token_ids: Sequence[int],
        needs: Collection[Need],
        media: Sequence[Medium] = (),
        pruning: Pruning | None = None,
        *,
        logit_count: int | None = None,
    ) -> tuple[Prefix, Tensor]:
        """Prefill tokens with the needed observations; return the logits after them as well.

        Args:
            token_ids: The tokens.
            needs: What the policies need.
            media: Images and videos among the tokens.
            pruning: Visual tokens to prune.
            logit_count: As in `Prefix.extend`.
        """
        pixel_values = self.pixels(media)
        extend = partial(Prefix.extend, token_ids=self.tensor(token_ids), pixels=pixel_values, logit_count=logit_count)
        prefix, logits = self._observed(frozenset(needs), extend, pruning)
        prefix.remake = lambda: self.prefill(token_ids, needs, media, pruning)[0]
        return prefix, logits

    def ask(self, prefix: Prefix, question_ids: Sequence[int]) -> tuple[Prefix, Tensor]:
        """Return a copy of a prefix that has read a question, and the logits after it."""
        extended = prefix.fork()
        with self.meter.phase("prefill"):
            logits = extended.extend(self.tensor(question_ids), question=True)
        extended.remake = lambda: self.ask(prefix, question_ids)[0]
        return extended, logits

    def prefill_together(
        self, contexts: Sequence[Sequence[int]], needs: Iterable[Need]
    ) -> tuple[Prefix, Tensor] | None:
        """Prefill texts in one batch; None if an observer cannot tell its sequences apart.

        Args:
            contexts: The tokens of every text.
            needs: What the policies need.

        Returns:
            As `prefill`, with a row for every text.
        """
        needs = frozenset(needs)
        prefix = Prefix(self.model, needs - self.harmful.keys())
        if not prefix.separable:
            return None
        max_length = max(map(len, contexts))
        token_ids, token_mask = left_padded(contexts, max_length)
        attention_mask = None if bool(token_mask.all()) else token_mask.to(self.device)
        extend = partial(
            Prefix.extend,
            token_ids=token_ids.to(self.device),
            token_mask=attention_mask,
            token_count=sum(map(len, contexts)),
        )
        return self._observed(needs, extend, fresh_prefix=prefix)

    def _observed(
        self,
        needs: frozenset[Need],
        extend: Callable[[Prefix], Tensor],
        pruning: Pruning | None = None,
        fresh_prefix: Prefix | None = None,
    ) -> tuple[Prefix, Tensor]:
        """Prefill with observers, without those that change the model's parameters.

        Args:
            needs: What is observed.
            extend: Prefills a prefix and returns the logits.
            pruning: Visual tokens to prune.
            fresh_prefix: An empty prefix with these observers, if there is one already.
        """

        def prefilled(safe_needs: frozenset[Need], fresh_prefix: Prefix | None = None) -> tuple[Prefix, Tensor]:
            prefix = fresh_prefix or Prefix(self.model, safe_needs, pruning)
            with self.meter.phase("prefill"):
                logits = extend(prefix)
            prefix.cache.broken |= {need: self.harmful[need] for need in needs if need in self.harmful}
            return prefix, logits

        result = prefilled(needs - self.harmful.keys(), fresh_prefix)
        plugin_needs = [need for need in needs - self.harmful.keys() if not is_built_in(need)]
        if not plugin_needs or not (changed_name := self._weights.changed()):
            return result
        self._weights.restore(changed_name)
        for need in plugin_needs:  # find out which of them it was
            prefilled(frozenset({need}))
            if changed_name := self._weights.changed():
                self._weights.restore(changed_name)
                self.harmful[need] = BudgetError(_CHANGED.format(changed_name))
        return prefilled(needs - self.harmful.keys())

    @contextmanager
    def policy_call(self, prefix: Prefix | None = None) -> Iterator[None]:
        """Run a policy; see `plugin_call`. The model's parameters are the same afterwards.

        Args:
            prefix: What the policy is shown; it counts as modified if parameters were changed.

        Raises:
            PluginError: The policy has failed, or changed a parameter of the model.
        """
        failure: Exception | None = None
        try:
            with plugin_call():
                yield
        except Exception as error:
            failure = error
        if changed_name := self._weights.changed():
            self._weights.restore(changed_name)
            if prefix is not None:
                prefix.cache.modified_in_place = True
            raise PluginError(_CHANGED.format(changed_name)) from failure
        if failure is not None:
            raise failure

    def pixels(self, media: Sequence[Medium]) -> Pixels | None:
        """What the model takes for media; None if there are none."""
        if not media:
            return None
        assert self.vision is not None
        return self.vision.pixels(media, self.device)

    def joins_images(self, media: Sequence[Medium]) -> bool:
        """Return whether several sequences can show media like these in one forward."""
        return joins_images(self.model, media)

    def pixels_of_rows(self, rows: Iterable[Sequence[Medium]]) -> Pixels | None:
        """Return what the model takes for the media of several sequences; None if there are none."""
        sequences = [pixels for media in rows if (pixels := self.pixels(media)) is not None]
        return join_pixels(self.model, sequences) if sequences else None

    def visual_count(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens are visual."""
        return sum(map(token_ids.count, visual_ids(self.model)))

    def expanded(self, context_text: str, media: Sequence[Medium]) -> str:
        """A text with the tokens of its media in place of their placeholders."""
        if not media:
            return context_text
        assert self.vision is not None
        return self.vision.expand(context_text, media)

    def compress(
        self,
        prefix: Prefix,
        cell: Cell,
        prompt: Prompt,
        reserved_tokens: int | None = None,
        prompt_length: int | None = None,
        trailing_tokens: int = 0,
        *,
        policy: Policy | None = None,
    ) -> RaggedCache | None:
        """Compress a prefix for a cell; None if its policy fails.

        Args:
            prefix: The prefilled context.
            cell: The cell.
            prompt: A prompt that the failure is recorded for.
            reserved_tokens: Free rows behind every segment.
            prompt_length, trailing_tokens: As in `Compression`.
            policy: A policy that selects the same entries as the cell's and runs instead of it.
        """
        runs = policy or cell.policy
        compression = Compression(runs, cell.budget, cell.moment, cell.seed, prompt_length, trailing_tokens)
        try:
            return self._compressed(prefix, [compression], reserved_tokens)[0]
        except PluginError as error:
            self.fail(cell, prompt, str(error).replace(str(runs), str(cell.policy)))
            return None

    def compress_all(self, prefix: Prefix, cells: Sequence[Cell], reserved_tokens: int) -> list[RaggedCache | None]:
        """Compress a prefix for cells of one moment.

        Args:
            prefix: The prefilled context; see `compress`.
            cells: The cells.
            reserved_tokens: Free rows behind every segment.

        Returns:
            A cache for each; only None if a policy fails, so that each must be compressed alone.
        """
        compressions = [Compression(cell.policy, cell.budget, cell.moment, cell.seed) for cell in cells]
        try:
            return [*self._compressed(prefix, compressions, reserved_tokens)]
        except PluginError:
            return [None] * len(cells)

    def _compressed(
        self, prefix: Prefix, compressions: Sequence[Compression], reserved_tokens: int | None
    ) -> list[RaggedCache]:
        """Compress a prefix in several ways, at one moment."""
        runs_policy = not all(compression.policy.is_full for compression in compressions)
        try:
            with self.meter.phase("compress"), self.policy_call(prefix) if runs_policy else nullcontext():
                return prefix.compress(compressions, None if compressions[0].moment in LATER else reserved_tokens)
        except PluginError:
            if prefix.is_lent:
                prefix.restore()  # before a waiting cell reads it
            raise

    def fail(self, cell: Cell, prompt: Prompt, reason: str) -> None:
        """Mark a cell as failed, at a prompt."""
        self._give_up(cell, reason)

    def _give_up(self, cell: Cell, reason: str) -> None:
        if cell.cell not in self.failed:
            self.reporter.message(f"{cell} failed: {reason}")
        self.failed[cell.cell] = reason


@dataclass
class Worker(ModelRunner):
    """Answers prompts with one model and stores the responses.

    Args:
        tokenizer: The model's tokenizer.
        store: Receives responses as soon as they exist, and says which are not needed.
        batch_size, cache_memory, prefill_batch: See `Batching`.
        fidelity: Whether cells are also compared with the full cache on its own answers.
    """

    tokenizer: Any = field(kw_only=True)
    store: ResponseSink = field(kw_only=True)
    batch_size: int | str = field(default="auto", kw_only=True)
    cache_memory: int | None = field(default=None, kw_only=True)
    prefill_batch: int | str = field(default="auto", kw_only=True)
    fidelity: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.meter = Meter(self.reporter, fidelity=self.fidelity)
        self.batching = Batching(self.model, self.batch_size, self.cache_memory, self.prefill_batch)
        self._ends = end_tokens(self.model, self.tokenizer)
        self._thinking = Thinking.of(self.tokenizer)
        self._measured_alone: dict[Branch, MeasuredText] = {}

    def measure_alone(self, branch: Branch) -> MeasuredText:
        """Measure a text on the full cache, without a context; it is the same for all cells and measured once."""
        if branch not in self._measured_alone:
            self._measured_alone[branch] = measure_alone(self.model, branch.input_ids, branch.answer_ids)
        return self._measured_alone[branch]

    def row(self, cell: Cell, prompt: Prompt) -> DecodeRow:
        """A response of a cell to a prompt, still to be generated."""
        request = prompt.request
        stop = self.stop(prompt)
        draw = None
        if request.sampling is not None:
            # Neither policy nor budget: cells that are compared draw with the same noise.
            draw_key = (cell.seed, cell.task, request.sample_id, request.question_id, prompt.repeat)
            draw = Draw(request.sampling, draw_key)
        return DecodeRow(prompt.limit, stop, draw=draw, given=prompt.given_ids)

    def stop(self, prompt: Prompt) -> Stop:
        """Return the stop condition of the answers to a prompt."""
        return stop_of(prompt.request, self.tokenizer, self._ends, self._thinking)

    def pool(self, question_width: int) -> Pool[Response]:
        """A pool for responses whose questions have at most `question_width` tokens."""
        batching = self.batching

        def has_room(row_count: int, held_caches: list[RaggedCache]) -> bool:
            return batching.has_room(row_count - 1, held_caches, question_fed=True)

        return Pool(
            self.model,
            batching.fed_counts,
            batching.asking,
            question_width,
            has_room,
            batching.gives_same_bits,
            batching.allows_rows,
        )

    def done(self, responses: Sequence[Response], cells: Iterable[Cell]) -> None:
        """Store responses of some cells; a cell whose response has failed is given up."""
        cells_by_id = {cell.cell: cell for cell in cells}
        for response in responses:
            if response.error:
                self._give_up(cells_by_id[response.cell], response.error)
        self.store.append(responses)
        self.meter.end(responses)

    def fail(self, cell: Cell, prompt: Prompt, reason: str) -> None:
        """Mark a cell as failed, and store why."""
        super().fail(cell, prompt, reason)
        self.store.append([replace(empty(cell, prompt), error=reason)])


def model_of(stage: Stage, grid: Grid) -> nn.Module:
    """Load the stage's model on its device."""
    return load_model(
        stage.model,
        grid.revision,
        stage.device,
        stage.dtype,
        device_map=grid.device_map,
        quantization=grid.quantization,
        attn=grid.attn,
    )


@contextmanager
def loaded_model(stage: Stage, grid: Grid, notify: Say) -> Iterator[nn.Module]:
    """The stage's model with kvbench's attention, on a sensible number of threads."""
    model = model_of(stage, grid)
    with thread_budget(model, notify), engine(model):
        yield model
