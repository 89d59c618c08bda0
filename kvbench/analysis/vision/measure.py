"""Runs the analysis: every cell of a grid answers, and its cache is observed at every decode step.

A cell writes its own answer, greedily, as in a run. Decode step 0 is the cache that the answer
begins with, after the first compression and the question. Step `s` ends when `s` tokens of the
answer have passed the model and the cache has been cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvbench.analysis.choosing import chosen
from kvbench.analysis.common import Bench, loaded, prompt_name, stages
from kvbench.analysis.retention.steps import Trace, Watch, entries, held_at
from kvbench.analysis.vision.grids import View, drawable, views
from kvbench.analysis.vision.options import MOST_HEADS, MOST_LAYERS, Options
from kvbench.decoding import Thinking
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import Row, end_tokens
from kvbench.engine.draw import choose
from kvbench.engine.driver import forward
from kvbench.engine.models import full_layer_ids, model_info, visual_ids
from kvbench.engine.prefix import Prefix
from kvbench.engine.pruning import prunes, pruning_of
from kvbench.errors import PluginError, UserError, plugin_call
from kvbench.progress import Reporter
from kvbench.runs.answers import Prompt, stop_of
from kvbench.runs.cell import Cell
from kvbench.runs.grid import Grid
from kvbench.runs.planning import Job, Stage

BOUNDARIES = ("vision_start", "vision_end")
"""Tokens around an image, which some families have; columns of the tables."""


@dataclass(frozen=True)
class Kept:
    """What one cell held while it answered one prompt.

    Attributes:
        cell: The cell.
        trace: What it held of prompt and answer.
        prompt: Tokens of the prompt.
        answer: What it said.
    """

    cell: Cell
    trace: Trace
    prompt: int
    answer: str

    @property
    def steps(self) -> int:
        """Number of decode steps, including step 0."""
        return self.trace.gone.shape[-1] - self.prompt + 1

    def counts(self, counted: Tensor | None = None) -> Tensor:
        """Entries of every KV head at every decode step, int64 `[L, H, steps]`.

        Args:
            counted: Positions of the prompt to count, bool `[prompt]`; None: all of prompt and
                answer.
        """
        tokens = self.trace.gone.shape[-1]
        if counted is not None:
            answer = torch.zeros(tokens - self.prompt, dtype=torch.bool)
            counted = torch.cat([counted, answer])
        return entries(self.trace.gone, counted)[..., self.prompt - 1 :]

    def held(self, steps: Sequence[int]) -> Tensor:
        """Which tokens of the prompt are held at some steps, bool `[L, H, len(steps), prompt]`."""
        rows = torch.tensor([self.prompt - 1 + step for step in steps])
        return held_at(self.trace.gone[..., : self.prompt], rows)

    @property
    def evicted(self) -> Tensor:
        """First decode step at which a token of the prompt is not held, `[L, H, prompt]`.

        It is `steps` if the token is held to the end.
        """
        return (self.trace.gone[..., : self.prompt] - (self.prompt - 1)).clamp(min=0)


@dataclass
class Shown:
    """One prompt with images.

    Attributes:
        prompt: The prompt.
        question: Its question without special tokens, on one line.
        views: Its images.
        visual: Which of its tokens are of images or videos, bool `[T]`.
        boundaries: Which are the tokens of `BOUNDARIES` that the model has, bool `[T]` by name.
        kept: What every cell held.
    """

    prompt: Prompt
    question: str
    views: list[View]
    visual: Tensor
    boundaries: Mapping[str, Tensor]
    kept: list[Kept] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The sample, and which question it is if it is not the first."""
        return prompt_name(self.prompt)


@dataclass
class OfTask:
    """What was found on one task with one model.

    Attributes:
        model, task: Their names.
        length: Length of the prompts; 0 for data that kvbench does not resize.
        layers: The model's own index of the full-attention layers.
        draw_layers, draw_heads: What to draw: positions in `layers`, and KV heads.
        draw_steps: How many decode steps to draw.
        shown: The prompts.
    """

    model: str
    task: str
    length: int
    layers: list[int]
    draw_layers: list[int]
    draw_heads: list[int]
    draw_steps: int
    shown: list[Shown] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """The result of the analysis.

    Attributes:
        tasks: One result for each task and model.
        failed: Why cells failed, by cell id; they are nowhere in `tasks`.
        undrawn: Models for which it is unknown where the tokens of an image lie.
    """

    tasks: list[OfTask]
    failed: dict[str, str]
    undrawn: list[str]


def analyze(grid: Grid, options: Options, reporter: Reporter) -> Found:
    """Let every cell of a grid answer, and observe its cache.

    Args:
        grid: Policies, budgets, models, tasks, moments, lengths and samples.
        options: What to look at.
        reporter: Told of the progress.

    Raises:
        UserError: Something is unknown or out of range, or a task shows no images.
    """
    found = Found([], {}, [])
    for stage in stages(grid, reporter.message, pruning=True):
        for job in stage.jobs:
            if not any(prompt.media for prompt in job.prompts):
                raise UserError(
                    f"{job.task.name} shows no images; use a task that does, or kvbench analyze "
                    "retention"
                )
        with loaded(stage, grid, reporter.message) as model:
            if not drawable(model):
                found.undrawn.append(stage.model)
            bench = Bench(model, reporter, found.failed, stage.vision)
            work = [(job, options.chosen(job.prompts)) for job in stage.jobs]
            reporter.start(sum(len(job.cells) * len(some) for job, some in work), stage.model)
            try:
                found.tasks.extend(_task(bench, stage, *one, options) for one in work)
            finally:
                reporter.stop()
    for task in found.tasks:
        for shown in task.shown:
            shown.kept = [kept for kept in shown.kept if kept.cell.cell not in found.failed]
    return found


def _task(
    bench: Bench, stage: Stage, job: Job, prompts: Sequence[Prompt], options: Options
) -> OfTask:
    model = bench.model
    layers = full_layer_ids(model)
    drawn = chosen(options.layers, layers, "layers", MOST_LAYERS)
    heads = range(model_info(model).kv_heads)
    task = OfTask(
        model=stage.model,
        task=job.task.name,
        length=job.task.length,
        layers=layers,
        draw_layers=[layers.index(layer) for layer in drawn],
        draw_heads=chosen(options.heads, heads, "heads", MOST_HEADS),
        draw_steps=options.steps,
    )
    follower = _Follower(bench, stage.tokenizer, options.new_tokens)
    for prompt in prompts:
        task.shown.append(shown := _shown(bench, prompt, stage.tokenizer))
        shown.kept += follower.follow(prompt, job.cells)
    return task


def _shown(bench: Bench, prompt: Prompt, tokenizer: Any) -> Shown:
    model, ids = bench.model, prompt.ids
    config: Any = model.config
    boundaries = {}
    for name in BOUNDARIES:
        token = getattr(config, f"{name}_token_id", None)
        if token is not None:
            boundaries[name] = torch.tensor(ids) == token
    pixels, drawn = bench.pixels(prompt.media), []
    if pixels is not None and drawable(model):
        assert bench.vision is not None
        drawn = views(model, bench.vision, ids, prompt.media, pixels)
    visual = torch.isin(torch.tensor(ids), torch.tensor(visual_ids(model)))
    question = tokenizer.decode(prompt.question_ids, skip_special_tokens=True)
    return Shown(prompt, " ".join(question.split()), drawn, visual, boundaries)


@dataclass
class _Follower:
    """Answers prompts and observes the caches.

    Attributes:
        bench: The model.
        tokenizer: Its tokenizer.
        new_tokens: Maximum tokens of an answer; None for the task's limit.
    """

    bench: Bench
    tokenizer: Any
    new_tokens: int | None

    def __post_init__(self) -> None:
        self._ends = end_tokens(self.bench.model, self.tokenizer)
        self._thinking = Thinking.of(self.tokenizer)

    def follow(self, prompt: Prompt, cells: Sequence[Cell]) -> list[Kept]:
        """Answer one prompt with every cell that has not failed."""
        groups = [[cell for cell in cells if not prunes(cell.policy)]]
        groups += [[cell] for cell in cells if prunes(cell.policy)]  # each has a prefill of its own
        made = {kept.cell.cell: kept for group in groups for kept in self._together(prompt, group)}
        return [made[cell.cell] for cell in cells if cell.cell in made]

    def _together(self, prompt: Prompt, cells: Sequence[Cell]) -> Iterator[Kept]:
        """Answer one prompt with cells that share a prefill at each moment."""
        limit = prompt.request.max_new_tokens if self.new_tokens is None else self.new_tokens
        reserve = len(prompt.question_ids) + limit
        for asked in (False, True):
            start = None
            for cell in cells:
                if (cell.moment != "context") != asked:
                    continue
                self.bench.reporter.advance(1)
                if cell.cell in self.bench.failed:
                    continue
                try:
                    start = start or self._prefill(prompt, cells, asked)
                except PluginError as error:
                    self.bench.fail(cell, str(error))
                    continue
                prefix, logits = start
                cache = self.bench.compress(prefix, cell, cell.policy, reserve)
                if cache is None:
                    start = None if prefix.spoiled else start
                    continue
                kept = self._answer(cell, cache, prompt, logits, limit)
                if kept is not None:
                    yield kept

    def _prefill(
        self, prompt: Prompt, cells: Sequence[Cell], asked: bool
    ) -> tuple[Prefix, Tensor | None]:
        """Prefill a context, and its question if it is `asked`; then also give the logits.

        Raises:
            PluginError: The policy of the only cell fails to prune the images.
        """
        bench, first = self.bench, cells[0]
        pruning = pruning_of(first.policy, first.budget)
        needs = frozenset(need for cell in cells for need in cell.policy.needs)
        prefix = Prefix(bench.model, needs, pruning)
        pixels = bench.pixels(prompt.media)
        if pruning is not None:
            ids = prompt.ids if asked else prompt.context_ids
            with plugin_call():
                logits = prefix.extend(bench.tensor(ids), pixels=pixels)
            return prefix, logits if asked else None
        prefix.extend(bench.tensor(prompt.context_ids), pixels=pixels)
        return prefix, prefix.extend(bench.tensor(prompt.question_ids)) if asked else None

    def _answer(
        self, cell: Cell, cache: RaggedCache, prompt: Prompt, logits: Tensor | None, limit: int
    ) -> Kept | None:
        """Decode an answer; None if the policy fails on the way.

        Args:
            cell: The cell.
            cache: Its cache.
            prompt: The prompt.
            logits: Logits after the prompt; None if the question is still to be asked.
            limit: Maximum tokens of the answer.
        """
        model, size = self.bench.model, len(prompt.ids)
        allowed = cell.budget.per_head(cache.get_seq_length(), cache.visual_tokens()[0])
        row = Row(limit, stop_of(prompt.request, self.tokenizer, self._ends, self._thinking))
        try:
            with plugin_call():
                watch = Watch(cache, size + limit)
                if logits is None:
                    logits = forward(model, cache, self.bench.tensor(prompt.question_ids))
                    watch.step()
                row.push(*choose(logits, [None], [0]))
                while not row.reason:
                    logits = forward(model, cache, self.bench.tensor(row.tokens[-1:]))
                    watch.step()
                    row.push(*choose(logits, [None], [len(row.tokens)]))
        except PluginError as error:
            self.bench.fail(cell, str(error))
            return None
        if row.error:
            self.bench.fail(cell, row.error)
            return None
        return Kept(cell, watch.trace(allowed), size, row.text())
