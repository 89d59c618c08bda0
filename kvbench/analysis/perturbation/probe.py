"""Output perturbation of every policy and budget on the contexts of a task (arXiv 2502.03805, 4.5).

All cells share one prefill per context. As in the paper, the query is that of the first decoded token: the token that
the full cache predicts is fed in, and its queries on the full cache are used to measure every cell, so a layer's value
concerns that layer alone. `l1_forward` is measured in a forward pass on the compressed cache, in which the losses of
earlier layers accumulate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvbench.analysis.common import analysis_runner, contexts, kept_masks, prompt_name, stages
from kvbench.analysis.perturbation.head_outputs import FullCacheQuery, Perturbed, value_norms
from kvbench.analysis.perturbation.options import PerturbationOptions
from kvbench.analysis.perturbation.rows import QuestionRow, Rows
from kvbench.analysis.perturbation.stages import record_stage1
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import NOT_FINITE
from kvbench.engine.draw import choose
from kvbench.engine.driver import forward
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import attention_modules, full_layer_ids
from kvbench.engine.prefix import Prefix
from kvbench.errors import UserError
from kvbench.plugin import Policy, Queries
from kvbench.progress import Reporter
from kvbench.runs.answers import Prompt
from kvbench.runs.cell import Cell
from kvbench.runs.grid import Grid
from kvbench.runs.worker import ModelRunner

_LAST = Queries(1)

UsefulTokens = Callable[[Any, Prompt], Tensor]
"""Marks the useful tokens of a prompt's context, bool `[T]`, given the tokenizer."""


@dataclass
class RetainedEntries:
    """Entries that one cell keeps for one question.

    Attributes:
        cell: The cell.
        kept_masks: By layer bool `[H, columns at the compression]`.
        stage1: Entries kept by stage 1, by layer; layers without evictions are missing.
        merged: K and V by layer, `[H, columns, d]`, if a merger changed them.
        block_outputs: Attention block outputs in a forward pass on the compressed cache, `[L, d_model]`.
    """

    cell: Cell
    kept_masks: list[Tensor]
    stage1: dict[int, Tensor]
    merged: list[tuple[Tensor, Tensor]] | None
    block_outputs: Tensor | None = None


@dataclass
class ProbedQuestion:
    """One question on the full cache.

    Attributes:
        prompt: The question.
        tokens: Columns visible to the measured query.
        query: By layer `[H_q, d]`.
        question_entries: K and V of the columns after the context, by layer, `[H, m, d]` each.
        block_outputs: Attention blocks' outputs with the full cache, `[L, d_model]`.
        token: The answer's first token.
        cells: Entries that the cells keep for this question.
    """

    prompt: Prompt
    tokens: int
    query: list[Tensor]
    question_entries: list[tuple[Tensor, Tensor]]
    block_outputs: Tensor
    token: int
    cells: list[RetainedEntries] = field(default_factory=list)


@dataclass(frozen=True)
class Perturbation:
    """Perturbation result: a row per query head, and a row per layer (columns: docs/analysis.md)."""

    heads: pd.DataFrame
    layers: pd.DataFrame
    failed: dict[str, str]


def analyze(
    grid: Grid,
    reporter: Reporter,
    *,
    query: str = "answer",
    first_stage: float = 0.5,
    useful_of: UsefulTokens | None = None,
    gap: float = 1.0,
) -> Perturbation:
    """Measure the output perturbation of all cells of a grid.

    Args:
        grid: Policies, budgets, models, tasks, moments, lengths and samples.
        reporter: Progress reporter.
        query: `answer` for the first decoded token, `question` for the question's last token.
        first_stage: Fraction for stage 1, for policies without a parameter of that name.
        useful_of: Marks the useful tokens of a context, to measure attention dilution as well; questions for which it
            marks none are left out.
        gap: See `FullCacheQuery.gap`.

    Raises:
        UserError: A value in the grid is unknown or out of range.
    """
    PerturbationOptions(query, first_stage)  # checks them before any work is done
    row_arrays = Rows()
    failures: dict[str, str] = {}
    for stage in stages(grid, reporter.message):
        with analysis_runner(stage, grid, reporter, failures) as runner:
            reporter.start(sum(len(planned.prompts) * len(planned.cells) for planned in stage.jobs), stage.model)
            for job in stage.jobs:
                probe = Probe(runner, job.cells, query, first_stage, gap=gap)
                for prompts in contexts(job):
                    if useful_of is not None:
                        marked = [(prompt, useful_of(stage.tokenizer, prompt)) for prompt in prompts]
                        probe.useful = {prompt_name(prompt): useful for prompt, useful in marked if bool(useful.any())}
                    asked = [prompt for prompt in prompts if useful_of is None or prompt_name(prompt) in probe.useful]
                    if asked:
                        row_arrays.add(query, probe.layer_ids, probe.context(asked, job.cells))
                    reporter.advance(len(prompts) * len(job.cells))
    heads, layers = pd.DataFrame(row_arrays.heads()), pd.DataFrame(row_arrays.layers())
    # Drop failed cells, which would be compared over fewer contexts than the rest.
    heads, layers = (frame[~frame["cell"].isin(failures)] if len(frame) else frame for frame in (heads, layers))
    return Perturbation(heads.reset_index(drop=True), layers.reset_index(drop=True), failures)


@dataclass
class Probe:
    """Measurement of the cells of one task, one context at a time.

    Attributes:
        runner: Runs the model.
        cells: The cells of the task.
        query: Query to measure.
        first_stage: Fraction for stage 1, for a policy without a parameter of that name.
        useful: Useful tokens of a context, bool `[T]`, by `prompt_name`, to measure their attention dilution.
        gap: See `FullCacheQuery.gap`.
    """

    runner: ModelRunner
    cells: Sequence[Cell]
    query: str
    first_stage: float
    useful: Mapping[str, Tensor] = field(default_factory=dict)
    gap: float = 1.0

    def __post_init__(self) -> None:
        model = self.runner.model
        self.needs = frozenset({_LAST, *(need for cell in self.cells for need in cell.policy.needs)})
        self.layer_ids = full_layer_ids(model)

    def context(self, prompts: Sequence[Prompt], cells: Sequence[Cell]) -> Iterator[QuestionRow]:
        """Measure all questions about one context.

        Yields:
            The values of one question in one layer, for every layer.
        """
        prefix, _ = self.runner.prefill(prompts[0].context_ids, self.needs, prompts[0].media)
        questions = [self._ask(prefix, prompt, cells) for prompt in prompts]
        for cell in cells:
            if cell.moment != "question" and cell.cell not in self.runner.failed:
                self._before_question(prefix, cell, questions)
        prefix.restore()
        cell_order = {cell.cell: position for position, cell in enumerate(cells)}
        for question in questions:
            question.cells.sort(key=lambda retained: cell_order[retained.cell.cell])
        context_entries = [
            (layer.key[0], layer.value[0], layer.scale)
            for layer in prefix.cache.ragged
            if layer.key is not None and layer.value is not None
        ]
        for layer_index, (key, value, scale) in enumerate(context_entries):
            weight = prefix.info.output_weight(layer_index)
            context_norms = value_norms(value, weight)
            for question in questions:
                question_key, question_value = question.question_entries[layer_index]
                full_query = FullCacheQuery(
                    query=question.query[layer_index],
                    key=torch.cat([key, question_key], 1),
                    value=torch.cat([value, question_value], 1),
                    weight=weight,
                    scale=scale,
                    norm=torch.cat([context_norms, value_norms(question_value, weight)], 1),
                    useful=self._useful(question, key.device),
                    gap=self.gap,
                )
                perturbed = [
                    (
                        retained.cell,
                        _measure(full_query, retained, layer_index),
                        _out(retained, layer_index),
                    )
                    for retained in question.cells
                ]
                full_output = question.block_outputs[layer_index]
                yield QuestionRow(
                    question.prompt.request,
                    question.tokens,
                    layer_index,
                    full_query,
                    full_output,
                    perturbed,
                )

    def _useful(self, question: ProbedQuestion, device: torch.device) -> Tensor | None:
        """Return the useful entries that a question sees, bool `[n]`; none of them is behind the context."""
        useful = self.useful.get(prompt_name(question.prompt))
        if useful is None:
            return None
        return torch.nn.functional.pad(useful, (0, question.tokens - len(useful))).to(device)

    def _ask(self, prefix: Prefix, prompt: Prompt, cells: Sequence[Cell]) -> ProbedQuestion:
        """Ask a question on the full cache; compress the cells of moment `question`."""
        context_length = len(prompt.context_ids)
        question_cells = [
            candidate
            for candidate in cells
            if candidate.moment == "question" and candidate.cell not in self.runner.failed
        ]
        extended, full_outputs, token = self._longer(prefix, prompt)
        retained_cells = []
        for cell in question_cells:
            policy, stage1 = record_stage1(cell.policy, self.first_stage)
            cache = self.runner.compress(extended, cell, prompt, 1, policy=policy)
            if cache is None:
                continue
            retained = _hold(cell, policy, cache, stage1)
            if self.query == "answer":
                with self._outputs() as outputs:
                    forward(self.runner.model, cache, self.runner.tensor([token]))
                retained.block_outputs = _stacked(outputs)
            retained_cells.append(retained)
        extended.restore()
        if self.query == "answer":
            with self._outputs() as outputs:
                extended.extend(self.runner.tensor([token]))
            full_outputs = _stacked(outputs)
        return ProbedQuestion(
            prompt=prompt,
            tokens=context_length + len(prompt.question_ids) + (self.query == "answer"),
            query=[
                extended.cache.observers[_LAST].read(layer_index)[0, :, -1] for layer_index in range(prefix.info.layers)
            ],
            question_entries=[
                (
                    layer.key[0, :, context_length:].clone(),
                    layer.value[0, :, context_length:].clone(),
                )
                for layer in extended.cache.ragged
                if layer.key is not None and layer.value is not None
            ],
            block_outputs=full_outputs,
            token=token,
            cells=retained_cells,
        )

    def _longer(self, prefix: Prefix, prompt: Prompt) -> tuple[Prefix, Tensor, int]:
        """Extend the context by a question; also return the outputs at its end and the next token."""
        with self._outputs() as outputs:
            extended, logits = self.runner.ask(prefix, prompt.question_ids)
        (token,) = choose(logits, [None], [0])
        if token < 0:
            raise UserError(NOT_FINITE)
        return extended, _stacked(outputs), token

    def _before_question(self, prefix: Prefix, cell: Cell, questions: Sequence[ProbedQuestion]) -> None:
        """Compress a context for a cell and ask its questions."""
        policy, stage1 = record_stage1(cell.policy, self.first_stage)
        reserve = max(len(candidate.prompt.question_ids) for candidate in questions) + 1
        cache = self.runner.compress(prefix, cell, questions[0].prompt, reserve, policy=policy)
        if cache is None:
            return
        for position, question in enumerate(questions):
            forked = cache.fork() if position + 1 < len(questions) else cache
            retained = _hold(cell, policy, forked, stage1)
            with self._outputs() as outputs:
                forward(self.runner.model, forked, self.runner.tensor(question.prompt.question_ids))
                if self.query == "answer":
                    forward(self.runner.model, forked, self.runner.tensor([question.token]))
            retained.block_outputs = _stacked(outputs)
            question.cells.append(retained)

    @contextmanager
    def _outputs(self) -> Iterator[dict[int, Tensor]]:
        """Capture the attention block outputs at the last column, `[d_model]` by layer."""
        outputs: dict[int, Tensor] = {}
        handles = [
            module.register_forward_hook(
                lambda hooked, inputs, result, layer_index=layer_index: outputs.__setitem__(
                    layer_index, result[0][0, -1].detach().double()
                )
            )
            for layer_index, module in attention_modules(self.runner.model)
        ]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()


def _stacked(outputs: dict[int, Tensor]) -> Tensor:
    return torch.stack([outputs[layer_index] for layer_index in sorted(outputs)])


def _hold(cell: Cell, policy: Policy, cache: RaggedCache, stage1: dict[int, Tensor]) -> RetainedEntries:
    """Record the entries of a compressed cache, before anything is appended to it."""
    merged = None
    if policy.merge is not None:
        merged = [_spread(layer) for layer in cache.ragged]
    return RetainedEntries(
        cell,
        kept_masks(cache),
        {layer_index: stage1_mask[0] for layer_index, stage1_mask in stage1.items()},
        merged,
    )


def _spread(layer: RaggedLayer) -> tuple[Tensor, Tensor]:
    """Scatter K and V of a packed layer to their columns, `[H, columns, d]`; 0 where nothing is held."""
    row_indices, live_mask = layer.padded_rows()
    column = layer.col[row_indices].long()[0].masked_fill(~live_mask[0], layer.seen)[..., None]
    dense_tensors = []
    for (packed,) in layer.read(row_indices):
        dense = packed.new_zeros(layer.heads, layer.seen + 1, layer.dim)
        dense.scatter_(1, column.expand(-1, -1, layer.dim), packed)
        dense_tensors.append(dense[:, :-1])
    return dense_tensors[0], dense_tensors[1]


def _measure(full_query: FullCacheQuery, retained: RetainedEntries, layer_index: int) -> Perturbed:
    """Measure a cell in a layer; columns after the compressed part count as kept by stage 1."""
    later_columns = full_query.key.shape[1] - retained.kept_masks[layer_index].shape[1]

    def keep_later(mask: Tensor) -> Tensor:
        return torch.nn.functional.pad(mask, (0, later_columns), value=True)

    kept_mask = keep_later(retained.kept_masks[layer_index])
    if retained.merged is not None:
        key, value = (
            torch.cat(
                [merged_entries.to(full_entries.dtype), full_entries[:, merged_entries.shape[1] :]],
                1,
            )
            for merged_entries, full_entries in zip(
                retained.merged[layer_index], (full_query.key, full_query.value), strict=True
            )
        )
        return full_query.replace(kept_mask, key, value)
    stage1_mask = retained.stage1.get(layer_index)
    return full_query.evict(kept_mask, None if stage1_mask is None else keep_later(stage1_mask))


def _out(retained: RetainedEntries, layer_index: int) -> Tensor:
    if retained.block_outputs is None:
        return torch.tensor(torch.nan)
    return retained.block_outputs[layer_index]
