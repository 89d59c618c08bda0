"""Output perturbation of every policy and budget on the contexts of a task (arXiv 2502.03805, 4.5).

One prefill per context serves all cells. As in the paper, the query is that of the first decoded
token: the token that the full cache predicts is fed in, and its queries on the full cache are used
to measure every cell. A layer's number is therefore about that layer alone. `l1_forward` is
measured in a forward on the compressed cache itself, in which the losses of earlier layers add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

from kvbench.analysis.common import Bench, contexts, held, loaded, stages
from kvbench.analysis.perturbation.measure import Perturbed, Seen, value_norms
from kvbench.analysis.perturbation.rows import Measured, Rows
from kvbench.analysis.perturbation.stages import noting
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

Query = Literal["answer", "question"]
QUERIES: tuple[Query, ...] = ("answer", "question")
_LAST = Queries(1)


@dataclass
class Held:
    """What one cell keeps for one question.

    Attributes:
        cell: The cell.
        kept: By layer bool `[H, columns at the compression]`.
        stage1: The part that stage 1 keeps, by layer; a layer that lost nothing is missing.
        merged: K and V by layer, `[H, columns, d]`, if a merger has changed them.
        out: Attention blocks' outputs in a forward on the compressed cache, `[L, d_model]`.
    """

    cell: Cell
    kept: list[Tensor]
    stage1: dict[int, Tensor]
    merged: list[tuple[Tensor, Tensor]] | None
    out: Tensor | None = None


@dataclass
class Asked:
    """One question on the full cache.

    Attributes:
        prompt: The question.
        tokens: Columns that the measured query sees.
        query: By layer `[H_q, d]`.
        late: K and V of the columns after the context, by layer, `[H, m, d]` each.
        out: Attention blocks' outputs with the full cache, `[L, d_model]`.
        token: The answer's first token.
        cells: What the cells keep for this question.
    """

    prompt: Prompt
    tokens: int
    query: list[Tensor]
    late: list[tuple[Tensor, Tensor]]
    out: Tensor
    token: int
    cells: list[Held] = field(default_factory=list)


@dataclass(frozen=True)
class Perturbation:
    """Result: a row per query head, and a row per layer (columns: docs/analysis.md)."""

    heads: pd.DataFrame
    layers: pd.DataFrame
    failed: dict[str, str]


def analyze(
    grid: Grid,
    reporter: Reporter,
    *,
    query: Query = "answer",
    first_stage: float = 0.5,
) -> Perturbation:
    """Measure the output perturbation of all cells of a grid.

    Args:
        grid: Policies, budgets, models, tasks, moments, lengths and samples.
        reporter: Told of the progress.
        query: `answer` for the first decoded token, `question` for the question's last token.
        first_stage: Share of stage 1 for policies that have no parameter of that name.

    Raises:
        UserError: Something in the grid is unknown or out of range.
    """
    check(query, first_stage)
    rows = Rows()
    failed: dict[str, str] = {}
    for stage in stages(grid, reporter.message):
        with loaded(stage, grid, reporter.message) as model:
            bench = Bench(model, reporter, failed, stage.vision)
            reporter.start(sum(len(j.prompts) * len(j.cells) for j in stage.jobs), stage.model)
            try:
                for job in stage.jobs:
                    probe = Probe(bench, job.cells, query, first_stage)
                    for prompts in contexts(job):
                        rows.add(query, probe.layer_ids, probe.context(prompts, job.cells))
                        reporter.advance(len(prompts) * len(job.cells))
            finally:
                reporter.stop()
    heads, layers = pd.DataFrame(rows.heads()), pd.DataFrame(rows.layers())
    # A cell that failed on a later context would be compared over other contexts than the rest.
    heads, layers = (f[~f["cell"].isin(failed)] if len(f) else f for f in (heads, layers))
    return Perturbation(heads.reset_index(drop=True), layers.reset_index(drop=True), failed)


def check(query: str, first_stage: float) -> Query:
    """Check the two parameters before any work is done.

    Raises:
        UserError: One is out of range.
    """
    for known in QUERIES:
        if query == known and 0 <= first_stage <= 1:
            return known
    if query not in QUERIES:
        raise UserError(f"--query {query}: use {' or '.join(QUERIES)}")
    raise UserError(f"--first-stage {first_stage}: use a share in [0, 1]")


@dataclass
class Probe:
    """Measures the cells of one task, context by context.

    Attributes:
        bench: The model.
        cells: The cells of the task.
        query: Which query is measured.
        first_stage: Share of stage 1 for a policy without a parameter of that name.
    """

    bench: Bench
    cells: Sequence[Cell]
    query: Query
    first_stage: float

    def __post_init__(self) -> None:
        model = self.bench.model
        self.needs = frozenset({_LAST, *(n for c in self.cells for n in c.policy.needs)})
        self.layer_ids = full_layer_ids(model)

    def context(self, prompts: Sequence[Prompt], cells: Sequence[Cell]) -> Iterator[Measured]:
        """Measure all questions about one context.

        Yields:
            The numbers of one question in one layer, layer by layer.
        """
        prefix = self._prefill(prompts[0])
        asked = [self._ask(prefix, prompt, cells) for prompt in prompts]
        for cell in cells:
            if cell.moment != "question" and cell.cell not in self.bench.failed:
                prefix = self._before_question(prefix, cell, asked)
        order = {cell.cell: i for i, cell in enumerate(cells)}
        for question in asked:
            question.cells.sort(key=lambda one: order[one.cell.cell])
        known = [
            (layer.key[0], layer.value[0], layer.scale)
            for layer in prefix.cache.ragged
            if layer.key is not None and layer.value is not None
        ]
        for index, (key, value, scale) in enumerate(known):
            weight = prefix.info.output_weight(index)
            norm = value_norms(value, weight)
            for question in asked:
                late_key, late_value = question.late[index]
                seen = Seen(
                    query=question.query[index],
                    key=torch.cat([key, late_key], 1),
                    value=torch.cat([value, late_value], 1),
                    weight=weight,
                    scale=scale,
                    norm=torch.cat([norm, value_norms(late_value, weight)], 1),
                )
                found = [(x.cell, _measure(seen, x, index), _out(x, index)) for x in question.cells]
                out = question.out[index]
                yield Measured(question.prompt.request, question.tokens, index, seen, out, found)

    def _prefill(self, prompt: Prompt) -> Prefix:
        return self.bench.prefill(prompt.context_ids, self.needs, prompt.media)

    def _ask(self, prefix: Prefix, prompt: Prompt, cells: Sequence[Cell]) -> Asked:
        """Ask a question on the full cache; compress the cells of moment `question`."""
        size = len(prompt.context_ids)
        late = [c for c in cells if c.moment == "question" and c.cell not in self.bench.failed]
        longer, out, token = self._longer(prefix, prompt)
        found = []
        for cell in late:
            policy, stage1 = noting(cell.policy, self.first_stage)
            cache = self.bench.compress(longer, cell, policy, 1)
            if cache is None:
                if longer.spoiled:
                    longer, out, token = self._longer(prefix, prompt)
                continue
            one = _hold(cell, policy, cache, stage1)
            if self.query == "answer":
                with self._outputs() as outputs:
                    forward(self.bench.model, cache, self.bench.tensor([token]))
                one.out = _stacked(outputs)
            found.append(one)
        if self.query == "answer":
            with self._outputs() as outputs:
                longer.extend(self.bench.tensor([token]))
            out = _stacked(outputs)
        return Asked(
            prompt=prompt,
            tokens=size + len(prompt.question_ids) + (self.query == "answer"),
            query=[
                longer.cache.observers[_LAST].read(i)[0, :, -1] for i in range(prefix.info.layers)
            ],
            late=[
                (layer.key[0, :, size:].clone(), layer.value[0, :, size:].clone())
                for layer in longer.cache.ragged
                if layer.key is not None and layer.value is not None
            ],
            out=out,
            token=token,
            cells=found,
        )

    def _longer(self, prefix: Prefix, prompt: Prompt) -> tuple[Prefix, Tensor, int]:
        """Extend the context by a question; also give the outputs at its end and the next token."""
        longer = prefix.fork()
        with self._outputs() as outputs:
            logits = longer.extend(self.bench.tensor(prompt.question_ids))
        (token,) = choose(logits, [None], [0])
        if token < 0:
            raise UserError(NOT_FINITE)
        return longer, _stacked(outputs), token

    def _before_question(self, prefix: Prefix, cell: Cell, asked: Sequence[Asked]) -> Prefix:
        """Compress a context for a cell and ask its questions; give a prefill that is whole."""
        policy, stage1 = noting(cell.policy, self.first_stage)
        room = max(len(a.prompt.question_ids) for a in asked) + 1
        cache = self.bench.compress(prefix, cell, policy, room)
        if cache is None:
            return self._prefill(asked[0].prompt) if prefix.spoiled else prefix
        for i, question in enumerate(asked):
            own = cache.fork() if i + 1 < len(asked) else cache
            one = _hold(cell, policy, own, stage1)
            with self._outputs() as outputs:
                forward(self.bench.model, own, self.bench.tensor(question.prompt.question_ids))
                if self.query == "answer":
                    forward(self.bench.model, own, self.bench.tensor([question.token]))
            one.out = _stacked(outputs)
            question.cells.append(one)
        return prefix

    @contextmanager
    def _outputs(self) -> Iterator[dict[int, Tensor]]:
        """Capture the attention blocks' outputs at the last column, `[d_model]` by layer."""
        found: dict[int, Tensor] = {}
        handles = [
            module.register_forward_hook(
                lambda m, a, out, i=i: found.__setitem__(i, out[0][0, -1].detach().double())
            )
            for i, module in attention_modules(self.bench.model)
        ]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


def _stacked(outputs: dict[int, Tensor]) -> Tensor:
    return torch.stack([outputs[i] for i in sorted(outputs)])


def _hold(cell: Cell, policy: Policy, cache: RaggedCache, stage1: dict[int, Tensor]) -> Held:
    """Read what a compressed cache keeps, before anything is appended to it."""
    merged = None
    if policy.merge is not None:
        merged = [_spread(layer) for layer in cache.ragged]
    return Held(cell, held(cache), {i: x[0] for i, x in stage1.items()}, merged)


def _spread(layer: RaggedLayer) -> tuple[Tensor, Tensor]:
    """K and V of a packed layer at their columns, `[H, columns, d]`, zero where nothing is held."""
    rows, live = layer.padded_rows()
    index = layer.col[rows].long()[0].masked_fill(~live[0], layer.seen)[..., None]
    out = []
    for (own,) in layer.read(rows):
        dense = own.new_zeros(layer.heads, layer.seen + 1, layer.dim)
        dense.scatter_(1, index.expand(-1, -1, layer.dim), own)
        out.append(dense[:, :-1])
    return out[0], out[1]


def _measure(seen: Seen, one: Held, index: int) -> Perturbed:
    """Measure a cell in a layer; columns after the compressed part are kept, as part of stage 1."""
    more = seen.key.shape[1] - one.kept[index].shape[1]

    def all_behind(mask: Tensor) -> Tensor:
        return torch.nn.functional.pad(mask, (0, more), value=True)

    kept = all_behind(one.kept[index])
    if one.merged is not None:
        key, value = (
            torch.cat([own.to(full.dtype), full[:, own.shape[1] :]], 1)
            for own, full in zip(one.merged[index], (seen.key, seen.value), strict=True)
        )
        return seen.replace(kept, key, value)
    first = one.stage1.get(index)
    return seen.evict(kept, None if first is None else all_behind(first))


def _out(one: Held, index: int) -> Tensor:
    if one.out is None:
        return torch.tensor(torch.nan)
    return one.out[index]
