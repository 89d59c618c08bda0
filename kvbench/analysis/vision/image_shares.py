"""Vision analysis: every cell of a grid answers while its cache is observed at every decode step.

Each cell generates its own answer greedily, as in a run. Decode step 0 is the cache at the beginning of the answer,
after the first compression and the question. Step `s` ends when `s` tokens of the answer have passed the model and
eviction is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvbench.analysis.choosing import select_numbers
from kvbench.analysis.common import analysis_runner, prompt_name, stages
from kvbench.analysis.retention.steps import Trace, Watch, entries, held_at_steps
from kvbench.analysis.vision.grids import ImageView, drawable, views
from kvbench.analysis.vision.options import MOST_HEADS, MOST_LAYERS, VisionOptions
from kvbench.decoding import Thinking
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import DecodeRow, end_tokens
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
from kvbench.runs.worker import ModelRunner

BOUNDARIES = ("vision_start", "vision_end")
"""Tokens around an image in some model families; columns of the tables."""


@dataclass(frozen=True)
class CellRecord:
    """Entries that one cell held while it answered one prompt.

    Attributes:
        cell: The cell.
        trace: Entries held of prompt and answer.
        prompt: Number of prompt tokens.
        answer: Text of the answer.
    """

    cell: Cell
    trace: Trace
    prompt: int
    answer: str

    @property
    def steps(self) -> int:
        """Number of decode steps, including step 0."""
        return self.trace.eviction_steps.shape[-1] - self.prompt + 1

    def counts(self, counted_mask: Tensor | None = None) -> Tensor:
        """Return the entries per KV head at every decode step, int64 `[L, H, steps]`.

        Args:
            counted_mask: Positions of the prompt to count, bool `[prompt]`; None: all of prompt and answer.
        """
        length = self.trace.eviction_steps.shape[-1]
        if counted_mask is not None:
            answer_mask = torch.zeros(length - self.prompt, dtype=torch.bool)
            counted_mask = torch.cat([counted_mask, answer_mask])
        return entries(self.trace.eviction_steps, counted_mask)[..., self.prompt - 1 :]

    def held(self, steps: Sequence[int]) -> Tensor:
        """Return which prompt tokens are held at the given steps, bool `[L, H, len(steps), prompt]`."""
        positions = torch.tensor([self.prompt - 1 + step for step in steps])
        return held_at_steps(self.trace.eviction_steps[..., : self.prompt], positions)

    @property
    def evicted(self) -> Tensor:
        """Return the first decode step at which each prompt token is not held, `[L, H, prompt]`.

        It is `steps` if the token is held to the end.
        """
        return (self.trace.eviction_steps[..., : self.prompt] - (self.prompt - 1)).clamp(min=0)


@dataclass
class ImagePrompt:
    """One prompt with images.

    Attributes:
        prompt: The prompt.
        question: Its question without special tokens, on one line.
        views: Its images.
        visual: Tokens of images or videos, bool `[T]`.
        boundaries: Tokens of `BOUNDARIES` that the model has, bool `[T]` by name.
        records: Entries held by every cell.
    """

    prompt: Prompt
    question: str
    views: list[ImageView]
    visual: Tensor
    boundaries: Mapping[str, Tensor]
    records: list[CellRecord] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Sample, with the question number after the first."""
        return prompt_name(self.prompt)


@dataclass
class TaskVision:
    """Vision results of one task and model.

    Attributes:
        model, task: Names.
        length: Length of the prompts; 0 for data of natural length.
        layers: The model's index of the full-attention layers.
        draw_layers, draw_heads: Positions in `layers` and KV heads to draw.
        draw_steps: Number of decode steps to draw.
        samples: The prompts.
    """

    model: str
    task: str
    length: int
    layers: list[int]
    draw_layers: list[int]
    draw_heads: list[int]
    draw_steps: int
    samples: list[ImagePrompt] = field(default_factory=list)


@dataclass(frozen=True)
class VisionResult:
    """Result of the vision analysis.

    Attributes:
        tasks: One result per task and model.
        failed: Reasons of failures by cell id; failed cells are not in `tasks`.
        undrawn: Models with unknown token locations.
    """

    tasks: list[TaskVision]
    failed: dict[str, str]
    undrawn: list[str]


def analyze(grid: Grid, options: VisionOptions, reporter: Reporter) -> VisionResult:
    """Let every cell of a grid answer and observe its cache.

    Args:
        grid: Policies, budgets, models, tasks, moments, lengths and samples.
        options: Options of the analysis.
        reporter: Progress reporter.

    Raises:
        UserError: A value is unknown or out of range, or a task has no images.
    """
    result = VisionResult([], {}, [])
    for stage in stages(grid, reporter.message, pruning=True):
        for job in stage.jobs:
            if not any(prompt.media for prompt in job.prompts):
                raise UserError(f"{job.task.name} shows no images; use a task that does, or kvbench analyze retention")
        with analysis_runner(stage, grid, reporter, result.failed) as runner:
            if not drawable(runner.model):
                result.undrawn.append(stage.model)
            planned_jobs = [(job, options.select_prompts(job.prompts)) for job in stage.jobs]
            reporter.start(
                sum(len(job.cells) * len(job_prompts) for job, job_prompts in planned_jobs),
                stage.model,
            )
            result.tasks.extend(_task(runner, stage, *planned, options) for planned in planned_jobs)
    for task in result.tasks:
        for sample in task.samples:
            sample.records = [record for record in sample.records if record.cell.cell not in result.failed]
    return result


def _task(runner: ModelRunner, stage: Stage, job: Job, prompts: Sequence[Prompt], options: VisionOptions) -> TaskVision:
    model = runner.model
    layers = full_layer_ids(model)
    drawn_layers = select_numbers(options.layers, layers, "layers", MOST_LAYERS)
    head_range = range(model_info(model).kv_heads)
    task = TaskVision(
        model=stage.model,
        task=job.task.name,
        length=job.task.length,
        layers=layers,
        draw_layers=[layers.index(layer) for layer in drawn_layers],
        draw_heads=select_numbers(options.heads, head_range, "heads", MOST_HEADS),
        draw_steps=options.steps,
    )
    follower = _Follower(runner, stage.tokenizer, options.new_tokens)
    for prompt in prompts:
        task.samples.append(sample := _shown(runner, prompt, stage.tokenizer))
        sample.records += follower.follow(prompt, job.cells)
    return task


def _shown(runner: ModelRunner, prompt: Prompt, tokenizer: Any) -> ImagePrompt:
    model, token_ids = runner.model, prompt.ids
    config: Any = model.config
    boundaries = {}
    for boundary in BOUNDARIES:
        token_id = getattr(config, f"{boundary}_token_id", None)
        if token_id is not None:
            boundaries[boundary] = torch.tensor(token_ids) == token_id
    pixels, image_views = runner.pixels(prompt.media), []
    if pixels is not None and drawable(model):
        assert runner.vision is not None
        image_views = views(model, runner.vision, token_ids, prompt.media, pixels)
    visual_mask = torch.isin(torch.tensor(token_ids), torch.tensor(visual_ids(model)))
    question = tokenizer.decode(prompt.question_ids, skip_special_tokens=True)
    return ImagePrompt(prompt, " ".join(question.split()), image_views, visual_mask, boundaries)


@dataclass
class _Follower:
    """Runner that answers prompts and observes the caches.

    Attributes:
        runner: Runs the model.
        tokenizer: Its tokenizer.
        new_tokens: Maximum tokens of an answer; None for the task's limit.
    """

    runner: ModelRunner
    tokenizer: Any
    new_tokens: int | None

    def __post_init__(self) -> None:
        self._ends = end_tokens(self.runner.model, self.tokenizer)
        self._thinking = Thinking.of(self.tokenizer)

    def follow(self, prompt: Prompt, cells: Sequence[Cell]) -> list[CellRecord]:
        """Answer one prompt with every cell that has not failed."""
        cell_groups = [[cell for cell in cells if not prunes(cell.policy)]]
        cell_groups += [[cell] for cell in cells if prunes(cell.policy)]  # each has a separate prefill
        by_cell = {
            record.cell.cell: record for cell_group in cell_groups for record in self._together(prompt, cell_group)
        }
        return [by_cell[cell.cell] for cell in cells if cell.cell in by_cell]

    def _together(self, prompt: Prompt, cells: Sequence[Cell]) -> Iterator[CellRecord]:
        """Answer one prompt with cells that share a prefill at each moment."""
        token_limit = prompt.request.max_new_tokens if self.new_tokens is None else self.new_tokens
        reserve = len(prompt.question_ids) + token_limit
        for with_question in (False, True):
            prefilled = None
            for cell in cells:
                if (cell.moment != "context") != with_question:
                    continue
                self.runner.reporter.advance(1)
                if cell.cell in self.runner.failed:
                    continue
                try:
                    prefilled = prefilled or self._prefill(prompt, cells, with_question)
                except PluginError as error:
                    self.runner.fail(cell, prompt, str(error))
                    continue
                prefix, logits = prefilled
                cache = self.runner.compress(prefix, cell, prompt, reserve)
                if cache is None:
                    continue
                record = self._answer(cell, cache, prompt, logits, token_limit)
                if record is not None:
                    yield record

    def _prefill(self, prompt: Prompt, cells: Sequence[Cell], with_question: bool) -> tuple[Prefix, Tensor | None]:
        """Prefill a context; if `with_question`, also its question, and return the logits.

        Raises:
            PluginError: The policy of the only cell fails to prune the images.
        """
        runner, first_cell = self.runner, cells[0]
        pruning = pruning_of(first_cell.policy, first_cell.budget)
        needs = frozenset(need for cell in cells for need in cell.policy.needs)
        if pruning is not None:
            token_ids = prompt.ids if with_question else prompt.context_ids
            with runner.policy_call():
                prefix, logits = runner.prefill(token_ids, needs, prompt.media, pruning)
            return prefix, logits if with_question else None
        prefix, _ = runner.prefill(prompt.context_ids, needs, prompt.media)
        return runner.ask(prefix, prompt.question_ids) if with_question else (prefix, None)

    def _answer(
        self,
        cell: Cell,
        cache: RaggedCache,
        prompt: Prompt,
        logits: Tensor | None,
        token_limit: int,
    ) -> CellRecord | None:
        """Decode an answer; return None if the policy fails.

        Args:
            cell: The cell.
            cache: Its cache.
            prompt: The prompt.
            logits: Logits after the prompt; None if the question is pending.
            token_limit: Maximum tokens of the answer.
        """
        model, prompt_length = self.runner.model, len(prompt.ids)
        entry_limit = cell.budget.per_head(cache.get_seq_length(), cache.visual_tokens()[0])
        decode_row = DecodeRow(token_limit, stop_of(prompt.request, self.tokenizer, self._ends, self._thinking))
        try:
            with plugin_call():
                watch = Watch(cache, prompt_length + token_limit)
                if logits is None:
                    logits = forward(model, cache, self.runner.tensor(prompt.question_ids))
                    watch.step()
                decode_row.push(*choose(logits, [None], [0]))
                while not decode_row.reason:
                    logits = forward(model, cache, self.runner.tensor(decode_row.tokens[-1:]))
                    watch.step()
                    decode_row.push(*choose(logits, [None], [len(decode_row.tokens)]))
        except PluginError as error:
            self.runner.fail(cell, prompt, str(error))
            return None
        if decode_row.error:
            self.runner.fail(cell, prompt, decode_row.error)
            return None
        return CellRecord(cell, watch.trace(entry_limit), prompt_length, decode_row.text())
